"""The fallback for models that cannot attend over a flat row: the same rows as ordinary padded batches.

Padding stands on the right, where causal attention cannot see it; positions are explicit; prompts are not shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from postgrad.models.micro_batch import MicroBatch, ModelInput, Placed, build, place
from postgrad.types import TrainRow


def pad_rows(
    rows: Sequence[TrainRow], *, tokens_per_micro_batch: int, split_groups: bool = True, device: torch.device | None = None
) -> list[MicroBatch]:
    """Batches of at most `tokens_per_micro_batch` tokens, padding included, of rows of similar length. See `packed.pack`."""
    bins: list[list[Placed]] = []
    for unit in sorted(_units(place(rows), split_groups=split_groups), key=_width, reverse=True):
        if bins and (len(bins[-1]) + len(unit)) * _width(bins[-1]) <= tokens_per_micro_batch:
            bins[-1] += unit
        else:
            bins.append(list(unit))
    return [_padded_batch(chosen, device) for chosen in bins]


def _units(placed: Sequence[Placed], *, split_groups: bool) -> list[list[Placed]]:
    together: dict[object, list[Placed]] = {}
    for row in placed:
        key = (None, row.index) if split_groups or row.row.group is None else (row.row.group,)
        together.setdefault(key, []).append(row)
    return list(together.values())


def _width(placed: Sequence[Placed]) -> int:
    return max(row.needed for row in placed)


def _padded_batch(placed: Sequence[Placed], device: torch.device | None) -> MicroBatch:
    width = _width(placed)
    computed = [row for row in placed if row.needed]
    given = ModelInput(
        ids=[[*row.row.token_ids[: row.needed], *[0] * (width - row.needed)] for row in computed],
        positions=[list(range(width)) for _ in computed],
        source=[number * width + position - 1 for number, row in enumerate(computed) for position in row.positions],
        attention_mask=[[1] * row.needed + [0] * (width - row.needed) for row in computed],
    )
    return build(placed, given, device)
