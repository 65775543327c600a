"""The policy losses: hand numbers, where the gradient is exactly zero, broadcasting that must not happen."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.formulas import (
    NonFiniteError,
    cispo_surrogate,
    clip_fractions,
    clipped_surrogate,
    gamma_weight_surrogate,
    reinforce_surrogate,
    soft_gate_surrogate,
    two_sided_clip_surrogate,
)

RATIO = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1, 0.9])
SIGN = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)


def _gradient(function, ratio: torch.Tensor, *args: torch.Tensor, **kwargs: float) -> list[float]:
    leaf = ratio.clone().requires_grad_()
    function(leaf, *args, **kwargs).sum().backward()
    assert leaf.grad is not None
    return leaf.grad.tolist()


def test_clip_hand_numbers_and_bounds() -> None:
    torch.testing.assert_close(clipped_surrogate(RATIO, SIGN), torch.tensor([-1.2, 1.5, -0.5, 0.8, -1.1, 0.9]))
    wide = clipped_surrogate(RATIO, 2 * SIGN, clip_low=0.4, clip_high=0.3)
    torch.testing.assert_close(wide, torch.tensor([-2.6, 3.0, -1.0, 1.2, -2.2, 1.8]))


def test_gradient_is_exactly_zero_where_the_clip_is_active_and_minus_a_elsewhere() -> None:
    assert _gradient(clipped_surrogate, RATIO, 2 * SIGN) == [0.0, 2.0, -2.0, 0.0, -2.0, 2.0]


def test_on_policy_the_loss_is_zero_and_the_gradient_is_not() -> None:
    advantages = torch.tensor([0.5, -0.5])
    assert clipped_surrogate(torch.ones(2), advantages).sum().item() == 0.0
    assert _gradient(clipped_surrogate, torch.ones(2), advantages) == [-0.5, 0.5]


@PROPERTY
@given(st.floats(0.01, 10), st.floats(-3, 3), st.floats(0, 0.9), st.floats(0, 3))
def test_clipped_loss_is_never_below_the_unclipped_one(ratio: float, advantage: float, low: float, high: float) -> None:
    r, a = torch.tensor([ratio], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    loss = clipped_surrogate(r, a, clip_low=low, clip_high=high).item()
    assert loss >= (-r * a).item()
    clipped = min(max(ratio, 1 - low), 1 + high)
    assert loss == pytest.approx(max(-ratio * advantage, -clipped * advantage))


def test_two_sided_clip_bounds_the_loss_of_negative_advantages_only() -> None:
    ratio, advantages = torch.tensor([50.0, 3.0, 50.0, 0.5]), torch.tensor([-1.0, -1.0, 1.0, -1.0])
    torch.testing.assert_close(two_sided_clip_surrogate(ratio, advantages), torch.tensor([4.0, 3.0, -1.2, 0.8]))
    assert _gradient(two_sided_clip_surrogate, ratio, advantages) == [0.0, 1.0, 0.0, 0.0]
    torch.testing.assert_close(two_sided_clip_surrogate(ratio, advantages, max_ratio=10.0)[0], torch.tensor(10.0))
    narrow = two_sided_clip_surrogate(ratio, advantages, clip_low=0.1, clip_high=0.3, max_ratio=1.5)
    torch.testing.assert_close(narrow, torch.tensor([1.5, 1.5, -1.3, 0.9]))


@pytest.mark.parametrize("max_ratio", [1.5, 0.0, math.nan])
def test_a_bound_inside_the_clip_raises(max_ratio: float) -> None:
    with pytest.raises(ValueError, match=r"max_ratio must exceed 1 \+ clip_high = 1.5"):
        two_sided_clip_surrogate(RATIO, SIGN, clip_high=0.5, max_ratio=max_ratio)


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.2), (1.0, 0.2), (math.nan, 0.2), (0.2, -0.1), (0.2, math.nan)])
def test_clip_bounds_that_make_no_sense_raise(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="clip_"):
        clipped_surrogate(RATIO, SIGN, clip_low=low, clip_high=high)
    with pytest.raises(ValueError, match="clip_"):
        clip_fractions(RATIO, SIGN, torch.ones(6), clip_low=low, clip_high=high)


def test_a_clip_of_zero_is_allowed() -> None:
    torch.testing.assert_close(clipped_surrogate(RATIO, SIGN, clip_low=0.0, clip_high=0.0)[:4], torch.tensor([-1.0, 1.5, -0.5, 1.0]))


def test_reinforce_is_minus_a_log_pi() -> None:
    logprobs = torch.tensor([[-1.0, -0.5], [-2.0, -4.0]])
    torch.testing.assert_close(reinforce_surrogate(logprobs, torch.tensor([2.0, -1.0])), torch.tensor([[2.0, 1.0], [-2.0, -4.0]]))


def test_on_policy_reinforce_has_the_gradient_of_the_clipped_surrogate() -> None:
    logprobs = torch.tensor([-1.0, -0.5, -3.0])
    advantages = torch.tensor([1.0, -2.0, 0.5])
    expected = _gradient(lambda x: clipped_surrogate(torch.exp(x - logprobs), advantages), logprobs)
    assert _gradient(reinforce_surrogate, logprobs, advantages) == pytest.approx(expected)


def test_cispo_weighs_by_the_clipped_ratio_and_no_token_loses_its_gradient() -> None:
    ratio = torch.tensor([9.0, 2.0, 0.1], requires_grad=True)
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 2.0])
    loss = cispo_surrogate(ratio, advantages, logprobs)
    torch.testing.assert_close(loss, torch.tensor([5.0, -4.0, 0.6]))
    loss.sum().backward()
    assert ratio.grad is None
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([-5.0, 2.0, -0.2]))
    bounded = cispo_surrogate(ratio, advantages, logprobs, clip_low=0.2, clip_high=0.5)
    torch.testing.assert_close(bounded, torch.tensor([1.5, -3.0, 4.8]))


@pytest.mark.parametrize(("low", "high"), [(-0.1, 4.0), (1.1, 4.0), (1.0, -0.1), (math.nan, 4.0)])
def test_cispo_bounds_that_make_no_sense_raise(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="clip_"):
        cispo_surrogate(RATIO, SIGN, -RATIO, clip_low=low, clip_high=high)


def test_cispo_bounds_of_zero_make_it_reinforce() -> None:
    torch.testing.assert_close(cispo_surrogate(RATIO, SIGN, -RATIO, clip_low=0.0, clip_high=0.0), reinforce_surrogate(-RATIO, SIGN))


def test_cispo_takes_a_sequence_ratio() -> None:
    logprobs = -torch.ones(2, 3)
    loss = cispo_surrogate(torch.tensor([[2.0], [3.0]]), torch.tensor([1.0, -1.0]), logprobs)
    torch.testing.assert_close(loss, torch.tensor([[2.0] * 3, [-3.0] * 3]))


def test_soft_gate_hand_numbers() -> None:
    ratio, advantages = torch.tensor([1.0, 1.0, 3.0, 3.0]), torch.tensor([1.0, -1.0, 2.0, -1.0])

    def gate(tau: float, r: float) -> float:
        return 4 / tau / (1 + math.exp(-tau * (r - 1)))

    expected = [-gate(1.0, 1.0), gate(1.05, 1.0), -2 * gate(1.0, 3.0), gate(1.05, 3.0)]
    torch.testing.assert_close(soft_gate_surrogate(ratio, advantages), torch.tensor(expected))
    assert _gradient(soft_gate_surrogate, torch.ones(2), torch.tensor([1.0, -3.0])) == pytest.approx([-1.0, 3.0])
    other = soft_gate_surrogate(ratio, advantages, temperature_positive=2.0, temperature_negative=0.5)
    torch.testing.assert_close(other, torch.tensor([-gate(2.0, 1.0), gate(0.5, 1.0), -2 * gate(2.0, 3.0), gate(0.5, 3.0)]))
    for wrong in ({"temperature_positive": 0.0}, {"temperature_negative": 0.0}):
        with pytest.raises(ValueError, match="temperatures"):
            soft_gate_surrogate(ratio, advantages, **wrong)


def test_gamma_weight_hand_numbers() -> None:
    log_ratio = torch.tensor([[-0.2, 0.0, 9.0], [0.3, 0.1, 9.0], [-0.2, 0.0, 9.0]])
    mask = torch.tensor([[1, 1, 0]] * 3)
    logprobs = torch.tensor([[-1.0, -2.0, -5.0]] * 3, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.0])

    def phi(log_w: float, k: float, rate: float) -> float:
        return math.exp(k * log_w + rate * (1 - math.exp(log_w)))

    loss = gamma_weight_surrogate(log_ratio, advantages, logprobs, mask)
    up, down = phi(-0.2, 2.0, 3.0), -2 * phi(0.4, 3.0, 2.0)
    torch.testing.assert_close(loss, torch.tensor([[up, 2 * up, 0.0], [down, 2 * down, 0.0], [0.0, 0.0, 0.0]]))
    other = gamma_weight_surrogate(
        log_ratio, advantages, logprobs, mask, shape_positive=1.0, rate_positive=0.5, shape_negative=0.7, rate_negative=1.5
    )
    assert other[0, 0].item() == pytest.approx(phi(-0.2, 1.0, 0.5))
    assert other[1, 0].item() == pytest.approx(-2 * phi(0.4, 0.7, 1.5))
    torch.testing.assert_close(gamma_weight_surrogate(log_ratio, advantages[:, None], logprobs, mask), loss)
    torch.testing.assert_close(gamma_weight_surrogate(log_ratio, 0.5 * advantages, logprobs, mask), 0.5 * loss)


@pytest.mark.parametrize("log_w", [-1e30, -200.0, 200.0, 1e30])
def test_gamma_weight_vanishes_for_extreme_ratios(log_w: float) -> None:
    loss = gamma_weight_surrogate(torch.tensor([[log_w]]), torch.tensor([1.0]), torch.tensor([[-1.0]]), torch.ones(1, 1))
    assert loss.item() == 0.0


def test_gamma_weight_is_a_constant_of_the_gradient() -> None:
    log_ratio = torch.tensor([[0.5]], requires_grad=True)
    loss = gamma_weight_surrogate(log_ratio, torch.tensor([1.0]), log_ratio - 1.0, torch.ones(1, 1))
    loss.sum().backward()
    assert log_ratio.grad is not None
    assert log_ratio.grad.item() == pytest.approx(-math.exp(1.0 + 3 * (1 - math.exp(0.5))))


def test_a_rollout_with_advantage_zero_takes_the_positive_branch_without_effect() -> None:
    weight = gamma_weight_surrogate(torch.zeros(1, 1), torch.zeros(1), -torch.ones(1, 1), torch.ones(1, 1))
    assert weight.item() == 0.0


def test_clip_fraction_counts_only_tokens_that_lose_their_gradient() -> None:
    mask = torch.ones(6)
    fractions = clip_fractions(RATIO, SIGN, mask)
    assert [x.item() for x in fractions] == pytest.approx([1 / 6, 1 / 6, 2 / 6])
    zero = sum(g == 0.0 for g in _gradient(clipped_surrogate, RATIO, SIGN))
    assert fractions.region.item() == pytest.approx(zero / 6)
    assert clip_fractions(RATIO, torch.zeros(6), mask).region.item() == 0.0
    assert [x.item() for x in clip_fractions(RATIO, SIGN, mask, clip_low=0.05, clip_high=0.05)] == pytest.approx([2 / 6] * 2 + [4 / 6])
    assert [x.item() for x in clip_fractions(RATIO, SIGN, mask, clip_low=0.6, clip_high=0.0)] == pytest.approx([0.0, 2 / 6, 2 / 6])


def test_a_ratio_exactly_on_a_bound_keeps_its_gradient_and_is_not_counted() -> None:
    ratio, advantages, bounds = torch.tensor([0.75, 1.5, 4.0]), torch.tensor([-1.0, 1.0, -1.0]), {"clip_low": 0.25, "clip_high": 0.5}
    assert 0.0 not in _gradient(two_sided_clip_surrogate, ratio, advantages, **bounds)
    assert clip_fractions(ratio, advantages, torch.ones(3), max_ratio=4.0, **bounds).region.item() == 0.0


def test_clip_fraction_with_an_upper_bound_counts_the_negative_side_too() -> None:
    ratio, advantages = torch.tensor([5.0, 5.0, 3.0, 5.0]), torch.tensor([-1.0, 1.0, -1.0, 0.0])
    assert clip_fractions(ratio, advantages, torch.ones(4)).high.item() == 0.25
    assert clip_fractions(ratio, advantages, torch.ones(4), max_ratio=4.0).high.item() == 0.5


@PROPERTY
@given(st.integers(0, 10_000))
def test_clip_fraction_equals_the_share_of_zero_gradients(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ratio, advantages = torch.randn(4, 5, generator=generator).exp(), torch.randn(4, generator=generator)
    gradient = torch.tensor(_gradient(two_sided_clip_surrogate, ratio, advantages, clip_low=0.3, clip_high=0.4, max_ratio=1.8))
    region = clip_fractions(ratio, advantages, torch.ones(4, 5), clip_low=0.3, clip_high=0.4, max_ratio=1.8).region
    assert region.item() == pytest.approx((gradient == 0).float().mean().item())


def test_clip_fraction_reads_counted_tokens_and_a_global_denominator() -> None:
    ratio, mask = torch.tensor([[1.5, 1.0, 9.0], [1.5, 9.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    advantages = torch.tensor([1.0, -1.0])
    assert clip_fractions(ratio, advantages, mask).high.item() == pytest.approx(1 / 3)
    assert clip_fractions(ratio, advantages, mask, denominator=12).high.item() == pytest.approx(1 / 12)
    sequence = clip_fractions(torch.tensor([[1.5], [0.5]]), advantages, mask)
    assert [x.item() for x in sequence] == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_a_sequence_ratio_is_never_taken_for_a_token_ratio() -> None:
    with pytest.raises(ValueError, match="unsqueeze"):
        clip_fractions(torch.ones(3), torch.ones(3), torch.ones(3, 3))


@pytest.mark.parametrize("advantages", [torch.tensor([1.0, -2.0]), torch.tensor([[1.0], [-2.0]]), torch.tensor([[1.0] * 2, [-2.0] * 2])])
def test_advantages_per_row_and_per_token_agree(advantages: torch.Tensor) -> None:
    ratio = torch.tensor([[1.0, 1.1], [1.0, 1.1]])
    torch.testing.assert_close(clipped_surrogate(ratio, advantages), torch.tensor([[-1.0, -1.1], [2.0, 2.2]]))


def test_in_a_square_batch_advantages_belong_to_rows() -> None:
    assert clipped_surrogate(torch.ones(3, 3), torch.tensor([1.0, 2.0, 3.0]))[:, 0].tolist() == [-1.0, -2.0, -3.0]


MISFITS = [((2, 3), (3,)), ((2, 3), (1, 3)), ((2, 3), (1, 1)), ((2, 3), (2, 2)), ((3,), (2,)), ((3,), (3, 1)), ((2, 3), ())]


@pytest.mark.parametrize(("ratio", "advantages"), MISFITS)
def test_nothing_else_broadcasts(ratio: tuple[int, ...], advantages: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        clipped_surrogate(torch.ones(ratio), torch.ones(advantages))


def test_a_sequence_ratio_meets_per_token_advantages() -> None:
    loss = clipped_surrogate(torch.tensor([[1.1], [0.9]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    torch.testing.assert_close(loss, torch.tensor([[-1.1, -2.2], [-2.7, -3.6]]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_that_count_raise_even_where_a_clip_would_hide_them(bad: float) -> None:
    one, wrong = torch.ones(1), torch.tensor([bad])
    for function in (
        clipped_surrogate,
        two_sided_clip_surrogate,
        soft_gate_surrogate,
        reinforce_surrogate,
        lambda r, a: cispo_surrogate(r, a, one),
        lambda r, a: clip_fractions(r, a, one),
    ):
        with pytest.raises(NonFiniteError, match="advantages"):
            function(one, wrong)
        with pytest.raises(NonFiniteError, match="ratio"):
            function(wrong, one)
    with pytest.raises(NonFiniteError):
        cispo_surrogate(one, one, wrong)
    for log_ratio, advantages, logprobs in ((wrong, one, one), (one, wrong, one), (one, one, wrong)):
        with pytest.raises(NonFiniteError):
            gamma_weight_surrogate(log_ratio[None], advantages, logprobs[None], one[None])


def test_overflow_raises_instead_of_returning_infinity() -> None:
    big = torch.tensor([1e30])
    for function in (clipped_surrogate, soft_gate_surrogate, reinforce_surrogate):
        with pytest.raises(NonFiniteError, match=function.__name__):
            function(big, torch.tensor([-3e38]))
    with pytest.raises(NonFiniteError, match="cispo_surrogate"):
        cispo_surrogate(torch.ones(1), big, big)
    with pytest.raises(NonFiniteError, match="gamma_weight_surrogate"):
        gamma_weight_surrogate(torch.zeros(1, 1), big, big[None], torch.ones(1, 1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_log_probs_under_the_mask_reach_neither_value_nor_gradient(bad: float) -> None:
    mask = torch.tensor([[1, 0]])
    for function in (
        lambda x: reinforce_surrogate(x, torch.tensor([2.0]), mask),
        lambda x: cispo_surrogate(torch.tensor([[2.0, 1.0]]), torch.tensor([1.0]), x, mask),
        lambda x: gamma_weight_surrogate(torch.tensor([[0.0, bad]]), torch.tensor([2.0]), x, mask),
    ):
        logprobs = torch.tensor([[-1.5, bad]], requires_grad=True)
        loss = function(logprobs)
        torch.testing.assert_close(loss, torch.tensor([[3.0, 0.0]]))
        loss.sum().backward()
        assert logprobs.grad is not None
        assert logprobs.grad.tolist() == [[-2.0, 0.0]]


def test_half_precision_is_computed_in_fp32_and_double_stays_double() -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        r, a = RATIO.to(dtype), SIGN.to(dtype)
        one = torch.ones(6, 1)
        for loss in (
            clipped_surrogate(r, a),
            two_sided_clip_surrogate(r, a),
            reinforce_surrogate(r, a),
            cispo_surrogate(r, a, -r),
            soft_gate_surrogate(r, a),
            gamma_weight_surrogate(r[:, None] - 1, a, -r[:, None], one),
        ):
            assert loss.dtype == expected


def test_gradients() -> None:
    generator = torch.Generator().manual_seed(3)
    ratio = (0.4 * torch.randn(3, 4, dtype=torch.float64, generator=generator)).exp().requires_grad_()
    logprobs = torch.randn(3, 4, dtype=torch.float64, generator=generator).requires_grad_()
    advantages, mask = torch.tensor([1.0, -0.7, 0.3], dtype=torch.float64), torch.rand(3, 4, generator=generator) > 0.3
    for function in (clipped_surrogate, soft_gate_surrogate):
        assert torch.autograd.gradcheck(lambda r, f=function: f(r, advantages), ratio)
    assert torch.autograd.gradcheck(lambda r: two_sided_clip_surrogate(r, advantages, max_ratio=1.3), ratio)
    assert torch.autograd.gradcheck(lambda x: reinforce_surrogate(x, advantages, mask), logprobs)
    assert torch.autograd.gradcheck(lambda x: cispo_surrogate(ratio, advantages, x, mask), logprobs)
    assert torch.autograd.gradcheck(lambda x: gamma_weight_surrogate(ratio.log(), advantages, x, mask), logprobs)
