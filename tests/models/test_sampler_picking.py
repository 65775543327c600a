"""From logits to tokens: filters, inverse-CDF draws, log-probs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from postgrad.errors import RecipeError
from postgrad.models.noise import TurnNoise
from postgrad.models.picking import check_params, pick
from postgrad.protocols import SampleKey, SamplingParams


def reference_support(logits: list[float], params: SamplingParams) -> set[int]:
    """The filters by their definitions, token by token, in Python floats. Ties with the last kept token are kept."""
    scaled = [value / params.temperature for value in logits]
    top = max(scaled)
    weights = [math.exp(value - top) for value in scaled]
    kept = set(range(len(weights)))
    if params.top_k:
        floor = sorted(weights, reverse=True)[min(params.top_k, len(weights)) - 1]
        kept = {token for token in kept if weights[token] >= floor}
    if params.top_p < 1.0:
        mass, floor, target = 0.0, 0.0, params.top_p * sum(weights[token] for token in kept)
        for weight in sorted((weights[token] for token in kept), reverse=True):
            mass, floor = mass + weight, weight
            if mass >= target * (1 - 1e-6):
                break
        kept = {token for token in kept if weights[token] >= floor}
    return {token for token in kept if weights[token] >= params.min_p}


def drawn(logits: Tensor, params: SamplingParams, uniforms: Tensor) -> Tensor:
    """Tokens drawn from one row of logits [V] with each of the uniforms."""
    return pick(logits.expand(len(uniforms), -1), uniforms, params).tokens


GRID = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-12, 12), min_size=2, max_size=40),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([0, 1, 2, 5, 100]),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_support_is_exactly_what_the_filters_define(levels: list[int], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = [level / 4 for level in levels]  # quarters, so that ties occur
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    support = reference_support(logits, params)
    reachable = set(drawn(torch.tensor(logits), params, GRID).tolist())
    assert reachable <= support
    mass = {token: math.exp(logits[token] / temperature) for token in support}
    clearly = {token for token, weight in mass.items() if weight / sum(mass.values()) > 1 / 500}
    assert clearly <= reachable


@pytest.mark.parametrize(
    ("params", "support"),
    [
        (SamplingParams(), {0, 1, 2, 3}),
        (SamplingParams(top_k=2), {0, 1}),
        (SamplingParams(top_p=0.5), {0}),
        (SamplingParams(top_p=0.51), {0, 1}),
        (SamplingParams(top_p=0.8), {0, 1}),
        (SamplingParams(min_p=0.3), {0, 1}),
        (SamplingParams(min_p=0.61), {0}),
        (SamplingParams(top_k=2, top_p=0.6), {0}),  # 0.5 / 0.8 of what top-k kept
        (SamplingParams(top_k=3, top_p=0.9), {0, 1, 2}),
        (SamplingParams(top_p=0.9, temperature=0.5), {0, 1}),  # squared and renormalised: 0.66, 0.24, 0.06, 0.04
    ],
)
def test_filters_on_a_distribution_one_can_do_by_hand(params: SamplingParams, support: set[int]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(drawn(logits, params, GRID).tolist()) == support


def test_top_p_over_a_flat_vocabulary_keeps_far_more_than_the_first_look() -> None:
    logits = torch.arange(5000, 0, -1) * 1e-4  # nearly flat, strictly falling
    weights = logits.double().exp()
    reached = int((weights.cumsum(0) < 0.7 * weights.sum()).sum())
    tokens = drawn(logits, SamplingParams(top_p=0.7), GRID)
    assert reached > 3000
    assert reached - 5 <= int(tokens.max()) <= reached + 1


@pytest.mark.parametrize("vocabulary", [5, 256, 257, 1000])
def test_draws_follow_the_distribution(vocabulary: int) -> None:
    """Chi-square of keyed noise against softmax(logits / T), rare tokens pooled."""
    count, temperature = 20_000, 1.3
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 2
    uniforms = torch.tensor([TurnNoise(SampleKey(5, 0, 0, sample), 0).at(0) for sample in range(count)], dtype=torch.float64)
    tokens = drawn(logits, SamplingParams(temperature=temperature), uniforms)
    expected = torch.softmax(logits.double() / temperature, 0) * count
    observed = torch.bincount(tokens, minlength=vocabulary).double()
    common = expected >= 10
    pairs = [(observed[common], expected[common]), (observed[~common].sum()[None], expected[~common].sum()[None])]
    cells = [(o, e) for o, e in pairs if len(e) and float(e.sum()) > 0]
    statistic = sum(float(((o - e) ** 2 / e).sum()) for o, e in cells)
    degrees = sum(len(e) for _, e in cells) - 1
    assert abs(statistic - degrees) < 4 * math.sqrt(2 * degrees)


def test_the_draw_is_the_inverse_of_the_running_sum() -> None:
    logits = torch.tensor([0.2, 0.0, 0.3, 0.5]).log()  # the second token has probability 0
    uniforms = torch.tensor([0.0, 0.1999, 0.2001, 0.4999, 0.5001, 1 - 2**-53], dtype=torch.float64)
    assert drawn(logits, SamplingParams(), uniforms).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    logits = torch.full((700,), -math.inf)
    logits[[300, 301]] = 0.0  # whole blocks before and after hold nothing
    token = int(drawn(logits, SamplingParams(), torch.tensor([uniform], dtype=torch.float64)))
    assert token == (300 if uniform < 0.5 else 301)


def test_a_rare_token_behind_a_common_one_keeps_its_probability() -> None:
    """A running sum in fp32 would round 1e-9 away behind 1.0."""
    logits = torch.zeros(400)
    logits[1:] = math.log(1e-9)
    total = 1 + 399e-9
    uniforms = torch.tensor([1 / total - 1e-12, (1 + 1.5e-9) / total, (1 + 398.5e-9) / total], dtype=torch.float64)
    assert drawn(logits, SamplingParams(), uniforms).tolist() == [0, 2, 399]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logprobs_are_unfiltered_and_at_the_temperature(dtype: torch.dtype, temperature: float) -> None:
    logits = (torch.randn(20, 300, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    params = SamplingParams(temperature=temperature, top_k=5, top_p=0.8, min_p=0.01)
    picked = pick(logits, torch.rand(20, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), params)
    expected = torch.log_softmax(logits.double() / temperature, -1).gather(-1, picked.tokens[:, None])[:, 0]
    torch.testing.assert_close(picked.logprobs, expected, atol=2e-6, rtol=0)


def test_greedy_takes_the_first_of_the_largest_and_reports_its_logprob_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    picked = pick(logits, torch.tensor([0.99], dtype=torch.float64), SamplingParams(temperature=0.0, top_k=1))
    assert picked.tokens.tolist() == [1]
    torch.testing.assert_close(picked.logprobs, torch.log_softmax(logits.double(), -1)[:, 1])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_that_are_not_finite_are_reported_and_leave_the_others_alone(temperature: float) -> None:
    logits = torch.zeros(4, 10)
    logits[0, 3], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    picked = pick(logits, torch.full((4,), 0.5, dtype=torch.float64), SamplingParams(temperature=temperature))
    assert picked.finite.tolist() == [False, False, False, True]
    assert float(picked.logprobs[3]) == pytest.approx(-math.log(10))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=-0.1),
        SamplingParams(temperature=math.inf),
        SamplingParams(temperature=math.nan),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=1.1),
        SamplingParams(top_k=-1),
        SamplingParams(min_p=1.5),
        SamplingParams(stop_strings=("",)),
    ],
)
def test_settings_out_of_range_are_refused(params: SamplingParams) -> None:
    with pytest.raises(RecipeError):
        check_params(params)
