"""What the rest of the code knows of models: a `Sampler` that writes tokens and an `Engine` that learns from them.

Both take and give token ids. Neither knows of messages, tools, rewards or recipes.
Implementations: `models.sampler.LocalSampler`, `models.engine.LocalEngine`, `testing.ScriptedPolicy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from postgrad.types import TrainRow


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to pick the next token. Filters apply to the temperature-scaled distribution, in the order top-k, top-p, min-p.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 switch the filters off.
    stop_ids: every id that ends a turn (all of the model's end ids). The sampled end id is kept, with its log-prob.
    stop_strings: sampling stops after the token that completes one of them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class SampleKey:
    """Names one rollout. With the turn it keys the sampling noise, so a sample does not depend on its batch.

    `step` is the optimizer step (or the evaluation's own number), `prompt` the index of the prompt in the run's order.
    """

    seed: int
    step: int
    prompt: int
    sample: int


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Continue `context` (the whole rollout so far: prompt, sampled tokens, tool results) by at most `max_tokens` tokens.

    The sampler finds what it has already cached by comparing ids: a cache can be missed, never wrong.
    """

    key: SampleKey
    turn: int
    context: tuple[int, ...]
    max_tokens: int


class Finish(StrEnum):
    """Why one turn of sampling ended."""

    STOP_ID = "stop_id"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled turn: the new ids, their log-probs under softmax(logits / temperature) without filters, and why it ended.

    A greedy turn (temperature 0) reports log-probs at temperature 1.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish


class InfrastructureError(Exception):
    """Something outside the model and outside postgrad failed: a server, a connection, an environment.

    Raised by a `Sampler` for a batch or given back for one request, or raised by a tool for its own rollout. The rollouts concerned
    are tried once more, then masked out; they never get reward 0. Any other exception of a sampler is a bug and ends the run.
    """


Answer = tuple[TurnRequest, "Completion | InfrastructureError"]
"""A request, and its turn, or what outside the model failed while it was sampled."""


class Stream(Protocol):
    """Turns being sampled side by side. A request joins at any time and comes back as soon as its own turn has ended."""

    @property
    def busy(self) -> bool:
        """Whether a request is still to come back."""
        ...

    def submit(self, requests: Sequence[TurnRequest]) -> None: ...

    def step(self) -> list[Answer]:
        """Sample on for a while, a token of every row or more; the requests that came back, often none. Only while `busy`."""
        ...


class Sampler(Protocol):
    """Writes tokens.

    `stream`:   for as long as the block lasts. `starts`: contexts that rollouts will begin with, as far as they are known. What they
                have in common is read once. A sample may depend on that in its last digits; else on its request and the weights alone.
    `generate`: answers in request order.
    `forget`:   drops every cache (new weights, or the rollouts ended).
    """

    def stream(self, params: SamplingParams, *, starts: Sequence[Sequence[int]] = ()) -> AbstractContextManager[Stream]: ...

    def generate(self, requests: Sequence[TurnRequest], params: SamplingParams) -> list[Completion]: ...

    def forget(self) -> None: ...


class BatchStream:
    """A stream over a function that answers whole batches: everything that waits is one batch."""

    def __init__(self, generate: Callable[[Sequence[TurnRequest]], list[Completion]]) -> None:
        self._generate = generate
        self._waiting: list[TurnRequest] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def submit(self, requests: Sequence[TurnRequest]) -> None:
        self._waiting += requests

    def step(self) -> list[Answer]:
        batch, self._waiting = self._waiting, []
        try:
            return list(zip(batch, self._generate(batch), strict=True))
        except InfrastructureError as error:
            return [(request, error) for request in batch]


class Rows(Protocol):
    """One micro-batch as a loss function sees it: R rows, each with up to L trained tokens, padded on the right.

    mask [R, L] True where a trained token stands; per_token[name] [R, L] (0 outside the mask); per_row[name] [R];
    entropy [R, L] of the distribution that each trained token was drawn from (nats, differentiable, 0 outside the mask).
    """

    @property
    def mask(self) -> Tensor: ...
    @property
    def per_token(self) -> Mapping[str, Tensor]: ...
    @property
    def per_row(self) -> Mapping[str, Tensor]: ...
    @property
    def entropy(self) -> Tensor: ...


LossFunction = Callable[["Tensor", Rows], "tuple[Tensor, dict[str, Tensor]]"]
"""(current log-probs [R, L], rows) -> (scalar loss, sums to add up over micro-batches).

Denominators inside the loss are global (the whole batch's), so losses and gradients of micro-batches add up exactly.
"""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function, with what an engine has to know of it; a bare function is one of which nothing is known.

    whole_groups: it has to see all rows of a group in one call. whole_batch: all rows of the batch, whatever memory that takes.
    constant_gradient: its derivative by the log-probs does not depend on them, and it does not read the entropy. The head is then
    computed in one pass; an engine refuses a loss of which this is not true.
    """

    function: LossFunction
    whole_groups: bool = False
    whole_batch: bool = False
    constant_gradient: bool = False

    @classmethod
    def of(cls, loss: LossFunction) -> Loss:
        return loss if isinstance(loss, cls) else cls(loss)

    def __call__(self, logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        return self.function(logprobs, rows)


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """loss: the batch's loss (sum over micro-batches). sums: the loss function's own sums plus `entropy` [nats, summed over
    trained tokens] and `tokens`. logprobs: per input row, the current log-prob of each *trained* token, in order, detached."""

    loss: float
    sums: dict[str, float]
    logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class OptimizerResult:
    """grad_norm before clipping (2-norm over all trained weights), and the learning rate that was used."""

    grad_norm: float
    learning_rate: float


class Engine(Protocol):
    """Learns from rows. Gradients accumulate over `forward_backward` calls until `optimizer_step`."""

    def forward_backward(self, rows: Sequence[TrainRow], loss: LossFunction, *, temperature: float = 1.0) -> BackwardResult: ...

    def logprobs(
        self, rows: Sequence[TrainRow], *, model: Literal["policy", "reference"] = "policy", temperature: float = 1.0
    ) -> list[list[float]]:
        """Per row, the log-prob (nats, at the temperature) of each trained token, in order. No gradient, dropout off."""
        ...

    def values(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """Per row, the scalar head's value before each trained token; only for an engine over a model with such a head."""
        ...

    def optimizer_step(self, learning_rate: float) -> OptimizerResult:
        """Clip, step, clear gradients. Raises `RunError`, leaving weights untouched, when a gradient is not finite."""
        ...

    def global_sum(self, value: float) -> float:
        """Sum over ranks (the value itself on one process)."""
        ...

    def save_state(self, folder: Path) -> None:
        """Trained weights and optimizer state as safetensors + JSON; exact."""
        ...

    def load_state(self, folder: Path) -> None: ...
