"""③ score: rewards → totals → advantages → the split of each advantage over its rewards; and which groups carry a signal.

`score` may be called several times for one batch (a filter dropped groups, so more were drawn); `judge` then looks at all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from postgrad import formulas
from postgrad.rewards.filter import GroupFilter, keep_groups
from postgrad.rewards.ledger import Floats, compared_total, split_advantages, weighted_total
from postgrad.rewards.metrics import reward_metrics
from postgrad.rewards.score import RewardCount, Scores
from postgrad.rollout.metrics import rollout_metrics
from postgrad.train.judged import JudgedGroup
from postgrad.train.model_rewards import Judges
from postgrad.train.presets import AdvantageScale
from postgrad.train.recipe import GRPOLoss
from postgrad.types import Group


@dataclass(frozen=True)
class Scored:
    """Groups of equal size, their scores, and which of them `loss.filter` keeps."""

    groups: tuple[Group, ...]
    scores: Scores
    filter: GroupFilter

    @property
    def kept(self) -> int:
        return sum(self.filter.kept)

    def metrics(self) -> dict[str, float]:
        dropped = {f"groups/dropped/{cause}": float(count) for cause, count in self.filter.dropped.items()}
        return reward_metrics(self.scores) | rollout_metrics(self.groups) | dropped


def score(groups: Sequence[Group], scorer: Judges, loss: GRPOLoss) -> Scored:
    scores = scorer.score(groups)
    outcome = scores.outcome_totals if loss.filter == "outcome" else None
    compared = compared_total(scores.values, scores.weights, scores.group_size, normalize=loss.normalize)
    return Scored(tuple(groups), scores, keep_groups(compared, outcome, scores.group_size, mode=loss.filter))


def joined(parts: Sequence[Scored]) -> Scored:
    """The draws of one batch as one."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0].scores
    scores = Scores(
        names=first.names,
        weights=first.weights,
        roles=first.roles,
        values=np.concatenate([part.scores.values for part in parts]),
        group_size=first.group_size,
        failures=tuple(failure for part in parts for failure in part.scores.failures),
        counts={name: _sum([part.scores.counts[name] for part in parts]) for name in first.counts},
        turns={name: _turns(name, parts) for name in first.turns},
    )
    kept = tuple(flag for part in parts for flag in part.filter.kept)
    causes = tuple(cause for part in parts for cause in part.filter.causes)
    return Scored(tuple(group for part in parts for group in part.groups), scores, GroupFilter(kept, causes))


def _turns(name: str, parts: Sequence[Scored]) -> dict[int, Sequence[float]]:
    """The values of a reward's turns, under each rollout's place in the joined batch."""
    starts = np.cumsum([0, *(len(part.scores.values) for part in parts)])
    placed = zip(starts[:-1].tolist(), parts, strict=True)
    return {start + rollout: values for start, part in placed for rollout, values in part.scores.turns[name].items()}


def _sum(counts: Sequence[RewardCount]) -> RewardCount:
    return RewardCount(
        scored=sum(count.scored for count in counts),
        abstained=sum(count.abstained for count in counts),
        failed=sum(count.failed for count in counts),
        seconds=sum(count.seconds for count in counts),
    )


def judge(scored: Scored, loss: GRPOLoss, *, scale: AdvantageScale) -> list[JudgedGroup]:
    """Advantages and their split. A group that the filter drops takes no part in them: its advantages are 0."""
    scores, size = scored.scores, scored.scores.group_size
    in_batch = np.repeat(np.array(scored.filter.kept), size)[:, None]
    values = np.where(in_batch, scores.values, np.nan)
    totals = weighted_total(values, scores.weights, size)
    advantages = advantages_of(values, totals, scores.weights, group_size=size, loss=loss, scale=scale)
    split = split_advantages(
        values, scores.weights, advantages, names=scores.names, group_size=size, scale=scale, normalize=loss.normalize,
        positive_weight=loss.positive_weight,
    )  # fmt: skip
    return [
        JudgedGroup(
            group=group,
            rewards=_columns(scores.names, scores.values, index, size),
            totals=scores.totals[index * size : (index + 1) * size].tolist(),
            advantages=advantages[index * size : (index + 1) * size].tolist(),
            shares=_columns(split.names, split.shares, index, size),
            dropped="" if scored.filter.kept[index] else str(scored.filter.causes[index]),
        )
        for index, group in enumerate(scored.groups)
    ]


def advantages_of(
    values: Floats, totals: Floats, weights: Sequence[float], *, group_size: int, loss: GRPOLoss, scale: AdvantageScale
) -> Floats:
    """[N] from the formulas; 0 where every reward abstained."""
    if loss.normalize == "normalize_then_sum":
        advantages = formulas.normalize_then_sum(torch.from_numpy(values.T.copy()), torch.tensor(weights).double(), group_size)
    elif scale == "leave_one_out":
        advantages = formulas.leave_one_out_advantages(torch.from_numpy(totals), group_size)
    else:
        advantages = formulas.group_advantages(torch.from_numpy(totals), group_size, scale=scale)
    numbers: Floats = formulas.weight_positive(advantages.double(), positive_weight=loss.positive_weight).numpy()
    return numbers


def _columns(names: Sequence[str], table: Floats, group: int, size: int) -> Mapping[str, Sequence[float]]:
    part = table[group * size : (group + 1) * size]
    return {name: part[:, column].tolist() for column, name in enumerate(names)}
