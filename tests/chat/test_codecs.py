"""Reading tool calls out of sampled text: never raises, never takes half a call for a call."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.chat.codecs import HERMES, LLAMA3, MISTRAL, describe_tools, parse_llama3, parse_mistral, parse_tagged, write_calls
from postgrad.types import MalformedCall, ToolCall, ToolSpec

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), json_values, max_size=3)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)


@given(st.lists(st.tuples(names, arguments), min_size=1, max_size=3), st.sampled_from(["", "I look it up."]))
def test_written_calls_are_read_back_in_order(pairs, content):
    calls = tuple(ToolCall(name, values, id=f"call_{index}") for index, (name, values) in enumerate(pairs))
    assert parse_tagged(write_calls(content, calls)) == (content, calls)


@given(
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", '{"name": "a", "arguments": {}}', "{", "}", '"', "x", "\n", "[TOOL_CALLS]", "[", "null"]
        )
    )
)
def test_no_text_makes_the_readers_raise(parts):
    text = "".join(parts)
    for parse in (parse_tagged, parse_llama3, parse_mistral):
        content, calls = parse(text)
        assert isinstance(content, str)
        assert all(isinstance(call, (ToolCall, MalformedCall)) for call in calls)


@pytest.mark.parametrize(
    ("inside", "error"),
    [
        ("{'name': 'add'}", "invalid JSON"),
        ('{"name": "add", "arguments": {"a": 1}', "invalid JSON"),
        ('{"name": "add", "arguments": [1, 2]}', '"arguments" must be a JSON object, not a list'),
        ('{"name": "add", "arguments": 3}', '"arguments" must be a JSON object, not a number'),
        ('{"name": "add", "arguments": null}', '"arguments" must be a JSON object, not null'),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', '"arguments" must be a JSON object, not a string'),
        ('{"arguments": {}}', 'the call has no "name"'),
        ('{"name": "", "arguments": {}}', 'the call has no "name"'),
        ('{"name": 3, "arguments": {}}', '"name" must be a string'),
        ('{"name": "add"}', 'the call has no "arguments" object'),
        ("[]", "a call is a JSON object, not a list"),
        ("", "invalid JSON"),
        ('{"name": "add", "arguments": {"a": NaN}}', "NaN is not a JSON value"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "surrogates not allowed"),
        ("[" * 100_000, "nested too deeply"),
        ('{"name": "a", "arguments": {}} and more', "text follows the JSON object"),
    ],
)
def test_what_is_no_call_says_why(inside, error):
    _, (call,) = parse_tagged(f"<tool_call>{inside}</tool_call>")
    assert isinstance(call, MalformedCall)
    assert error in call.error


@pytest.mark.parametrize("text", ['<tool_call>{"name": "add", "arguments": {}}', '<tool_call>{"name": "add", ', "<tool_call>"])
def test_a_call_that_is_not_closed_is_malformed(text):
    _, (call,) = parse_tagged(text)
    assert isinstance(call, MalformedCall)
    assert "not closed" in call.error


def test_a_broken_call_does_not_spoil_the_next_one():
    content, calls = parse_tagged('a <tool_call>{<tool_call>{"name": "add", "arguments": {}}</tool_call> b')
    assert content == "a\nb"
    assert [type(call) for call in calls] == [MalformedCall, ToolCall]
    assert calls[1].id == "call_1"


def test_a_closing_marker_inside_a_string_does_not_end_the_call():
    _, (call,) = parse_tagged('<tool_call>{"name": "say", "arguments": {"text": "</tool_call>"}}</tool_call>')
    assert call == ToolCall("say", {"text": "</tool_call>"}, id="call_0")


@given(st.text(max_size=50).filter(lambda text: "<tool_call>" not in text))
def test_text_without_calls_is_content_unchanged(text):
    assert parse_tagged(text) == (text, ())


def test_llama3_reads_bare_objects_and_leaves_other_json_alone():
    both = '{"name": "add", "parameters": {"a": 1}}; {"name": "sub", "parameters": {}}'
    assert parse_llama3(both)[1] == (ToolCall("add", {"a": 1}, id="call_0"), ToolCall("sub", {}, id="call_1"))
    assert parse_llama3('{"answer": 3}') == ('{"answer": 3}', ())
    assert isinstance(parse_llama3('{"name": "add", "parameters": {')[1][0], MalformedCall)
    assert isinstance(parse_llama3('{"name": "add", "parameters": "x"}')[1][0], MalformedCall)


def test_mistral_reads_the_list_after_its_marker():
    text = 'Look. [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "sub"}]'
    content, calls = parse_mistral(text)
    assert content == "Look."
    assert calls[0] == ToolCall("add", {"a": 1}, id="call_0")
    assert isinstance(calls[1], MalformedCall)
    assert isinstance(parse_mistral("[TOOL_CALLS] [{")[1][0], MalformedCall)
    assert isinstance(parse_mistral("[TOOL_CALLS] []")[1][0], MalformedCall)


def test_every_style_has_its_own_name():
    assert [style.name for style in (HERMES, LLAMA3, MISTRAL)] == ["hermes", "llama3", "mistral"]


def test_the_description_keeps_types_choices_descriptions_and_what_is_optional():
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "in English"},
            "unit": {"enum": ["c", "f"]},
            "days": {"type": "array", "items": {"type": "integer"}},
            "where": {"type": "object", "properties": {"lat": {"type": "number"}}},
            "limit": {"type": "integer", "minimum": 1},
        },
        "required": ["city"],
    }
    text = describe_tools([ToolSpec("weather", "Forecast.", schema), ToolSpec("now", "", {"type": "object", "properties": {}})])
    assert 'weather(city: string (in English), unit?: "c" | "f", days?: array of integer, ' in text
    assert json.dumps(schema["properties"]["where"]) in text
    assert '"minimum": 1' in text
    assert "\nnow()\n" in text
    assert '{"name": "weather", "arguments": {"city": ...}}' in text
