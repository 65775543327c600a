"""Linear layers that add their weights' gradients to what has accumulated: the same gradients, and no tensor of a weight's size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from postgrad.models.engine import LocalEngine
from postgrad.models.linears import computed_by, into_gradients
from postgrad.protocols import Rows
from postgrad.testing import tiny_model
from postgrad.testing.tiny import ARCHITECTURES
from postgrad.types import TrainRow

ROWS = [TrainRow(tuple(range(3 + n, 15 + n)), (False, False, *[True] * 10)) for n in range(5)]


def loss(logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
    return -(logprobs * rows.mask).sum() / 50, {}


class NewTensors(TorchDispatchMode):
    """Counts those of one shape that no weight and no gradient of the model is."""

    def __init__(self, model: nn.Module, shape: torch.Size) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.shape, self.made = model, shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape == self.shape:
            known = [tensor.data_ptr() for weight in self.model.parameters() for tensor in (weight, weight.grad) if tensor is not None]
            self.made += result.data_ptr() not in known
        return result


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_several_micro_batches_give_the_gradients_of_one(architecture: Any) -> None:
    models = [tiny_model(architecture).requires_grad_() for _ in range(2)]
    for model, budget in zip(models, (4096, 13), strict=True):
        model.get_input_embeddings().weight.requires_grad_(requires_grad=False)  # the first layers' input then needs no gradient
        model.get_output_embeddings().weight.requires_grad_(requires_grad=False)
        LocalEngine(model, tokens_per_micro_batch=budget).forward_backward(ROWS, loss)
    expected, found = ({name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad} for model in models)
    for name, gradient in expected.items():
        assert gradient is not None
        assert gradient.abs().max() > 0
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()), msg=name)


def test_a_biased_layer_gives_torchs_gradients_and_a_frozen_weight_none() -> None:
    layer, x, upstream = (
        nn.Linear(3, 4).double(),
        torch.randn(2, 5, 3, dtype=torch.double, requires_grad=True),
        torch.randn(2, 5, 4).double(),
    )
    expected = torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), upstream)
    layer.weight.grad = torch.ones_like(layer.weight)
    with into_gradients(nn.Sequential(layer)):
        layer(x).backward(upstream)
    found = (x.grad, layer.weight.grad - 1, layer.bias.grad)
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)
    x.grad = None
    layer.weight.requires_grad_(requires_grad=False)
    layer.weight.grad = None
    with into_gradients(nn.Sequential(layer)):
        layer(x).backward(upstream)
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, expected[0])


@pytest.mark.parametrize("padding", [None, 4])
def test_an_embedding_gives_torchs_gradient_without_a_tensor_of_its_size(padding: int | None) -> None:
    module, ids, upstream = nn.Embedding(9, 3, padding_idx=padding), torch.tensor([[4, 2, 4], [8, 2, 0]]), torch.randn(2, 3, 3)
    (expected,) = torch.autograd.grad(module(ids), module.weight, upstream)
    module.weight.grad = torch.ones_like(module.weight)
    with NewTensors(module, module.weight.shape) as new, into_gradients(nn.Sequential(module)):
        module(ids).backward(upstream)
    assert new.made == 0
    torch.testing.assert_close(module.weight.grad - 1, expected)
    assert "forward" not in vars(module)


def test_after_the_first_micro_batch_no_gradient_of_a_layer_is_made() -> None:
    model: Any = tiny_model()
    with NewTensors(model, model.model.layers[0].mlp.gate_proj.weight.shape) as new:
        LocalEngine(model, tokens_per_micro_batch=13).forward_backward(ROWS, loss)
    assert new.made == 4, "the zeros that gate and up of both layers begin with"


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_gradients_that_would_lose_digits_are_made_by_autograd(dtype: torch.dtype | None) -> None:
    """bf16 products are added up in fp32; a bf16 weight's own gradient is rounded once, as ever."""
    layer = nn.Linear(3, 4, bias=False) if dtype else nn.Linear(3, 4, bias=False).bfloat16()
    x, start = torch.randn(2, 3, dtype=layer.weight.dtype), torch.ones_like(layer.weight)
    results = []
    for how in (into_gradients, lambda model: nullcontext()):
        layer.weight.grad = start.clone()
        with how(nn.Sequential(layer)), torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            layer(x).sum().backward()
        results.append(layer.weight.grad)
    assert torch.equal(*results)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_weight_still_sees_its_gradient(register: str) -> None:
    layer, seen = nn.Linear(2, 2, bias=False), []
    layer.weight.grad = torch.zeros(2, 2)
    getattr(layer.weight, register)(lambda tensor: seen.append(tensor.shape))
    with into_gradients(nn.Sequential(layer)):
        layer(torch.ones(1, 2)).sum().backward()
    assert seen == [layer.weight.shape]


def test_layers_that_are_not_plain_are_left_alone() -> None:
    class Other(nn.Linear):
        pass

    model = nn.ModuleList([nn.Linear(2, 2), Other(2, 2), nn.Linear(2, 2)])
    hooked: Callable[[Tensor], Tensor] = lambda x: x  # noqa: E731 - as someone else's library sets it
    vars(model[2])["forward"] = hooked
    with computed_by(lambda x, weight, bias: x * 0, model):
        assert [bool(layer(torch.ones(1, 2)).any()) for layer in model] == [False, True, True]
    assert "forward" not in vars(model[0])
    assert vars(model[2])["forward"] is hooked
