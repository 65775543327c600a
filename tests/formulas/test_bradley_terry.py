from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.formulas import NonFiniteError, bradley_terry_loss

SCORE = st.floats(-50, 50)


def test_hand_numbers() -> None:
    chosen, rejected = torch.tensor([1.2, 0.3]), torch.tensor([0.5, 0.9])
    expected = [math.log1p(math.exp(-0.7)), math.log1p(math.exp(0.6))]
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected), torch.tensor(expected))
    margin = [math.log1p(math.exp(-0.2)), math.log1p(math.exp(0.6))]
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected, torch.tensor([0.5, 0.0])), torch.tensor(margin))
    centred = [expected[0] + 0.1 * 1.7**2, expected[1] + 0.1 * 1.2**2]
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected, center_coef=0.1), torch.tensor(centred))


def test_equal_scores_give_ln_2() -> None:
    assert bradley_terry_loss(torch.tensor([3.0]), torch.tensor([3.0])).item() == pytest.approx(math.log(2.0))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(SCORE, SCORE, SCORE)
def test_only_the_difference_matters_and_a_larger_one_costs_less(high: float, low: float, shift: float) -> None:
    def loss(a: float, b: float) -> float:
        return bradley_terry_loss(torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64)).item()

    assert loss(high + shift, low + shift) == pytest.approx(loss(high, low), abs=1e-9)
    assert 0 <= loss(high + 1, low) < loss(high, low)


@pytest.mark.parametrize("other", [torch.zeros(2, 1), torch.zeros(1), torch.zeros(3)])
def test_shapes_are_never_broadcast(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="shapes differ"):
        bradley_terry_loss(torch.zeros(2), other)
    with pytest.raises(ValueError, match="margin"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(2), other)


def test_extreme_scores_are_exact_and_non_finite_ones_raise() -> None:
    assert bradley_terry_loss(torch.tensor([-1e30]), torch.tensor([1e30])).item() == pytest.approx(2e30)
    assert bradley_terry_loss(torch.tensor([1e30]), torch.tensor([-1e30])).item() == 0.0
    for bad in (math.nan, math.inf, -math.inf):
        wrong, fine = torch.tensor([bad]), torch.zeros(1)
        for name, arguments in (("chosen", (wrong, fine)), ("rejected", (fine, wrong)), ("margin", (fine, fine, wrong))):
            with pytest.raises(NonFiniteError, match=f"{name}.*: 1 of 1"):
                bradley_terry_loss(*arguments)
    with pytest.raises(NonFiniteError, match="bradley_terry_loss"):
        bradley_terry_loss(torch.tensor([1e30]), torch.tensor([-1e29]), center_coef=0.01)


@pytest.mark.parametrize("coef", [-0.1, math.nan])
def test_a_negative_centering_weight_raises(coef: float) -> None:
    with pytest.raises(ValueError, match="center_coef"):
        bradley_terry_loss(torch.zeros(1), torch.zeros(1), center_coef=coef)


def test_half_precision_is_widened_before_the_subtraction() -> None:
    chosen, rejected, margin = (torch.tensor([x], dtype=torch.bfloat16) for x in (100.0, 0.1, 0.1))
    loss = bradley_terry_loss(chosen, rejected, margin)
    assert loss.dtype == torch.float32
    assert loss.item() == bradley_terry_loss(chosen.float(), rejected.float(), margin.float()).item()


def test_gradients() -> None:
    chosen, rejected, margin = (torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    assert torch.autograd.gradcheck(
        lambda a, b: bradley_terry_loss(a, b, margin, center_coef=0.3), (chosen.requires_grad_(), rejected.requires_grad_())
    )
