"""The aggregations: what divides, and that micro-batches add up to the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.formulas import NonFiniteError, constant_length_mean, sequence_mean, token_mean

X = torch.tensor([[1.0, 2.0, 3.0], [6.0, 9.0, 9.0], [4.0, 4.0, 4.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
AGGREGATIONS = (token_mean, sequence_mean, partial(constant_length_mean, length=7))
Aggregation = Callable[..., torch.Tensor]


def test_hand_numbers_with_an_empty_row_in_neither_numerator_nor_denominator() -> None:
    assert token_mean(X, MASK).item() == 3.0
    assert sequence_mean(X, MASK).item() == 3.75
    assert constant_length_mean(X, MASK, 10).item() == pytest.approx(9 / 20)


def test_denominator_replaces_the_count_of_tokens_or_sequences() -> None:
    assert token_mean(X, MASK, denominator=18).item() == 0.5
    assert sequence_mean(X, MASK, denominator=torch.tensor(3)).item() == 2.5
    assert constant_length_mean(X, MASK, 10, denominator=3).item() == pytest.approx(0.3)


def test_a_bool_and_an_integer_mask_mean_the_same() -> None:
    for function in AGGREGATIONS:
        for same in (MASK.bool(), MASK.double(), 2 * MASK):
            assert function(X, same).item() == function(X, MASK).item()


def _denominator(function: Aggregation, mask: torch.Tensor) -> int:
    return int(mask.sum()) if function is token_mean else int(mask.any(-1).sum())


@pytest.mark.parametrize("function", AGGREGATIONS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_eight_micro_batches_of_one_are_one_of_eight(function: Aggregation, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(8, 5, generator=generator) > 0.6
    mask[0] = True
    mask[1] = False
    whole = torch.randn(8, 5, dtype=torch.float64, generator=generator).requires_grad_()
    parts = whole.detach().clone().requires_grad_()
    (loss := function(whole**2, mask)).backward()
    total = 0.0
    for row in range(8):
        part = function(parts[row : row + 1] ** 2, mask[row : row + 1], denominator=_denominator(function, mask))
        part.backward()
        total += part.item()
    assert total == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.integers(0, 4))
def test_padding_changes_nothing(seed: int, padding: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, mask = torch.randn(3, 4, generator=generator), torch.rand(3, 4, generator=generator) > 0.4
    mask[0, 0] = True
    wide = torch.cat([x, torch.full((3, padding), math.nan)], 1)
    wide_mask = torch.cat([mask, torch.zeros(3, padding, dtype=torch.bool)], 1)
    for function in AGGREGATIONS:
        torch.testing.assert_close(function(wide, wide_mask), function(x, mask))


@pytest.mark.parametrize("function", AGGREGATIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_what_stands_under_the_mask_reaches_neither_value_nor_gradient(function: Aggregation, bad: float) -> None:
    x = torch.where(MASK.bool(), X, bad).requires_grad_()
    value = function(x, MASK)
    value.backward()
    assert value.item() == function(X, MASK).item()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, MASK.bool())


@pytest.mark.parametrize("function", AGGREGATIONS)
def test_nothing_counted_is_an_error_unless_the_denominator_is_given(function: Aggregation) -> None:
    empty = torch.zeros(2, 3)
    x = torch.full((2, 3), math.nan, requires_grad=True)
    with pytest.raises(ValueError, match="no counted"):
        function(x, empty)
    value = function(x, empty, denominator=4)
    value.backward()
    assert value.item() == 0.0
    assert x.grad is not None
    assert not x.grad.any()


@pytest.mark.parametrize("function", AGGREGATIONS)
def test_wrong_arguments_raise(function: Aggregation) -> None:
    for wrong in (0, -1.0, math.nan, torch.tensor(0)):
        with pytest.raises(ValueError, match="denominator must be positive"):
            function(X, MASK, denominator=wrong)
    with pytest.raises(ValueError, match="mask has shape"):
        function(X, MASK[:, :1])
    with pytest.raises(ValueError, match="mask has shape"):
        function(X, torch.ones(3))
    with pytest.raises(NonFiniteError):
        function(torch.full_like(X, math.nan), MASK)


@pytest.mark.parametrize("length", [0, -1, math.nan])
def test_a_length_that_is_no_length_raises(length: float) -> None:
    with pytest.raises(ValueError, match="length must be positive"):
        constant_length_mean(X, MASK, length)


def test_half_precision_is_summed_in_fp32() -> None:
    x = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)  # a bf16 sum of ones stops at 256
    for function in AGGREGATIONS:
        assert function(x, torch.ones(1, 4096)).dtype == torch.float32
    assert token_mean(x, torch.ones(1, 4096), denominator=1).item() == 4096.0
    assert token_mean(x.double(), torch.ones(1, 4096)).dtype == torch.float64


@pytest.mark.parametrize("function", AGGREGATIONS)
def test_gradients(function: Aggregation) -> None:
    x = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: function(v, MASK), x)
    assert torch.autograd.gradcheck(lambda v: function(v, MASK, denominator=11.0), x)
