"""token_logprobs and entropy_from_logits: hand numbers, differential against torch, extreme logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.formulas import NonFiniteError, entropy_from_logits, token_logprobs


def test_hand_numbers() -> None:
    logits = torch.tensor([[math.log(1.0), math.log(4.0)], [math.log(1.0), math.log(1.0)]])
    torch.testing.assert_close(token_logprobs(logits, torch.tensor([1, 0])), torch.tensor([math.log(0.8), math.log(0.5)]))
    expected = -(0.2 * math.log(0.2) + 0.8 * math.log(0.8))
    torch.testing.assert_close(entropy_from_logits(logits), torch.tensor([expected, math.log(2.0)]))


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([1.0, 3.0])
    torch.testing.assert_close(token_logprobs(logits, torch.tensor(1), temperature=2.0), torch.tensor(-math.log1p(math.exp(-1.0))))
    torch.testing.assert_close(entropy_from_logits(logits, temperature=2.0), entropy_from_logits(logits / 2))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_is_no_temperature_raises(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(torch.zeros(2), torch.tensor(0), temperature=temperature)
    with pytest.raises(ValueError, match="temperature"):
        entropy_from_logits(torch.zeros(2), temperature=temperature)


@pytest.mark.parametrize(("ids", "first"), [([0, 4], "4"), ([-1, 0], "-1"), ([-100, 0], "-100")])
def test_ids_outside_the_vocabulary_are_named(ids: list[int], first: str) -> None:
    with pytest.raises(ValueError, match=rf"1 token ids lie outside 0\.\.3, the first is {first}$"):
        token_logprobs(torch.zeros(2, 4), torch.tensor(ids))


def test_first_and_last_id_of_the_vocabulary_are_inside_it() -> None:
    torch.testing.assert_close(token_logprobs(torch.zeros(2, 4), torch.tensor([0, 3])), torch.full((2,), -math.log(4.0)))


def test_shapes_that_do_not_fit_raise() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        token_logprobs(torch.zeros(3, 4), torch.zeros(4, dtype=torch.long))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.floats(-30, 30), min_size=2, max_size=6), st.floats(0.1, 5.0))
def test_probabilities_sum_to_one_and_give_the_entropy(logits: list[float], temperature: float) -> None:
    z = torch.tensor(logits, dtype=torch.float64)
    logp = token_logprobs(z.expand(len(logits), -1), torch.arange(len(logits)), temperature=temperature)
    assert logp.exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    entropy = entropy_from_logits(z, temperature=temperature).item()
    assert entropy == pytest.approx(-(logp.exp() * logp).sum().item(), abs=1e-12)
    assert -1e-12 <= entropy <= math.log(len(logits)) + 1e-12


def test_large_logits_keep_their_digits() -> None:
    assert token_logprobs(torch.tensor([1e4, 1e4 - 1]), torch.tensor(0)).item() == pytest.approx(-math.log1p(math.exp(-1.0)), abs=1e-6)


def test_a_ruled_out_token_adds_no_entropy_and_gets_no_gradient() -> None:
    logits = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    entropy = entropy_from_logits(logits)
    entropy.backward()
    assert entropy.item() == pytest.approx(math.log(2.0))
    assert logits.grad is not None
    assert logits.grad.tolist() == [0.0, 0.0, 0.0]
    assert token_logprobs(logits.detach(), torch.tensor(0)).item() == pytest.approx(-math.log(2.0))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_raise(bad: float) -> None:
    with pytest.raises(NonFiniteError, match=r"token_logprobs: 1 of 1 values"):
        token_logprobs(torch.tensor([bad, 0.0]), torch.tensor(1))
    with pytest.raises(NonFiniteError, match="entropy_from_logits"):
        entropy_from_logits(torch.tensor([bad, 0.0]))


def test_a_token_that_is_ruled_out_raises_rather_than_give_minus_infinity() -> None:
    with pytest.raises(NonFiniteError):
        token_logprobs(torch.tensor([0.0, -math.inf]), torch.tensor(1))


def test_gradients() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.tensor([[0, 4, 2], [1, 1, 3]])
    assert torch.autograd.gradcheck(lambda z: token_logprobs(z, ids, temperature=0.7), logits)
    assert torch.autograd.gradcheck(lambda z: entropy_from_logits(z, temperature=0.7), logits)
