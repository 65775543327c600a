"""The preference losses: hand numbers, the sign of each gradient, no overflow, no option that is silently ignored."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.formulas import DPO_LOSSES, WHOLE_BATCH_DPO_LOSSES, NonFiniteError, dpo_loss, implicit_reward

LN2 = math.log(2.0)
ZERO = torch.zeros(1, dtype=torch.float64)
OPTIONS: dict[str, dict[str, Any]] = {
    "exo_pair": {"label_smoothing": 0.1},
    "sigmoid_norm": {"chosen_tokens": torch.tensor([2]), "rejected_tokens": torch.tensor([4])},
}


def _sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _nls(x: float) -> float:
    """−log σ(x)"""
    return math.log1p(math.exp(-x))


def _loss(a: float, b: float, *, beta: float = 0.5, loss: str = "sigmoid", **options: Any) -> float:
    """Loss of one pair whose chosen and rejected log-ratios are a and b."""
    at = [torch.tensor([x], dtype=torch.float64) for x in (a - 3.0, b - 4.0, -3.0, -4.0)]
    return dpo_loss(*at, beta=beta, loss=loss, **{**OPTIONS.get(loss, {}), **options}).item()


@pytest.mark.parametrize("beta", [0.01, 0.1, 5.0])
def test_policy_equal_to_reference_gives_ln_2_and_not_zero(beta: float) -> None:
    loss = dpo_loss(torch.tensor([-3.0]), torch.tensor([-9.0]), torch.tensor([-3.0]), torch.tensor([-9.0]), beta=beta)
    assert loss.item() == pytest.approx(0.693147, abs=1e-6)


A, B = 1.0, -0.6  # with β = 0.5: βa = 0.5, βb = −0.3, z = 0.8
HAND = {
    "sigmoid": _nls(0.8),
    "sigmoid_norm": _nls(0.5 * (1.0 / 2 + 0.6 / 4)),
    "hinge": 0.2,
    "ipo": 0.6**2,
    "exo_pair": _sigma(0.8) * (-_nls(0.8) - math.log(0.9)) + _sigma(-0.8) * (-_nls(-0.8) - math.log(0.1)),
    "robust": _nls(0.8),
    "nca_pair": _nls(0.5) + 0.5 * _nls(-0.5) + 0.5 * _nls(0.3),
    "bco_pair": _nls(0.5) + _nls(0.3),
    "sppo_hard": 0.0**2 + 0.4**2,
    "apo_zero": 1 - _sigma(0.5) + _sigma(-0.3),
    "apo_down": _sigma(0.5) + 1 - _sigma(0.8),
    "aot": _nls(0.8),
    "aot_unpaired": _nls(0.8),
    "discopop": _nls(0.8) * _sigma(-16.0) + math.exp(-0.8) * _sigma(16.0),
}


def test_every_loss_has_a_hand_number() -> None:
    assert set(HAND) == set(DPO_LOSSES)


@pytest.mark.parametrize("loss", DPO_LOSSES)
def test_hand_numbers(loss: str) -> None:
    assert _loss(A, B, loss=loss) == pytest.approx(HAND[loss], abs=1e-12)


def test_label_smoothing_mixes_in_the_flipped_label() -> None:
    mixed = 0.9 * _nls(0.8) + 0.1 * _nls(-0.8)
    for loss in ("sigmoid", "aot", "aot_unpaired"):
        assert _loss(A, B, loss=loss, label_smoothing=0.1) == pytest.approx(mixed)
    assert _loss(A, B, loss="robust", label_smoothing=0.1) == pytest.approx((0.9 * _nls(0.8) - 0.1 * _nls(-0.8)) / 0.8)
    assert _loss(A, B, label_smoothing=0.5) == pytest.approx(0.5 * (_nls(0.8) + _nls(-0.8)))


def test_hinge_is_zero_once_the_margin_is_reached() -> None:
    assert _loss(3.0, 0.0, loss="hinge") == 0.0


def test_divergences_replace_the_log_ratio() -> None:
    js = 0.5 * (math.log(_sigma(A)) - math.log(_sigma(B)))
    forward = 0.5 * (-math.exp(-A) + math.exp(-B))
    assert _loss(A, B, divergence="js") == pytest.approx(_nls(js))
    assert _loss(A, B, divergence="forward_kl") == pytest.approx(_nls(forward))
    assert _loss(A, B, loss="hinge", divergence="js") == pytest.approx(1 - js)
    per_token = 0.5 * (math.log(2 * _sigma(A)) / 2 - math.log(2 * _sigma(B)) / 4)  # f' is 0 where policy = reference
    assert _loss(A, B, loss="sigmoid_norm", divergence="js") == pytest.approx(_nls(per_token))


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "js"])
@pytest.mark.parametrize("loss", ["sigmoid", "sigmoid_norm"])
def test_policy_equal_to_reference_gives_ln_2_under_every_divergence(loss: str, divergence: str) -> None:
    assert _loss(0.0, 0.0, loss=loss, divergence=divergence) == pytest.approx(LN2)


def test_ipo_averages_over_tokens_when_it_is_given_their_counts() -> None:
    tokens = {"chosen_tokens": torch.tensor([2]), "rejected_tokens": torch.tensor([4])}
    assert _loss(A, B, loss="ipo", **tokens) == pytest.approx((0.5 + 0.15 - 1.0) ** 2)
    for one in tokens:
        with pytest.raises(ValueError, match="chosen_tokens and rejected_tokens"):
            _loss(A, B, loss="ipo", **{one: tokens[one]})


def test_token_counts_must_be_there_positive_and_one_per_pair() -> None:
    with pytest.raises(ValueError, match="chosen_tokens and rejected_tokens"):
        dpo_loss(ZERO, ZERO, ZERO, ZERO, beta=0.1, loss="sigmoid_norm")
    for wrong in ("chosen_tokens", "rejected_tokens"):
        with pytest.raises(ValueError, match="no tokens"):
            _loss(A, B, loss="sigmoid_norm", **{wrong: torch.tensor([0])})
        with pytest.raises(ValueError, match=wrong):
            _loss(A, B, loss="sigmoid_norm", **{wrong: torch.tensor([2, 2])})
    two = ZERO.expand(2)
    with pytest.raises(ValueError, match="no tokens"):
        dpo_loss(two, two, two, two, beta=0.1, loss="ipo", chosen_tokens=torch.tensor([1, 0]), rejected_tokens=torch.tensor([1, 1]))
    assert math.isfinite(_loss(A, B, loss="sigmoid_norm", chosen_tokens=torch.tensor([1]), rejected_tokens=torch.tensor([1])))


def test_aot_compares_the_sorted_batch() -> None:
    a, b = torch.tensor([1.0, -2.0]), torch.tensor([0.5, -0.5])
    reference = torch.tensor([3.0, -3.0])
    unpaired = dpo_loss(a, b, 0 * a, 0 * b, beta=1.0, loss="aot_unpaired")
    torch.testing.assert_close(unpaired, torch.tensor([_nls(-2.0 + 0.5), _nls(1.0 - 0.5)]))
    paired = dpo_loss(a, b, reference, 0 * b, beta=1.0, loss="aot")
    torch.testing.assert_close(paired, torch.tensor([_nls(-1.5 + 3.0), _nls(0.5 - 3.0)]))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(DPO_LOSSES), st.floats(-3, 3), st.floats(-3, 3))
def test_a_constant_added_to_policy_and_reference_changes_nothing(loss: str, a: float, shift: float) -> None:
    x = [torch.tensor([v], dtype=torch.float64) for v in (a - 3.0, -4.0, -3.0, -4.0)]
    moved = [x[0] + shift, x[1], x[2] + shift, x[3]]
    kwargs = {"beta": 0.5, "loss": loss, **OPTIONS.get(loss, {})}
    torch.testing.assert_close(dpo_loss(*moved, **kwargs), dpo_loss(*x, **kwargs))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.floats(-20, 20), st.floats(-20, 20))
def test_sigmoid_is_never_negative_and_falls_with_the_margin(a: float, b: float) -> None:
    assert 0 <= _loss(a + 0.5, b) < _loss(a, b)


@pytest.mark.parametrize("loss", sorted(set(DPO_LOSSES) - {"apo_down", "discopop"}))  # those two do not, by design
def test_at_the_reference_the_gradient_raises_chosen_and_lowers_rejected(loss: str) -> None:
    chosen, rejected = (torch.zeros(1, requires_grad=True) for _ in range(2))
    dpo_loss(chosen, rejected, torch.zeros(1), torch.zeros(1), beta=0.5, loss=loss, **OPTIONS.get(loss, {})).sum().backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.item() < 0 < rejected.grad.item()


@pytest.mark.parametrize("loss", DPO_LOSSES)
@pytest.mark.parametrize("margin", [-1e4, -200.0, 200.0, 1e4])
def test_extreme_margins_give_finite_values_and_gradients(loss: str, margin: float) -> None:
    chosen = torch.tensor([margin], requires_grad=True)
    value = dpo_loss(chosen, torch.zeros(1), torch.zeros(1), torch.zeros(1), beta=1.0, loss=loss, **OPTIONS.get(loss, {}))
    value.sum().backward()
    assert math.isfinite(value.item())
    assert chosen.grad is not None
    assert math.isfinite(chosen.grad.item())


def test_discopop_does_not_overflow_where_its_exponential_has_no_weight() -> None:
    assert _loss(-300.0, 0.0, beta=1.0, loss="discopop") == pytest.approx(300.0)


@pytest.mark.parametrize("loss", DPO_LOSSES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_log_probs_raise(loss: str, bad: float) -> None:
    for place in range(4):
        four = [torch.tensor([bad if i == place else -1.0]) for i in range(4)]
        with pytest.raises(NonFiniteError, match=("policy_chosen", "policy_rejected", "reference_chosen", "reference_rejected")[place]):
            dpo_loss(*four, beta=0.1, loss=loss, **OPTIONS.get(loss, {}))


def test_overflow_raises_instead_of_returning_infinity() -> None:
    with pytest.raises(NonFiniteError, match=r"dpo_loss \(ipo\)"):
        dpo_loss(torch.tensor([-1e30]), torch.zeros(1), torch.zeros(1), torch.zeros(1), beta=0.1, loss="ipo")


@pytest.mark.parametrize("place", range(4))
def test_shapes_are_never_broadcast(place: int) -> None:
    four = [torch.zeros((2, 1) if i == place else (2,)) for i in range(4)]
    with pytest.raises(ValueError, match="shapes differ: policy_chosen"):
        dpo_loss(*four, beta=0.1)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown DPO loss 'simpo'; known are sigmoid, .*discopop"):
        dpo_loss(ZERO, ZERO, ZERO, ZERO, beta=0.1, loss="simpo")
    with pytest.raises(ValueError, match=r"unknown divergence 'kl'; known are reverse_kl, forward_kl, js"):
        dpo_loss(ZERO, ZERO, ZERO, ZERO, beta=0.1, divergence="kl")  # type: ignore[arg-type]


@pytest.mark.parametrize("beta", [0.0, -0.1, math.nan, math.inf])
def test_a_beta_that_is_no_beta_raises(beta: float) -> None:
    with pytest.raises(ValueError, match="beta"):
        dpo_loss(ZERO, ZERO, ZERO, ZERO, beta=beta)


@pytest.mark.parametrize("smoothing", [-0.1, 0.6, math.nan])
def test_label_smoothing_outside_its_range_raises(smoothing: float) -> None:
    with pytest.raises(ValueError, match="label_smoothing must lie"):
        dpo_loss(ZERO, ZERO, ZERO, ZERO, beta=0.1, label_smoothing=smoothing)


def test_smoothing_at_which_a_loss_is_undefined_raises() -> None:
    with pytest.raises(ValueError, match=r"must be < 0\.5"):
        _loss(A, B, loss="robust", label_smoothing=0.5)
    with pytest.raises(ValueError, match="must be > 0"):
        _loss(A, B, loss="exo_pair", label_smoothing=0.0)


READS_SMOOTHING = {"sigmoid", "exo_pair", "robust", "aot", "aot_unpaired"}
READS_DIVERGENCE = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop"}


@pytest.mark.parametrize("loss", DPO_LOSSES)
@pytest.mark.parametrize(
    ("option", "value", "readers"), [("label_smoothing", 0.2, READS_SMOOTHING), ("divergence", "js", READS_DIVERGENCE)]
)
def test_an_option_is_read_or_refused_never_ignored(loss: str, option: str, value: Any, readers: set[str]) -> None:
    if loss in readers:
        assert _loss(A, B, loss=loss, **{option: value}) != pytest.approx(HAND[loss], abs=1e-6)
    else:
        with pytest.raises(ValueError, match=f"the {loss} loss does not read {option}"):
            _loss(A, B, loss=loss, **{option: value})


def test_implicit_reward_is_beta_times_the_log_ratio() -> None:
    reward = implicit_reward(torch.tensor([-3.0, -2.0]), torch.tensor([-4.0, -1.0]), beta=0.1)
    torch.testing.assert_close(reward, torch.tensor([0.1, -0.1]))
    assert implicit_reward(torch.zeros(1).bfloat16(), torch.zeros(1).bfloat16(), beta=0.1).dtype == torch.float32
    with pytest.raises(ValueError, match="shapes differ"):
        implicit_reward(torch.zeros(2), torch.zeros(2, 1), beta=0.1)
    with pytest.raises(NonFiniteError):
        implicit_reward(torch.tensor([math.nan]), torch.zeros(1), beta=0.1)


def test_half_precision_is_widened_before_the_subtraction() -> None:
    for place in range(4):
        four = [torch.tensor([-100.0 - 7 * i], dtype=torch.bfloat16 if i == place else torch.float32) for i in range(4)]
        assert dpo_loss(*four, beta=0.1).dtype == torch.float32
    half = [torch.tensor([x], dtype=torch.bfloat16) for x in (-100.0, -0.1, -1.0, -99.0)]
    assert dpo_loss(*half, beta=0.01).item() == dpo_loss(*(x.float() for x in half), beta=0.01).item()


@pytest.mark.parametrize("loss", DPO_LOSSES)
def test_gradients(loss: str) -> None:
    generator = torch.Generator().manual_seed(5)
    four = tuple(torch.randn(3, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(4))
    options = dict(OPTIONS.get(loss, {}))
    if loss == "sigmoid_norm":
        options = {"chosen_tokens": torch.tensor([2, 3, 1]), "rejected_tokens": torch.tensor([1, 5, 2])}
    assert torch.autograd.gradcheck(lambda *x: dpo_loss(*x, beta=0.3, loss=loss, **options), four)
    if loss in READS_DIVERGENCE:
        for divergence in ("forward_kl", "js"):
            assert torch.autograd.gradcheck(
                lambda *x, d=divergence: dpo_loss(*x, beta=0.3, loss=loss, divergence=d, **options),  # type: ignore[arg-type]
                four,
            )


@pytest.mark.parametrize("loss", DPO_LOSSES)
def test_exactly_the_losses_that_need_the_whole_batch_say_so(loss: str) -> None:
    """A pair's loss depends on the other pairs, or it does not."""
    torch.manual_seed(0)
    four = [torch.randn(6, dtype=torch.float64) - 3 for _ in range(4)]
    options = {"label_smoothing": 0.1} if loss == "exo_pair" else {}
    counts = {"chosen_tokens": torch.ones(6), "rejected_tokens": torch.ones(6)} if loss == "sigmoid_norm" else {}
    whole = dpo_loss(*four, beta=0.5, loss=loss, **options, **counts).sum()
    parts = [
        dpo_loss(*(x[half] for x in four), beta=0.5, loss=loss, **options, **{name: x[half] for name, x in counts.items()}).sum()
        for half in (slice(0, 3), slice(3, 6))
    ]
    assert torch.allclose(whole, sum(parts)) == (loss not in WHOLE_BATCH_DPO_LOSSES)
