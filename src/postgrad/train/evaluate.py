"""Held-out prompts: roll out, score, report with intervals. Used during training, by `postgrad eval` and by the demo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from postgrad.chat.format import ChatFormat
from postgrad.models.reader import Reader
from postgrad.protocols import Sampler, SamplingParams
from postgrad.rewards.ledger import weighted_total
from postgrad.rewards.score import Scores
from postgrad.rollout import RolloutConfig, collect
from postgrad.rollout.journal import Journals, no_journals
from postgrad.rollout.metrics import rollout_metrics
from postgrad.rollout.tools import Toolbox
from postgrad.train.judged import rows_of
from postgrad.train.model_rewards import Judges
from postgrad.train.recipe import RLRecipe
from postgrad.train.setup import load_frozen_policy
from postgrad.train.statistics import Interval, mean_interval
from postgrad.types import Group, Prompt, Rollout, StopReason


@dataclass(frozen=True)
class Evaluation:
    """The rollouts, their scores, and per reward the mean over rollouts with its 95 % interval."""

    groups: tuple[Group, ...]
    scores: Scores
    rewards: dict[str, Interval]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Evaluator:
    sampler: Sampler
    chat: ChatFormat
    toolbox: Toolbox
    rollout: RolloutConfig
    params: SamplingParams
    scorer: Judges
    prompts: Sequence[Prompt]
    seed: int
    journals: Journals = no_journals

    def run(self, step: int) -> Evaluation:
        """Evaluate the live weights. `step` keys the noise (apart from training's) when the temperature is not 0."""
        prompts = [self.scorer.at(step, prompt) for prompt in self.prompts]
        with self.journals(-1 - step) as journal:
            groups = collect(
                list(enumerate(prompts)), sampler=self.sampler, chat=self.chat, toolbox=self.toolbox, config=self.rollout,
                params=self.params, seed=self.seed, step=-1 - step, journal=journal,
            )  # fmt: skip
        scores = self.scorer.score(groups)
        rewards = {name: mean_interval([float(value) for value in scores.values[:, column]]) for column, name in enumerate(scores.names)}
        return Evaluation(tuple(groups), scores, rewards, self._metrics(groups, scores, rewards))

    def _metrics(self, groups: Sequence[Group], scores: Scores, rewards: dict[str, Interval]) -> dict[str, float]:
        metrics = {
            "eval/reward": mean_interval(
                [float(value) for value in weighted_total(scores.values, scores.weights, self.rollout.group_size)]
            ).mean
        }
        for name, interval in rewards.items():
            metrics |= {
                f"eval/rewards/{name}/mean": interval.mean,
                f"eval/rewards/{name}/low": interval.low,
                f"eval/rewards/{name}/high": interval.high,
            }
        shown = ("completions/mean_length", "completions/clipped_ratio", "tools/call_frequency", "tools/failure_frequency")
        rollout = rollout_metrics(groups)
        return metrics | {f"eval/{name}": rollout[name] for name in shown if name in rollout}


def kl_to(model: str, result: Evaluation, recipe: RLRecipe) -> Interval:
    """KL(policy ‖ `model`) in nats per rollout, estimated on the rollouts that the policy sampled: the mean of Σ (log π − log π_model).

    Unbiased where they were sampled from the whole distribution, so not for greedy ones.
    """
    reference = load_frozen_policy(model, recipe).model
    reader = Reader(reference.model, autocast=reference.autocast, tokens_per_micro_batch=recipe.batch.tokens_per_micro_batch)
    rows = [(number, row) for number, rollout in enumerate(_sound(result.groups)) for row in rows_of(None, rollout, 0.0)]
    values = reader.read(reader.model, [row for _, row in rows], temperature=recipe.evaluation.temperature, name=model)
    gaps = [0.0] * (rows[-1][0] + 1)
    for (number, row), known in zip(rows, values, strict=True):
        sampled = [value for value, flag in zip(row.per_token["sampler_logprobs"], row.trained, strict=True) if flag]
        gaps[number] += sum(sampled) - sum(known)
    return mean_interval(gaps)


def _sound(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts if rollout.stop is not StopReason.INFRASTRUCTURE]
