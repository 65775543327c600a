"""What a user should hear early about how rewards, weights and normalisation work together. Says nothing where nothing applies.

1. `design_notes`     from what the rewards declare, before training.
2. `observed_notes`   from one batch of scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from postgrad.rewards.base import RewardRole
from postgrad.rewards.filter import cancelling_rewards
from postgrad.rewards.ledger import EQUAL, Scale, equal_groups
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


def design_notes(rewards: Sequence[Declared], *, scale: Scale) -> list[Note]:
    """Notes on the recipe's `rewards:` as declared. `scale` is how advantages are scaled."""
    notes = [Note("no-effect-weight", f"reward {r.name} has weight 0: it is logged and trains nothing") for r in rewards if r.weight == 0.0]
    acting = [reward for reward in rewards if reward.weight != 0.0]
    if not any(reward.role == "outcome" for reward in acting):
        notes.append(Note("no-outcome", "no reward has the role outcome: nothing says what the task itself is"))
    if len(acting) == 1 and scale in ("group", "batch") and abs(acting[0].weight) != 1.0:
        why = f"advantages are divided by the {scale}'s standard deviation"
        notes.append(Note("no-effect-scale", f"the weight {acting[0].weight:g} of the only reward has no effect: {why}"))
    return notes + _outranking(acting)


def _outranking(acting: Sequence[Declared]) -> list[Note]:
    """Shaping rewards that together outweigh the outcome: then a wrong answer can outrank a right one."""
    outcome, shaping = [r for r in acting if r.role == "outcome"], [r for r in acting if r.role == "shaping"]
    if not outcome or any(reward.range is None for reward in acting):
        return []
    gap, help_ = sum(map(_width, outcome)), sum(map(_width, shaping))
    if help_ <= gap * (1 + EQUAL):
        return []
    message = f"the shaping rewards move the total by up to {help_:g}, the outcome by {gap:g}: a wrong answer can outrank a right one"
    return [Note("shaping-outranks-outcome", message)]


def _width(reward: Declared) -> float:
    low, high = reward.range or (0.0, 0.0)
    return abs(reward.weight) * (high - low)


def observed_notes(rewards: Sequence[Declared], scores: Scores, *, scale: Scale) -> list[Note]:
    """Notes on one batch of scores."""
    notes = [note for index, reward in enumerate(rewards) for note in _out_of_range(reward, scores.values[:, index])]
    notes += _silent(scores)
    notes += _two_levels(scores) if scale == "group" else []
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


def _two_levels(scores: Scores) -> list[Note]:
    """'The punishment must exceed the reward' acts only where a group has three levels or more: with two, dividing by the standard
    deviation gives {1, 0}, {1, −1} and {1, −5} the same advantages."""
    groups = scores.totals.reshape(-1, scores.group_size)[~equal_groups(scores.totals, scores.group_size)]
    if not len(groups) or any(_levels(group) > 2 for group in groups) or not _penalty(groups):
        return []
    message = (
        "every group of this batch has two levels of reward, and advantages are divided by the group's standard deviation: the size of the "
        "penalty has no effect ({1, 0}, {1, −1} and {1, −5} give the same advantages). It acts with scale: none, or with a third level"
    )
    return [Note("no-effect-penalty", message)]


def _levels(group: NDArray[np.float64]) -> int:
    counted = np.sort(group[~np.isnan(group)])
    return 1 + int((np.diff(counted) > EQUAL * max(1.0, float(np.abs(counted).max()))).sum())


def _penalty(groups: NDArray[np.float64]) -> bool:
    return bool(np.nanmin(groups) < 0.0 < np.nanmax(groups))
