"""What PPO learns from: rollouts with the reward, value, advantage and return of every sampled token.

1. `experience_of`           rollouts and their scores → rows for the actor and for the critic.
2. `RawExperience.finished`  log-probs and values → token rewards → advantages and returns, spread back over the rows.

Time steps are the tokens that the policy sampled, in order, over all training rows of a rollout; tool results and prompts are none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from postgrad import formulas
from postgrad.errors import RunError
from postgrad.rewards.metrics import reward_metrics
from postgrad.rewards.score import Scores
from postgrad.rollout.record import group_to_json
from postgrad.train.critic import explained_variance
from postgrad.train.judged import rows_of
from postgrad.train.recipe import PPOLoss
from postgrad.types import Group, Rollout, StopReason, TrainRow

KL = {"k1": formulas.kl_k1, "k2": formulas.kl_k2, "k3": formulas.kl_k3}
"""Estimators of KL(policy ‖ reference) per token."""

Cut = Literal["bootstrap", "score"]
OUT_OF_ROOM = frozenset({StopReason.TURN_TOKENS, StopReason.TOTAL_TOKENS, StopReason.TURNS})
"""Ends that came too early. After `INVALID_CALLS` more room would not have helped: its score counts."""


@dataclass(frozen=True)
class RawExperience:
    """Rollouts that count, in order. `rows_of_rollout[i]` are the places of rollout i's rows in `policy_rows` and `value_rows`.

    totals: each rollout's score, less the penalty of a cut one. turn_rewards: what rewards that judge each turn paid for each turn of it;
    their sum is a part of the total.
    unfinished: a limit cut the rollout and the critic says what would have come: `last_rewards` then holds no score.
    last_rewards: what the last sampled token earns besides its turn.
    value_rows: the same rows; the last row of an unfinished rollout is read once more after its last token.
    """

    groups: Sequence[Group]
    scores: Scores
    rollouts: list[Rollout]
    totals: list[float]
    turn_rewards: list[list[float]]
    unfinished: list[bool]
    last_rewards: list[float]
    rows_of_rollout: list[list[int]]
    policy_rows: list[TrainRow]
    value_rows: list[TrainRow]

    def finished(
        self, old: Sequence[Sequence[float]], reference: Sequence[Sequence[float]] | None, values: Sequence[Sequence[float]], *,
        loss: PPOLoss, kl_coef: float,
    ) -> Experience:  # fmt: skip
        """`old`, `reference`: per row, log-probs of its sampled tokens. `values`: per row, the critic's; one more if unfinished."""
        mask = self._padded([[1.0] * len(self._joined(old, index)) for index in range(len(self.rollouts))]).bool()
        by_token = self._padded([self._joined(old, index) for index in range(len(self.rollouts))])
        value, bootstrap = self._values(values, mask)
        kl = torch.zeros_like(by_token)
        if reference is not None:
            by_reference = self._padded([self._joined(reference, index) for index in range(len(self.rollouts))])
            kl = KL[loss.kl_estimator](by_token, by_reference, mask)
        scores = torch.tensor(self.totals, dtype=torch.float64)
        last = torch.tensor(self.last_rewards, dtype=torch.float64)
        rewards = formulas.token_rewards(last, mask, kl, kl_coef=kl_coef) + self._at_the_end_of_turns(mask)
        if loss.whiten_rewards:
            rewards = formulas.whiten(rewards, mask, center=False)
        advantages, returns = formulas.gae(rewards, value, mask, gamma=loss.gamma, lam=loss.lam, bootstrap=bootstrap)
        white = formulas.whiten(advantages, mask) if loss.whiten_advantages else advantages
        columns = {"old_logprobs": by_token, "advantages": white, "old_values": value, "returns": returns}
        rows = self._spread({name: tensor.tolist() for name, tensor in columns.items()}, reference)
        return Experience(self, rows, mask, by_token, kl, value, returns, advantages, scores, kl_coef)

    def _joined(self, per_row: Sequence[Sequence[float]], rollout: int) -> list[float]:
        return [value for row in self.rows_of_rollout[rollout] for value in per_row[row]]

    def _padded(self, lists: Sequence[Sequence[float]]) -> Tensor:
        width = max(map(len, lists))
        return torch.tensor([[*values, *[0.0] * (width - len(values))] for values in lists], dtype=torch.float64)

    def _values(self, values: Sequence[Sequence[float]], mask: Tensor) -> tuple[Tensor, Tensor]:
        """(values [B, T], bootstrap [B]): 0 after the end of a finished rollout."""
        joined = [(self._joined(values, index), unfinished) for index, unfinished in enumerate(self.unfinished)]
        after = torch.tensor([row[-1] if unfinished else 0.0 for row, unfinished in joined], dtype=torch.float64)
        return self._padded([row[:-1] if unfinished else row for row, unfinished in joined]), after

    def _at_the_end_of_turns(self, mask: Tensor) -> Tensor:
        """[B, T]: what each turn earned by itself, on its last sampled token."""
        placed = torch.zeros(mask.shape, dtype=torch.float64)
        for index, (rollout, earned) in enumerate(zip(self.rollouts, self.turn_rewards, strict=True)):
            ends = torch.tensor(rollout.turn_lengths).cumsum(0) - 1
            placed[index].index_add_(0, ends, torch.tensor(earned, dtype=torch.float64))
        return placed

    def _spread(self, columns: dict[str, list[list[float]]], reference: Sequence[Sequence[float]] | None) -> list[TrainRow]:
        """The actor's rows with one value per token in each column; 0 where nothing was sampled, and never read there."""
        rows = list(self.policy_rows)
        for rollout, places in enumerate(self.rows_of_rollout):
            start = 0
            for place in places:
                row = rows[place]
                end = start + row.trained_tokens
                parts = {name: values[rollout][start:end] for name, values in columns.items()}
                if reference is not None:
                    parts["reference_logprobs"] = list(reference[place])
                rows[place] = replace(row, per_token={name: _over_tokens(row, part) for name, part in parts.items()}, per_row={})
                start = end
        return rows


@dataclass(frozen=True)
class Experience:
    """One iteration's data. Tensors are [B, T] over the sampled tokens of each rollout; `steps` marks which places are time steps."""

    raw: RawExperience
    rows: list[TrainRow]
    steps: Tensor
    logprobs: Tensor
    kl: Tensor
    values: Tensor
    returns: Tensor
    advantages: Tensor
    scores: Tensor
    kl_coef: float

    def minibatches(self, count: int, *, seed: int, step: int, epoch: int) -> list[list[TrainRow]]:
        """Whole rollouts, shuffled by (seed, step, epoch), in `count` parts of about equal size."""
        order = np.random.default_rng((seed & 0xFFFFFFFF, step, epoch)).permutation(len(self.raw.rollouts))
        parts = np.array_split(order, min(count, len(order)))
        return [[self.rows[place] for rollout in sorted(part.tolist()) for place in self.raw.rows_of_rollout[rollout]] for part in parts]

    def records(self, step: int) -> list[dict[str, Any]]:
        """One line of a rollout file per group. A rollout that took no part has the advantage 0."""
        means = torch.where(self.steps, self.advantages, 0.0).sum(1) / self.steps.sum(1)
        advantage = {id(rollout): mean for rollout, mean in zip(self.raw.rollouts, means.tolist(), strict=True)}
        scores, size = self.raw.scores, self.raw.scores.group_size
        lines = []
        for number, group in enumerate(self.raw.groups):
            entries = [
                {
                    "rewards": {name: _json(scores.values[number * size + sample, k]) for k, name in enumerate(scores.names)},
                    "total": _json(scores.totals[number * size + sample]),
                    "advantage": advantage.get(id(rollout), 0.0),
                }
                for sample, rollout in enumerate(group.rollouts)
            ]
            lines.append({"step": step, "dropped": "", **group_to_json(group), "scores": entries})
        return lines

    def metrics(self) -> dict[str, float]:
        """Under TRL's names; means over rollouts of sums over their sampled tokens, nothing from the padding."""
        kl = torch.where(self.steps, self.kl, 0.0).sum(1).mean().item()
        returns = self.returns[self.steps]
        scores = self.scores.mean().item()
        ended = sum(rollout.stop in (StopReason.END, StopReason.TERMINAL_TOOL, StopReason.ENVIRONMENT) for rollout in self.raw.rollouts)
        return reward_metrics(self.raw.scores) | {
            "objective/kl": kl,
            "objective/entropy": -torch.where(self.steps, self.logprobs, 0.0).sum(1).mean().item(),
            "objective/non_score_reward": -self.kl_coef * kl,
            "objective/scores": scores,
            "objective/rlhf_reward": scores - self.kl_coef * kl,
            "objective/kl_coef": self.kl_coef,
            "val/num_eos_tokens": float(ended),
            "val/explained_variance": explained_variance(self.values[self.steps], returns),
            "val/returns_std": returns.std(correction=0).item(),
        }


def experience_of(groups: Sequence[Group], scores: Scores, *, missing_end_penalty: float, cut: Cut = "bootstrap") -> RawExperience:
    """The rollouts that count: scored, sampled at least one token, and not spoiled by the infrastructure.

    A rollout that a limit cut loses `missing_end_penalty`. With `cut: bootstrap` the critic's value after its last token stands in the
    place of its score, which judged half an answer; paying both would reward being cut. Raises `RunError` when none counts.
    """
    raw = RawExperience(groups, scores, [], [], [], [], [], [], [], [])
    number = 0
    for index, group in enumerate(groups):
        one_prompt = len({rollout.segments[0].token_ids for rollout in group.rollouts}) == 1
        for rollout in group.rollouts:
            total, earned = float(scores.totals[number]), _earned_by_turns(scores, number, rollout.turns)
            number += 1
            if rollout.stop is StopReason.INFRASTRUCTURE or math.isnan(total) or not rollout.sampled_tokens:
                continue
            penalty = missing_end_penalty * rollout.stop.truncated
            unfinished = cut == "bootstrap" and rollout.stop in OUT_OF_ROOM
            raw.totals.append(total - penalty)
            raw.turn_rewards.append(earned)
            raw.unfinished.append(unfinished)
            raw.last_rewards.append((0.0 if unfinished else total - sum(earned)) - penalty)
            _append(raw, index if one_prompt else None, rollout, unfinished=unfinished)
    if not raw.rollouts:
        raise RunError("no rollout of this iteration has a reward", hint="look at the reward failures in events.jsonl")
    return raw


def _earned_by_turns(scores: Scores, rollout: int, turns: int) -> list[float]:
    """Per turn, the weighted sum of the rewards that judge each turn by itself."""
    earned = np.zeros(turns)
    for name, weight in zip(scores.names, scores.weights, strict=True):
        earned += weight * np.asarray(scores.turns.get(name, {}).get(rollout, (0.0,) * turns))
    return list(map(float, earned))


def _append(raw: RawExperience, group: int | None, rollout: Rollout, *, unfinished: bool) -> None:
    rows = [row for row in rows_of(group, rollout, 0.0) if row.trained_tokens]
    first = len(raw.policy_rows)
    raw.rollouts.append(rollout)
    raw.rows_of_rollout.append(list(range(first, first + len(rows))))
    raw.policy_rows.extend(replace(row, per_token={}, per_row={}) for row in rows)
    values = [replace(row, per_token={}, per_row={}) for row in rows]
    if unfinished:
        values[-1] = _read_after_the_last_token(values[-1])
    raw.value_rows.extend(values)


def _read_after_the_last_token(row: TrainRow) -> TrainRow:
    """One more place to read, behind the last sampled token: where the rollout would have gone on."""
    last = max(place for place, flag in enumerate(row.trained) if flag)
    ids = row.token_ids[: last + 1]
    return replace(row, token_ids=(*ids, ids[-1]), trained=(*row.trained[: last + 1], True))


def _json(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _over_tokens(row: TrainRow, trained: Sequence[float]) -> list[float]:
    values = iter(trained)
    return [next(values) if flag else 0.0 for flag in row.trained]
