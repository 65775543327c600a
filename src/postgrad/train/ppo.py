"""PPO with its four roles: actor (the policy), critic (its values), reference, reward. With tools it is Agent PPO.

    prompts ─ ① rollout ─ ② score ─ ③ values ─▶ ④ token rewards, advantages ─▶ ⑤ epochs of updates of actor and critic

①  `rollout.agent.collect`, as in GRPO; tool results and prompts are no time steps.
②  Reward functions and reward models, as in GRPO; a rollout that a limit cut loses `missing_end_penalty`, by its stop reason.
③  The critic's value before each sampled token; for a cut rollout also the value after its last one, which stands in the place of its
    score (bootstrap; docs/decisions/0005).
④  r_t = −kl_coef·KL_t, plus the score on the last sampled token (what a turn earned by itself, on the turn's last); `formulas.gae`;
    advantages are whitened over all sampled tokens.
⑤  `formulas.clipped_surrogate` for the actor, `formulas.clipped_value_loss` for the critic, several epochs of minibatches.

Where this deviates from a literal reading of the article (each was a bug somewhere):
1. The score sits on the last *sampled* token, never on padding (trl#3750).
2. Nothing under the mask (tool text, padding) reaches a loss, a metric or a gradient.
3. The KL stands in exactly one place: in the reward, or in the loss.

One step of a run is one iteration: rollouts and all updates on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postgrad import formulas
from postgrad.protocols import Engine, LossFunction, Rows
from postgrad.rollout.metrics import rollout_metrics
from postgrad.train.critic import CriticWatch
from postgrad.train.experience import KL, Experience, experience_of
from postgrad.train.loop import Timer
from postgrad.train.order import positions_in_run
from postgrad.train.recipe import PPORecipe
from postgrad.train.sampling import Sampling
from postgrad.train.schedule import learning_rate
from postgrad.types import Group, TrainRow

# ⑤ the losses ----------------------------------------------------------------------------------------------------------------------


def actor_loss(recipe: PPORecipe, kl_coef: float, *, tokens: float) -> LossFunction:
    """The clipped surrogate, mean over the minibatch's sampled tokens; beside it the KL to the reference (`kl_in: loss`) and the entropy.

    Rows carry per_token old_logprobs, advantages, and reference_logprobs where the KL is in the loss.
    """
    clip = {"clip_low": recipe.loss.clip, "clip_high": recipe.loss.clip}

    def loss(current: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        mask, old, advantages = rows.mask, rows.per_token["old_logprobs"], rows.per_token["advantages"]
        log_ratio = formulas.log_ratio(current, old, mask)
        ratio = formulas.token_ratio(log_ratio)
        per_token = formulas.clipped_surrogate(ratio, advantages, **clip)
        if recipe.loss.kl_in == "loss" and kl_coef:
            per_token = per_token + kl_coef * KL[recipe.loss.kl_estimator](current, rows.per_token["reference_logprobs"], mask)
        if recipe.loss.entropy_coef:
            per_token = per_token - recipe.loss.entropy_coef * rows.entropy
        with torch.no_grad():
            clipped = formulas.clip_fractions(ratio, advantages, mask, **clip, denominator=1.0)
            counted = torch.where(mask, ratio, 0.0)
            sums = {
                "approxkl": formulas.kl_k3(old, current, mask).sum(),
                "clipfrac": clipped[2],
                "ratio": counted.sum(),
                "square_ratio": (counted**2).sum(),
            }
        return formulas.token_mean(per_token, mask, denominator=tokens), sums

    return loss


def critic_loss(recipe: PPORecipe, *, tokens: float) -> LossFunction:
    """½ of the clipped squared error, mean over the minibatch's sampled tokens. Rows carry per_token old_values and returns."""

    def loss(values: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        old, returns = rows.per_token["old_values"], rows.per_token["returns"]
        per_token = formulas.clipped_value_loss(values, old, returns, rows.mask, clip=recipe.loss.value_clip)
        with torch.no_grad():
            moved = ((values - old).abs() > recipe.loss.value_clip) & rows.mask
        return formulas.token_mean(per_token, rows.mask, denominator=tokens), {"clipfrac": moved.float().sum()}

    return loss


# one run ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PPOParts:
    """What a PPO run is made of; `build.build_ppo` makes it from a recipe."""

    sampling: Sampling
    actor: Engine
    critic: Engine
    record: Callable[[int, Experience], None] = lambda step, experience: None
    """Told of every iteration: writes the rollout file and the failures."""
    note: Callable[[str], None] = lambda text: None
    """Told what a reader of the log should know."""


class ActorCritic:
    """Two engines as the loop's one: their states are saved and restored together."""

    def __init__(self, actor: Engine, critic: Engine) -> None:
        self.actor, self.critic = actor, critic

    def save_state(self, folder: Path) -> None:
        for name, engine in (("actor", self.actor), ("critic", self.critic)):
            (folder / name).mkdir()
            engine.save_state(folder / name)

    def load_state(self, folder: Path) -> None:
        self.actor.load_state(folder / "actor")
        self.critic.load_state(folder / "critic")


class PPO:
    """One PPO run; see `loop.Method`."""

    def __init__(self, recipe: PPORecipe, parts: PPOParts) -> None:
        self.recipe, self.parts = recipe, parts
        self.engine = ActorCritic(parts.actor, parts.critic)
        self.timer = Timer()
        self.kl_coef = recipe.loss.kl_coef
        self.watch = CriticWatch(recipe.critic.warmup_steps, parts.note)
        self.total_steps, self.total_prompts = positions_in_run(
            size=len(parts.sampling.prompts), epochs=recipe.epochs, per_step=recipe.batch.prompts, max_steps=recipe.max_steps
        )
        self.headline: tuple[str, ...] = (
            "objective/scores",
            "objective/kl",
            "loss/value_avg",
            "val/explained_variance",
            "policy/clipfrac_avg",
        )

    def step(self, step: int) -> dict[str, float]:
        groups = self._rollout(step)  # ①
        with self.timer.part("reward"):
            scores = self.parts.sampling.score(groups)  # ②
        experience = self._experience(groups, scores)  # ③ ④
        self.parts.record(step, experience)
        metrics = experience.metrics() | self._update(step, experience)  # ⑤
        self.parts.sampling.sampler.forget()
        self._adapt(metrics["objective/kl"], len(experience.steps))
        self.watch.see(step, metrics)
        epoch = self.parts.sampling.epochs(min(step * self.recipe.batch.prompts, self.total_prompts))
        return metrics | rollout_metrics(groups) | {"epoch": epoch} | self.timer.take()

    def _rollout(self, step: int) -> list[Group]:
        first = (step - 1) * self.recipe.batch.prompts
        with self.timer.part("rollout"):
            return self.parts.sampling.groups(step, range(first, min(first + self.recipe.batch.prompts, self.total_prompts)))

    def _experience(self, groups: Sequence[Group], scores: Any) -> Experience:
        """Old log-probs, reference log-probs and values, all from before the first update; then advantages and returns."""
        temperature = self.recipe.rollout.temperature
        rows = experience_of(groups, scores, missing_end_penalty=self.recipe.loss.missing_end_penalty, cut=self.recipe.loss.cut)
        with self.timer.part("logprobs"):
            old = self.parts.actor.logprobs(rows.policy_rows, temperature=temperature)
            reference = (
                self.parts.actor.logprobs(rows.policy_rows, model="reference", temperature=temperature)
                if self.recipe.loss.kl_coef
                else None
            )
        with self.timer.part("values"):
            values = self.parts.critic.values(rows.value_rows)
        in_reward = self.kl_coef if self.recipe.loss.kl_in == "reward" else 0.0
        return rows.finished(old, reference, values, loss=self.recipe.loss, kl_coef=in_reward)

    def _update(self, step: int, experience: Experience) -> dict[str, float]:
        """Epochs of minibatches; an epoch ends early when the policy has moved more than `target_kl` from the one that sampled."""
        totals: dict[str, float] = {}
        updates = 0
        rate = learning_rate(step, self.total_steps, self.recipe.optimizer)
        frozen = step <= self.recipe.critic.warmup_steps
        norms: dict[str, float] = {}
        for epoch in range(self.recipe.batch.epochs):
            for rows in experience.minibatches(self.recipe.batch.minibatches, seed=self.recipe.seed, step=step, epoch=epoch):
                tokens = float(sum(row.trained_tokens for row in rows))
                if not tokens:
                    continue
                sums = self._critic_update(rows, tokens, rate, norms) | ({} if frozen else self._actor_update(rows, tokens, rate, norms))
                updates += 1
                for name, value in sums.items():
                    totals[name] = totals.get(name, 0.0) + value
                target = self.recipe.loss.target_kl
                if target is not None and not frozen and sums["policy/approxkl_avg"] > target:
                    return self._averaged(totals, updates, norms) | {"policy/stopped_epoch": float(epoch)}
        return self._averaged(totals, updates, norms)

    def _actor_update(self, rows: Sequence[TrainRow], tokens: float, rate: float, norms: dict[str, float]) -> dict[str, float]:
        total = self.parts.actor.global_sum(tokens)
        with self.timer.part("actor"):
            loss = actor_loss(self.recipe, self.kl_coef, tokens=total)
            result = self.parts.actor.forward_backward(rows, loss, temperature=self.recipe.rollout.temperature)
            norms["grad_norm"] = self.parts.actor.optimizer_step(rate).grad_norm
        mean = {name: result.sums[name] / tokens for name in ("approxkl", "clipfrac", "ratio", "square_ratio", "entropy")}
        return {
            "loss/policy_avg": result.loss,
            "policy/approxkl_avg": mean["approxkl"],
            "policy/clipfrac_avg": mean["clipfrac"],
            "policy/entropy_avg": mean["entropy"],
            "val/ratio": mean["ratio"],
            "val/ratio_var": max(0.0, mean["square_ratio"] - mean["ratio"] ** 2),
        }

    def _critic_update(self, rows: Sequence[TrainRow], tokens: float, rate: float, norms: dict[str, float]) -> dict[str, float]:
        scale = self.recipe.critic.learning_rate / self.recipe.optimizer.learning_rate
        total = self.parts.critic.global_sum(tokens)
        with self.timer.part("critic"):
            result = self.parts.critic.forward_backward(rows, critic_loss(self.recipe, tokens=total))
            norms["critic/grad_norm"] = self.parts.critic.optimizer_step(rate * scale).grad_norm
        return {"loss/value_avg": result.loss, "val/clipfrac_avg": result.sums["clipfrac"] / tokens}

    def _averaged(self, totals: Mapping[str, float], updates: int, norms: Mapping[str, float]) -> dict[str, float]:
        return {name: value / max(updates, 1) for name, value in totals.items()} | dict(norms)

    def _adapt(self, kl: float, episodes: int) -> None:
        """Ziegler et al. 2019: the coefficient follows the error of the KL per episode, by at most 20 % of it over the horizon."""
        target = self.recipe.loss.adaptive_kl_target
        if target is not None:
            error = max(-0.2, min(0.2, kl / target - 1))
            self.kl_coef *= 1 + error * episodes / self.recipe.loss.adaptive_kl_horizon

    # what the loop needs beside `step`

    def evaluate(self, step: int) -> dict[str, float]:
        with self.timer.part("evaluate"):
            return self.parts.sampling.evaluate(step)

    def state(self) -> dict[str, Any]:
        return {"kl_coef": self.kl_coef, "watch": self.watch.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.kl_coef = float(state["kl_coef"])
        self.watch.load_state(state["watch"])

    def export(self, folder: Path) -> None:
        self.parts.sampling.policy.export(folder, {"Method": f"PPO, {self.total_steps} iterations", "Notes": self.recipe.notes})
