"""Leave out whole groups that carry no signal, by their spread and never by their mean, and say why.

A group is kept or dropped as one: rollouts taken out singly would change the mean and the spread of those that stay (RL#3469).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from postgrad.errors import RecipeError
from postgrad.rewards.ledger import equal_groups, group_means

FilterMode = Literal["none", "zero_std", "outcome"]
Cause = Literal["all_abstained", "all_equal", "outcome_constant"]


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """kept [B]: groups that stay. causes [B]: why a group carries no signal, None where it does (also for groups that are kept)."""

    kept: tuple[bool, ...]
    causes: tuple[Cause | None, ...]

    @property
    def dropped(self) -> Mapping[Cause, int]:
        """Dropped groups by cause."""
        return Counter(cause for cause, kept in zip(self.causes, self.kept, strict=True) if cause is not None and not kept)


def keep_groups(totals: ArrayLike, outcome_totals: ArrayLike | None, group_size: int, *, mode: FilterMode = "none") -> GroupFilter:
    """Which groups stay in the batch. totals and outcome_totals [N], NaN = abstained.

    none:     all.
    zero_std: those whose totals differ.
    outcome:  those whose totals and outcome totals both differ: shaping alone is no reason to learn (DAPO's dynamic sampling).

    A group with fewer than two counted totals is `all_abstained` when it has none, else `all_equal`.

    >>> keep_groups([1.0, 0.0, 0.5, 0.5], None, 2, mode="zero_std").kept
    (True, False)
    """
    if mode == "outcome" and outcome_totals is None:
        hint = "give the reward that judges the task itself role: outcome"
        raise RecipeError("filter: outcome needs a reward with role outcome and a weight", key="loss.filter", hint=hint)
    equal = equal_groups(totals, group_size)
    empty = np.isnan(group_means(totals, group_size)[::group_size])
    constant = np.zeros_like(equal) if outcome_totals is None else equal_groups(outcome_totals, group_size)
    causes = tuple(_cause(*flags) for flags in zip(empty.tolist(), equal.tolist(), constant.tolist(), strict=True))
    drops: Mapping[FilterMode, tuple[Cause, ...]] = {
        "none": (),
        "zero_std": ("all_abstained", "all_equal"),
        "outcome": ("all_abstained", "all_equal", "outcome_constant"),
    }
    return GroupFilter(kept=tuple(cause not in drops[mode] for cause in causes), causes=causes)


def _cause(empty: bool, equal: bool, outcome_constant: bool) -> Cause | None:
    if empty:
        return "all_abstained"
    if equal:
        return "all_equal"
    return "outcome_constant" if outcome_constant else None


def cancelling_rewards(
    values: ArrayLike, weights: ArrayLike, totals: ArrayLike, names: Sequence[str], group_size: int
) -> dict[int, tuple[str, ...]]:
    """Groups whose totals are equal although rewards differ within them: {group: names of the rewards that cancel} (trl#3857).

    Such a group shows a spread in every log and still trains nothing.

    >>> cancelling_rewards([[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0], [1.0, 1.0], ["brief", "thorough"], 2)
    {0: ('brief', 'thorough')}
    """
    weighted = np.asarray(values, dtype=np.float64) * np.asarray(weights, dtype=np.float64)
    varies = np.stack([~equal_groups(column, group_size) for column in weighted.T], axis=1)
    equal = equal_groups(totals, group_size)
    return {
        int(group): tuple(name for name, active in zip(names, varies[group], strict=True) if active)
        for group in np.flatnonzero(equal & (varies.sum(axis=1) > 1))
    }
