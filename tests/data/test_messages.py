"""One conversation in the shapes that files have it: the same result, or a reason."""

from __future__ import annotations

import json

import pytest

from postgrad.data.messages import BadRow, read_messages, read_tools
from postgrad.types import Message, ToolCall, ToolSpec

USER = {"role": "user", "content": "2 + 2"}
ANSWER = {"role": "assistant", "content": "4"}
CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "unit": None}}}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_arguments_as_object_and_as_json_string_are_the_same_call():
    as_text = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 2})}}]
    first = read_messages([USER, {"role": "assistant", "content": None, "tool_calls": CALLS}])
    second = read_messages([USER, {"role": "assistant", "content": "", "tool_calls": as_text}])
    assert first == second
    assert first[1] == Message("assistant", "", (ToolCall("add", {"a": 2}, id="c1"),))


def test_nulls_that_arrow_adds_to_arguments_are_gone():
    """ms-swift#10125."""
    (_, turn) = read_messages([USER, {"role": "assistant", "content": None, "tool_calls": CALLS, "name": None, "tool_call_id": None}])
    assert turn.tool_calls[0].arguments == {"a": 2}


def test_sharegpt_names_are_understood():
    messages = read_messages(
        [
            {"from": "human", "value": "2 + 2"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "4"},
        ]
    )
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1].tool_calls == (ToolCall("add", {"a": 2}),)


@pytest.mark.parametrize(
    "content", ["2 + 2", [{"type": "text", "text": "2 + 2"}], [{"type": "text", "value": "2 +"}, {"type": "text", "text": " 2"}], ["2 + 2"]]
)
def test_text_parts_are_text(content):
    assert read_messages([{"role": "user", "content": content}, ANSWER])[0] == Message("user", "2 + 2")


MARKS = [
    ({}, None), ({"train": False}, False), ({"train": True}, True), ({"weight": 0}, False), ({"loss_weight": 0.0}, False),
    ({"loss_weight": 1.0}, None), ({"weight": None}, None),
]  # fmt: skip


@pytest.mark.parametrize(("mark", "train"), MARKS)
def test_marks_of_a_message_say_whether_it_is_trained(mark, train):
    assert read_messages([USER, {**ANSWER, **mark}])[1].train is train


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "not empty"),
        ("{", "not JSON"),
        ([3], "not an object"),
        ([{"role": "robot", "content": "x"}], "unknown role 'robot'"),
        ([{"role": "user", "content": None}], "has no content"),
        ([USER, {"role": "assistant", "content": None}], "has no content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "'image_url'; only text"),
        ([{"role": "user", "content": 3}], "content of type int"),
        ([USER, {**ANSWER, "train": "false"}], "train must be true or false"),
        ([USER, {**ANSWER, "weight": 0.5}], "must be 0 or 1"),
        ([{**USER, "train": True}, ANSWER], "only assistant turns"),
        ([USER, {"role": "tool", "content": "4"}, ANSWER], "no call before it"),
        (
            [USER, {"role": "assistant", "content": None, "tool_calls": CALLS}, {"role": "tool", "content": "4", "tool_call_id": "zz"}],
            "'zz'",
        ),
        ([USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}], "has no name"),
        ([USER, {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}], "must be an object"),
        ([USER, {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}], "not JSON"),
        ([{**USER, "tool_calls": CALLS}], "only an assistant can"),
    ],
)
def test_what_is_no_conversation_says_why(messages, reason):
    with pytest.raises(BadRow, match=reason):
        read_messages(messages)


def test_each_call_is_answered_once_by_id_in_any_order():
    two = [CALLS[0], {"id": "c2", "function": {"name": "sub", "arguments": {}}}]
    turn = {"role": "assistant", "content": None, "tool_calls": two}
    answers = [{"role": "tool", "content": "x", "tool_call_id": "c2"}, {"role": "tool", "content": "y", "tool_call_id": "c1"}]
    assert len(read_messages([USER, turn, *answers, ANSWER])) == 5
    with pytest.raises(BadRow, match="no call before it"):
        read_messages([USER, turn, *answers, {"role": "tool", "content": "z", "tool_call_id": "c1"}])


def test_results_of_calls_written_as_text_are_accepted():
    turn = {"role": "assistant", "content": '<tool_call>{"name": "add", "arguments": {}}</tool_call>'}
    assert len(read_messages([USER, turn, {"role": "tool", "content": "4"}, ANSWER])) == 4


def test_tools_as_list_as_json_string_and_without_wrapper_are_the_same():
    bare = [{"name": "add", "description": "Adds.", "parameters": SCHEMA}]
    wrapped = [{"type": "function", "function": bare[0]}]
    expected = (ToolSpec("add", "Adds.", SCHEMA),)
    assert read_tools(bare) == read_tools(wrapped) == read_tools(json.dumps(wrapped)) == expected
    assert read_tools(None) == read_tools([]) == read_tools("") == ()


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ("{", "not JSON"),
        ({"name": "add"}, "must be a list"),
        ([3], "/tools/0: a tool is an object"),
        ([{"description": "x"}], "/tools/0/name"),
        ([{"function": {"name": "add", "parameters": [1]}}], "/tools/0/function/parameters: must be a JSON Schema"),
        ([{"name": "add", "parameters": {"type": "dictionary"}}], "/tools/0/parameters/type: not a JSON Schema"),
    ],
)
def test_tools_that_are_no_schema_are_rejected_with_a_pointer(tools, reason):
    with pytest.raises(BadRow, match=reason):
        read_tools(tools)


def test_names_of_parameters_are_no_words_of_the_schema_language():
    """A parameter may be called `default`, `enum` or `type`, and its own schema is read like any other."""
    parameters = {
        "type": "dict",
        "properties": {"default": {"type": "float"}, "type": {"type": "dict", "properties": {}}, "enum": {"type": "tuple"}},
    }
    (tool,) = read_tools([{"name": "f", "parameters": parameters}])
    assert tool.parameters["properties"] == {
        "default": {"type": "number"},
        "type": {"type": "object", "properties": {}},
        "enum": {"type": "array"},
    }


def test_pythons_types_are_read_wherever_a_type_may_stand():
    parameters = {
        "type": "dict",
        "properties": {"a": {"type": ["str", "NoneType"]}, "b": {"type": ["any", "int"]}, "c": {"anyOf": [{"type": "int"}]}},
    }
    (tool,) = read_tools([{"name": "f", "parameters": parameters}])
    assert tool.parameters["properties"] == {"a": {"type": ["string", "null"]}, "b": {}, "c": {"anyOf": [{"type": "integer"}]}}
    data = {"type": "dict", "properties": {"a": {"enum": [{"type": "dict"}], "default": {"type": "dict"}}}}
    (tool,) = read_tools([{"name": "f", "parameters": data}])
    assert tool.parameters["properties"]["a"] == data["properties"]["a"]
