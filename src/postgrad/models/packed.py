"""Training rows -> micro-batches within a token budget: flat rows without padding, each group's prompt once.

1. Rows of one group that start with the same prefix are one unit: prefix + what each row adds.
2. A unit larger than the budget is split; each part computes the prefix again, which is counted.
3. Best fit, largest unit first. The same rows always give the same micro-batches, and no token is lost: a row longer than the
   budget is a micro-batch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from postgrad.models.layout import PackedLayout
from postgrad.models.micro_batch import MicroBatch, ModelInput, Placed, build, place
from postgrad.models.segments import Segment
from postgrad.packing import fill
from postgrad.types import TrainRow


def pack(
    rows: Sequence[TrainRow],
    *,
    tokens_per_micro_batch: int,
    share_prefixes: bool = True,
    split_groups: bool = True,
    device: torch.device | None = None,
) -> list[MicroBatch]:
    """Micro-batches of at most `tokens_per_micro_batch` computed tokens.

    `split_groups=False` keeps every group in one micro-batch, whatever its size: for losses that compare the rows of a group.
    Rows of a unit stay next to each other, in input order.
    """
    units = _units(place(rows), share_prefixes=share_prefixes)
    if split_groups:
        units = [part for unit in units for part in _split(unit, tokens_per_micro_batch)]
    else:
        _check_whole_groups(units)
    bins = fill([unit.tokens for unit in units], tokens_per_micro_batch)
    return [_micro_batch([units[index] for index in chosen], device) for chosen in bins]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Rows that share their first `prefix` tokens. `repeats`: another part of the same group computes them too."""

    rows: tuple[Placed, ...]
    prefix: int
    repeats: bool = False

    @property
    def prefix_tokens(self) -> int:
        return self.prefix if any(row.positions for row in self.rows) else 0

    @property
    def tokens(self) -> int:
        return self.prefix_tokens + sum(_own_tokens(row, self.prefix) for row in self.rows)


def _own_tokens(row: Placed, prefix: int) -> int:
    return max(row.needed - prefix, 0)


def _units(placed: Sequence[Placed], *, share_prefixes: bool) -> list[_Unit]:
    """Rows of one group whose prefix is the same, token for token, belong together; every other row stands alone."""
    together: dict[object, list[Placed]] = {}
    for row in placed:
        grouped = row.row.group is not None
        key = (row.row.group, row.row.token_ids[: row.row.shared_prefix]) if grouped else (None, row.index)
        together.setdefault(key, []).append(row)
    return [_Unit(tuple(unit), unit[0].row.shared_prefix if share_prefixes and len(unit) > 1 else 0) for unit in together.values()]


def _check_whole_groups(units: Sequence[_Unit]) -> None:
    groups = [unit.rows[0].row.group for unit in units if unit.rows[0].row.group is not None]
    torn = sorted({group for group in groups if groups.count(group) > 1})
    if torn:
        raise ValueError(f"the rows of group {torn[0]} do not start with the same shared prefix")


def _split(unit: _Unit, budget: int) -> list[_Unit]:
    parts: list[list[Placed]] = []
    used = budget
    for row in unit.rows:
        own = _own_tokens(row, unit.prefix)
        if not parts or used + own > budget:
            parts.append([])
            used = unit.prefix
        parts[-1].append(row)
        used += own
    units = [_Unit(tuple(part), unit.prefix) for part in parts]
    first = next((number for number, part in enumerate(units) if part.prefix_tokens), 0)
    return [replace(part, repeats=number > first) for number, part in enumerate(units)]


@dataclass(slots=True)
class _FlatRow:
    """A flat row that grows segment by segment."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    source: list[int] = field(default_factory=list)

    def add(self, unit: _Unit) -> None:
        prefix_tokens = unit.prefix_tokens
        prefix = self._append(unit.rows[0].row, 0, prefix_tokens, None) if prefix_tokens else None
        for row in unit.rows:
            start, _ = self._append(row.row, unit.prefix, max(row.needed, unit.prefix), prefix)
            self.source += (_source(position - 1, start, unit.prefix, prefix) for position in row.positions)

    def _append(self, row: TrainRow, first: int, last: int, prefix: tuple[int, int] | None) -> tuple[int, int]:
        """Tokens first..last of a row -> where they lie in the flat row. Positions restart with each row."""
        start = len(self.ids)
        self.ids += row.token_ids[first:last]
        self.positions += range(first, last)
        if last > first:
            self.segments.append(Segment(start, len(self.ids), prefix))
        return start, len(self.ids)


def _source(position: int, start: int, shared: int, prefix: tuple[int, int] | None) -> int:
    """Where the token at `position` of a row lies, if the row's own tokens begin at `start` with position `shared`."""
    return start + position - shared if position >= shared or prefix is None else prefix[0] + position


def _micro_batch(units: Sequence[_Unit], device: torch.device | None) -> MicroBatch:
    flat = _FlatRow()
    for unit in units:
        flat.add(unit)
    repeated = sum(unit.prefix_tokens for unit in units if unit.repeats)
    given = ModelInput([flat.ids], [flat.positions], flat.source, PackedLayout(tuple(flat.segments)), repeated_prefix_tokens=repeated)
    return build([row for unit in units for row in unit.rows], given, device)
