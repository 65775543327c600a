"""The statistics by hand, against slow versions, and under what must not change them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.rewards.doctor.numbers import (
    bootstrap_interval,
    group_covariances,
    mann_kendall,
    pooled_correlations,
    pooled_spearman,
    r_squared,
    ranks_within,
    rise,
    within,
)

VALUES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0, math.nan]), min_size=12, max_size=12).map(np.array)


def test_ranks_share_ties_and_leave_out_what_is_not_counted():
    assert ranks_within(np.array([5.0, 1.0, 1.0, math.nan]), 4).tolist() == [1.0, -0.5, -0.5, 0.0]


def test_a_correlation_within_groups_ignores_how_groups_differ():
    """Across the two groups x and y rise together; within each they fall."""
    table = within(np.array([[0.0, 1.0], [1.0, 0.0], [10.0, 11.0], [11.0, 10.0]]), 2)
    assert pooled_correlations(table)[0, 1] == pytest.approx(-1.0)


def test_a_reward_that_never_varies_has_no_correlation():
    assert np.isnan(pooled_correlations(within(np.array([[1.0, 0.0], [1.0, 1.0]]), 2))[0, 1])


def test_spearman_leaves_out_groups_in_which_one_side_is_constant():
    """Only the first group counts: three pairs in order, one against it."""
    length = np.array([1.0, 2.0, 3.0, 1.0, 2.0, 3.0])
    total = np.array([1.0, 3.0, 2.0, 7.0, 7.0, 7.0])
    assert pooled_spearman(length, total, 3) == pytest.approx(0.5)
    assert math.isnan(pooled_spearman(length, np.ones(6), 3))


@settings(deadline=None, max_examples=60)
@given(VALUES, VALUES, st.permutations([0, 1, 2]))
def test_spearman_depends_on_order_alone(x, y, order):
    """Neither on the scale of the values nor on the order of the groups."""
    before = pooled_spearman(x, y, 4)
    moved = (np.exp(x.reshape(3, 4)[list(order)]).reshape(-1), (2 * y.reshape(3, 4)[list(order)] + 5).reshape(-1))
    after = pooled_spearman(*moved, 4)
    assert before == pytest.approx(after, nan_ok=True)
    assert math.isnan(before) or -1.0 - 1e-12 <= before <= 1.0 + 1e-12


def test_covariance_of_each_reward_with_the_advantages_of_its_group():
    table = np.array([[1.0, 0.0], [0.0, 0.0], [2.0, 1.0], [0.0, 3.0]])
    covariances = group_covariances(within(table, 2), np.array([1.0, -1.0, 0.5, -0.5]), 2)
    assert covariances.tolist() == [[0.5, 0.0], [0.5, -0.5]]


def test_the_bootstrap_gives_the_same_interval_every_time_and_covers_the_mean():
    groups = np.random.default_rng(0).normal(1.0, 1.0, (64, 1))
    low, high = bootstrap_interval(groups)
    assert bootstrap_interval(groups)[0] == low
    assert low < groups.mean() < high
    assert (high - low)[0] == pytest.approx(2 * 1.96 * groups.std() / 8, rel=0.15)


def test_a_reward_that_is_another_plus_noise_is_explained_as_far_as_it_is():
    noise = np.random.default_rng(1)
    x = noise.normal(size=4000)
    assert r_squared(x, x[:, None] * 3) == pytest.approx(1.0)
    assert r_squared(x + noise.normal(size=4000), x[:, None]) == pytest.approx(0.5, abs=0.03)
    assert math.isnan(r_squared(np.zeros(4), np.ones((4, 1))))


def test_mann_kendall_by_hand():
    """Four rising values: S = 6, variance 26/3, z = 5/√(26/3) = 1.698, p = .0447."""
    up, down = mann_kendall(np.array([1.0, 2.0, 3.0, 4.0]))
    assert (up, down) == (pytest.approx(0.0447, abs=2e-4), 1.0)
    assert mann_kendall(np.array([4.0, 3.0, 2.0, 1.0])) == (1.0, pytest.approx(0.0447, abs=2e-4))
    assert mann_kendall(np.array([1.0, 2.0, 3.0])) == (1.0, 1.0)
    assert mann_kendall(np.ones(9)) == (1.0, 1.0)


def test_mann_kendall_is_right_about_chance():
    """Of many series without a trend about one in twenty has p < .05."""
    noise = np.random.default_rng(2)
    found = np.mean([mann_kendall(noise.normal(size=12))[0] < 0.05 for _ in range(2000)])
    assert 0.03 < found < 0.06


def test_rise_is_from_the_first_third_to_the_last():
    assert rise(np.array([0.0, 1.0, 9.0, 9.0, 5.0, 6.0])) == pytest.approx(5.0)
