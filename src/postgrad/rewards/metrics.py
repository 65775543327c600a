"""The numbers a run logs about its rewards, under TRL's names where TRL has one.

    reward                          mean total over the rollouts that have one
    reward_std                      mean over groups of the sample standard deviation of the totals
    frac_reward_zero_std            share of the groups whose totals are equal: they train nothing
    rewards/<name>/mean, /std       over the rollouts that the reward scored, before its weight
    rewards/<name>/abstained        rollouts for which it returned None
    rewards/<name>/failed           rollouts on which it failed (exception, deadline, crash, NaN)
    rewards/unscored                rollouts without any reward: abstained by all, or broken outside the model

A NaN never enters a mean, and is never hidden: it is counted. A mean over nothing is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from postgrad.rewards.ledger import equal_groups, group_spread

if TYPE_CHECKING:
    from postgrad.rewards.score import Scores


def reward_metrics(scores: Scores) -> dict[str, float]:
    """One batch's metrics."""
    metrics: dict[str, float] = {}
    for index, name in enumerate(scores.names):
        metrics |= _of_reward(name, scores.values[:, index])
        count = scores.counts.get(name)
        metrics[f"rewards/{name}/abstained"] = float(count.abstained if count else np.isnan(scores.values[:, index]).sum())
        metrics[f"rewards/{name}/failed"] = float(count.failed if count else 0)
    return metrics | _of_totals(scores.totals, scores.group_size)


def _of_reward(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    scored = values[~np.isnan(values)]
    if not len(scored):
        return {}
    return {f"rewards/{name}/mean": float(scored.mean()), f"rewards/{name}/std": float(scored.std(ddof=1)) if len(scored) > 1 else 0.0}


def _of_totals(totals: NDArray[np.float64], group_size: int) -> dict[str, float]:
    scored = ~np.isnan(totals)
    metrics = {"rewards/unscored": float((~scored).sum())}
    if not scored.any():
        return metrics
    groups = scored.reshape(-1, group_size).any(axis=1)
    return metrics | {
        "reward": float(totals[scored].mean()),
        "reward_std": float(group_spread(totals, group_size)[groups].mean()),
        "frac_reward_zero_std": float(equal_groups(totals, group_size)[groups].mean()),
    }
