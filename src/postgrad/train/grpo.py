"""GRPO, and with tools Agent GRPO: one file, the article's five steps.

    prompts ─ ① generate ─ ② tool loop ─▶ groups ─ ③ score ─▶ advantages ─ ④ loss ─ ⑤ update

①② `rollout.agent.collect`: G rollouts per prompt; without tools a rollout is one turn.
③   `judging.score`, then `judging.judge` with `formulas.group_advantages`: A = (r − mean of the group) / (std of the group + 1e-4).
④   `grpo_loss`: ratio level × surrogate × aggregation, and where the KL goes; the named presets are rows of `presets.PRESETS`.
⑤   `Engine.optimizer_step`.

Where this deviates from a literal reading of the article:
1. The loss is a masked mean with the whole batch's denominator, never `mean(loss × mask)`, which divides by padding too.
2. An abstaining reward is left out of its group's statistics; it is not a 0.
3. A rollout whose advantage is 0 has no gradient without a KL term: it counts in the denominator and costs no forward or backward.
4. π_old is what the sampler reported (docs/decisions/0003), so a sampler of lower precision is corrected instead of ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from postgrad import formulas
from postgrad.protocols import BackwardResult, Engine, Loss, Rows
from postgrad.train.credit import Hook
from postgrad.train.judged import Denominators, JudgedGroup, Minibatch, split_minibatches
from postgrad.train.judging import Scored, joined, judge, score
from postgrad.train.loop import Timer
from postgrad.train.order import positions_in_run
from postgrad.train.presets import LossSettings, loss_settings
from postgrad.train.recipe import GRPORecipe
from postgrad.train.sampling import Sampling
from postgrad.train.schedule import learning_rate
from postgrad.types import Group, TrainRow

KL = {"k1": formulas.kl_k1, "k2": formulas.kl_k2, "k3": formulas.kl_k3}


# ④ the loss ------------------------------------------------------------------------------------------------------------------------


def grpo_loss(settings: LossSettings, batch: Denominators, *, own_old: bool = False) -> Loss:
    """The loss of the GRPO family. Rows carry `per_row["advantages"]`, or `per_token["advantages"]` where turns are
    credited, `per_token["old_logprobs"]` unless the policy is its own π_old (`own_old`: no row of the batch carries them), and with a KL
    term `per_token["reference_logprobs"]`."""

    def loss(current: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        mask, advantages = rows.mask, rows.per_token.get("advantages")
        if advantages is None:
            advantages = rows.per_row["advantages"][:, None]
        old = current.detach() if own_old else rows.per_token["old_logprobs"]
        ratio = policy_ratio(settings.ratio, current, old, mask)
        per_token = surrogate(settings, ratio, advantages, current, mask)
        sums = clip_counts(settings, ratio, advantages, mask)
        if settings.kl_coef:
            kl = KL[settings.kl_estimator](current, rows.per_token["reference_logprobs"], mask)
            per_token = per_token + settings.kl_coef * kl
            sums["kl"] = kl.detach().sum()
        return aggregate(settings, per_token, rows, batch), sums

    # With ratio 1 every surrogate's derivative by a log-prob is −A times its share of the mean, whatever the log-prob is.
    return Loss(loss, constant_gradient=own_old and not settings.kl_coef)


def policy_ratio(level: Literal["token", "sequence"], current: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """π_new / π_old per token, or one geometric mean per row, repeated over its tokens. Shape [R, L]."""
    log_ratio = formulas.log_ratio(current, old, mask)
    if level == "token":
        return formulas.token_ratio(log_ratio)
    return formulas.sequence_ratio(log_ratio, mask)[:, None].expand(mask.shape)


def surrogate(settings: LossSettings, ratio: Tensor, advantages: Tensor, current: Tensor, mask: Tensor) -> Tensor:
    """Loss per token [R, L] of the surrogate that the preset names."""
    clip = {"clip_low": settings.clip_low, "clip_high": settings.clip_high}
    if settings.surrogate == "cispo":
        return formulas.cispo_surrogate(ratio, advantages, current, mask, **clip)
    if settings.surrogate == "reinforce":
        return formulas.reinforce_surrogate(current, advantages, mask)
    if settings.max_ratio is not None:
        return formulas.two_sided_clip_surrogate(ratio, advantages, **clip, max_ratio=settings.max_ratio)
    return formulas.clipped_surrogate(ratio, advantages, **clip)


def aggregate(settings: LossSettings, per_token: Tensor, rows: Rows, batch: Denominators) -> Tensor:
    """The batch's loss. The mean over a rollout that was forked into several rows weighs each row by its share of the tokens."""
    if settings.aggregation == "token_mean":
        return formulas.token_mean(per_token, rows.mask, denominator=batch.tokens)
    if settings.aggregation == "sequence_mean":
        return formulas.sequence_mean(rows.per_row["share"][:, None] * per_token, rows.mask, denominator=batch.rollouts)
    return formulas.constant_length_mean(per_token, rows.mask, settings.length, denominator=batch.rollouts)


def clip_counts(settings: LossSettings, ratio: Tensor, advantages: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Tokens on which the clip is active, by side: the policy term has no gradient there."""
    if settings.surrogate != "clipped":
        return {}
    low, high, _ = formulas.clip_fractions(
        ratio, advantages, mask, clip_low=settings.clip_low, clip_high=settings.clip_high, max_ratio=settings.max_ratio, denominator=1.0
    )
    return {"clip_low": low, "clip_high": high}


# one run ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GRPOParts:
    """What a GRPO run is made of; `build.build_grpo` makes it from a recipe."""

    sampling: Sampling
    engine: Engine
    hook: Hook | None = None
    """The user's own advantages (`loss.advantages`)."""
    record: Callable[[int, Scored, Sequence[JudgedGroup]], None] = lambda step, scored, judged: None
    """Told of every batch: writes the rollout file and the failures."""


class GRPO:
    """One GRPO run; see `loop.Method`."""

    def __init__(self, recipe: GRPORecipe, parts: GRPOParts) -> None:
        self.recipe, self.parts, self.engine = recipe, parts, parts.engine
        self.settings = loss_settings(recipe.loss, recipe.rollout)
        self.timer = Timer()
        self.drawn = 0
        self.buffer: list[Minibatch] = []
        self.updates = recipe.batch.minibatches * recipe.batch.epochs
        self.own_old = self.settings.old_logprobs == "policy" and self.updates == 1
        """With one update per batch the policy is its own π_old."""
        batches = None if recipe.max_steps is None else -(-recipe.max_steps // self.updates)
        rollout_batches, self.total_prompts = positions_in_run(
            size=len(parts.sampling.prompts), epochs=recipe.epochs, per_step=recipe.batch.prompts, max_steps=batches
        )
        self.total_steps = recipe.max_steps or rollout_batches * self.updates
        outcomes = [reward.name for reward in parts.sampling.judges.rewards if reward.role == "outcome"]
        shown = [f"rewards/{name}/mean" for name in outcomes[:2]]
        self.headline: tuple[str, ...] = ("reward", *shown, "reward_std", "entropy", "completions/mean_length")

    def step(self, step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if not self.buffer:
            scored = self._draw(step)  # ① generate ② tool loop ③ score
            self.buffer = self._prepare(step, scored)  # advantages, and the rows that carry them
            metrics = scored.metrics()
        batch = self.buffer.pop(0)
        with self.timer.part("train"):
            result = self._backward(batch)  # ④ loss
            update = self.engine.optimizer_step(learning_rate(step, self.total_steps, self.recipe.optimizer))  # ⑤ update
        self.parts.sampling.sampler.forget()
        rates = {
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rate,
            "epoch": self.parts.sampling.epochs(self.drawn),
        }
        return metrics | loss_metrics(batch, result) | rates | self.timer.take()

    def _draw(self, step: int) -> Scored:
        """A batch of groups. Those that the filter drops are replaced by the groups of new prompts while refills are left."""
        before = (step - 1) // self.updates * self.recipe.batch.prompts
        wanted = min(self.recipe.batch.prompts, self.total_prompts - before)  # the last batch of an `epochs` run may be smaller
        draws: list[Scored] = []
        for _ in range(1 + self.recipe.rollout.refill):
            count = wanted - sum(draw.kept for draw in draws)
            if not count:
                break
            groups = self._generate(step, range(self.drawn, self.drawn + count))  # ① ②
            self.drawn += count
            with self.timer.part("reward"):
                draws.append(score(groups, self.parts.sampling.judges, self.recipe.loss))  # ③
        return joined(draws)

    def _generate(self, step: int, positions: Sequence[int]) -> list[Group]:
        with self.timer.part("rollout"):
            return self.parts.sampling.groups(step, positions)

    def _prepare(self, step: int, scored: Scored) -> list[Minibatch]:
        """The minibatches of a rollout batch, with every log-prob that must be taken before the first update."""
        judged = judge(scored, self.recipe.loss, scale=self.settings.scale, hook=self.parts.hook)
        self.parts.record(step, scored, judged)
        batches = split_minibatches(
            [group for group in judged if not group.dropped],
            minibatches=self.recipe.batch.minibatches,
            mask_truncated=self.recipe.loss.mask_truncated,
            skip_zero=self.settings.kl_coef == 0.0,
        )
        return [self._with_logprobs(batch) for batch in batches] * self.recipe.batch.epochs

    def _with_logprobs(self, batch: Minibatch) -> Minibatch:
        rows = batch.rows
        if self.settings.old_logprobs == "sampler":
            rows = tuple(with_values(row, "old_logprobs", row.per_token["sampler_logprobs"]) for row in rows)
        elif not self.own_old:
            rows = self._measured(rows, "old_logprobs", "policy")
        if self.settings.kl_coef:
            rows = self._measured(rows, "reference_logprobs", "reference")
        return replace(batch, rows=rows)

    def _measured(self, rows: Sequence[TrainRow], name: str, model: Literal["policy", "reference"]) -> tuple[TrainRow, ...]:
        with self.timer.part(name):
            values = self.engine.logprobs(rows, model=model, temperature=self.recipe.rollout.temperature)
        return tuple(with_values(row, name, spread(row, trained)) for row, trained in zip(rows, values, strict=True))

    def _backward(self, batch: Minibatch) -> BackwardResult:
        totals = Denominators(self.engine.global_sum(batch.denominators.tokens), self.engine.global_sum(batch.denominators.rollouts))
        loss = grpo_loss(self.settings, totals, own_old=self.own_old)
        return self.engine.forward_backward(batch.rows, loss, temperature=self.recipe.rollout.temperature)

    def score_one(self, step: int) -> Scored:
        """Sample and score the first prompt's group without training on it: what a dry run shows."""
        return score(self._generate(step, [self.drawn]), self.parts.sampling.judges, self.recipe.loss)

    # what the loop needs beside `step`

    def evaluate(self, step: int) -> dict[str, float]:
        with self.timer.part("evaluate"):
            return self.parts.sampling.evaluate(step)

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "buffer": [batch.to_json() for batch in self.buffer]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.drawn = int(state["drawn"])
        self.buffer = [Minibatch.from_json(record) for record in state["buffer"]]

    def export(self, folder: Path) -> None:
        facts = {"Method": f"GRPO (preset {self.recipe.loss.preset}), {self.total_steps} steps", "Notes": self.recipe.notes}
        self.parts.sampling.policy.export(folder, facts)


def with_values(row: TrainRow, name: str, values: Sequence[float]) -> TrainRow:
    return replace(row, per_token={**row.per_token, name: values})


def spread(row: TrainRow, trained: Sequence[float]) -> list[float]:
    """One value per token from one per trained token; 0 elsewhere (never read there)."""
    values = iter(trained)
    return [next(values) if flag else 0.0 for flag in row.trained]


def loss_metrics(batch: Minibatch, result: BackwardResult) -> dict[str, float]:
    """Means over the trained tokens that were computed. A step without any (every advantage 0) has only its loss, which is 0."""
    tokens = result.sums.get("tokens", 0.0)
    metrics = {"loss": result.loss, "trained_rollouts": float(len(batch.rows)), "trained_tokens": tokens}
    if not tokens:
        return metrics
    metrics["entropy"] = result.sums["entropy"] / tokens
    if "kl" in result.sums:
        metrics["kl"] = result.sums["kl"] / tokens
    if "clip_low" in result.sums:
        low, high = result.sums["clip_low"] / tokens, result.sums["clip_high"] / tokens
        metrics |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
    return metrics | {"sampling/logprob_difference": sampler_difference(batch.rows, result.logprobs) / tokens}


def sampler_difference(rows: Sequence[TrainRow], current: Sequence[Sequence[float]]) -> float:
    """Σ |log π − log-prob the sampler reported| over the trained tokens [nats]."""
    total = 0.0
    for row, values in zip(rows, current, strict=True):
        sampled = [value for value, flag in zip(row.per_token["sampler_logprobs"], row.trained, strict=True) if flag]
        total += sum(abs(now - then) for now, then in zip(values, sampled, strict=True))
    return total
