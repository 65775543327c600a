import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.rewards.ledger import (
    centred,
    compared_total,
    equal_groups,
    group_means,
    group_spread,
    outcome_total,
    recomputed_advantages,
    split_advantages,
    weighted_total,
)  # fmt: skip

NAN = float("nan")


def split(values, weights, advantages, group_size, scale, **options):
    names = [f"r{index}" for index in range(len(weights))]
    return split_advantages(values, weights, advantages, names=names, group_size=group_size, scale=scale, **options)


def group_advantages(totals, group_size, scale):
    torch = pytest.importorskip("torch")
    from postgrad import formulas

    tensor = torch.tensor(np.asarray(totals, dtype=np.float64))
    if scale == "leave_one_out":
        return formulas.leave_one_out_advantages(tensor, group_size).numpy()
    return formulas.group_advantages(tensor, group_size, scale=scale).numpy()


# ---- totals


def test_total_is_the_weighted_sum():
    assert weighted_total([[1.0, 2.0], [0.5, -1.0]], [1.0, 0.5], 2).tolist() == [2.0, 0.0]


def test_abstaining_reward_counts_with_its_groups_mean():
    # r1 of the first group: mean of 1 and 4; the second group is not looked at
    values = [[1.0, 1.0], [1.0, NAN], [0.0, 4.0], [9.0, 100.0], [9.0, 100.0], [9.0, 100.0]]
    assert weighted_total(values, [1.0, 2.0], 3).tolist() == [3.0, 6.0, 8.0, 209.0, 209.0, 209.0]


def test_abstention_does_not_move_the_siblings():
    """One rollout's abstention from a reward that is equal for all others leaves every advantage as without that reward."""
    task = [1.0, 0.0, 0.5, 0.25]
    without = group_advantages(task, 4, "group")
    for constant in (0.0, 0.1, -3.7, 1e6 / 3):
        values = np.column_stack([task, [constant, NAN, constant, constant]])
        totals = weighted_total(values, [1.0, 0.7], 4)
        np.testing.assert_allclose(group_advantages(totals, 4, "group"), without, atol=1e-9)
        counted_as_zero = np.nan_to_num(values) @ [1.0, 0.7]
        if constant:
            assert np.abs(group_advantages(counted_as_zero, 4, "group") - without).max() > 0.01  # what it would have done


def test_reward_that_abstains_on_a_whole_group_adds_nothing_there():
    values = [[1.0, NAN], [0.0, NAN], [1.0, 5.0], [0.0, 7.0]]
    assert weighted_total(values, [1.0, 1.0], 2).tolist() == [1.0, 0.0, 6.0, 7.0]


def test_abstaining_rollout_gets_nothing_of_that_reward_and_the_others_share_it_alone():
    values = np.array([[1.0, 4.0], [0.0, NAN], [1.0, 2.0], [0.0, 0.0]])
    totals = weighted_total(values, [1.0, 1.0], 4)
    shares = split(values, [1.0, 1.0], group_advantages(totals, 4, "none"), 4, "none").shares
    assert shares[:, 1].tolist() == [2.0, 0.0, 0.0, -2.0]  # 4, 2 and 0 about their own mean


def test_rollout_with_no_reward_at_all_has_no_total():
    totals = weighted_total([[1.0, 1.0], [NAN, NAN], [0.0, NAN]], [1.0, 1.0], 3)
    assert np.isnan(totals).tolist() == [False, True, False]


def test_a_reward_that_only_watches_gives_no_total():
    totals = weighted_total([[NAN, 1.0], [0.5, 7.0]], [1.0, 0.0], 2)
    assert np.isnan(totals[0])
    assert totals[1] == 0.5


def test_rollout_without_total_is_as_if_it_were_not_there():
    values = [[1.0, 2.0], [NAN, NAN], [0.0, 1.0], [0.5, NAN]]
    without = [[1.0, 2.0], [0.0, 1.0], [0.5, NAN]]
    for scale in ("group", "none", "leave_one_out"):
        full = group_advantages(weighted_total(values, [1.0, 0.5], 4), 4, scale)
        assert full[1] == 0.0
        np.testing.assert_allclose(full[[0, 2, 3]], group_advantages(weighted_total(without, [1.0, 0.5], 3), 3, scale), atol=1e-12)


def test_outcome_total_leaves_shaping_out_and_is_none_without_an_outcome():
    values, roles = [[1.0, 0.3], [NAN, 0.2]], ["outcome", "shaping"]
    total = outcome_total(values, [2.0, 1.0], roles, 2)
    assert total[0] == 2.0
    assert np.isnan(total[1])
    assert outcome_total(values, [2.0, 1.0], ["shaping", "shaping"], 2) is None
    assert outcome_total(values, [0.0, 1.0], roles, 2) is None


def test_mean_of_equal_values_is_that_value_exactly():
    assert group_means([0.1, 0.1, 0.1, NAN], 4).tolist() == [0.1] * 4
    assert centred([0.1, 0.1, 0.1, NAN], 4).tolist() == [0.0] * 4


def test_spread_is_the_sample_standard_deviation():
    assert group_spread([1.0, 0.0, 2.0, NAN, 1.0, 1.0, 1.0, 1.0], 4).tolist() == [1.0, 0.0]


def test_differences_below_rounding_are_no_spread():
    assert equal_groups([1.0, 1.0 + 1e-7, 1.0, 1.0 + 1e-5], 2).tolist() == [True, False]
    assert equal_groups([1e6, 1e6 + 0.5, 0.1 + 0.2, 0.3], 2).tolist() == [True, True]
    assert equal_groups([NAN, NAN, 5.0, NAN], 2).tolist() == [True, True]


@pytest.mark.parametrize("values", [[1.0, 2.0], [[1.0, np.inf]], [[1.0]]])
def test_wrong_shapes_and_infinities_are_refused(values):
    with pytest.raises(ValueError, match=r"rollouts, rewards|infinite"):
        weighted_total(values, [1.0, 1.0], 1)


def test_part_of_a_group_is_refused():
    with pytest.raises(ValueError, match="no whole groups of 2"):
        weighted_total([[1.0]] * 3, [1.0], 2)


# ---- shares


def test_shares_by_hand():
    """Two rewards, std 1: totals 3, 1, 2 → A = (S − 2) / (1 + ε)."""
    values = [[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]]
    result = split(values, [1.0, 2.0], [1 / 1.0001, -1 / 1.0001, 0.0], 3, "group")
    np.testing.assert_allclose(result.shares * 1.0001, [[1 / 3, 2 / 3], [1 / 3, -4 / 3], [-2 / 3, 2 / 3]])
    assert result.residual < 1e-12
    assert result.names == ("r0", "r1")


SCORE = st.one_of(st.floats(-10, 10), st.sampled_from([0.0, 1.0, -1.0, 0.1, NAN, NAN]))


@st.composite
def batches(draw):
    groups, size, rewards = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    row = st.lists(SCORE, min_size=rewards, max_size=rewards)
    values = draw(st.lists(row, min_size=groups * size, max_size=groups * size))
    weights = draw(st.lists(st.sampled_from([1.0, 0.2, -0.5, 3.0, 0.0]), min_size=rewards, max_size=rewards))
    return np.array(values), np.array(weights), size


@pytest.mark.parametrize("scale", ["group", "batch", "none", "leave_one_out"])
@given(batch=batches())
def test_advantages_split_exactly_over_the_rewards(scale, batch):
    values, weights, size = batch
    advantages = group_advantages(weighted_total(values, weights, size), size, scale)
    result = split(values, weights, advantages, size, scale)
    assert result.residual <= 1e-6 * max(1.0, np.abs(advantages).max())
    assert not result.shares[np.isnan(values)].any()  # who abstained is owed nothing


@given(batch=batches())
def test_normalised_sums_split_exactly_too(batch):
    torch = pytest.importorskip("torch")
    from postgrad import formulas

    values, weights, size = batch
    advantages = formulas.normalize_then_sum(torch.tensor(values.T.copy()), torch.tensor(weights), size).numpy()
    assert split(values, weights, advantages, size, "group", normalize="normalize_then_sum").residual <= 1e-6 * max(
        1.0, np.abs(advantages).max()
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none", "leave_one_out", "normalize_then_sum"])
@pytest.mark.parametrize("positive_weight", [0.0, 0.1, 2.0])
@settings(deadline=None, max_examples=25)
@given(batch=batches())
def test_weighed_advantages_split_exactly_too(scale, positive_weight, batch):
    torch = pytest.importorskip("torch")
    from postgrad import formulas

    values, weights, size = batch
    options = {"scale": scale}
    if scale == "normalize_then_sum":
        options = {"scale": "group", "normalize": "normalize_then_sum"}
        plain = formulas.normalize_then_sum(torch.tensor(values.T.copy()), torch.tensor(weights), size)
    else:
        plain = torch.tensor(group_advantages(weighted_total(values, weights, size), size, scale))
    advantages = formulas.weight_positive(plain, positive_weight=positive_weight).numpy()
    result = split(values, weights, advantages, size, positive_weight=positive_weight, **options)
    assert result.residual <= 1e-6 * max(1.0, np.abs(advantages).max())
    again = recomputed_advantages(values, weights, group_size=size, positive_weight=positive_weight, **options)
    np.testing.assert_allclose(again, result.shares.sum(axis=1))


def test_weighed_shares_by_hand():
    """Totals 2, 0 and 1, centred 1, −1, 0, unscaled; λ = 0.1 reaches both shares of the first rollout and nothing else."""
    values = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    result = split(values, [1.0, 1.0], [0.1, -1.0, 0.0], 3, "none", positive_weight=0.1)
    np.testing.assert_allclose(result.shares, [[0.1 / 3, 0.2 / 3], [-2 / 3, -1 / 3], [1 / 3, -1 / 3]])
    with pytest.raises(ValueError, match="the shares of rollout 0"):
        split(values, [1.0, 1.0], [1.0, -1.0, 0.0], 3, "none", positive_weight=0.1)


@given(batch=batches())
def test_groups_with_an_advantage_are_those_whose_compared_totals_differ(batch):
    values, weights, size = batch
    compared = compared_total(values, weights, size, normalize="normalize_then_sum")
    advantages = recomputed_advantages(values, weights, group_size=size, scale="group", normalize="normalize_then_sum")
    differ = ~equal_groups(compared, size)
    largest = np.abs(advantages).reshape(-1, size).max(axis=1)
    assert (largest[differ] > 1e-9).all()
    assert (largest[~differ] < 1e-2).all()  # rounding, divided by a small spread of the batch at most
    acting = np.isnan(values[:, weights != 0]).all(axis=1)
    assert (np.isnan(compared) == acting).all()


def test_rewards_that_cancel_in_the_total_are_compared_when_each_is_normalised():
    values = [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.5, 0.5]]
    np.testing.assert_allclose(weighted_total(values, [1.0, 1.0], 4), 1.0)
    assert equal_groups(compared_total(values, [1.0, 1.0], 4), 4).tolist() == [True]
    unequal = [[2.0, 0.0], [1.0, 1.0], [0.0, 2.0], [2.0, 0.0]]
    assert equal_groups(compared_total([[a, b / 4] for a, b in unequal], [1.0, 4.0], 4), 4).tolist() == [True]
    normalised = compared_total([[a, b / 4] for a, b in unequal], [1.0, 4.0], 4, normalize="normalize_then_sum")
    assert not equal_groups(normalised, 4).any()


def test_normalize_then_sum_against_trl():
    """Numbers of TRL 1.16.0's own code for weights 1 and 2 (its None is our NaN)."""
    values = [[1.0, NAN], [0.0, 0.5], [0.0, 0.5], [1.0, NAN], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
    expected = [0.540028, -0.540028, -0.540028, 0.540028, -0.540028, 1.620084, -1.620084, 0.540028]
    # half a unit of the sixth digit is less than the 1e-6 that are checked
    result = split(values, [1.0, 2.0], expected, 4, "group", normalize="normalize_then_sum")
    np.testing.assert_allclose(result.shares.sum(axis=1), expected, atol=1e-6)


@pytest.mark.parametrize("scale", ["group", "batch", "none", "leave_one_out"])
def test_group_that_differs_by_rounding_only_has_no_shares(scale):
    values = np.array([[0.1, 0.2], [0.3, 0.0], [0.0, 0.3]])
    totals = weighted_total(values, [1.0, 1.0], 3)
    assert len(set(totals)) > 1  # 0.1 + 0.2 is not 0.3
    assert not split(values, [1.0, 1.0], group_advantages(totals, 3, scale), 3, scale).shares.any()


def test_advantages_of_other_rewards_are_noticed():
    values = [[1.0], [0.0]]
    for wrong in ([0.5, -0.4], [NAN, -0.5], [0.0, 0.0]):
        with pytest.raises(ValueError, match="the shares of rollout"):
            split(values, [1.0], wrong, 2, "none")
    with pytest.raises(ValueError, match="names"):
        split(values, [1.0], [0.5, -0.5, 0.0], 2, "none")
