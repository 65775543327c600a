"""Which row comes when: a pure function of the position, so that resuming needs one number and every row comes once per epoch."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


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
