"""One forward and backward pass: what the model reads, which hidden state predicts which token, what the loss function sees.

A token is trained by the hidden state of the token before it: for the first token of a completion that is the last of the prompt.
Tokens behind a row's last prediction change nothing (attention is causal) and are not computed.
A row without trained tokens costs nothing but keeps its place: the loss function sees it with an empty mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from postgrad.models.layout import PackedLayout
from postgrad.types import TrainRow


@dataclass(frozen=True)
class MicroBatch:
    """R rows with N trained tokens, up to L in one row. All [N] tensors run row by row, in token order.

    input_ids, position_ids [B, T]: one flat row with its `layout`, or a padded batch with its `attention_mask`.
    source [N]: the place (in B·T) of the hidden state that predicts each trained token; targets [N]: that token.
    row_index: where each of the R rows stood in the input.
    mask [R, L], per_token, per_row, entropy: see `protocols.Rows`. The entropy is there once the model has read the batch.
    repeated_prefix_tokens: prompt tokens computed here although another micro-batch computes them too (a group was split).
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: PackedLayout | None
    attention_mask: Tensor | None
    source: Tensor
    targets: Tensor
    row_index: tuple[int, ...]
    mask: Tensor
    per_token: Mapping[str, Tensor]
    per_row: Mapping[str, Tensor]
    repeated_prefix_tokens: int = 0
    read_entropy: Tensor | None = None

    @property
    def entropy(self) -> Tensor:
        if self.read_entropy is None:
            raise ValueError("the model has not read this micro-batch yet")
        return self.read_entropy

    def with_entropy(self, flat: Tensor) -> MicroBatch:
        """This batch, read: `flat` [N] is each trained token's entropy."""
        return replace(self, read_entropy=self.to_rows(flat))

    @property
    def trained_tokens(self) -> int:
        return len(self.targets)

    @property
    def computed_tokens(self) -> int:
        """Tokens that go through the model, padding included."""
        return self.input_ids.numel()

    @property
    def untrained_rows(self) -> int:
        return len(self.row_index) - int(self.mask.any(1).sum())

    def to_rows(self, flat: Tensor) -> Tensor:
        """[N] -> [R, L], 0 outside the mask. Differentiable."""
        return flat.new_zeros(self.mask.shape).masked_scatter(self.mask, flat)

    def flat(self, rows: Tensor) -> Tensor:
        """[R, L] -> [N]: the inverse of `to_rows`."""
        return rows[self.mask]

    def split(self, flat: Tensor) -> list[list[float]]:
        """[N] -> per row, in the order of `row_index`, the values of its trained tokens."""
        return [part.tolist() for part in torch.split(flat, self.mask.sum(1).tolist())]


@dataclass(frozen=True, slots=True)
class Placed:
    """A row with its place in the input, and the positions of its trained tokens."""

    index: int
    row: TrainRow
    positions: tuple[int, ...]

    @property
    def needed(self) -> int:
        """How many of the row's first tokens must go through the model; 0 when nothing is trained."""
        return self.positions[-1] if self.positions else 0


def place(rows: Sequence[TrainRow]) -> list[Placed]:
    return [Placed(index, row, tuple(p for p, trained in enumerate(row.trained) if trained)) for index, row in enumerate(rows)]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What a `MicroBatch` gives the model, as lists: ids and positions [B][T], and the source of each trained token."""

    ids: list[list[int]]
    positions: list[list[int]]
    source: list[int]
    layout: PackedLayout | None = None
    attention_mask: list[list[int]] | None = None
    repeated_prefix_tokens: int = 0


def build(placed: Sequence[Placed], given: ModelInput, device: torch.device | None) -> MicroBatch:
    """The tensors of one micro-batch. Raises `ValueError` when the rows do not carry the same names in per_token and per_row."""

    def whole(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=device)

    lengths = [len(row.positions) for row in placed]
    mask = torch.arange(max(lengths), device=device) < whole(lengths)[:, None]
    return MicroBatch(
        input_ids=whole(given.ids),
        position_ids=whole(given.positions),
        layout=given.layout,
        attention_mask=None if given.attention_mask is None else whole(given.attention_mask),
        source=whole(given.source),
        targets=whole([row.row.token_ids[position] for row in placed for position in row.positions]),
        row_index=tuple(row.index for row in placed),
        mask=mask,
        per_token=_per_token(placed, mask),
        per_row=_per_row(placed, device),
        repeated_prefix_tokens=given.repeated_prefix_tokens,
    )


def _per_token(placed: Sequence[Placed], mask: Tensor) -> dict[str, Tensor]:
    columns = {}
    for name in _names(placed, lambda row: row.per_token):
        values = torch.tensor([row.row.per_token[name][position] for row in placed for position in row.positions], dtype=torch.float32)
        columns[name] = torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values.to(mask.device))
    return columns


def _per_row(placed: Sequence[Placed], device: torch.device | None) -> dict[str, Tensor]:
    names = _names(placed, lambda row: row.per_row)
    return {name: torch.tensor([row.row.per_row[name] for row in placed], dtype=torch.float32, device=device) for name in names}


def _names(placed: Sequence[Placed], columns: Callable[[TrainRow], Mapping[str, object]]) -> list[str]:
    """The names that every row carries; a number that only some rows have would be a silent zero for the others."""
    names = sorted(columns(placed[0].row))
    for row in placed:
        if sorted(columns(row.row)) != names:
            raise ValueError(f"row {row.index} carries {sorted(columns(row.row))}, row {placed[0].index} carries {names}")
    return names
