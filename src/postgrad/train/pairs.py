"""Preference pairs as training rows, and a micro-batch's numbers back as pairs.

A pair is two rows of one group: both start with the prompt, which is computed once. The engine keeps a group in one micro-batch for losses
that declare `whole_groups`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from postgrad.data import Pair
from postgrad.data.preferences import Answer
from postgrad.protocols import Rows
from postgrad.types import TrainRow


def pair_rows(pairs: Sequence[Pair], reference: Sequence[Sequence[float]] | None = None) -> list[TrainRow]:
    """Two rows per pair, chosen first. `reference`: per row, the reference's log-prob of each scored token."""
    rows = []
    for number, pair in enumerate(pairs):
        for side, answer in enumerate((pair.chosen, pair.rejected)):
            index = 2 * number + side
            rows.append(answer_row(pair.prompt_ids, answer, index, group=number, reference=None if reference is None else reference[index]))
    return rows


def answer_row(
    prompt_ids: tuple[int, ...], answer: Answer, index: int, *, group: int | None, reference: Sequence[float] | None
) -> TrainRow:
    """The answer after its prompt; what an assistant wrote in it is scored. `per_row["index"]` says which row it is.

    Raises `ValueError` for an answer without a scored token, and when `reference` does not hold one number per scored token.
    """
    if not any(answer.scored):
        raise ValueError(f"answer {index} has no token to score")
    if reference is not None and len(reference) != sum(answer.scored):
        raise ValueError(f"answer {index} has {sum(answer.scored)} scored tokens but {len(reference)} reference log-probs")
    trained = (False,) * len(prompt_ids) + answer.scored
    per_token = {}
    if reference is not None:
        values = iter(reference)
        per_token["reference_logprobs"] = [next(values) if flag else 0.0 for flag in trained]
    shared = 0 if group is None else len(prompt_ids)
    return TrainRow(prompt_ids + answer.token_ids, trained, group, shared, per_token, {"index": float(index)})


def scored_row(ids: tuple[int, ...], index: int, *, group: int | None = None, shared: int = 0) -> TrainRow:
    """A row whose scalar head is read at its last token: where a next token would be predicted. That token itself is never computed."""
    return TrainRow((*ids, ids[-1]), (False,) * len(ids) + (True,), group, shared, per_row={"index": float(index)})


@dataclass(frozen=True, slots=True)
class Sides:
    """Places of a micro-batch's chosen and rejected rows, pair by pair, [P] each; `pair`: which pairs of the batch they are."""

    chosen: Tensor
    rejected: Tensor
    pair: Tensor


def sides_of(rows: Rows) -> Sides:
    """Raises `ValueError` when a pair's two rows are not both there."""
    index = rows.per_row["index"].long()
    order = index.argsort()
    ordered = index[order]
    if len(ordered) % 2 or bool((ordered[0::2] % 2 != 0).any()) or bool((ordered[1::2] != ordered[0::2] + 1).any()):
        raise ValueError("a micro-batch holds one side of a pair without the other")
    return Sides(order[0::2], order[1::2], ordered[0::2] // 2)


def token_counts(mask: Tensor) -> Tensor:
    """[R] scored tokens per row."""
    return mask.sum(1).to(torch.float32)
