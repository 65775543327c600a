"""Limits, and that one window alone is no alarm."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from postgrad.rewards.doctor.assemble import About, Sample, Sampled, assemble
from postgrad.rewards.doctor.finding import Details, Finding, Levels, Passed, Rule, decide, judge, one
from postgrad.rewards.doctor.observed import WINDOW_GROUPS

LEVELS = Levels(0.3, 0.5, 0.75)
RULE = Rule("T", "test", "the reward", LEVELS, "")


def run(*means: float, groups: int = WINDOW_GROUPS):
    """One window per value; every rollout of it has that reward."""
    sampled = [
        Sampled(step, f"p{step}-{group}", (Sample({"r": mean}), Sample({"r": mean})))
        for step, mean in enumerate(means, start=1)
        for group in range(groups)
    ]
    return assemble(sampled, About("test"))


def mean_reward(observed) -> float:
    return float(np.nanmean(observed.values))


@pytest.mark.parametrize(("value", "level"), [(0.3, 0), (0.31, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (math.nan, 0)])
def test_a_limit_itself_is_still_good(value, level):
    assert LEVELS.level(value) == level


@pytest.mark.parametrize(("value", "level"), [(-0.3, 0), (-0.31, 1), (-0.51, 2), (-0.71, 3), (0.9, 0), (math.nan, 0)])
def test_limits_where_low_is_bad(value, level):
    assert Levels(-0.3, -0.5, -0.7, below=True).level(value) == level


def test_a_check_with_notes_only_never_alarms():
    assert Levels(0.98).level(1e9) == 1


@pytest.mark.parametrize(
    ("means", "level", "steps", "still"),
    [
        ((0.9, 0.1, 0.9, 0.1), 0, None, None),  # never twice in a row
        ((0.1, 0.9, 0.9, 0.1), 3, (2, 3), False),
        ((0.9, 0.6, 0.1, 0.1), 2, (1, 2), False),  # what both share
        ((0.1, 0.9, 0.9, 0.9), 3, (2, 4), True),
        ((0.9, 0.9, 0.1, 0.9, 0.9), 3, (4, 5), True),  # of equal stretches the latest
        ((0.9,), 1, (1, 1), True),  # one window: a note
    ],
)
def test_a_severity_counts_once_two_neighbouring_windows_show_it(means, level, steps, still):
    verdict = judge(run(*means), one(mean_reward), LEVELS)
    assert verdict.level == level
    if level:
        assert verdict.where.step_range == steps
        assert verdict.still is still


def test_windows_without_a_number_are_passed_over():
    """A statistic that one window does not have neither confirms nor denies."""
    verdict = judge(run(0.9, -1.0, 0.9), one(lambda part: math.nan if mean_reward(part) < 0 else mean_reward(part)), LEVELS)
    assert verdict.level == 3


def test_the_gravest_column_is_the_one_explained():
    observed = run(0.4, 0.4)

    def measure(part):
        return np.array([mean_reward(part), 2 * mean_reward(part), math.nan])

    result = decide(observed, RULE, measure, lambda where, value, column: Details(f"{column} {value:.1f}", {}, ""), healthy="{value}")
    assert isinstance(result, Finding)
    assert (result.severity, result.message) == ("critical", "1 0.8")


def test_what_passed_shows_its_worst_number():
    result = decide(run(0.1, 0.2), RULE, lambda part: np.array([0.05, mean_reward(part)]), lambda *a: None, healthy="at most {value}")
    assert isinstance(result, Passed)
    assert result.message == "at most 0.15"


def test_a_window_holds_whole_steps_of_at_least_32_groups_and_the_rest_joins_the_last():
    observed = run(*[0.0] * 7, groups=10)  # 40 and 30 groups: too few for two windows
    assert [window.group_count for window in observed.windows] == [70]
    assert [window.group_count for window in run(*[0.0] * 9, groups=10).windows] == [40, 50]
    assert [window.step_range for window in run(*[0.0] * 8, groups=10).windows] == [(1, 4), (5, 8)]


def test_the_numbers_of_a_step_belong_to_the_window_of_its_rollouts():
    observed = dataclasses.replace(run(0.0, 0.0), metrics=((0, {"kl": 9.0}), (1, {"kl": 1.0}), (2, {"kl": 2.0}), (3, {"kl": 3.0})))
    assert [window.mean("kl") for window in observed.windows] == [1.0, 2.5]
