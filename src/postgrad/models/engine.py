"""The engine on one process: log-probs, gradients and optimizer steps of a model, in micro-batches of a token budget.

1. Rows are packed into flat rows that share prompts (`packed`), or padded where the model cannot attend over them (`padded`):
   decided once per model by `capability`, said in the log.
2. Each micro-batch runs the body, then the log-prob head at the trained positions, then the loss function, then backward;
   its graph is gone before the next begins. Losses carry global denominators, so how the rows fall into micro-batches
   changes nothing but rounding.
3. A loss or gradient that is not finite raises `RunError` and names the micro-batch; weights and moments stay as they were.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from postgrad.errors import RunError
from postgrad.models import engine_state
from postgrad.models.allocator import keep_freed_memory
from postgrad.models.attention import scalar_head
from postgrad.models.capability import check_head, packed_refusal
from postgrad.models.engine_state import EngineState
from postgrad.models.forward import Readout, mode, score, value
from postgrad.models.micro_batch import MicroBatch
from postgrad.models.optimizer import Optimizer, OptimizerConfig
from postgrad.models.packed import pack
from postgrad.models.padded import pad_rows
from postgrad.models.state import load_trainable_state, trainable_state
from postgrad.protocols import BackwardResult, LossFunction, OptimizerResult
from postgrad.types import TrainRow

__all__ = ["LocalEngine", "OptimizerConfig", "ReferenceModel"]

logger = logging.getLogger("postgrad")

_OWN_SUMS = ("entropy", "tokens", "computed_tokens", "repeated_prefix_tokens", "untrained_rows")


class ReferenceModel(Protocol):
    """Gives the reference's model inside a `with`: a frozen copy, or the policy with its adapter off."""

    def active(self) -> AbstractContextManager[nn.Module]: ...


class LocalEngine:
    """`protocols.Engine` on one process.

    tokens_per_micro_batch: tokens that go through the model at once; bounds memory.
    autocast: dtype of the matrix products (None: the weights' own).
    reads: what a model gives per trained token: `logprobs`, or `values` of its scalar head. The loss function sees these numbers.
    dropout: whether `forward_backward` uses the model's dropout. Off, log-probs are those of `logprobs` and of the sampler
    (a policy's ratio is 1 on its own samples). On, prompts of a group are not shared: each row draws its own noise.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        reference: ReferenceModel | None = None,
        tokens_per_micro_batch: int = 4096,
        autocast: torch.dtype | None = None,
        optimizer: OptimizerConfig | None = None,
        max_grad_norm: float | None = 1.0,
        device: torch.device | str | None = None,
        dropout: bool = False,
        reads: Literal["logprobs", "values"] = "logprobs",
    ) -> None:
        if tokens_per_micro_batch < 1:
            raise ValueError(f"tokens_per_micro_batch must be at least 1, got {tokens_per_micro_batch}")
        self.model = model if device is None else model.to(device)
        self.reference = reference
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.autocast = autocast
        self.dropout = dropout
        self.reads = reads
        self.device = next(model.parameters()).device
        if self.device.type == "cpu":
            keep_freed_memory()
        self._refusals: dict[int, str | None] = {}
        self.refusal_to_pack(model)
        self.optimizer = Optimizer(model, optimizer or OptimizerConfig(), max_grad_norm=max_grad_norm)

    def refusal_to_pack(self, model: nn.Module) -> str | None:
        """Why this model's micro-batches are padded, or None. Checked once per model; raises `ModelError` if it cannot be trained."""
        if id(model) not in self._refusals:
            self._check_head(model)
            self._refusals[id(model)] = packed_refusal(model)
            if self._refusals[id(model)] is not None:
                logger.warning("%s is computed with padding, which is slower: %s", type(model).__name__, self._refusals[id(model)])
        return self._refusals[id(model)]

    def forward_backward(self, rows: Sequence[TrainRow], loss: LossFunction, *, temperature: float = 1.0) -> BackwardResult:
        """Add the loss's gradient to what has accumulated. See `protocols.Engine`.

        A loss function with a true attribute `whole_groups` sees all rows of a group in one call, with `whole_batch` all rows of the
        batch, whatever memory that takes. On any error the gradients
        accumulated since the last step are dropped.
        `sums` also holds computed_tokens, repeated_prefix_tokens and untrained_rows (rows without a trained token).
        """
        whole_batch = getattr(loss, "whole_batch", False)
        split_groups = not getattr(loss, "whole_groups", False)
        budget = sum(len(row.token_ids) for row in rows) if whole_batch else self.tokens_per_micro_batch
        batches = self._batches(self.model, rows, budget, split_groups=split_groups, share_prefixes=not self.dropout)
        total = 0.0
        sums = dict.fromkeys(_OWN_SUMS, 0.0)
        logprobs: list[list[float]] = [[] for _ in rows]
        with self._dropping_gradients_on_error():
            for number, batch in enumerate(batches, 1):
                value, more, current = self._backward(batch, loss, temperature, name=f"micro-batch {number} of {len(batches)}")
                total += value
                for key, number_of in more.items():
                    sums[key] = sums.get(key, 0.0) + number_of
                _scatter(batch, current, logprobs)
        return BackwardResult(loss=total, sums=sums, logprobs=logprobs)

    def logprobs(
        self, rows: Sequence[TrainRow], *, model: Literal["policy", "reference"] = "policy", temperature: float = 1.0
    ) -> list[list[float]]:
        """See `protocols.Engine`. Raises `RunError` when a log-prob is not finite."""
        self._require("logprobs")
        return self._read(rows, model, temperature)

    def values(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """Per row, the scalar head's value before each trained token. Raises `RunError` when one is not finite."""
        self._require("values")
        return self._read(rows, "policy", 1.0)

    def _read(self, rows: Sequence[TrainRow], model: Literal["policy", "reference"], temperature: float) -> list[list[float]]:
        result: list[list[float]] = [[] for _ in rows]
        with self._scoring(model) as scored:
            for batch in self._batches(scored, rows, self.tokens_per_micro_batch):
                current, _ = self._readout(scored, batch, temperature=temperature, dtype=self.autocast)
                _check_finite(current, batch, f"the {model}", self.reads)
                _scatter(batch, current, result)
        return result

    @property
    def _readout(self) -> Readout:
        return score if self.reads == "logprobs" else value

    def _require(self, reads: str) -> None:
        if self.reads != reads:
            raise ValueError(f"this engine reads {self.reads}, not {reads}")

    def _check_head(self, model: nn.Module) -> None:
        if self.reads == "logprobs":
            check_head(model)
        else:
            scalar_head(model)

    def optimizer_step(self, learning_rate: float) -> OptimizerResult:
        return self.optimizer.step(learning_rate)

    def global_sum(self, value: float) -> float:
        return value

    def save_state(self, folder: Path) -> None:
        """Trained weights, moments, step counts and, with dropout, the noise generator. Accumulated gradients are not part of it."""
        moments, steps = self.optimizer.state()
        generator = torch.get_rng_state().tolist() if self.dropout else None
        state = EngineState(weights=trainable_state(self.model), moments=moments, steps=steps, generator=generator)
        engine_state.write(state, folder)

    def load_state(self, folder: Path) -> None:
        """Continue from `save_state`, bit for bit; drops accumulated gradients. Raises `CheckpointError` for another model's state."""
        state = engine_state.read(folder)
        self.optimizer.check(state.moments, state.steps)
        load_trainable_state(self.model, state.weights)
        self.optimizer.load(state.moments, state.steps)
        if self.dropout and state.generator is not None:
            torch.set_rng_state(torch.tensor(state.generator, dtype=torch.uint8))

    def _batches(
        self, model: nn.Module, rows: Sequence[TrainRow], budget: int, *, split_groups: bool = True, share_prefixes: bool = True
    ) -> list[MicroBatch]:
        if self.refusal_to_pack(model) is not None:
            return pad_rows(rows, tokens_per_micro_batch=budget, split_groups=split_groups, device=self.device)
        return pack(rows, tokens_per_micro_batch=budget, share_prefixes=share_prefixes, split_groups=split_groups, device=self.device)

    def _backward(self, batch: MicroBatch, loss: LossFunction, temperature: float, *, name: str) -> tuple[float, dict[str, float], Tensor]:
        """-> (loss, sums, log-probs [N]). The graph is gone on return."""
        with mode(self.model, training=self.dropout):
            current, entropy = self._readout(self.model, batch, temperature=temperature, dtype=self.autocast)
            _check_finite(current, batch, name, self.reads)
            value, sums = loss(batch.to_rows(current), batch)
            self._check_loss(value, batch, name)
            if value.requires_grad:
                value.backward()  # type: ignore[no-untyped-call]
                self._check_gradient(batch, name)
        own = (entropy.sum().item(), batch.trained_tokens, batch.computed_tokens, batch.repeated_prefix_tokens, batch.untrained_rows)
        return value.item(), _merged(sums, dict(zip(_OWN_SUMS, own, strict=True))), current.detach()

    def _check_loss(self, value: Tensor, batch: MicroBatch, name: str) -> None:
        if not math.isfinite(value.item()):
            what = f"the loss of {name} is {value.item()}"
            raise RunError(what, where=_rows_of(batch), hint="look at the numbers that these rows carry")

    def _check_gradient(self, batch: MicroBatch, name: str) -> None:
        if not math.isfinite(self.optimizer.gradient_norm()):
            what = f"the gradient is not finite after {name} ({', '.join(self.optimizer.non_finite()[:3])})"
            raise RunError(what, where=_rows_of(batch), hint="lower optimizer.learning_rate")

    @contextmanager
    def _dropping_gradients_on_error(self) -> Iterator[None]:
        """Half a batch's gradient must never reach an optimizer step."""
        try:
            yield
        except BaseException:
            self.optimizer.clear()
            raise

    @contextmanager
    def _scoring(self, which: Literal["policy", "reference"]) -> Iterator[nn.Module]:
        if which == "reference" and self.reference is None:
            raise ValueError("this engine was made without a reference")
        source = nullcontext(self.model) if which == "policy" or self.reference is None else self.reference.active()
        with source as model, mode(model, training=False), torch.no_grad():
            yield model


def _check_finite(current: Tensor, batch: MicroBatch, name: str, reads: str) -> None:
    if not bool(current.isfinite().all()):
        what = "log-prob" if reads == "logprobs" else "value"
        raise RunError(f"a {what} of {name} is not finite", where=_rows_of(batch), hint="the weights hold values that are not finite")


def _merged(sums: Mapping[str, Tensor], own: dict[str, float]) -> dict[str, float]:
    taken = sorted(own.keys() & sums.keys())
    if taken:
        raise ValueError(f"the loss function returns {', '.join(taken)}, which the engine counts itself")
    return {name: float(number) for name, number in sums.items()} | own


def _scatter(batch: MicroBatch, flat: Tensor, result: list[list[float]]) -> None:
    """Put the values [N] of a micro-batch's trained tokens where its rows stood in the input."""
    for index, values in zip(batch.row_index, batch.split(flat), strict=True):
        result[index] = values


def _rows_of(batch: MicroBatch) -> str:
    shown = ", ".join(str(index) for index in batch.row_index[:8])
    return f"rows {shown}{' …' if len(batch.row_index) > 8 else ''} of the batch"
