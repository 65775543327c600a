"""AdamW by hand numbers: clipping, decay, zero gradients, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from postgrad.errors import CheckpointError, RunError
from postgrad.models.optimizer import Optimizer, OptimizerConfig


def layer() -> nn.Linear:
    """Weight [[1, 2]], bias [3]."""
    linear = nn.Linear(2, 1)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, 2.0]]))
        linear.bias.fill_(3.0)
    return linear


def with_gradient(linear: nn.Linear, weight: list[float], bias: float) -> nn.Linear:
    linear.weight.grad, linear.bias.grad = torch.tensor([weight]), torch.tensor([bias])
    return linear


def test_the_first_step_moves_each_weight_by_the_learning_rate() -> None:
    """m̂ / √v̂ is the gradient's sign after one step; matrices decay by lr · decay · weight first, biases do not."""
    linear = with_gradient(layer(), [0.3, -0.4], 0.0001)
    result = Optimizer(linear, OptimizerConfig(weight_decay=0.1, eps=0.0), max_grad_norm=None).step(0.01)
    assert linear.weight.tolist()[0] == pytest.approx([1 - 0.001 - 0.01, 2 - 0.002 + 0.01])
    assert linear.bias.item() == pytest.approx(3 - 0.01)
    assert result.learning_rate == 0.01
    assert result.grad_norm == pytest.approx(math.sqrt(0.3**2 + 0.4**2 + 0.0001**2))
    assert linear.weight.grad is None


@pytest.mark.parametrize(("limit", "factor"), [(1.0, 0.1), (10.0, 1.0), (20.0, 1.0)])
def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_reported(limit: float, factor: float) -> None:
    """Gradient (6, 8): norm 10. The first moment is 0.1 · what was left of it."""
    linear = with_gradient(layer(), [6.0, 8.0], 0.0)
    optimizer = Optimizer(linear, OptimizerConfig(), max_grad_norm=limit)
    assert optimizer.step(0.1).grad_norm == pytest.approx(10.0)
    moments, steps = optimizer.state()
    assert moments["weight.exp_avg"].tolist()[0] == pytest.approx([0.6 * factor, 0.8 * factor])
    assert steps == {"weight": 1, "bias": 1}


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    linear = with_gradient(layer(), [1.0, 1.0], 1.0)
    optimizer = Optimizer(linear, OptimizerConfig(), max_grad_norm=1.0)
    optimizer.step(0.1)
    before = [linear.weight.clone(), linear.bias.clone()], optimizer.state()[0]["weight.exp_avg"].clone()
    with_gradient(linear, [bad, 3e38], 0.0)
    with pytest.raises(RunError, match="not finite"):
        optimizer.step(0.1)
    assert torch.equal(linear.weight, before[0][0])
    assert torch.equal(linear.bias, before[0][1])
    assert torch.equal(optimizer.state()[0]["weight.exp_avg"], before[1])
    assert linear.weight.grad is None


def test_a_missing_gradient_is_a_gradient_of_zero() -> None:
    """A weight without a gradient still decays and moves on its moments, as with an explicit zero."""
    explicit, missing = (with_gradient(layer(), [1.0, 1.0], 1.0) for _ in range(2))
    for linear, weight in ((explicit, torch.zeros(1, 2)), (missing, None)):
        optimizer = Optimizer(linear, OptimizerConfig(weight_decay=0.1), max_grad_norm=1.0)
        optimizer.step(0.1)
        linear.weight.grad, linear.bias.grad = weight, torch.zeros(1)
        optimizer.step(0.1)
    assert torch.equal(explicit.weight, missing.weight)


def test_frozen_weights_are_left_alone() -> None:
    linear = layer()
    linear.weight.requires_grad_(False)
    optimizer = Optimizer(linear, OptimizerConfig(), max_grad_norm=1.0)
    linear.bias.grad = torch.ones(1)
    optimizer.step(0.5)
    assert linear.weight.tolist() == [[1.0, 2.0]]
    assert linear.bias.item() == pytest.approx(2.5)
    linear.bias.requires_grad_(False)
    assert Optimizer(linear, OptimizerConfig(), max_grad_norm=1.0).step(0.5).grad_norm == 0.0


def test_state_of_other_weights_is_refused() -> None:
    optimizer = Optimizer(with_gradient(layer(), [1.0, 1.0], 1.0), OptimizerConfig(), max_grad_norm=1.0)
    optimizer.step(0.1)
    moments, steps = optimizer.state()
    with pytest.raises(CheckpointError, match="shape"):
        Optimizer(nn.Linear(3, 1), OptimizerConfig(), max_grad_norm=1.0).load(moments, steps)
    with pytest.raises(CheckpointError, match="other weights"):
        Optimizer(nn.Linear(2, 1, bias=False), OptimizerConfig(), max_grad_norm=1.0).load(moments, steps)
    with pytest.raises(CheckpointError, match="other weights"):
        optimizer.load({}, steps)
