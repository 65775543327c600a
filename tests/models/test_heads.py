"""Log-probs, entropy and gradients without a [tokens × vocabulary] tensor, equal to log_softmax over all logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from postgrad.models.heads import selected_logprobs


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def problem(
    tokens: int, vocabulary: int, *, width: int = 16, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (
        torch.randn(n, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for n in (tokens, vocabulary)
    )
    return hidden, weight, torch.randint(0, vocabulary, (tokens,), generator=generator)


def by_definition(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, bias: Tensor | None = None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    raw = torch.nn.functional.linear(hidden, weight, bias)
    everything = ((raw if softcap is None else softcap * torch.tanh(raw / softcap)) / temperature).log_softmax(-1)
    return everything.gather(1, targets[:, None]).squeeze(1), -(everything.exp() * everything).sum(-1)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 20),
    vocabulary=st.integers(2, 60),
    tile=st.integers(1, 64),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    biased=st.booleans(),
    softcap=st.sampled_from([None, 3.0]),
)
def test_values_and_gradients_are_those_of_log_softmax(
    tokens: int, vocabulary: int, tile: int, temperature: float, biased: bool, softcap: float | None
) -> None:
    hidden, weight, targets = problem(tokens, vocabulary, dtype=torch.float64)
    bias = torch.linspace(-2, 2, vocabulary, dtype=torch.float64, requires_grad=True) if biased else None
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    how: dict[str, Any] = {"temperature": temperature, "bias": bias, "softcap": softcap, "tile": tile}
    logprobs, entropy = selected_logprobs(hidden, weight, targets, **how)
    wanted, wanted_entropy = by_definition(hidden, weight, targets, temperature, bias, softcap)
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=0, atol=1e-10)
    upstream, other = torch.linspace(-1, 1, tokens, dtype=torch.float64), torch.linspace(2, -1, tokens, dtype=torch.float64)
    for ours, theirs in (
        ((logprobs * upstream).sum(), (wanted * upstream).sum()),
        ((entropy * other).sum(), (wanted_entropy * other).sum()),
        ((logprobs * upstream + entropy * other).sum(), (wanted * upstream + wanted_entropy * other).sum()),
    ):
        pairs = zip(*(torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (ours, theirs)), strict=True)
        for actual, expected in pairs:
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    once, once_entropy = selected_logprobs(hidden, weight, targets, **how, gradient=upstream)
    torch.testing.assert_close(once, wanted, rtol=0, atol=1e-10)
    torch.testing.assert_close(once_entropy, wanted_entropy, rtol=0, atol=1e-10)
    for actual, expected in zip(*(torch.autograd.grad(found, leaves, upstream) for found in (once, wanted)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_one_pass_refuses_a_loss_that_differs_from_its_announcement() -> None:
    hidden, weight, targets = problem(4, 30)
    logprobs, entropy = selected_logprobs(hidden, weight, targets, temperature=1.0, gradient=torch.full((4,), -0.25))
    assert not entropy.requires_grad
    with pytest.raises(RuntimeError, match="another derivative"):
        (-logprobs.mean() * 1.01).backward()
    assert hidden.grad is None
    assert weight.grad is None


@pytest.mark.parametrize("one_pass", [True, False])
def test_the_weights_gradient_can_be_added_where_one_has_accumulated(one_pass: bool) -> None:
    hidden, weight, targets = problem(9, 40, dtype=torch.float64)
    upstream = torch.linspace(-1, 2, 9, dtype=torch.float64)
    selected_logprobs(hidden, weight, targets, temperature=1.3, tile=7)[0].backward(upstream)
    assert hidden.grad is not None
    assert weight.grad is not None
    alone, accumulated = hidden.grad.clone(), weight.grad
    expected = 2 * accumulated
    hidden.grad = None
    announced = upstream if one_pass else None
    selected_logprobs(hidden, weight, targets, temperature=1.3, tile=7, gradient=announced, into=accumulated)[0].backward(upstream)
    torch.testing.assert_close(hidden.grad, alone)
    assert weight.grad is accumulated
    torch.testing.assert_close(accumulated, expected)


def test_a_gradient_is_not_added_up_in_bf16() -> None:
    hidden, weight, targets = problem(3, 8)
    with pytest.raises(ValueError, match="give `into` in fp32"):
        selected_logprobs(hidden, weight, targets, temperature=1.0, into=torch.zeros(8, 16, dtype=torch.bfloat16))


def test_one_pass_makes_each_logit_once() -> None:
    class Products(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            self.made += func is torch.ops.aten.mm.default and result.shape[-1] == 5_000
            return result

    hidden, weight, targets = problem(6, 5_000)
    with Products() as products:
        logprobs, _ = selected_logprobs(hidden, weight, targets, temperature=1.0, gradient=torch.ones(6), tile=2)
        logprobs.sum().backward()
    assert products.made == 3


def test_gradients_pass_gradcheck() -> None:
    hidden, weight, targets = problem(5, 11, width=4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: selected_logprobs(h, w, targets, temperature=0.7, tile=3), (hidden, weight))


def test_hand_numbers() -> None:
    """Logits (0, ln 3): probabilities 1/4 and 3/4; at temperature 1/2 logits (0, 2 ln 3): 1/10 and 9/10."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    logprobs, entropy = selected_logprobs(hidden, weight, torch.tensor([1]), temperature=1.0)
    assert logprobs.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)))
    assert selected_logprobs(hidden, weight, torch.tensor([0]), temperature=0.5)[0].item() == pytest.approx(math.log(0.1))
    scaled, _ = selected_logprobs(hidden, weight, torch.tensor([0]), temperature=1.0, scale=2.0)
    assert scaled.item() == pytest.approx(math.log(0.1))


def test_no_tensor_of_tokens_times_vocabulary_is_made() -> None:
    hidden, weight, targets = problem(600, 20_000, width=4)
    with LargestTensor() as largest:
        logprobs, _ = selected_logprobs(hidden, weight, targets, temperature=1.0, tile=1024)
        logprobs.sum().backward()
    assert largest.elements == 600 * 1024
    with LargestTensor() as largest:
        selected_logprobs(hidden, weight, targets, temperature=1.0, tile=32, gradient=torch.ones(600))[0].sum().backward()
    assert largest.elements == 32 * 20_000


def test_tiles_shrink_as_tokens_grow() -> None:
    hidden, weight, targets = problem(40_000, 2_000, width=1)
    with LargestTensor() as largest, torch.no_grad():
        selected_logprobs(hidden, weight, targets, temperature=1.0)
    assert largest.elements <= 40_000 * 256


def test_a_frozen_head_costs_no_weight_gradient() -> None:
    hidden, weight, targets = problem(6, 500)
    weight.requires_grad_(False)
    logprobs, _ = selected_logprobs(hidden, weight, targets, temperature=1.0, tile=100)
    with LargestTensor() as largest:
        logprobs.sum().backward()
    assert weight.grad is None
    assert largest.elements < weight.numel()


def test_bf16_autocast_keeps_the_gradient_to_its_own_precision() -> None:
    """Against exact arithmetic on the same bf16 logits: what is left is one rounding (2⁻⁹). exp(logits − logZ) in bf16 loses 2 to 4 %."""
    hidden, weight, targets = problem(64, 3_000, width=32)
    upstream = torch.linspace(-1, 1, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, entropy = selected_logprobs(hidden, weight, targets, temperature=1.0, tile=700)
    narrow_hidden, narrow_weight = hidden.detach().bfloat16(), weight.detach().bfloat16()
    exact = torch.cat([narrow_hidden @ part.T for part in narrow_weight.split(700)], 1).double().log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), exact.gather(1, targets[:, None]).squeeze(1), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), rtol=0, atol=5e-5)
    by_logits = (torch.nn.functional.one_hot(targets, 3_000) - exact.exp()) * upstream.double()[:, None]
    expected = by_logits @ narrow_weight.double(), by_logits.T @ narrow_hidden.double()
    for actual, wanted in zip(torch.autograd.grad(logprobs, (hidden, weight), upstream), expected, strict=True):
        assert actual.dtype == torch.float32
        assert ((actual - wanted).norm() / wanted.norm()).item() < 0.004
    with torch.autocast("cpu", dtype=torch.bfloat16):
        once, _ = selected_logprobs(hidden, weight, targets, temperature=1.0, tile=16, gradient=upstream)
    for actual, wanted in zip(torch.autograd.grad(once, (hidden, weight), upstream), expected, strict=True):
        assert actual.dtype == torch.float32
        assert ((actual - wanted).norm() / wanted.norm()).item() < 0.004


def test_a_confident_token_keeps_its_small_gradient_in_bf16() -> None:
    """g · (1 − p) with p = 0.99966 is 0.00034 · g; taken in bf16, 1 − p would be 0 or 0.004."""
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[8.0], [0.0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = selected_logprobs(hidden, weight, torch.tensor([0]), temperature=1.0)
    (gradient,) = torch.autograd.grad(logprobs.sum(), hidden)
    assert gradient.item() == pytest.approx(8 * (1 - 1 / (1 + math.exp(-8))), rel=0.01)


def test_extreme_logits_stay_finite() -> None:
    hidden, weight = torch.tensor([[1e4]], requires_grad=True), torch.tensor([[1.0], [-1.0], [0.5]])
    logprobs, entropy = selected_logprobs(hidden, weight, torch.tensor([0]), temperature=1.0, tile=2)
    logprobs.sum().backward()
    assert (logprobs.item(), entropy.item(), hidden.grad.item()) == (0.0, 0.0, 0.0)


def test_no_temperature_is_refused() -> None:
    hidden, weight, targets = problem(2, 5)
    with pytest.raises(ValueError, match="temperature above 0"):
        selected_logprobs(hidden, weight, targets, temperature=0.0)
