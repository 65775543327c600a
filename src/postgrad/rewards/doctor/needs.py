"""What a check needs before it can look, and what would bring it."""

from __future__ import annotations

import numpy as np

from postgrad.rewards.doctor.finding import Rule, Skipped, skipped
from postgrad.rewards.doctor.observed import WINDOW_GROUPS, Observed


def groups(observed: Observed, rule: Rule, *, least: int = 2) -> Skipped | None:
    """At least `WINDOW_GROUPS` groups of at least `least` rollouts."""
    if not observed.group_count:
        return skipped(rule, "there are no rollouts with rewards", "rollouts")
    if observed.group_size < least:
        return skipped(rule, "one rollout per prompt: nothing can be compared within a group", "rollout.group_size")
    if observed.group_count < WINDOW_GROUPS:
        return skipped(rule, f"{observed.group_count} groups; statistics are pooled over at least {WINDOW_GROUPS}", "max_steps")
    return None


def group_baseline(observed: Observed, rule: Rule) -> Skipped | None:
    """Advantages that come from comparing the rollouts of a group, as in GRPO."""
    if observed.method == "ppo":
        return skipped(rule, "advantages are measured against the critic, not within the group")
    return None


def outcome(observed: Observed, rule: Rule) -> Skipped | None:
    if observed.outcome is not None:
        return None
    return skipped(rule, "no reward is known to be the outcome, the task itself", "rewards[].role (or --outcome NAME)")


def verdict(observed: Observed, rule: Rule) -> Skipped | None:
    """An outcome on a scale where right and wrong can be told apart."""
    if observed.outcome is not None and observed.bounds is None:
        return skipped(rule, "the outcome is a continuous score without a declared range: right and wrong cannot be told apart",
                       "@reward(range=...)")  # fmt: skip
    return None


def advantages(observed: Observed, rule: Rule) -> Skipped | None:
    if np.isfinite(observed.advantages).any():
        return None
    return skipped(rule, "the advantages were not written", "advantage")


def several(observed: Observed, rule: Rule) -> Skipped | None:
    if len(observed.acting) > 1:
        return None
    return skipped(rule, "there is only one reward with a weight", "rewards")
