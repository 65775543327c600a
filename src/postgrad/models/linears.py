"""A model's linear layers, computed in another way for a while, whatever model they are in.

1. `computed_by`     every plain linear layer computes with a given function.
2. `into_gradients`  inside it, their weights' gradients are added to what has accumulated by the products that make them, and those of an
                     embedding row by row: autograd would make a tensor of the whole vocabulary for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

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
    embeddings = [
        module for module in model.modules() if type(module) is nn.Embedding and "forward" not in vars(module) and _adds_rows(module)
    ]
    for module in embeddings:
        vars(module)["forward"] = lambda ids, module=module: _embedded(ids, module)
    try:
        with computed_by(_linear, model, where=has_gradient):
            yield
    finally:
        for module in embeddings:
            del vars(module)["forward"]


def has_gradient(weight: Tensor) -> bool:
    """Whether a share of the gradient can be added to what has accumulated without losing digits."""
    return weight.requires_grad and weight.grad is not None and weight.dtype == weight.grad.dtype == at_least_fp32(weight.dtype)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if torch.is_autocast_enabled(x.device.type) or x.dtype != weight.dtype or not torch.is_grad_enabled():
        return linear(x, weight, bias)
    return _IntoGradient.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


def _adds_rows(module: nn.Embedding) -> bool:
    """On a CPU, where the order of the sums is fixed."""
    plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return plain and module.weight.device.type == "cpu" and has_gradient(module.weight)


def _embedded(ids: Tensor, module: nn.Embedding) -> Tensor:
    if not torch.is_grad_enabled():
        return embedding(ids, module.weight)
    return _RowsIntoGradient.apply(ids, module.weight, module.padding_idx)  # type: ignore[no-any-return, no-untyped-call]


class _RowsIntoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.padding = padding
        return embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ids, weight = ctx.saved_tensors
        rows, flat = grad.flatten(0, -2), ids.flatten()
        if ctx.padding is not None:  # as torch's own: the padding's row has no gradient
            rows = rows * (flat != ctx.padding)[:, None]
        weight.grad.index_add_(0, flat, rows)
        return None, None, None


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
