"""Groups survive JSON exactly."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postgrad.rollout import group_from_json, group_to_json
from postgrad.types import Group, Message, Prompt, Rollout, Segment, Source, StopReason, ToolCall, ToolResult, ToolSpec

TEXT = st.text(max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=2)
CALLS = st.builds(ToolCall, TEXT, OBJECT, TEXT)
MESSAGES = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    TEXT,
    st.lists(CALLS, max_size=2).map(tuple),
    TEXT,
    TEXT,
    TEXT,
    st.sampled_from([None, True, False]),
)
RESULTS = st.builds(ToolResult, st.none() | CALLS, TEXT, TEXT, st.floats(0, 1e6))
IDS = st.lists(st.integers(0, 200_000), max_size=5)
SAMPLED = st.lists(st.tuples(st.integers(0, 200_000), FLOATS), max_size=5).map(
    lambda pairs: Segment(Source.MODEL, tuple(token for token, _ in pairs), tuple(value for _, value in pairs))
)
SEGMENTS = SAMPLED | st.builds(Segment, st.sampled_from([Source.PROMPT, Source.TOOL]), IDS.map(tuple))
ROW = st.lists(SEGMENTS, max_size=3).map(tuple)
ROLLOUTS = st.builds(
    Rollout,
    segments=ROW,
    messages=st.lists(MESSAGES, max_size=2).map(tuple),
    stop=st.sampled_from(StopReason),
    sample=st.integers(0, 100),
    tool_results=st.lists(RESULTS, max_size=2).map(tuple),
    forks=st.lists(ROW, max_size=2).map(tuple),
    text=TEXT,
    raw_text=TEXT,
    rewrites=st.integers(0, 3),
    infrastructure_errors=st.lists(TEXT, max_size=2).map(tuple),
)
TOOLS = st.builds(ToolSpec, TEXT, TEXT, OBJECT)
PROMPTS = st.builds(
    Prompt, TEXT, st.lists(MESSAGES, max_size=2).map(tuple), OBJECT, st.none() | TEXT, st.lists(TOOLS, max_size=2).map(tuple)
)
GROUPS = st.builds(Group, PROMPTS, st.lists(ROLLOUTS, max_size=2).map(tuple))


def through_text(group: Group) -> Group:
    return group_from_json(json.loads(json.dumps(group_to_json(group))))


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(GROUPS)
def test_a_group_survives_json_exactly(group: Group) -> None:
    assert through_text(group) == group
    assert through_text(group) == group_from_json(group_to_json(group))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(FLOATS, min_size=1, max_size=5))
def test_log_probs_keep_every_bit(values: list[float]) -> None:
    segment = Segment(Source.MODEL, (1,) * len(values), tuple(values))
    group = Group(Prompt("d:1", ()), (Rollout((segment,), (), StopReason.END),))
    again = through_text(group).rollouts[0].segments[0].logprobs
    assert [struct.pack("d", value) for value in again] == [struct.pack("d", value) for value in values]


def test_no_field_of_a_rollout_is_forgotten() -> None:
    names: set[str] = set(Rollout.__dataclass_fields__)
    data: dict[str, Any] = group_to_json(Group(Prompt("d:1", ()), (Rollout((), (), StopReason.END),)))
    assert set(data["rollouts"][0]) == names
    assert set(data["prompt"]) == set(Prompt.__dataclass_fields__)


def test_a_record_whose_ids_and_log_probs_differ_in_length_is_refused() -> None:
    data = group_to_json(Group(Prompt("d:1", ()), (Rollout((Segment(Source.MODEL, (1, 2), (-1.0, -2.0)),), (), StopReason.END),)))
    data["rollouts"][0]["segments"][0]["logprobs"].pop()
    with pytest.raises(ValueError, match="takes 2 log-probs, got 1"):
        group_from_json(data)
