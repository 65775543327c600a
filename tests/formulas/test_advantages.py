"""Advantages from rewards: ties are exactly zero, abstentions touch nobody else, and groups never mix."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.formulas import NonFiniteError, group_advantages, leave_one_out_advantages, normalize_then_sum, weight_positive, whiten

NAN = math.nan
SCALES = ("group", "batch", "none")
PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)
REWARD = st.floats(-10, 10).map(lambda x: round(x, 3))


def test_hand_numbers() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 1.0, 1.0, 3.0])
    group = group_advantages(rewards, 4)
    unit, double = math.sqrt(1 / 3), math.sqrt(4 / 3)
    expected = [0.5 / (unit + 1e-4)] * 4 + [1 / (double + 1e-4)] * 4
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0] * 2)
    torch.testing.assert_close(group, signs * torch.tensor(expected))
    torch.testing.assert_close(group_advantages(rewards, 4, scale="none"), signs * torch.tensor([0.5] * 4 + [1.0] * 4))
    std = math.sqrt(9.5 / 7)  # over the eight rewards (mean 1.25), not over their deviations
    batch = signs * torch.tensor([0.5] * 4 + [1.0] * 4) / (std + 1e-4)
    torch.testing.assert_close(group_advantages(rewards, 4, scale="batch"), batch)


def test_eps_is_added_to_the_standard_deviation() -> None:
    assert group_advantages(torch.tensor([1.0, -1.0]), 2, eps=0.0).tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])
    assert group_advantages(torch.tensor([1.0, -1.0]), 2, eps=1.0)[0].item() == pytest.approx(1 / (math.sqrt(2) + 1))
    assert group_advantages(torch.tensor([1.0, 1.0]), 2, eps=0.0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1e-30, 1e6, 3e38])
def test_equal_rewards_have_advantage_exactly_zero(scale: str, value: float) -> None:
    rewards = torch.full((7,), value)
    assert group_advantages(rewards, 7, scale=scale).tolist() == [0.0] * 7  # type: ignore[arg-type]
    assert leave_one_out_advantages(rewards, 7).tolist() == [0.0] * 7


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rewards", [[0.5, 0.5 + 1e-7, 0.5], [0.0, 1e-7, 0.0], [300.0, 300.0 + 2e-4, 300.0], [-300.0, -300.0002, -300.0]])
def test_rounding_noise_is_no_signal(scale: str, rewards: list[float]) -> None:
    for x in (torch.tensor(rewards), torch.tensor(rewards, dtype=torch.float64)):
        assert group_advantages(x, 3, scale=scale).tolist() == [0.0] * 3  # type: ignore[arg-type]
        assert leave_one_out_advantages(x, 3).tolist() == [0.0] * 3


def test_ties_are_judged_per_group_and_without_the_abstentions() -> None:
    for near in (300.0, -300.0):
        rewards = torch.tensor([near, near + 2e-4, NAN, 0.0, 2e-6, NAN], dtype=torch.float64)
        advantages = group_advantages(rewards, 3, scale="none").tolist()
        assert advantages == pytest.approx([0.0, 0.0, 0.0, -1e-6, 1e-6, 0.0], abs=1e-12)
        assert leave_one_out_advantages(rewards, 3).tolist() == pytest.approx([0.0, 0.0, 0.0, -2e-6, 2e-6, 0.0], abs=1e-12)


def test_what_counts_as_a_tie_is_a_parameter() -> None:
    rewards = torch.tensor([0.0, 1e-5], dtype=torch.float64)
    assert group_advantages(rewards, 2)[1].item() > 0
    assert group_advantages(rewards * 0.15, 2)[1].item() > 0
    assert group_advantages(rewards, 2, tie_tolerance=1e-4).tolist() == [0.0, 0.0]
    assert leave_one_out_advantages(rewards, 2, tie_tolerance=1e-4).tolist() == [0.0, 0.0]
    assert group_advantages(torch.tensor([0.0, 1e-12], dtype=torch.float64), 2, tie_tolerance=0.0)[1].item() > 0
    assert group_advantages(torch.tensor([0.0, 0.5], dtype=torch.float64), 2, tie_tolerance=0.5).tolist() == [0.0, 0.0]
    for function in (group_advantages, leave_one_out_advantages):
        with pytest.raises(ValueError, match="tie_tolerance"):
            function(rewards, 2, tie_tolerance=-1.0)


@pytest.mark.parametrize("scale", SCALES)
def test_a_group_of_one_and_a_group_with_one_reward_left_have_advantage_zero(scale: str) -> None:
    assert group_advantages(torch.tensor([3.0, 5.0]), 1, scale=scale).tolist() == [0.0, 0.0]  # type: ignore[arg-type]
    assert group_advantages(torch.tensor([3.0, NAN, NAN, NAN]), 2, scale=scale).tolist() == [0.0] * 4  # type: ignore[arg-type]
    assert leave_one_out_advantages(torch.tensor([3.0, 5.0]), 1).tolist() == [0.0, 0.0]
    assert leave_one_out_advantages(torch.tensor([3.0, NAN, NAN, NAN]), 2).tolist() == [0.0] * 4


@PROPERTY
@given(st.lists(REWARD, min_size=2, max_size=6), st.integers(0, 5), st.sampled_from(["group", "none"]))
def test_an_abstention_leaves_the_others_as_if_it_were_not_there(rewards: list[float], place: int, scale: str) -> None:
    place = min(place, len(rewards))
    with_gap = torch.tensor([*rewards[:place], NAN, *rewards[place:]], dtype=torch.float64)
    without = torch.tensor(rewards, dtype=torch.float64)
    for function in (lambda x: group_advantages(x, len(x), scale=scale), lambda x: leave_one_out_advantages(x, len(x))):  # type: ignore[arg-type]
        result = function(with_gap).tolist()
        assert result.pop(place) == 0.0
        assert result == pytest.approx(function(without).tolist(), abs=1e-12)


@PROPERTY
@given(st.lists(REWARD, min_size=3, max_size=3), st.lists(REWARD, min_size=3, max_size=3))
def test_groups_do_not_see_each_other(first: list[float], second: list[float]) -> None:
    a, b = torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)
    for function in (group_advantages, leave_one_out_advantages):
        torch.testing.assert_close(function(torch.cat([a, b]), 3), torch.cat([function(a, 3), function(b, 3)]))


@PROPERTY
@given(st.lists(REWARD, min_size=2, max_size=8))
def test_advantages_of_a_group_sum_to_zero_and_order_as_the_rewards(rewards: list[float]) -> None:
    x = torch.tensor(rewards, dtype=torch.float64)
    for scale in SCALES:
        advantages = group_advantages(x, len(rewards), scale=scale)  # type: ignore[arg-type]
        assert advantages.sum().item() == pytest.approx(0.0, abs=1e-9)
        assert advantages.argmax() == x.argmax()


@PROPERTY
@given(st.lists(REWARD, min_size=2, max_size=8))
def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(rewards: list[float]) -> None:
    advantages = leave_one_out_advantages(torch.tensor(rewards, dtype=torch.float64), len(rewards)).tolist()
    for i, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
        others = rewards[:i] + rewards[i + 1 :]
        assert advantage == pytest.approx(reward - sum(others) / len(others), abs=1e-9)


def test_a_harsher_punishment_changes_nothing_when_a_group_has_two_levels() -> None:
    def advantages(punishment: float, scale: str) -> list[float]:
        return group_advantages(torch.tensor([1.0, punishment, punishment]), 3, scale=scale, eps=0.0).tolist()  # type: ignore[arg-type]

    for punishment in (-1.0, -5.0):
        assert advantages(punishment, "group") == pytest.approx(advantages(0.0, "group"))
    assert advantages(-5.0, "none")[0] > advantages(0.0, "none")[0]


def test_batch_scale_divides_by_the_spread_of_the_rewards_that_did_not_abstain() -> None:
    rewards = torch.tensor([1.0, 0.0, NAN, 10.0, 10.0, 10.0])
    std = torch.tensor([1.0, 0.0, 10.0, 10.0, 10.0]).std().item()
    expected = [0.5 / (std + 1e-4), -0.5 / (std + 1e-4), 0.0, 0.0, 0.0, 0.0]
    assert group_advantages(rewards, 3, scale="batch").tolist() == pytest.approx(expected)


def test_wrong_arguments_raise() -> None:
    for function in (group_advantages, leave_one_out_advantages):
        flat = torch.zeros(2)
        for rewards, size in ((torch.zeros(7), 2), (torch.zeros(2, 2), 2), (flat, 0), (flat, -2), (torch.tensor(1.0), 1)):
            with pytest.raises(ValueError, match="whole number of groups"):
                function(rewards, size)
        for bad in (math.inf, -math.inf):
            with pytest.raises(NonFiniteError, match="rewards: 1 of 2"):
                function(torch.tensor([bad, NAN]), 2)
    with pytest.raises(ValueError, match="scale"):
        group_advantages(torch.zeros(2), 2, scale="std")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eps"):
        group_advantages(torch.zeros(2), 2, eps=-1e-4)


def test_a_spread_beyond_fp64_raises_instead_of_becoming_zero() -> None:
    with pytest.raises(NonFiniteError, match="standard deviation"):
        group_advantages(torch.tensor([1e300, -1e300], dtype=torch.float64), 2)
    with pytest.raises(NonFiniteError, match="advantages"):  # twice the largest fp32
        leave_one_out_advantages(torch.tensor([3e38, -3e38]), 2)


def test_widths_and_no_gradient() -> None:
    for given_type, expected in ((torch.bfloat16, torch.float32), (torch.int64, torch.float32), (torch.float64, torch.float64)):
        rewards = torch.tensor([1, 0], dtype=given_type)
        weights = torch.ones(1)
        for result in (
            *(group_advantages(rewards, 2, scale=scale) for scale in SCALES),  # type: ignore[arg-type]
            leave_one_out_advantages(rewards, 2),
            normalize_then_sum(rewards[None], weights, 2),
            whiten(rewards, torch.ones(2)),
        ):
            assert result.dtype == expected
    assert normalize_then_sum(torch.eye(2), torch.ones(2, dtype=torch.float64), 2).dtype == torch.float32
    leaf = torch.tensor([1.0, 0.0], requires_grad=True)
    assert not group_advantages(leaf, 2).requires_grad
    assert not normalize_then_sum(leaf[None], torch.ones(1), 2).requires_grad
    assert not whiten(leaf, torch.ones(2)).requires_grad


def test_each_reward_is_normalised_before_the_sum() -> None:
    small, large = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1000.0, 0.0])
    weights = torch.tensor([1.0, 0.5])
    total = group_advantages(small, 4, eps=0.1) + 0.5 * group_advantages(large, 4, eps=0.1)
    expected = total / (total.std() + 0.1)
    torch.testing.assert_close(normalize_then_sum(torch.stack([small, large]), weights, 4, eps=0.1), expected)


def test_rewards_that_cancel_in_the_sum_still_count() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])
    assert group_advantages(rewards.sum(0), 3).tolist() == [0.0, 0.0, 0.0]
    assert normalize_then_sum(rewards, torch.tensor([2.0, 1.0]), 3)[0].item() > 0


def test_a_rollout_on_which_every_reward_abstains_is_left_out_of_the_batch() -> None:
    rewards = torch.tensor([[1.0, 0.0, NAN, 0.0], [2.0, NAN, NAN, 0.0]])
    result = normalize_then_sum(rewards, torch.ones(2), 4)
    parts = sum(group_advantages(row, 4) for row in rewards)
    assert isinstance(parts, torch.Tensor)
    kept = parts[[0, 1, 3]]
    expected = (kept - kept.mean()) / (kept.std() + 1e-4)
    assert result[2].item() == 0.0
    torch.testing.assert_close(result[[0, 1, 3]], expected)
    one_left = normalize_then_sum(torch.tensor([[1.0, 0.0], [NAN, NAN]]), torch.ones(2), 2)
    torch.testing.assert_close(one_left, normalize_then_sum(torch.tensor([[1.0, 0.0]]), torch.ones(1), 2))


def test_a_reward_without_weight_changes_no_advantage_by_scoring() -> None:
    abstaining = torch.tensor([[1.0, 0.0, NAN, 0.0]])
    alone = normalize_then_sum(abstaining, torch.ones(1), 4)
    watched = normalize_then_sum(torch.cat([abstaining, torch.tensor([[3.0, 1.0, 5.0, 2.0]])]), torch.tensor([1.0, 0.0]), 4)
    torch.testing.assert_close(watched, alone)


def test_normalize_then_sum_refuses_what_does_not_fit() -> None:
    for rewards, weights in ((torch.zeros(2, 4), torch.ones(4)), (torch.zeros(4), torch.ones(4)), (torch.zeros(2, 4), torch.ones(2, 1))):
        with pytest.raises(ValueError, match="must be"):
            normalize_then_sum(rewards, weights, 2)
    with pytest.raises(NonFiniteError, match="normalize_then_sum"):
        normalize_then_sum(torch.tensor([[1.0, 0.0]]), torch.tensor([NAN]), 2)


def test_only_positive_advantages_are_weighed() -> None:
    advantages = torch.tensor([2.0, 0.5, 0.0, -1.0])
    assert weight_positive(advantages, positive_weight=0.5).tolist() == [1.0, 0.25, 0.0, -1.0]
    assert weight_positive(advantages, positive_weight=1.0).tolist() == advantages.tolist()
    assert weight_positive(advantages, positive_weight=0.0).tolist() == [0.0, 0.0, 0.0, -1.0]
    with pytest.raises(ValueError, match="positive_weight"):
        weight_positive(advantages, positive_weight=-0.1)
    with pytest.raises(NonFiniteError):
        weight_positive(torch.tensor([NAN]), positive_weight=0.5)


def test_whiten_hand_numbers() -> None:
    x, mask = torch.tensor([[1.0, 3.0], [5.0, 77.0]]), torch.tensor([[1, 1], [1, 0]])
    torch.testing.assert_close(whiten(x, mask), torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
    torch.testing.assert_close(whiten(x, mask, center=False), torch.tensor([[2.0, 3.0], [4.0, 0.0]]))
    torch.testing.assert_close(whiten(x, mask, eps=12.0), torch.tensor([[-0.5, 0.0], [0.5, 0.0]]))


@PROPERTY
@given(st.integers(0, 10_000), st.floats(-100, 100), st.floats(0.1, 100))
def test_whitened_values_have_mean_zero_and_variance_one(seed: int, shift: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 5, generator=generator) > 0.3
    mask[0, :2] = True
    x = shift + scale * torch.randn(4, 5, dtype=torch.float64, generator=generator)
    white = whiten(torch.where(mask, x, NAN), mask)[mask]
    assert white.mean().item() == pytest.approx(0.0, abs=1e-9)
    assert white.var().item() == pytest.approx(1.0, rel=1e-4)
    kept = whiten(x, mask, center=False)[mask]
    assert kept.mean().item() == pytest.approx(x[mask].mean().item())
    assert kept.var().item() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("bad", [NAN, math.inf, 1e30])
def test_whiten_never_reads_what_stands_under_the_mask(bad: float) -> None:
    result = whiten(torch.tensor([1.0, bad, 3.0]), torch.tensor([1, 0, 1]))
    torch.testing.assert_close(result, torch.tensor([-1.0, 0.0, 1.0]) / math.sqrt(2))


def test_equal_values_whiten_to_zero_and_nothing_raises() -> None:
    noise = torch.tensor([0.1, 0.1 + 1e-8, 0.1], dtype=torch.float64)
    assert whiten(noise, torch.ones(3)).tolist() == [0.0, 0.0, 0.0]
    assert whiten(torch.tensor([5.0, 9.0]), torch.tensor([1, 0])).tolist() == [0.0, 0.0]
    assert whiten(torch.tensor([5.0, 9.0]), torch.tensor([1, 0]), center=False).tolist() == [5.0, 0.0]
    with pytest.raises(ValueError, match="no counted value"):
        whiten(torch.ones(2), torch.zeros(2))
    with pytest.raises(ValueError, match="mask has shape"):
        whiten(torch.ones(2, 2), torch.ones(2, 1))
    for bad in (NAN, math.inf):
        with pytest.raises(NonFiniteError, match="whiten"):
            whiten(torch.tensor([1.0, bad]), torch.ones(2))
