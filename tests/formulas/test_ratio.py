"""log_ratio, token_ratio, sequence_ratio: masks select before exp, and nothing overflows in silence."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.formulas import MAX_LOG_RATIO, NonFiniteError, log_ratio, sequence_ratio, token_ratio

EXTREME = [math.nan, math.inf, -math.inf, 1e30, -1e30]


def test_hand_numbers() -> None:
    ratio = log_ratio(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.3, -1.5]]))
    torch.testing.assert_close(ratio, torch.tensor([[0.3, -0.5]]))
    torch.testing.assert_close(token_ratio(ratio), torch.tensor([[1.349859, 0.606531]]))
    torch.testing.assert_close(sequence_ratio(ratio, torch.ones(1, 2)), torch.tensor([math.exp(-0.1)]))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6))
def test_sequence_ratio_is_the_geometric_mean_of_the_token_ratios(values: list[float]) -> None:
    x = torch.tensor([values], dtype=torch.float64)
    expected = token_ratio(x).prod() ** (1 / len(values))
    assert sequence_ratio(x, torch.ones_like(x)).item() == pytest.approx(expected.item(), rel=1e-12)


def test_sequence_ratio_reads_counted_tokens_only_and_an_empty_row_has_ratio_one() -> None:
    x = torch.tensor([[0.2, 0.4, 9.0], [7.0, 7.0, 7.0]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    for same in (mask, mask.bool(), 2 * mask):
        torch.testing.assert_close(sequence_ratio(x, same), torch.tensor([math.exp(0.3), 1.0]))


@pytest.mark.parametrize("bad", EXTREME)
def test_what_stands_under_the_mask_reaches_neither_value_nor_gradient(bad: float) -> None:
    current = torch.tensor([[-1.0, bad, bad]], requires_grad=True)
    old = torch.tensor([[-1.3, bad, -1.0]], requires_grad=True)
    mask = torch.tensor([[True, False, False]])
    x = log_ratio(current, old, mask)
    assert x[0, 1:].tolist() == [0.0, 0.0]
    (token_ratio(x).sum() + sequence_ratio(x, mask).sum()).backward()
    for leaf in (current, old):
        assert leaf.grad is not None
        assert leaf.grad[0, 1:].tolist() == [0.0, 0.0]
        assert abs(leaf.grad[0, 0].item()) == pytest.approx(2 * math.exp(0.3), rel=1e-6)
    raw = torch.tensor([[0.3, bad, bad]], requires_grad=True)
    sequence_ratio(raw, mask).sum().backward()
    assert raw.grad is not None
    assert raw.grad[0, 1:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_that_count_raise(bad: float) -> None:
    fine, wrong = torch.zeros(2, 2), torch.tensor([[0.0, bad], [0.0, 0.0]])
    with pytest.raises(NonFiniteError, match=r"log_ratio: 1 of 4 values are not finite"):
        log_ratio(wrong, fine)
    with pytest.raises(NonFiniteError):
        log_ratio(fine, wrong, torch.ones(2, 2))
    with pytest.raises(NonFiniteError):
        token_ratio(wrong)
    with pytest.raises(NonFiniteError):
        sequence_ratio(wrong, torch.ones(2, 2))


def test_overflow_raises_instead_of_returning_infinity() -> None:
    with pytest.raises(NonFiniteError, match="token_ratio"):
        token_ratio(torch.tensor([1e35]))
    with pytest.raises(NonFiniteError, match="sequence_ratio"):
        sequence_ratio(torch.tensor([[1e35]]), torch.ones(1, 1))


@pytest.mark.parametrize("x", [50.0, 100.0, 1e4, 1e20])
def test_an_extreme_ratio_is_finite_and_its_gradient_points_the_right_way(x: float) -> None:
    for function in (token_ratio, lambda v: sequence_ratio(v, torch.ones_like(v))):
        leaf = torch.tensor([[x]], requires_grad=True)
        value = function(leaf)
        value.sum().backward()
        assert math.isfinite(value.item())
        assert value.item() == pytest.approx(math.exp(20) * (1 + x - 20), rel=1e-5)
        assert leaf.grad is not None
        assert leaf.grad.item() == pytest.approx(math.exp(20), rel=1e-5)


def test_an_extreme_negative_log_ratio_has_ratio_zero() -> None:
    assert token_ratio(torch.tensor([-1e30])).item() == 0.0


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.floats(-30, 30), st.floats(0.5, 10))
def test_ratio_is_exact_up_to_the_limit_and_increases_beyond(x: float, limit: float) -> None:
    def at(value: float) -> float:
        return token_ratio(torch.tensor(value, dtype=torch.float64), max_log_ratio=limit).item()

    if x <= limit:
        assert at(x) == pytest.approx(math.exp(x), rel=1e-12)
    assert at(x) <= math.exp(x) * (1 + 1e-12)
    assert at(x + 0.1) > at(x)


def test_default_limit_is_the_documented_one() -> None:
    assert MAX_LOG_RATIO == 20.0
    just_below = torch.tensor(19.9, dtype=torch.float64)
    assert token_ratio(just_below).item() == pytest.approx(math.exp(19.9), rel=1e-12)
    assert sequence_ratio(just_below.reshape(1, 1), torch.ones(1, 1)).item() == pytest.approx(math.exp(19.9), rel=1e-12)
    assert token_ratio(torch.tensor(80.0), max_log_ratio=88.0).item() == pytest.approx(math.exp(80.0), rel=1e-5)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.inf, math.nan])
def test_a_limit_that_limits_nothing_raises(limit: float) -> None:
    with pytest.raises(ValueError, match="max_log_ratio"):
        token_ratio(torch.zeros(1), max_log_ratio=limit)
    with pytest.raises(ValueError, match="max_log_ratio"):
        sequence_ratio(torch.zeros(1, 1), torch.ones(1, 1), max_log_ratio=limit)


def test_shapes_are_never_broadcast() -> None:
    with pytest.raises(ValueError, match="shapes differ: current"):
        log_ratio(torch.zeros(2, 3), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="mask has shape"):
        log_ratio(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3))
    with pytest.raises(ValueError, match="mask has shape"):
        sequence_ratio(torch.zeros(2, 3), torch.ones(2, 1))


def test_half_precision_is_widened_before_the_subtraction() -> None:
    current, old = torch.tensor([-100.0], dtype=torch.bfloat16), torch.tensor([-0.1], dtype=torch.bfloat16)
    x = log_ratio(current, old)
    assert x.dtype == torch.float32
    assert x.item() == current.float().item() - old.float().item()
    assert token_ratio(x.half()).dtype == torch.float32
    assert sequence_ratio(x.half().reshape(1, 1), torch.ones(1, 1)).dtype == torch.float32
    assert log_ratio(current.double(), old.double()).dtype == torch.float64


def test_gradients() -> None:
    current, old = (torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(2))
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])

    def both(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = log_ratio(a, b, mask)
        return token_ratio(x, max_log_ratio=0.5), sequence_ratio(x, mask, max_log_ratio=0.5)

    assert torch.autograd.gradcheck(both, (current, old))
