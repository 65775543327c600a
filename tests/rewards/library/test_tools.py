import json

import pytest

from postgrad.rewards.base import view_of
from postgrad.rewards.library import answer_uses_tool, tool_efficiency, tool_error, tool_exact, tool_match
from postgrad.types import Message, Prompt, Rollout, Segment, Source, StopReason, ToolCall, ToolResult


def rolled(calls=(), answer="", *, question="What is 12 + 34?", contents=None, errors=(), malformed=0):
    """One turn with the calls, their results, and an answer."""
    calls = tuple(ToolCall(name, arguments) for name, arguments in calls)
    contents = ["46"] * len(calls) if contents is None else contents
    results = [
        ToolResult(call, text, "raised" if index in errors else "") for index, (call, text) in enumerate(zip(calls, contents, strict=True))
    ]
    results += [ToolResult(None, "error", "malformed")] * malformed
    tools = tuple(Message("tool", result.content) for result in results)
    messages = (Message("assistant", "", calls), *tools, Message("assistant", answer))
    segments = (Segment(Source.MODEL, (1,), (-0.1,)), Segment(Source.TOOL, (2,)), Segment(Source.MODEL, (3,), (-0.1,)))
    rollout = Rollout(segments, messages, StopReason.END, tool_results=tuple(results), text=answer)
    return view_of(Prompt("r", (Message("user", question),)), rollout)


GOLD = [{"name": "add", "arguments": {"a": 1, "b": 2}}]
ADD = ("add", {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("calls", "value"),
    [
        ([ADD], 1.0),
        ([("add", {"b": 2.0, "a": 1})], 1.0),
        ([("add", {"a": 1, "b": 3})], (1 + (2 + 1) / 2) / 3),
        ([("add", {"a": 1})], (1 + (1 + 1) / 2) / 3),
        ([("add", {"a": 1, "b": 2, "c": 3})], (1 + (2 + 2) / 3) / 3),
        ([("add", {})], 1 / 3),
        ([("add", {"a": True, "b": "2"})], (1 + 2 / 2) / 3),
        ([("sub", {"a": 1, "b": 2})], 0.0),
        ([], 0.0),
        ([ADD, ADD], 0.5),
        ([ADD] * 10, 0.1),
        ([("sub", {}), ADD], 0.5),
    ],
)
def test_tool_match_by_hand(calls, value):
    assert tool_match(rolled(calls), GOLD) == pytest.approx(value)


def test_calls_match_in_any_order_and_each_once():
    gold = [{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 2}}]
    assert tool_match(rolled([("f", {"x": 2}), ("f", {"x": 1})]), gold) == 1.0
    assert tool_match(rolled([("f", {"x": 1}), ("f", {"x": 1})]), gold) == pytest.approx((1 + 2 / 3) / 2)


def test_no_call_is_right_where_none_is_wanted():
    assert tool_match(rolled(), []) == 1.0
    assert tool_match(rolled([ADD]), []) == 0.0
    assert tool_match(rolled(malformed=1), []) == 0.0


def test_malformed_calls_count_as_made():
    assert tool_match(rolled([ADD], malformed=1), GOLD) == 0.5
    assert tool_match(rolled(malformed=1), GOLD) == 0.0


def test_calling_everything_earns_less_than_being_right():
    everything = [("add", {"a": a, "b": b}) for a in range(4) for b in range(4)]
    assert tool_match(rolled(everything), GOLD) < 0.1


POSSIBLE = [{"area": {"base": [10], "height": [5, 5.0], "unit": ["cm", "centimetres", ""]}}]


@pytest.mark.parametrize(
    ("calls", "match"),
    [
        ([("area", {"base": 10, "height": 5})], 1.0),
        ([("area", {"base": 10, "height": 5, "unit": "CM"})], 1.0),
        ([("area", {"base": 10, "height": 5, "unit": "inch"})], (1 + (3 + 2) / 3) / 3),
        ([("area", {"base": 10})], (1 + (1 + 1) / 2) / 3),
        ([("area", {"base": 10, "height": 6})], (1 + (2 + 1) / 2) / 3),
        ([("area", {"base": 10, "height": 5, "depth": 1})], (1 + (2 + 2) / 3) / 3),
        ([("volume", {"base": 10, "height": 5})], 0.0),
        ([("area", {"base": 10, "height": 5}), ("area", {"base": 10, "height": 5})], 0.5),
        ([], 0.0),
    ],
)
def test_possible_answers_of_bfcl_are_gold(calls, match):
    assert tool_match(rolled(calls), POSSIBLE) == pytest.approx(match)
    assert tool_exact(rolled(calls), POSSIBLE) == float(match == 1.0)
    assert tool_exact(rolled(calls), json.dumps(POSSIBLE)) == float(match == 1.0)


def test_exact_is_all_or_nothing():
    assert tool_exact(rolled([ADD]), GOLD) == 1.0
    assert tool_exact(rolled([ADD], malformed=1), GOLD) == 0.0
    assert tool_exact(rolled(), []) == 1.0
    assert tool_exact(rolled([ADD]), None) is None


@pytest.mark.parametrize(
    "written", [None, "", "x", 3, [3], [{"arguments": {}}], [{"name": 3}], [{"name": "f", "arguments": [1]}], {"name": "f"}]
)
def test_gold_that_means_no_calls_abstains(written):
    assert tool_match(rolled([ADD]), written) is None


@pytest.mark.parametrize(
    ("calls", "malformed", "most", "value"),
    [
        ([], 0, 1, 0.0),
        ([ADD], 0, 1, 0.0),
        ([ADD, ADD], 0, 5, -0.5),
        ([ADD, ("add", {"b": 2, "a": 1})], 0, 5, -0.5),
        ([("f", {"x": i}) for i in range(4)], 0, 1, -0.75),
        ([("f", {"x": i}) for i in range(4)], 0, 4, 0.0),
        ([ADD], 1, 5, -0.5),
    ],
)
def test_tool_efficiency_by_hand(calls, malformed, most, value):
    assert tool_efficiency(rolled(calls, malformed=malformed), most) == value


def test_tool_errors_count_and_are_not_diluted():
    assert tool_error(rolled()) == 0.0
    assert tool_error(rolled([ADD])) == 0.0
    assert tool_error(rolled([ADD], errors={0})) == -0.5
    assert tool_error(rolled([ADD] * 100, errors={0})) == -0.5
    assert tool_error(rolled([ADD] * 3, errors={0, 1, 2})) == -1.0
    assert tool_error(rolled(malformed=1), worst=1) == -1.0


CALC = [("calculator", {"expression": "12 + 34"})]


@pytest.mark.parametrize(
    ("answer", "contents", "value"),
    [
        ("The answer is 46.", ["46"], 1.0),
        ("46.0", ["46"], 1.0),
        ("The answer is 47.", ["46"], 0.0),
        ("", ["46"], 0.0),
        ("45 or 46", ["46"], 0.0),
        ("<think>46</think>", ["46"], 0.0),
        ("It is sunny in Oslo today", ["sunny in oslo"], 1.0),
        ("It is rainy", ["sunny in oslo"], 0.0),
        ("sunflower", ["sun"], 0.0),
        ("The answer is 34", ["34"], None),
        ("12 + 34", ["12 + 34"], 0.0),
    ],
)
def test_answer_uses_tool(answer, contents, value):
    assert answer_uses_tool(rolled(CALC, answer, contents=contents)) == value


def test_a_failed_call_and_no_call_support_no_answer():
    assert answer_uses_tool(rolled(CALC, "46", errors={0})) == 0.0
    assert answer_uses_tool(rolled((), "46")) == 0.0
    assert answer_uses_tool(rolled(CALC, "x " * 300, contents=["x " * 300])) == 0.0
