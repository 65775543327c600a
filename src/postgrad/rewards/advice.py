"""What a user should hear early about how rewards, weights and normalisation work together. Says nothing where nothing applies.

1. `design_notes`     from what the rewards declare, before training.
2. `observed_notes`   from one batch of scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from postgrad.rewards.base import RewardRole
from postgrad.rewards.filter import cancelling_rewards
from postgrad.rewards.ledger import EQUAL, Floats, Scheme, equal_groups
from postgrad.rewards.score import Scores


class Declared(Protocol):
    """What is known of a reward before it scored anything: a function's or a reward model's."""

    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def role(self) -> RewardRole: ...
    @property
    def range(self) -> tuple[float, float] | None: ...


@dataclass(frozen=True, slots=True)
class Note:
    """One sentence for the user, under a name that stays the same from run to run."""

    id: str
    message: str


def design_notes(rewards: Sequence[Declared], scheme: Scheme) -> list[Note]:
    """Notes on the recipe's `rewards:` as declared. `scheme` is how advantages are made of them."""
    notes = [Note("no-effect-weight", f"reward {r.name} has weight 0: it is logged and trains nothing") for r in rewards if r.weight == 0.0]
    acting = [reward for reward in rewards if reward.weight != 0.0]
    if not any(reward.role == "outcome" for reward in acting):
        notes.append(Note("no-outcome", "no reward has the role outcome: nothing says what the task itself is"))
    if len(acting) == 1 and (scheme.divides_by_group or scheme.scale == "batch") and abs(acting[0].weight) != 1.0:
        why = f"advantages are divided by the {'group' if scheme.divides_by_group else 'batch'}'s standard deviation"
        notes.append(Note("no-effect-scale", f"the weight {acting[0].weight:g} of the only reward has no effect: {why}"))
    return notes + _outranking(acting, scheme)


def _outranking(acting: Sequence[Declared], scheme: Scheme) -> list[Note]:
    """Shaping rewards that together outweigh the outcome: then a wrong answer can outrank a right one.

    What they move the total by is weight × range; the weight alone where each is divided by its own standard deviation first.
    """
    outcome, shaping = [r for r in acting if r.role == "outcome"], [r for r in acting if r.role == "shaping"]
    if not outcome or (not scheme.each_normalized and any(reward.range is None for reward in acting)):
        return []
    gap, help_ = (sum(abs(r.weight) if scheme.each_normalized else _width(r) for r in part) for part in (outcome, shaping))
    if help_ <= gap * (1 + EQUAL):
        return []
    if scheme.each_normalized:
        message = f"each reward is normalised first, so only weights count: {help_:g} for shaping rewards, {gap:g} for the outcome"
        return [Note("shaping-outranks-outcome", f"{message}; a wrong answer can outrank a right one")]
    message = f"the shaping rewards move the total by up to {help_:g}, the outcome by {gap:g}: a wrong answer can outrank a right one"
    return [Note("shaping-outranks-outcome", message)]


def _width(reward: Declared) -> float:
    low, high = reward.range or (0.0, 0.0)
    return abs(reward.weight) * (high - low)


def observed_notes(rewards: Sequence[Declared], scores: Scores, scheme: Scheme) -> list[Note]:
    """Notes on one batch of scores. `scheme` is how advantages are made of them."""
    notes = [note for index, reward in enumerate(rewards) for note in _out_of_range(reward, scores.values[:, index])]
    notes += _silent(scores)
    notes += _two_levels(scores, scheme) if scheme.divides_by_group and scheme.positive_weight == 1.0 else []
    if scheme.each_normalized:  # what cancels in the total need not cancel then
        return notes
    cancelling = cancelling_rewards(scores.values, scores.weights, scores.totals, scores.names, scores.group_size)
    for names in dict.fromkeys(cancelling.values()):
        count = sum(found == names for found in cancelling.values())
        message = f"{' and '.join(names)} cancel: they differ within {count} groups whose totals are equal, so these train nothing"
        notes.append(Note("cancelling", message))
    return notes


def _out_of_range(reward: Declared, values: NDArray[np.float64]) -> list[Note]:
    scored = values[~np.isnan(values)]
    if reward.range is None or not len(scored):
        return []
    low, high = reward.range
    if low - EQUAL <= scored.min() and scored.max() <= high + EQUAL:
        return []
    seen = f"{scored.min():g} … {scored.max():g}"
    return [Note("out-of-range", f"reward {reward.name} declares the range {low:g} … {high:g} and returned {seen}")]


def _silent(scores: Scores) -> list[Note]:
    names = [name for index, name in enumerate(scores.names) if np.isnan(scores.values[:, index]).all()]
    return [Note("never-scored", f"reward {name} scored none of {len(scores.values)} rollouts") for name in names]


def _two_levels(scores: Scores, scheme: Scheme) -> list[Note]:
    """'The punishment must exceed the reward' acts only where a group has three levels or more: with two, dividing by the standard
    deviation gives {1, 0}, {1, −1} and {1, −5} the same advantages. The levels are those of the total, or of each reward where each is
    normalised by itself."""
    weighted = (scores.values * np.array(scores.weights)).T
    for number, values in enumerate(weighted if scheme.each_normalized else [scores.totals]):
        groups = values.reshape(-1, scores.group_size)[~equal_groups(values, scores.group_size)]
        if len(groups) and all(_levels(group) == 2 for group in groups) and _penalty(groups):
            return [Note("no-effect-penalty", _penalty_note(groups[0], scores.names[number] if scheme.each_normalized else "reward"))]
    return []


def _penalty_note(group: Floats, what: str) -> str:
    """The arithmetic, on one group [G] of two levels."""
    counted = group[~np.isnan(group)]
    high, low, size = float(counted.max()), float(counted.min()), len(counted)
    above = int((counted > (high + low) / 2).sum())
    up, down = two_level_advantages(above, size)
    return (
        f"every group of this batch has two levels of {what}, and these are divided by the group's standard deviation: the size of the "
        f"penalty has no effect. With {above} of {size} rollouts at {high:g} and {size - above} at {low:g} the advantages are {up:+.2f} "
        f"and {down:+.2f}; with {5 * low:g} in the place of {low:g} they are the same, because the distance between the levels cancels: "
        "√((1 − q)/q · (n − 1)/n) and −√(q/(1 − q) · (n − 1)/n), q = the share above. A penalty exceeds the reward with "
        "loss.positive_weight below 1 (0.2: a mistake teaches as much as five successes), with loss.scale: none, or with a third level"
    )


def two_level_advantages(above: int, size: int) -> tuple[float, float]:
    """Advantages of a group of `size` rollouts of which `above` have the higher of two rewards, whatever the two rewards are.

        A = √((1 − q)/q · (n − 1)/n) and −√(q/(1 − q) · (n − 1)/n),   q = above/n

    for d = high − low: r − mean is (1 − q)·d or −q·d, and the sample standard deviation is d·√(q(1 − q) · n/(n − 1)), so d cancels.

    >>> [round(value, 3) for value in two_level_advantages(1, 4)]
    [1.5, -0.5]
    """
    share, sample = above / size, (size - 1) / size
    return math.sqrt((1.0 - share) / share * sample), -math.sqrt(share / (1.0 - share) * sample)


def _levels(group: NDArray[np.float64]) -> int:
    counted = np.sort(group[~np.isnan(group)])
    return 1 + int((np.diff(counted) > EQUAL * max(1.0, float(np.abs(counted).max()))).sum())


def _penalty(groups: NDArray[np.float64]) -> bool:
    return bool(np.nanmin(groups) < 0.0 < np.nanmax(groups))
