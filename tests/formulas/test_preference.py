"""SimPO, CPO, ORPO, KTO and length-desensitised sums: hand numbers, signs of gradients, nothing silent."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from postgrad.formulas import NonFiniteError, cpo_loss, kto_loss, length_desensitized_sum, orpo_loss, simpo_loss


def nls(x: float) -> float:
    return math.log1p(math.exp(-x))


def t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_simpo_by_hand() -> None:
    loss = simpo_loss(t(-2.0, -3.0), t(-6.0, -3.0), t(2, 3), t(3, 3), beta=2.0, gamma=0.5)
    assert loss.tolist() == pytest.approx([nls(2.0 * (-1.0 + 2.0) - 0.5), nls(-0.5)])


def test_simpo_without_margin_on_equal_answers_is_ln_2() -> None:
    assert simpo_loss(t(-2.0), t(-2.0), t(2), t(2), gamma=0.0).item() == pytest.approx(math.log(2))


def test_simpo_has_the_defaults_of_its_paper() -> None:
    assert simpo_loss(t(-2.0), t(-6.0), t(2), t(3)).item() == pytest.approx(nls(2.0 * 1.0 - 1.0))


def test_cpo_by_hand() -> None:
    assert cpo_loss(t(-2.0, -5.0), t(-6.0, -5.0), beta=0.5).tolist() == pytest.approx([nls(2.0), math.log(2)])
    assert cpo_loss(t(-2.0), t(-6.0)).item() == pytest.approx(nls(0.4))


def test_orpo_by_hand() -> None:
    def log_odds(mean: float) -> float:
        p = math.exp(mean)
        return math.log(p / (1 - p))

    loss = orpo_loss(t(-1.0, -6.0), t(-4.0, -3.0), t(2, 4), t(2, 3))
    expected = [nls(log_odds(-0.5) - log_odds(-2.0)), nls(log_odds(-1.5) - log_odds(-1.0))]
    assert loss.tolist() == pytest.approx(expected)


def test_an_answer_that_is_certain_has_infinite_odds_and_raises() -> None:
    with pytest.raises(NonFiniteError):
        orpo_loss(t(0.0), t(-1.0), t(1), t(1))


def test_kto_by_hand() -> None:
    good = torch.tensor([True, False, True])
    loss = kto_loss(
        t(-1.0, -1.0, -4.0), t(-3.0, -3.0, -3.0), good, t(0.5).squeeze(), beta=0.5, desirable_weight=2.0, undesirable_weight=3.0
    )
    sigma = [1 / (1 + math.exp(-0.5 * x)) for x in (1.5, -1.5, -1.5)]
    assert loss.tolist() == pytest.approx([2 * (1 - sigma[0]), 3 * (1 - sigma[1]), 2 * (1 - sigma[2])])


def test_kto_reads_a_negative_kl_as_zero_and_sends_no_gradient_through_it() -> None:
    good, kl = torch.tensor([True]), torch.tensor(-4.0, dtype=torch.float64, requires_grad=True)
    policy = t(-1.0).requires_grad_()
    loss = kto_loss(policy, t(-1.0), good, kl)
    assert loss.item() == pytest.approx(0.5)
    loss.sum().backward()
    assert kl.grad is None
    assert policy.grad is not None


def test_kto_raises_desirable_and_lowers_undesirable_answers() -> None:
    policy = t(-1.0, -1.0).requires_grad_()
    kto_loss(policy, t(-1.0, -1.0), torch.tensor([True, False]), t(0.0).squeeze(), beta=0.1).sum().backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-0.025, 0.025])


@pytest.mark.parametrize("loss", [simpo_loss, orpo_loss])
def test_the_gradient_prefers_the_chosen_answer(loss) -> None:
    chosen, rejected = t(-2.0).requires_grad_(), t(-3.0).requires_grad_()
    loss(chosen, rejected, t(2), t(2)).sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.item() < 0 < rejected.grad.item()


def test_length_desensitised_sum_by_hand() -> None:
    logprobs = t(-1.0, -2.0, -4.0, -8.0, -16.0).reshape(1, 5)
    mask = torch.tensor([[True, False, True, True, True]])
    assert length_desensitized_sum(logprobs, mask, torch.tensor([2]), alpha=0.5).item() == -1 - 4 - 0.5 * (8 + 16)
    assert length_desensitized_sum(logprobs, mask, torch.tensor([2]), alpha=1.0).item() == -29
    assert length_desensitized_sum(logprobs, mask, torch.tensor([2]), alpha=0.0).item() == -5
    assert length_desensitized_sum(logprobs, mask, torch.tensor([4]), alpha=0.0).item() == -29


def test_what_stands_under_the_mask_reaches_no_gradient() -> None:
    logprobs = t(-1.0, math.nan, -2.0).reshape(1, 3).requires_grad_()
    length_desensitized_sum(logprobs, torch.tensor([[True, False, True]]), torch.tensor([1]), alpha=0.5).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[1.0, 0.0, 0.5]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simpo_loss(t(-1.0), t(-1.0), t(0), t(1)), "no tokens"),
        (lambda: simpo_loss(t(-1.0), t(-1.0), t(1), t(-1)), "no tokens"),
        (lambda: simpo_loss(t(-1.0), t(-1.0), t(1, 2), t(1)), "shapes differ"),
        (lambda: simpo_loss(t(-1.0), t(-1.0), t(1), t(1), beta=0.0), "beta"),
        (lambda: simpo_loss(t(-1.0), t(-1.0), t(1), t(1), gamma=math.nan), "gamma"),
        (lambda: cpo_loss(t(-1.0), t(-1.0), beta=math.inf), "beta"),
        (lambda: cpo_loss(t(-1.0), t(-1.0, -2.0)), "shapes differ"),
        (lambda: kto_loss(t(-1.0), t(-1.0), torch.tensor([True]), t(0.0), beta=-1.0), "beta"),
        (lambda: kto_loss(t(-1.0), t(-1.0), torch.tensor([True]), t(0.0), desirable_weight=0.0), "weights"),
        (lambda: kto_loss(t(-1.0), t(-1.0), torch.tensor([True]), t(0.0), undesirable_weight=0.0), "weights"),
        (lambda: kto_loss(t(-1.0), t(-1.0), torch.tensor([True, False]), t(0.0)), "shapes differ"),
        (lambda: length_desensitized_sum(t(-1.0)[None], torch.tensor([[True]]), torch.tensor([1]), alpha=1.1), "alpha"),
        (lambda: length_desensitized_sum(t(-1.0)[None], torch.tensor([[True]]), torch.tensor([1]), alpha=-0.1), "alpha"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("loss", [cpo_loss, lambda a, b: simpo_loss(a, b, t(1), t(1)), lambda a, b: orpo_loss(a, b, t(1), t(1))])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_non_finite_log_probs_raise(loss, bad) -> None:
    for pair in ((t(bad), t(-1.0)), (t(-1.0), t(bad))):
        with pytest.raises(NonFiniteError):
            loss(*pair)


def test_kto_has_the_beta_of_its_paper() -> None:
    loss = kto_loss(t(-1.0), t(-3.0), torch.tensor([True]), t(0.0).squeeze())
    assert loss.item() == pytest.approx(1 - 1 / (1 + math.exp(-0.2)))


@pytest.mark.parametrize("place", [0, 1, 3])
def test_kto_raises_on_non_finite_numbers(place) -> None:
    given = [t(-1.0), t(-1.0), torch.tensor([True]), t(0.0).squeeze()]
    given[place] = given[place] * math.nan
    with pytest.raises(NonFiniteError):
        kto_loss(*given)


def test_kto_reads_labels_of_any_kind_as_true_and_false() -> None:
    labels = kto_loss(t(-1.0, -1.0), t(-3.0, -3.0), torch.tensor([1, 0]), t(0.0).squeeze())
    assert torch.equal(labels, kto_loss(t(-1.0, -1.0), t(-3.0, -3.0), torch.tensor([True, False]), t(0.0).squeeze()))


def test_length_desensitised_sum_reads_any_mask_of_the_right_shape_and_raises_inside_it() -> None:
    logprobs = t(-1.0, -2.0)[None]
    assert length_desensitized_sum(logprobs, torch.tensor([[1.0, 0.0]]), torch.tensor([1]), alpha=0.5).item() == -1
    with pytest.raises(ValueError, match="shape"):
        length_desensitized_sum(logprobs, torch.tensor([True, True]), torch.tensor([1]), alpha=0.5)
    with pytest.raises(NonFiniteError):
        length_desensitized_sum(t(-1.0, math.nan)[None], torch.tensor([[True, True]]), torch.tensor([1]), alpha=0.5)


def test_every_answer_needs_a_token() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        simpo_loss(t(-1.0, -1.0), t(-1.0, -1.0), t(1, 0), t(1, 1))
