"""The KL estimators: the articles' numbers, unbiasedness by enumeration, and the two ends of the exponential."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.formulas import NonFiniteError, kl_k1, kl_k2, kl_k3, kl_k3_importance_weighted

CURRENT, REFERENCE = torch.tensor([-1.0, -0.5, -1.5]), torch.tensor([-1.2, -2.0, -1.0])
PROPERTY = settings(max_examples=30, deadline=None, derandomize=True)
LOGITS = st.lists(st.floats(-6, 6), min_size=2, max_size=6)


def test_the_articles_numbers() -> None:
    k3 = kl_k3(CURRENT, REFERENCE)
    torch.testing.assert_close(k3, torch.tensor([0.018731, 0.723130, 0.148721]), rtol=0, atol=1e-6)
    assert k3.mean().item() == pytest.approx(0.296861, abs=1e-6)
    torch.testing.assert_close(kl_k1(CURRENT, REFERENCE), torch.tensor([0.2, 1.5, -0.5]))
    torch.testing.assert_close(kl_k2(CURRENT, REFERENCE), torch.tensor([0.02, 1.125, 0.125]))
    ratio = torch.tensor([1.0, 2.0, 0.5])
    torch.testing.assert_close(kl_k3_importance_weighted(CURRENT, REFERENCE, ratio), k3 * ratio)


@PROPERTY
@given(st.integers(0, 10_000), st.integers(2, 8))
def test_k1_and_k3_have_the_kl_as_their_expectation(seed: int, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.log_softmax(3 * torch.randn(vocabulary, dtype=torch.float64, generator=generator), 0) for _ in range(2))
    kl = (p.exp() * (p - q)).sum().item()
    assert (p.exp() * kl_k3(p, q)).sum().item() == pytest.approx(kl, abs=1e-12)
    assert (p.exp() * kl_k1(p, q)).sum().item() == pytest.approx(kl, abs=1e-12)


@PROPERTY
@given(st.integers(0, 10_000), st.integers(2, 8))
def test_the_weighted_k3_is_unbiased_for_tokens_of_an_older_policy_in_value_and_gradient(seed: int, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, ref, old = (torch.randn(vocabulary, dtype=torch.float64, generator=generator) for _ in range(3))
    logits.requires_grad_()
    p, q, o = (torch.log_softmax(z, 0) for z in (logits, ref, old))
    kl = (p.exp() * (p - q)).sum()
    estimate = (o.exp() * kl_k3_importance_weighted(p, q, (p - o).exp())).sum()
    torch.testing.assert_close(estimate, kl)
    torch.testing.assert_close(torch.autograd.grad(estimate, logits, retain_graph=True), torch.autograd.grad(kl, logits))


@PROPERTY
@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k2_and_k3_are_never_negative_and_zero_only_at_equality(current: float, reference: float) -> None:
    a, b = torch.tensor(current), torch.tensor(reference)
    for estimator in (kl_k2, kl_k3):
        assert estimator(a, b).item() >= 0
        assert estimator(a, a).item() == 0.0
        if abs(current - reference) > 1e-3:
            assert estimator(a, b).item() > 0


def test_k3_keeps_its_digits_near_zero_where_the_literal_form_turns_negative() -> None:
    current, reference = torch.tensor(0.0, dtype=torch.bfloat16), torch.tensor(0.01, dtype=torch.bfloat16)
    literal = torch.exp(reference - current) - (reference - current) - 1
    assert literal.item() < -0.003
    x = reference.float().item()
    assert kl_k3(current, reference).item() == pytest.approx(math.expm1(x) - x, rel=1e-3)
    assert kl_k3(torch.tensor(0.0), torch.tensor(1e-3)).item() == pytest.approx(5.0e-7, rel=1e-3)
    assert kl_k3(current, reference).dtype == torch.float32


@pytest.mark.parametrize("x", [50.0, 100.0, 1e4, 1e20])
def test_k3_does_not_overflow_and_still_pulls_towards_the_reference(x: float) -> None:
    current = torch.tensor([-x], requires_grad=True)
    k3 = kl_k3(current, torch.tensor([0.0]))
    k3.sum().backward()
    assert k3.item() == pytest.approx(math.exp(20) * (x - 19) - x - 1, rel=1e-5)
    assert current.grad is not None
    assert current.grad.item() == pytest.approx(1 - math.exp(20), rel=1e-5)


def test_k3_is_exact_up_to_the_limit_and_continuous_there() -> None:
    def at(x: float, limit: float) -> float:
        return kl_k3(torch.tensor(0.0, dtype=torch.float64), torch.tensor(x, dtype=torch.float64), max_log_ratio=limit).item()

    assert at(19.9, 20.0) == pytest.approx(math.exp(19.9) - 20.9, rel=1e-12)
    assert at(2.5, 2.0) == pytest.approx(math.exp(2.0) * 1.5 - 3.5, rel=1e-12)
    assert at(2.0 + 1e-9, 2.0) == pytest.approx(at(2.0 - 1e-9, 2.0), rel=1e-7)
    assert kl_k3(torch.tensor(-80.0), torch.tensor(0.0), max_log_ratio=88.0).item() == pytest.approx(math.exp(80.0), rel=1e-5)
    for limit in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="max_log_ratio"):
            at(1.0, limit)


def test_k3_is_linear_where_the_policy_is_far_above_the_reference() -> None:
    current = torch.tensor([0.0], requires_grad=True)
    k3 = kl_k3(current, torch.tensor([-1e30]))
    k3.sum().backward()
    assert k3.item() == pytest.approx(1e30)
    assert current.grad is not None
    assert current.grad.item() == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, -1e30])
def test_what_stands_under_the_mask_reaches_neither_value_nor_gradient(bad: float) -> None:
    mask = torch.tensor([True, False, False])
    for estimator in (
        kl_k1,
        kl_k2,
        kl_k3,
        lambda c, r, m: kl_k3_importance_weighted(c, r, torch.where(m, 2.0, bad), m),
        lambda c, r, m: kl_k3_importance_weighted(c, r, torch.tensor([2.0]), m),
    ):
        current = torch.tensor([-1.0, bad, -1.0], requires_grad=True)
        reference = torch.tensor([-1.3, bad, bad], requires_grad=True)
        value = estimator(current, reference, mask)
        assert value[1:].tolist() == [0.0, 0.0]
        value.sum().backward()
        for leaf in (current, reference):
            assert leaf.grad is not None
            assert leaf.grad[1:].tolist() == [0.0, 0.0]
            assert 0 < abs(leaf.grad[0].item()) < 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_that_count_raise(bad: float) -> None:
    for estimator in (kl_k1, kl_k2, kl_k3):
        with pytest.raises(NonFiniteError):
            estimator(torch.tensor([bad]), torch.tensor([-1.0]))
    with pytest.raises(NonFiniteError, match="kl_k3_importance_weighted"):
        kl_k3_importance_weighted(torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([bad]))


def test_overflow_raises_instead_of_returning_infinity() -> None:
    with pytest.raises(NonFiniteError, match="kl_k2"):
        kl_k2(torch.tensor([-1e30]), torch.tensor([0.0]))
    with pytest.raises(NonFiniteError, match="kl_k3"):
        kl_k3(torch.tensor([-1e35]), torch.tensor([0.0]))


@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 2)])
def test_a_ratio_that_does_not_fit_raises(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        kl_k3_importance_weighted(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(shape))


def test_a_sequence_ratio_weighs_all_tokens_of_its_row() -> None:
    weighted = kl_k3_importance_weighted(CURRENT.expand(2, -1), REFERENCE.expand(2, -1), torch.tensor([[1.0], [3.0]]))
    torch.testing.assert_close(weighted, kl_k3(CURRENT, REFERENCE) * torch.tensor([[1.0], [3.0]]))


def test_the_weighted_k3_takes_the_same_limit() -> None:
    current, reference, two = torch.tensor(-3.0), torch.tensor(0.0), torch.tensor(2.0)
    limited = kl_k3_importance_weighted(current, reference, two, max_log_ratio=1.0)
    assert limited.item() == pytest.approx(2 * kl_k3(current, reference, max_log_ratio=1.0).item())
    assert limited.item() < kl_k3_importance_weighted(current, reference, two).item()


def test_gradients() -> None:
    current, reference, ratio = (
        torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3)
    )
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    for estimator in (kl_k1, kl_k2, kl_k3):
        assert torch.autograd.gradcheck(lambda a, b, e=estimator: e(a, b, mask), (current, reference))
    assert torch.autograd.gradcheck(lambda a, b: kl_k3(a, b, max_log_ratio=0.3), (current, reference))
    assert torch.autograd.gradcheck(
        lambda a, b, r: kl_k3_importance_weighted(a, b, r, mask, max_log_ratio=0.3), (current, reference, ratio)
    )
