"""Which row comes when: a pure function of the position, so that resuming needs one number and every row comes once per epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import numpy as np

from postgrad.packing import fill


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(int(index) for index in np.random.default_rng((seed & 0xFFFFFFFF, epoch)).permutation(size))


def row_at(position: int, *, size: int, seed: int, shuffle: bool) -> int:
    """The row that stands at `position` of the endless stream of epochs over `size` rows.

    >>> sorted(row_at(position, size=5, seed=0, shuffle=True) for position in range(5, 10))
    [0, 1, 2, 3, 4]
    """
    epoch, index = divmod(position, size)
    return _permutation(size, seed, epoch)[index] if shuffle else index


def positions_in_run(*, size: int, epochs: float | None, per_step: int, max_steps: int | None) -> tuple[int, int]:
    """(optimizer steps, rows drawn) of a run. With epochs the last step may be smaller; every row is drawn."""
    if max_steps is not None:
        return max_steps, max_steps * per_step
    assert epochs is not None
    rows = max(1, round(size * epochs))
    return -(-rows // per_step), rows


class Batches(Protocol):
    """The batches of a run: a pure function of the step, from 1 to `steps`."""

    @property
    def steps(self) -> int: ...

    def batch(self, step: int) -> Sequence[int]:
        """Indices of the step's rows."""
        ...

    def epoch(self, step: int) -> float:
        """Passes over the data once the step is done."""
        ...


@dataclass(frozen=True)
class CountedBatches:
    """Steps of `per_step` rows, through epoch after epoch; an epoch may begin inside a step, and the last step may be smaller."""

    size: int
    per_step: int
    seed: int
    shuffle: bool
    max_steps: int | None = None
    epochs: float | None = None

    @property
    def steps(self) -> int:
        return self._lengths[0]

    @property
    def _lengths(self) -> tuple[int, int]:
        return positions_in_run(size=self.size, epochs=self.epochs, per_step=self.per_step, max_steps=self.max_steps)

    def _end(self, step: int) -> int:
        return min(step * self.per_step, self._lengths[1])

    def batch(self, step: int) -> Sequence[int]:
        positions = range((step - 1) * self.per_step, self._end(step))
        return [row_at(position, size=self.size, seed=self.seed, shuffle=self.shuffle) for position in positions]

    def epoch(self, step: int) -> float:
        return self._end(step) / self.size


@dataclass(frozen=True)
class FilledBatches:
    """Steps filled with whole rows up to `tokens` tokens: a new filling in every epoch, keyed by the seed; each row once per epoch."""

    lengths: Sequence[int]
    tokens: int
    seed: int
    shuffle: bool
    max_steps: int | None = None
    epochs: float | None = None
    _ends: list[int] = field(default_factory=list)
    _held: dict[int, list[list[int]]] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        if self.max_steps is not None:
            return self.max_steps
        assert self.epochs is not None
        whole = int(self.epochs)
        full = self._end(whole)
        return max(1, full + round((self.epochs - whole) * len(self._filled(whole))) if self.epochs > whole else full)

    def batch(self, step: int) -> Sequence[int]:
        epoch, place = self._locate(step)
        return self._filled(epoch)[place]

    def epoch(self, step: int) -> float:
        epoch, place = self._locate(step)
        filled = self._filled(epoch)
        return epoch + sum(len(rows) for rows in filled[: place + 1]) / len(self.lengths)

    def fullness(self) -> float:
        """Share of the room in the first epoch's steps that rows fill, 0 to 1."""
        return sum(self.lengths) / (self.tokens * len(self._filled(0)))

    def _end(self, epochs: int) -> int:
        """Steps of the first epochs together."""
        while len(self._ends) < epochs:
            self._ends.append((self._ends[-1] if self._ends else 0) + len(self._filled(len(self._ends))))
        return self._ends[epochs - 1] if epochs else 0

    def _locate(self, step: int) -> tuple[int, int]:
        epoch = 0
        while self._end(epoch + 1) < step:
            epoch += 1
        return epoch, step - 1 - self._end(epoch)

    def _filled(self, epoch: int) -> list[list[int]]:
        key = epoch if self.shuffle else 0
        if key not in self._held:
            self._held.clear()
            self._held[key] = _filling(self.lengths, self.tokens, self.seed, key if self.shuffle else None)
        return self._held[key]


def _filling(lengths: Sequence[int], tokens: int, seed: int, epoch: int | None) -> list[list[int]]:
    """The steps of one epoch. Without an epoch the rows stay in the order of the file, and a step ends where the next row does not fit."""
    if epoch is None:
        steps: list[list[int]] = []
        room = 0
        for index, length in enumerate(lengths):
            if length > room or not steps:
                steps.append([])
                room = tokens
            steps[-1].append(index)
            room -= length
        return steps
    order = _permutation(len(lengths), seed, epoch)
    filled = [[order[place] for place in step] for step in fill([lengths[index] for index in order], tokens)]
    turn = np.random.default_rng((seed & 0xFFFFFFFF, epoch, 1)).permutation(len(filled))
    return [filled[int(place)] for place in turn]
