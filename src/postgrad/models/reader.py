"""Reads numbers off a model, row by row: log-probs, or the values of a scalar head. Trains nothing.

Rows are packed into flat rows that share prompts (`packed`), or padded where the model cannot attend over them (`padded`): decided once per
model by `capability`, said in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from postgrad.errors import RunError
from postgrad.models.allocator import keep_freed_memory
from postgrad.models.attention import scalar_head
from postgrad.models.capability import check_head, packed_refusal
from postgrad.models.forward import Readout, mode, read_logprobs, read_values
from postgrad.models.micro_batch import MicroBatch
from postgrad.models.packed import pack
from postgrad.models.padded import pad_rows
from postgrad.models.products import fast_products
from postgrad.types import TrainRow

logger = logging.getLogger("postgrad")

Reads = Literal["logprobs", "values"]


class Reader:
    """tokens_per_micro_batch: tokens that go through the model at once; bounds memory.
    autocast: dtype of the matrix products (None: the weights' own).
    reads: what a model gives per trained token: `logprobs`, or `values` of its scalar head.
    """

    def __init__(
        self, model: nn.Module, *, tokens_per_micro_batch: int = 4096, autocast: torch.dtype | None = None, reads: Reads = "logprobs"
    ) -> None:
        if tokens_per_micro_batch < 1:
            raise ValueError(f"tokens_per_micro_batch must be at least 1, got {tokens_per_micro_batch}")
        self.model = model
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.autocast = autocast
        self.reads = reads
        self.device = next(model.parameters()).device
        if self.device.type == "cpu":
            keep_freed_memory()
        self._refusals: dict[int, str | None] = {}
        self.refusal_to_pack(model)

    def refusal_to_pack(self, model: nn.Module) -> str | None:
        """Why this model's micro-batches are padded, or None. Checked once per model; raises `ModelError` if it cannot be trained."""
        if id(model) not in self._refusals:
            self._check_head(model)
            self._refusals[id(model)] = packed_refusal(model)
            if self._refusals[id(model)] is not None:
                logger.warning("%s is computed with padding, which is slower: %s", type(model).__name__, self._refusals[id(model)])
        return self._refusals[id(model)]

    def values(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """Per row, the scalar head's value before each trained token. Raises `RunError` when one is not finite."""
        self.require("values")
        return self.read(self.model, rows, temperature=1.0, name="the model")

    def read(self, model: nn.Module, rows: Sequence[TrainRow], *, temperature: float, name: str) -> list[list[float]]:
        """Per row, the number of each trained token under `model`, in eval mode and without a gradient."""
        result: list[list[float]] = [[] for _ in rows]
        with mode(model, training=False), torch.no_grad(), fast_products(self.device, self.autocast):
            for batch in self.batches(model, rows, self.tokens_per_micro_batch):
                current, _ = self.readout(model, batch, temperature=temperature, dtype=self.autocast)
                check_finite(current, batch, name, self.reads)
                scatter(batch, current, result)
        return result

    @property
    def readout(self) -> Readout:
        return read_logprobs if self.reads == "logprobs" else read_values

    def require(self, reads: Reads) -> None:
        if self.reads != reads:
            raise ValueError(f"this engine reads {self.reads}, not {reads}")

    def _check_head(self, model: nn.Module) -> None:
        if self.reads == "logprobs":
            check_head(model)
        else:
            scalar_head(model)

    def batches(
        self, model: nn.Module, rows: Sequence[TrainRow], budget: int, *, split_groups: bool = True, share_prefixes: bool = True
    ) -> list[MicroBatch]:
        if self.refusal_to_pack(model) is not None:
            return pad_rows(rows, tokens_per_micro_batch=budget, split_groups=split_groups, device=self.device)
        return pack(rows, tokens_per_micro_batch=budget, share_prefixes=share_prefixes, split_groups=split_groups, device=self.device)


def check_finite(current: Tensor, batch: MicroBatch, name: str, reads: Reads) -> None:
    if not bool(current.isfinite().all()):
        what = "log-prob" if reads == "logprobs" else "value"
        raise RunError(f"a {what} of {name} is not finite", where=rows_of(batch), hint="the weights hold values that are not finite")


def scatter(batch: MicroBatch, flat: Tensor, result: list[list[float]]) -> None:
    """Put the values [N] of a micro-batch's trained tokens where its rows stood in the input."""
    for index, values in zip(batch.row_index, batch.split(flat), strict=True):
        result[index] = values


def rows_of(batch: MicroBatch) -> str:
    shown = ", ".join(str(index) for index in batch.row_index[:8])
    return f"rows {shown}{' …' if len(batch.row_index) > 8 else ''} of the batch"
