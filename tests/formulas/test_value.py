from __future__ import annotations

import math

import pytest
import torch

from postgrad.formulas import NonFiniteError, clipped_value_loss


def test_hand_numbers() -> None:
    values, old, returns = torch.tensor([1.0, 0.1, -1.0, 1.0]), torch.zeros(4), torch.tensor([2.0, 2.0, 2.0, 0.0])
    # moved too far up: max(1, 1.8²); inside: 1.9²; moved the wrong way: max(3², 2.2²); overshot: max(1, 0.2²)
    expected = 0.5 * torch.tensor([1.8**2, 1.9**2, 3.0**2, 1.0])
    torch.testing.assert_close(clipped_value_loss(values, old, returns, clip=0.2), expected)


def test_gradient_is_zero_where_the_value_already_moved_by_the_clip() -> None:
    values = torch.tensor([1.0, 0.1, -1.0, 1.0], requires_grad=True)
    clipped_value_loss(values, torch.zeros(4), torch.tensor([2.0, 2.0, 2.0, 0.0]), clip=0.2).sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([0.0, -1.9, -3.0, 1.0]))


def test_an_infinite_clip_is_the_plain_squared_error_and_a_clip_of_zero_is_allowed() -> None:
    one, zero, two = torch.ones(1), torch.zeros(1), 2 * torch.ones(1)
    assert clipped_value_loss(one, zero, two, clip=math.inf).item() == 0.5
    assert clipped_value_loss(one, zero, two, clip=0.0).item() == 2.0


def test_wrong_arguments_raise() -> None:
    x = torch.zeros(2, 3)
    for clip in (-0.1, math.nan):
        with pytest.raises(ValueError, match="clip"):
            clipped_value_loss(x, x, x, clip=clip)
    for wrong in range(3):
        with pytest.raises(ValueError, match="shapes differ"):
            clipped_value_loss(*(torch.zeros(2, 1) if i == wrong else x for i in range(3)), clip=0.2)
    with pytest.raises(ValueError, match="mask has shape"):
        clipped_value_loss(x, x, x, torch.ones(3), clip=0.2)
    for wrong in range(3):
        with pytest.raises(NonFiniteError):
            clipped_value_loss(*(x + (math.nan if i == wrong else 0.0) for i in range(3)), clip=0.2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_what_stands_under_the_mask_reaches_neither_value_nor_gradient(bad: float) -> None:
    leaves = [torch.tensor([x, bad], requires_grad=True) for x in (1.0, 0.9, 3.0)]
    loss = clipped_value_loss(*leaves, torch.tensor([1, 0]), clip=0.2)
    assert loss.tolist() == [2.0, 0.0]
    loss.sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert leaf.grad[1].item() == 0.0
    assert leaves[0].grad is not None
    assert leaves[0].grad[0].item() == -2.0


def test_half_precision_is_computed_in_fp32() -> None:
    x = torch.tensor([100.0], dtype=torch.bfloat16)
    assert clipped_value_loss(x, x, x * 2, clip=0.2).dtype == torch.float32


def test_gradients() -> None:
    v, old, ret = (torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]])
    assert torch.autograd.gradcheck(lambda a, b, c: clipped_value_loss(a, b, c, mask, clip=0.3), (v, old, ret))
