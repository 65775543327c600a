import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.rewards import reward
from postgrad.rewards.base import RolloutView, call_form, declaration_of, view_of
from postgrad.rewards.combine import clip, factor_at, gate, multiply, potential, schedule, weighted_sum
from postgrad.rewards.library import length_in_group, numeric_match
from postgrad.rewards.load import load_rewards
from postgrad.rewards.score import Scorer
from postgrad.types import Group, Message, Prompt, Rollout, Segment, Source, StopReason


def rollout(text="", tokens=1, sample=0):
    segments = (Segment(Source.MODEL, (1,) * tokens, (-0.1,) * tokens),)
    return Rollout(segments, (Message("assistant", text),), StopReason.END, sample, text=text)


def view(text="", tokens=1):
    return view_of(Prompt("r", (Message("user", "q"),)), rollout(text, tokens))


@reward(scope="final", claim="the answer is right", range=(0, 1), role="outcome")
def correct(rollout: RolloutView, answer):
    return None if answer is None else float(rollout.final_answer.startswith(answer))


@reward(scope="final", claim="the answer is polite", range=(0, 1))
def polite(completion):
    return float("please" in completion)


@reward(scope="length", claim="it is short", range=(-1, 0))
def short(rollout, limit=10):
    return -1.0 if rollout.sampled_tokens > limit else 0.0


def undeclared(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


@reward(scope="final", claim="slow", range=(0, 1), deadline_s=7)
async def asked(completion):
    return 1.0 if completion else None


def facts(combined):
    declared = declaration_of(combined)
    return declared.range, declared.role, declared.scope, declared.group


def test_what_is_declared_follows_from_the_parts():
    assert facts(weighted_sum(correct, polite, weights=[1, -0.5])) == ((-0.5, 1.0), "outcome", "final", False)
    assert facts(weighted_sum(polite, short)) == ((-1.0, 1.0), "shaping", None, False)
    assert facts(multiply(correct, short)) == ((-1.0, 0.0), "outcome", None, False)
    assert facts(gate(correct, polite, weight=0.5)) == ((0.0, 1.5), "outcome", "final", False)
    assert facts(gate(correct, short)) == ((-1.0, 1.0), "outcome", None, False)
    assert facts(clip(weighted_sum(polite, short), low=-0.5, high=2)) == ((-0.5, 1.0), "shaping", None, False)
    assert facts(clip(undeclared, high=3)) == (None, "outcome", None, True)
    assert facts(schedule(polite, {0: 1, 100: -2})) == ((-2.0, 1.0), "shaping", "final", False)
    assert facts(weighted_sum(polite, undeclared)) == (None, "outcome", None, True)
    assert facts(gate(correct, length_in_group))[3] is True
    assert declaration_of(gate(correct, polite)).claim == "the answer is right; where that is reached, the answer is polite"
    assert declaration_of(gate(correct, polite, claim="good", scope="structure", name="all")).name == "all"
    assert declaration_of(weighted_sum(asked, polite)).deadline_s == 12.0


def test_columns_are_those_of_the_parts():
    form = call_form(weighted_sum(correct, short, polite))
    assert (form.style, form.required, form.optional, form.every_column) == ("rollout", ("answer",), ("limit",), False)
    assert call_form(weighted_sum(correct, undeclared)).every_column
    assert call_form(schedule(correct, {0: 1})).required == ("answer", "step")
    assert call_form(gate(correct, length_in_group)).style == "rollouts"
    assert call_form(weighted_sum(polite, asked)).asynchronous


@pytest.mark.parametrize(
    ("text", "tokens", "total", "product", "gated"),
    [("42 please", 1, 1.5, 0.0, 1.5), ("42", 1, 1.0, 0.0, 1.0), ("41 please", 1, 0.5, 0.0, 0.0), ("42 please", 99, 0.5, -1.0, 1.5)],
)
def test_values_by_hand(text, tokens, total, product, gated):
    seen = view(text, tokens)
    assert weighted_sum(correct, polite, short, weights=[1, 0.5, 1])(seen, answer="42") == total
    assert multiply(correct, polite, short)(seen, answer="42") == pytest.approx(product)
    assert gate(correct, polite, weight=0.5)(seen, answer="42") == gated
    assert clip(weighted_sum(correct, polite), high=0.75)(seen, answer="42") == min(0.75, correct(seen, "42") + polite(text))


def test_a_missing_part_abstains_unless_it_does_not_matter():
    assert weighted_sum(correct, polite)(view("please"), answer=None) is None
    assert gate(correct, polite)(view("please"), answer=None) is None
    sometimes = reward(range=(0, 1))(lambda rollout: None)
    assert gate(correct, sometimes)(view("42"), answer="42") is None
    assert gate(correct, sometimes)(view("41"), answer="42") == 0.0


@given(st.floats(0, 1), st.floats(0, 1), st.floats(-3, 3), st.floats(0, 3), st.floats(0, 5))
def test_nothing_wrong_ever_outranks_what_is_right(outcome, other, low, width, weight):
    """Whatever the shaping reward says, of whatever sign."""

    @reward(range=(low, low + width))
    def shaping(rollout, share):
        return low + share * width

    @reward(range=(0, 1), role="outcome")
    def task(rollout, value):
        return value

    gated = gate(task, shaping, weight=weight)
    right = gated(view(), value=1.0, share=0.0)
    wrong = gated(view(), value=min(outcome, 0.999), share=1.0)
    assert wrong < right
    assert gated(view(), value=other, share=0.5) <= declaration_of(gated).range[1] + 1e-9


def test_a_group_reward_makes_a_group_of_the_combination():
    combined = gate(numeric_match, length_in_group, weight=0.5)
    views = [view("7", 10), view("7", 30), view("8", 5), view("8", 30)]
    assert combined(views, answer="7") == pytest.approx([1 + 0.5 * (0.5 - 5 / 25), 1 - 0.25, -0.25, -0.25])


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: weighted_sum(), "at least one"),
        (lambda: weighted_sum(polite, weights=[1, 2]), "one finite weight per reward"),
        (lambda: weighted_sum(polite, weights=[math.nan]), "one finite weight"),
        (lambda: gate(correct, undeclared), "ranges"),
        (lambda: gate(correct, polite, weight=-1), "weight"),
        (lambda: clip(polite, low=1, high=0), "low ≤ high"),
        (lambda: schedule(polite, {}), "at least one step"),
        (lambda: potential(lambda messages: 0.0, gamma=0.0), "0 < gamma"),
        (lambda: potential(polite), "a function of `messages`"),
        (lambda: weighted_sum(polite, potential(lambda messages: 0.0)), "judges each turn"),
    ],
)
def test_combinations_that_mean_nothing_are_refused_where_they_are_made(make, what):
    with pytest.raises(ValueError, match=what):
        make()


def test_schedule_is_linear_between_its_steps_and_constant_outside():
    points = [(10, 1.0), (20, 0.0), (40, 2.0)]
    assert [factor_at(points, step) for step in (0, 10, 15, 20, 30, 40, 99)] == [1.0, 1.0, 0.5, 0.0, 1.0, 2.0, 2.0]
    faded = schedule(polite, {0: 1.0, 200: 0.0})
    assert [faded(view("please"), step=step) for step in (0, 100, 300)] == [1.0, 0.5, 0.0]


def many_turns(*contents):
    messages, segments = [], []
    for content in contents:
        messages += [Message("assistant", content), Message("tool", "ok")]
        segments += [Segment(Source.MODEL, (1,), (-0.1,)), Segment(Source.TOOL, (2,))]
    return view_of(Prompt("r", ()), Rollout(tuple(segments[:-1]), tuple(messages[:-1]), StopReason.END))


def found(messages, wanted):
    """How many of the wanted words have been said."""
    said = " ".join(message.content for message in messages)
    return float(sum(word in said for word in wanted))


def test_potential_pays_progress_when_it_is_made_and_nothing_in_total():
    shaped = potential(found)
    assert call_form(shaped).per_turn
    assert call_form(shaped).required == ("wanted",)
    assert shaped(many_turns("a", "x", "b", "done"), wanted=["a", "b"]) == [1.0, 0.0, 1.0, -2.0]
    assert shaped(many_turns("done"), wanted=["a", "b"]) == [0.0]


@given(st.lists(st.sampled_from("abx"), min_size=1, max_size=6))
def test_no_sequence_of_turns_farms_a_potential(turns):
    assert sum(potential(found)(many_turns(*turns), wanted=["a", "b"])) == 0.0


def test_a_potential_abstains_where_it_cannot_tell():
    assert potential(lambda messages: None)(many_turns("a", "b")) is None
    assert potential(found)(view_of(Prompt("r", ()), Rollout((), (), StopReason.END)), wanted=[]) is None


SOURCE = """
from postgrad.rewards import reward
from postgrad.rewards.combine import gate, weighted_sum
from postgrad.rewards.library import length_in_group, numeric_match

@reward(scope="final", claim="the answer is polite", range=(0, 1))
async def polite(completion):
    return float("please" in completion)

combined = gate(numeric_match, polite, weight=0.5)
short = gate(numeric_match, length_in_group)
"""


def test_a_combination_is_named_in_a_recipe_like_any_function(tmp_path):
    (tmp_path / "rewards.py").write_text(SOURCE)
    rewards = load_rewards([{"use": "rewards.py:combined"}, {"use": "rewards.py:short", "weight": 0.1}], tmp_path)
    assert [(r.name, r.role, r.range, r.group) for r in rewards] == [
        ("combined", "outcome", (0.0, 1.5), False),
        ("short", "outcome", (-0.5, 1.5), True),
    ]
    group = Group(
        Prompt("f:1", (), {"answer": "7"}), tuple(rollout(text, 1 + i, i) for i, text in enumerate(["7 please", "7", "8 please"]))
    )
    with Scorer(rewards) as scorer:
        values = scorer.score([group]).values
    np.testing.assert_allclose(values, [[1.5, 1.5], [1.0, 1.0], [0.0, -0.5]])
