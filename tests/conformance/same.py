"""The same model, rollouts and rewards for both sides; postgrad's side of each step; and what it means to agree.

1. `batch_of_rollouts`   ragged, multi-turn rollouts with tool results, and rewards.
2. `grpo_steps`          `GRPO.step` as a run calls it; only sampling and scoring are replaced by the given rollouts and rewards.
3. `sft_step`            `SFT.step` over given rows.
4. `assert_same_step`    loss and every gradient agree to 1e-4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from postgrad.models.engine import LocalEngine
from postgrad.protocols import OptimizerResult
from postgrad.rewards.score import Scores
from postgrad.testing import ScriptedPolicy
from postgrad.train.grpo import GRPO, GRPOParts
from postgrad.train.recipe import GRPORecipe, SFTRecipe
from postgrad.train.sampling import Sampling
from postgrad.train.sft import SFT
from postgrad.types import Group, Prompt, Rollout, Segment, Source, StopReason, TrainRow

RELATIVE = 1e-4
EOS = 2

MODEL, TOOL = Source.MODEL, Source.TOOL
# Per group: tokens of the prompt, then per rollout the lengths of its turns, from the model and from tools in turn.
TURNS: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = (
    (9, ((5,), (12,), (4, 6, 3), (2, 3, 7, 5, 4))),
    (3, ((1,), (8, 2, 1), (15,), (6, 9, 6))),
    (14, ((3,), (3, 4, 9), (7,), (10,))),
)
REWARDS = ((1.0, 0.0, 0.5, 2.0), (0.0, 1.0, 1.0, 0.3), (-1.0, 0.25, 0.0, 1.5))


@dataclass(frozen=True)
class Step:
    """One optimizer step as it was about to happen: the batch's loss, every parameter's gradient, and what was logged."""

    loss: float
    gradients: dict[str, Tensor]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """Groups of one size, and their rewards [N, K] (NaN = the reward returned None)."""

    groups: tuple[Group, ...]
    rewards: np.ndarray
    weights: tuple[float, ...] = (1.0,)

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return tuple(rollout for group in self.groups for rollout in group.rollouts)

    @property
    def group_size(self) -> int:
        return len(self.groups[0].rollouts)


def batch_of_rollouts(
    policy: nn.Module,
    *,
    temperature: float = 1.0,
    rewards: Any = REWARDS,
    weights: tuple[float, ...] = (1.0,),
    truncated: frozenset[int] = frozenset(),
    tools: bool = True,
    prompt_tokens: int | None = None,
    seed: int = 0,
) -> Batch:
    """Random tokens in the shape of `TURNS`, with the log-probs that `policy` gives them. rewards: [B, G] or [K, B, G].

    truncated: rollouts (0..N−1) that a limit ended; the others end with the end token. tools: without, each first turn only.
    prompt_tokens: one length for all prompts.
    """
    generator = torch.Generator().manual_seed(seed)
    numbers = iter(range(sum(len(rollouts) for _, rollouts in TURNS)))
    groups = []
    for index, (length, shapes) in enumerate(TURNS):
        prompt = Segment(Source.PROMPT, _tokens(prompt_tokens or length, generator))
        rollouts = []
        for sample, lengths in enumerate(shapes):
            cut = next(numbers) in truncated
            turns = [(MODEL, TOOL)[turn % 2] for turn in range(len(lengths) if tools else 1)]
            ids = [_tokens(length, generator) for length in lengths[: len(turns)]]
            ids[-1] = ids[-1] if cut else (*ids[-1][:-1], EOS)
            stop = StopReason.TURN_TOKENS if cut else StopReason.END
            segments = (prompt, *_segments(policy, prompt.token_ids, list(zip(turns, ids, strict=True)), temperature))
            rollouts.append(Rollout(segments=segments, messages=(), stop=stop, sample=sample))
        groups.append(Group(Prompt(row=f"prompts:{index}", messages=()), tuple(rollouts)))
    table = np.asarray(rewards, dtype=np.float64)
    return Batch(tuple(groups), table.reshape(len(weights), -1).T, weights)


def _tokens(count: int, generator: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(3, 200, (count,), generator=generator).tolist())


def _segments(
    policy: nn.Module, prompt: tuple[int, ...], turns: list[tuple[Source, tuple[int, ...]]], temperature: float
) -> Iterator[Segment]:
    ids = prompt + tuple(token for _, turn in turns for token in turn)
    logprobs = plain_logprobs(policy, ids, temperature)
    start = len(prompt)
    for source, turn in turns:
        stop = start + len(turn)
        yield Segment(source, turn, tuple(logprobs[start:stop]) if source is MODEL else ())
        start = stop


def plain_logprobs(model: nn.Module, ids: Sequence[int], temperature: float) -> list[float]:
    """Per token, its log-prob after the tokens before it, by the textbook: whole logits, one row. 0 for the first token."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double() / temperature
    chosen = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
    return [0.0, *chosen.tolist()]


# postgrad's side --------------------------------------------------------------------------------------------------------------------


class RecordingEngine(LocalEngine):
    """The engine, except that an optimizer step records the gradients and moves the weights by `move` instead of by AdamW."""

    def __init__(
        self, model: nn.Module, *, packed: bool = True, move: Callable[[nn.Module], None] = lambda model: None, **options: Any
    ) -> None:
        super().__init__(model, max_grad_norm=None, **options)
        assert (self.refusal_to_pack(model) is None) is packed, "the fallback to padding would hide a fault of the packed path"
        self.move, self.gradients, self.micro_batches = move, [], 0

    def _backward(self, *args: Any, **named: Any) -> Any:
        self.micro_batches += 1
        return super()._backward(*args, **named)

    def optimizer_step(self, learning_rate: float) -> OptimizerResult:
        self.gradients.append(gradients_of(self.model))
        self.optimizer.clear()
        self.move(self.model)
        return OptimizerResult(grad_norm=0.0, learning_rate=learning_rate)


@dataclass(frozen=True)
class FrozenReference:
    """Another model as the reference."""

    model: nn.Module

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        yield self.model


@dataclass(frozen=True)
class GivenScores:
    """Stands for the `Scorer`: answers with the batch's rewards."""

    batch: Batch

    @property
    def rewards(self) -> list[Any]:
        return [SimpleNamespace(name=name, role="outcome") for name in self._names()]

    def score(self, groups: Sequence[Group]) -> Scores:
        assert tuple(groups) == self.batch.groups
        names = self._names()
        return Scores(names, self.batch.weights, ("outcome",) * len(names), self.batch.rewards, self.batch.group_size)

    def _names(self) -> tuple[str, ...]:
        return tuple(f"reward_{number}" for number in range(len(self.batch.weights)))


class GivenRollouts(GRPO):
    """GRPO on rollouts that are already there."""

    batch: Batch

    def _generate(self, step: int, positions: Sequence[int]) -> list[Group]:
        return list(self.batch.groups)


def grpo_steps(
    model: nn.Module,
    batch: Batch,
    loss: dict[str, Any],
    *,
    steps: int = 1,
    temperature: float = 1.0,
    length: int = 64,
    reference: nn.Module | None = None,
    tokens_per_micro_batch: int = 60,
    minibatches: int = 1,
    packed: bool = True,
    move: Callable[[nn.Module], None] = lambda model: None,
) -> list[Step]:
    """The first `steps` optimizer steps on one rollout batch. `loss` is the recipe's section of that name.

    packed: whether the model is one that can be packed, that is, computed without padding and with shared prompts.
    """
    recipe = GRPORecipe.model_validate(
        {
            "method": "grpo",
            "model": "given",
            "run_dir": "unused",
            "max_steps": steps,
            "data": {"train": "given.jsonl", "shuffle": False},
            "batch": {
                "prompts": len(batch.groups),
                "minibatches": minibatches,
                "epochs": steps // minibatches,
                "tokens_per_micro_batch": tokens_per_micro_batch,
            },
            "rollout": {"group_size": batch.group_size, "temperature": temperature, "max_total_tokens": length},
            "rewards": [{"use": "given.py:reward"}],
            "loss": loss,
        }
    )
    engine = RecordingEngine(
        model,
        reference=None if reference is None else FrozenReference(reference),
        tokens_per_micro_batch=tokens_per_micro_batch,
        packed=packed,
        move=move,
    )
    given: Any = dict.fromkeys(("policy", "params", "toolbox", "rollout"))
    prompts = [group.prompt for group in batch.groups]
    sampling = Sampling(**given, sampler=ScriptedPolicy([]), judges=GivenScores(batch), prompts=prompts, seed=0, shuffle=False)  # type: ignore[arg-type]
    method = GivenRollouts(recipe, GRPOParts(sampling, engine))
    method.batch = batch
    metrics = [method.step(number) for number in range(1, steps + 1)]
    assert engine.micro_batches > len(engine.gradients), "the batch should not fit one micro-batch"
    return [Step(values["loss"], gradients, values) for values, gradients in zip(metrics, engine.gradients, strict=True)]


def sft_step(model: nn.Module, rows: Sequence[TrainRow], *, tokens_per_micro_batch: int = 60, packed: bool = True) -> Step:
    """One optimizer step over all rows."""
    recipe = SFTRecipe.model_validate(
        {
            "method": "sft",
            "model": "given",
            "run_dir": "unused",
            "max_steps": 1,
            "data": {"train": "given.jsonl", "shuffle": False},
            "batch": {"rows": len(rows), "tokens_per_micro_batch": tokens_per_micro_batch},
        }
    )
    engine = RecordingEngine(model, tokens_per_micro_batch=tokens_per_micro_batch, packed=packed)
    metrics = SFT(recipe, None, engine, rows, []).step(1)  # type: ignore[arg-type]
    assert engine.micro_batches > len(engine.gradients), "the batch should not fit one micro-batch"
    return Step(metrics["loss"], engine.gradients[0], metrics)


# agreement --------------------------------------------------------------------------------------------------------------------------


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Every trained parameter's gradient (zeros where there is none)."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def drift(size: float, *, seed: int = 1) -> Callable[[nn.Module], None]:
    """Moves every trained weight by noise of this size: the same weights get the same noise on both sides."""

    def move(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(size * torch.randn(parameter.shape, generator=generator))

    return move


def assert_same_step(ours: Step, theirs: Step, *, factor: float = 1.0) -> None:
    """Loss and gradients agree; `factor`: ours is that many times theirs.

    A gradient may differ by 1e-4 of its parameter's largest entry, or of 1e-3 of the whole gradient's largest entry: a parameter
    whose gradient is zero but for rounding (a key's bias without positions) has no digits to compare.
    """
    assert_same_gradients(ours.gradients, theirs.gradients, factor=factor)
    largest = _largest(theirs.gradients)
    assert math.isclose(ours.loss, factor * theirs.loss, rel_tol=RELATIVE, abs_tol=RELATIVE * min(largest, 0.01)), (ours.loss, theirs.loss)


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], *, factor: float = 1.0) -> None:
    assert ours.keys() == theirs.keys()
    floor = 1e-3 * _largest(theirs)
    assert floor > 0.0, "there is no gradient to compare"
    wrong = {name: error for name in theirs if (error := _difference(ours[name], factor * theirs[name], factor * floor)) > RELATIVE}
    assert not wrong, wrong


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest relative difference of any parameter's gradient."""
    floor = 1e-3 * _largest(theirs)
    return max(_difference(ours[name], theirs[name], floor) for name in theirs)


def _difference(ours: Tensor, theirs: Tensor, floor: float) -> float:
    return ((ours - theirs).abs().max() / max(theirs.abs().max().item(), abs(floor))).item()


def _largest(gradients: dict[str, Tensor]) -> float:
    return max(gradient.abs().max().item() for gradient in gradients.values())
