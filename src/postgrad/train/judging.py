"""③ score: rewards → totals → advantages → the split of each advantage over its rewards; and which groups carry a signal.

`score` may be called several times for one batch (a filter dropped groups, so more were drawn); `judge` then looks at all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from postgrad import formulas
from postgrad.rewards.filter import GroupFilter, keep_groups
from postgrad.rewards.ledger import Floats, compared_total, split_advantages, weighted_total
from postgrad.rewards.metrics import reward_metrics
from postgrad.rewards.score import RewardCount, Scores
from postgrad.rollout.metrics import rollout_metrics
from postgrad.train.credit import Credit, Hook, by_hook, by_state, by_turn
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


def judge(scored: Scored, loss: GRPOLoss, *, scale: AdvantageScale, hook: Hook | None = None) -> list[JudgedGroup]:
    """Advantages and their split. A group that the filter drops takes no part in them: its advantages are 0."""
    scores, size = scored.scores, scored.scores.group_size
    in_batch = np.repeat(np.array(scored.filter.kept), size)[:, None]
    values = np.where(in_batch, scores.values, np.nan)
    credit = credited(scored.groups, scores, values, loss, scale=scale, hook=hook)
    return [
        JudgedGroup(
            group=group,
            rewards=_columns(scores.names, scores.values, index, size),
            totals=scores.totals[index * size : (index + 1) * size].tolist(),
            advantages=credit.advantages[index * size : (index + 1) * size].tolist(),
            shares=_columns(scores.names[: credit.shares.shape[1]], credit.shares, index, size),
            token_advantages=None if credit.tokens is None else credit.tokens[index * size : (index + 1) * size],
            dropped="" if scored.filter.kept[index] else str(scored.filter.causes[index]),
        )
        for index, group in enumerate(scored.groups)
    ]


def credited(
    groups: Sequence[Group], scores: Scores, values: Floats, loss: GRPOLoss, *, scale: AdvantageScale, hook: Hook | None
) -> Credit:
    """The recipe's way of crediting tokens, applied to values [N, K]."""
    compare = partial(compared, weights=scores.weights, loss=loss, scale=scale)
    if hook is not None:
        return by_hook(groups, scores, values, hook)
    if loss.credit == "turn":
        return by_turn(groups, scores, values, compare, discount=loss.turn_discount)
    if loss.credit == "state":
        return by_state(groups, scores, values, compare, discount=loss.turn_discount, state_weight=loss.state_weight)
    return Credit(*compare(values, scores.group_size))


def compared(values: Floats, group_size: int, *, weights: Sequence[float], loss: GRPOLoss, scale: AdvantageScale) -> tuple[Floats, Floats]:
    """(advantages [N], shares [N, K]) of values [N, K] within groups, as the recipe scales them."""
    totals = weighted_total(values, weights, group_size)
    advantages = advantages_of(values, totals, weights, group_size=group_size, loss=loss, scale=scale)
    split = split_advantages(
        values, weights, advantages, names=[""] * len(weights), group_size=group_size, scale=scale, normalize=loss.normalize,
        positive_weight=loss.positive_weight,
    )  # fmt: skip
    return advantages, split.shares


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
