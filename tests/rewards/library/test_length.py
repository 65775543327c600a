import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.errors import RecipeError
from postgrad.rewards.base import view_of
from postgrad.rewards.library import cosine_length, length_in_group
from postgrad.rewards.load import load_rewards
from postgrad.types import Message, Prompt, Rollout, Segment, Source, StopReason


def of_length(tokens, tool_tokens=0):
    segments = (Segment(Source.MODEL, (1,) * tokens, (-0.1,) * tokens), Segment(Source.TOOL, (2,) * tool_tokens))
    return view_of(Prompt("r", (Message("user", "q"),)), Rollout(segments, (Message("assistant", "x"),), StopReason.END))


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 1.0), (25, (1 + math.sqrt(0.5)) / 2), (50, 0.5), (100, 0.0), (101, 0.0), (200, 0.0), (10_000, 0.0)]
)
def test_cosine_falls_and_stays_down(tokens, value):
    assert cosine_length(of_length(tokens, tool_tokens=500), max_tokens=100) == pytest.approx(value, abs=1e-12)


@given(st.integers(0, 300), st.integers(0, 300))
def test_longer_is_never_better(a, b):
    short, long = sorted((a, b))
    assert cosine_length(of_length(short), max_tokens=128) >= cosine_length(of_length(long), max_tokens=128)


@pytest.mark.parametrize(
    ("lengths", "values"), [([10, 20, 30], [0.5, 0.0, -0.5]), ([7, 7], [0.0, 0.0]), ([5], [0.0]), ([1, 101, 1], [0.5, -0.5, 0.5])]
)
def test_length_in_group_by_hand(lengths, values):
    assert length_in_group([of_length(length, tool_tokens=99 * length) for length in lengths]) == values


def test_bounds_are_asked_for():
    for args in ({}, {"max_tokens": 0}):
        with pytest.raises(RecipeError, match="needs args"):
            load_rewards([{"use": "cosine_length", "args": args}], ".")
    with pytest.raises(RecipeError, match="0 ≤ buffer ≤ max_tokens"):
        load_rewards([{"use": "soft_overlong", "args": {"max_tokens": 10, "buffer": -1}}], ".")
