"""A model's linear layers, computed in another way for a while, whatever model they are in.

1. `computed_by`     every plain linear layer computes with a given function.
2. `into_gradients`  inside it, their weights' gradients are added to what has accumulated by the products that make them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from postgrad.models.dtype import at_least_fp32

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [..., in], weight [out, in], bias [out] or None) -> [..., out], as `torch.nn.functional.linear`."""


@contextmanager
def computed_by(function: Linear, model: nn.Module, *, where: Callable[[Tensor], bool] = lambda weight: True) -> Iterator[None]:
    """Every plain linear layer whose weight is one of `where`. Exact type: a subclass may compute something else; and not one that
    someone else's hook wraps."""
    plain = [module for module in model.modules() if type(module) is nn.Linear and "forward" not in vars(module)]
    layers = [layer for layer in plain if where(layer.weight)]
    for layer in layers:
        vars(layer)["forward"] = lambda x, layer=layer: function(x, layer.weight, layer.bias)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


@contextmanager
def into_gradients(model: nn.Module) -> Iterator[None]:
    """For weights that have a gradient already: with many small micro-batches, writing each one's share of the gradient and reading it
    again to add it costs as much time as a tenth of the products."""
    with computed_by(_linear, model, where=has_gradient):
        yield


def has_gradient(weight: Tensor) -> bool:
    """Whether a share of the gradient can be added to what has accumulated without losing digits."""
    return weight.requires_grad and weight.grad is not None and weight.dtype == weight.grad.dtype == at_least_fp32(weight.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.is_autocast_enabled(x.device.type) or x.dtype != weight.dtype or not torch.is_grad_enabled():
        return linear(x, weight, bias)
    return _IntoGradient.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


class _IntoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_x, _, by_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        weight.grad.addmm_(rows.t(), x.flatten(0, -2))
        return grad @ weight if by_x else None, None, rows.sum(0) if by_bias else None
