"""The engine on one process: log-probs, gradients and optimizer steps of a model, in micro-batches of a token budget.

1. A `Reader` packs rows into micro-batches and reads log-probs (or values) off a model.
2. Each micro-batch runs the body, then the log-prob head at the trained positions, then the loss function, then backward;
   its graph is gone before the next begins. Losses carry global denominators, so how the rows fall into micro-batches
   changes nothing but rounding.
3. A log-prob, a loss or its derivative that is not finite raises `RunError` and names the micro-batch; a gradient that becomes so further
   down is found by the optimizer's step, which names the weights. Weights and moments stay as they were.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from postgrad.errors import RunError
from postgrad.models import engine_state
from postgrad.models.engine_state import EngineState
from postgrad.models.forward import mode, read_logprobs
from postgrad.models.linears import into_gradients
from postgrad.models.micro_batch import MicroBatch
from postgrad.models.optimizer import Optimizer, OptimizerConfig
from postgrad.models.products import fast_products
from postgrad.models.reader import Reader, Reads, check_finite, rows_of, scatter
from postgrad.models.state import load_trainable_state, trainable_state
from postgrad.protocols import BackwardResult, Loss, LossFunction, OptimizerResult
from postgrad.types import TrainRow

__all__ = ["LocalEngine", "OptimizerConfig", "ReferenceModel"]

_OWN_SUMS = ("entropy", "tokens", "computed_tokens", "repeated_prefix_tokens", "untrained_rows")


class ReferenceModel(Protocol):
    """Gives the reference's model inside a `with`: a frozen copy, or the policy with its adapter off."""

    def active(self) -> AbstractContextManager[nn.Module]: ...


class LocalEngine(Reader):
    """`protocols.Engine` on one process: a `Reader` that also trains.

    dropout: whether `forward_backward` uses the model's dropout. Off, log-probs are those of `logprobs` and of the sampler
    (a policy's ratio is 1 on its own samples). On, prompts of a group are not shared: each row draws its own noise, which is keyed by
    (`seed`, optimizer steps so far, call since the last one) and so the same after a resume.
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
        seed: int = 0,
        reads: Reads = "logprobs",
    ) -> None:
        placed = model if device is None else model.to(device)
        super().__init__(placed, tokens_per_micro_batch=tokens_per_micro_batch, autocast=autocast, reads=reads)
        self.reference = reference
        self.dropout = dropout
        self._seed = seed
        self._updates = self._calls = 0
        self.optimizer = Optimizer(placed, optimizer or OptimizerConfig(), max_grad_norm=max_grad_norm)

    def forward_backward(self, rows: Sequence[TrainRow], loss: LossFunction, *, temperature: float = 1.0) -> BackwardResult:
        """Add the loss's gradient to what has accumulated. See `protocols.Engine`.

        A `protocols.Loss` may say more of the function. On any error the gradients accumulated since the last step are dropped.
        `sums` also holds computed_tokens, repeated_prefix_tokens and untrained_rows (rows without a trained token).
        """
        known = Loss.of(loss)
        budget = self.tokens_per_micro_batch
        if known.whole_batch:  # padded to the longest, at the most
            budget = len(rows) * max((len(row.token_ids) for row in rows), default=1)
        batches = self.batches(self.model, rows, budget, split_groups=not known.whole_groups, share_prefixes=not self.dropout)
        total = 0.0
        sums = dict.fromkeys(_OWN_SUMS, 0.0)
        logprobs: list[list[float]] = [[] for _ in rows]
        with self._dropping_gradients_on_error(), self._noise():
            if len(batches) > 1:
                self.optimizer.fill_gradients()
            for number, batch in enumerate(batches, 1):
                value, more, current = self._backward(batch, known, temperature, name=f"micro-batch {number} of {len(batches)}")
                total += value
                for key, amount in more.items():
                    sums[key] = sums.get(key, 0.0) + amount
                scatter(batch, current, logprobs)
        return BackwardResult(loss=total, sums=sums, logprobs=logprobs)

    def logprobs(
        self, rows: Sequence[TrainRow], *, model: Literal["policy", "reference"] = "policy", temperature: float = 1.0
    ) -> list[list[float]]:
        """See `protocols.Engine`. Raises `RunError` when a log-prob is not finite."""
        self.require("logprobs")
        with self._source(model) as source:
            return self.read(source, rows, temperature=temperature, name=f"the {model}")

    def optimizer_step(self, learning_rate: float) -> OptimizerResult:
        result = self.optimizer.step(learning_rate)
        self._updates, self._calls = self._updates + 1, 0
        return result

    def global_sum(self, value: float) -> float:
        return value

    def save_state(self, folder: Path) -> None:
        """Trained weights, moments and step counts. Accumulated gradients are not part of it."""
        self._check_weights()
        moments, steps = self.optimizer.state()
        record = EngineState(weights=trainable_state(self.model), moments=moments, steps=steps, updates=self._updates)
        engine_state.write(record, folder)

    def load_state(self, folder: Path) -> None:
        """Continue from `save_state`, bit for bit; drops accumulated gradients. Raises `CheckpointError` for another model's state."""
        state = engine_state.read(folder)
        self.optimizer.check(state.moments, state.steps)
        load_trainable_state(self.model, state.weights)
        self.optimizer.load(state.moments, state.steps)
        self._updates, self._calls = state.updates, 0

    def _backward(self, batch: MicroBatch, loss: Loss, temperature: float, *, name: str) -> tuple[float, dict[str, float], Tensor]:
        """-> (loss, sums, log-probs [N]). The graph is gone on return."""
        with mode(self.model, training=self.dropout), fast_products(self.device, self.autocast), into_gradients(self.model):
            in_one_pass = loss.constant_gradient and self.reads == "logprobs"
            readout = partial(read_logprobs, gradient=_announced(loss, batch)) if in_one_pass else self.readout
            current, entropy = readout(self.model, batch, temperature=temperature, dtype=self.autocast)
            check_finite(current, batch, name, self.reads)
            total, sums = loss(batch.to_rows(current), batch.with_entropy(entropy))
            _check_loss(total, batch, name)
            if total.requires_grad:
                current.retain_grad()
                total.backward()  # type: ignore[no-untyped-call]
                _check_derivative(current.grad, batch, name)
        counts = (batch.trained_tokens, batch.computed_tokens, batch.repeated_prefix_tokens, batch.untrained_rows)
        own = (entropy.detach().sum().item(), *counts)
        return total.item(), _merged(sums, dict(zip(_OWN_SUMS, own, strict=True))), current.detach()

    def _check_weights(self) -> None:
        """What is saved can be trained on and exported: an update may have left numbers that are not finite."""
        broken = [name for name, weight in self.optimizer.weights.items() if not bool(weight.isfinite().all())]
        if broken:
            what = f"the update left {len(broken)} weights with values that are not finite (first: {broken[0]})"
            raise RunError(what, hint="lower optimizer.learning_rate")

    @contextmanager
    def _noise(self) -> Iterator[None]:
        """Dropout draws from a generator of its own; the process's generator is left as it was."""
        if not self.dropout:
            yield
            return
        key = hashlib.blake2b(f"{self._seed} {self._updates} {self._calls}".encode(), digest_size=7).digest()
        self._calls += 1
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(int.from_bytes(key, "big"))
            yield

    @contextmanager
    def _dropping_gradients_on_error(self) -> Iterator[None]:
        """Half a batch's gradient must never reach an optimizer step."""
        try:
            yield
        except BaseException:
            self.optimizer.clear()
            raise

    def _source(self, which: Literal["policy", "reference"]) -> AbstractContextManager[nn.Module]:
        if which == "policy":
            return nullcontext(self.model)
        if self.reference is None:
            raise ValueError("this engine was made without a reference")
        return self.reference.active()


def _announced(loss: LossFunction, batch: MicroBatch) -> Tensor:
    """[N]: the loss's derivative by each log-prob, for a loss whose derivative is the same wherever it is taken."""
    anywhere, entropy = (torch.zeros(batch.trained_tokens, device=batch.targets.device, requires_grad=True) for _ in range(2))
    if not batch.trained_tokens:
        return anywhere.detach()
    value, _ = loss(batch.to_rows(anywhere), batch.with_entropy(entropy))
    gradient, by_entropy = torch.autograd.grad(value, (anywhere, entropy), allow_unused=True)
    if by_entropy is not None:
        raise RuntimeError("a loss of constant gradient may not read the entropy, which has no gradient in one pass")
    return gradient


def _check_loss(value: Tensor, batch: MicroBatch, name: str) -> None:
    if not math.isfinite(value.item()):
        raise RunError(f"the loss of {name} is {value.item()}", where=rows_of(batch), hint="look at the numbers that these rows carry")


def _check_derivative(gradient: Tensor | None, batch: MicroBatch, name: str) -> None:
    if gradient is not None and not bool(gradient.isfinite().all()):
        what = f"the loss of {name} is finite, its derivative by the log-probs is not"
        raise RunError(what, where=rows_of(batch), hint="look at the numbers that these rows carry")


def _merged(sums: Mapping[str, Tensor], own: dict[str, float]) -> dict[str, float]:
    taken = sorted(own.keys() & sums.keys())
    if taken:
        raise ValueError(f"the loss function returns {', '.join(taken)}, which the engine counts itself")
    return {name: float(number) for name, number in sums.items()} | own
