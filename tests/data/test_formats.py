"""The formats people have: equal conversations, however they are written, give equal rows."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from postgrad.chat import ChatFormat
from postgrad.data import prepare_prompts, prepare_sft, rows_from
from postgrad.data.formats import _TESTS, Format, detect
from postgrad.errors import DataError
from postgrad.testing import tiny_tokenizer
from postgrad.types import Message, ToolSpec

TOKENIZER = tiny_tokenizer()
CHAT = ChatFormat(TOKENIZER)


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def sft(*rows, chat=CHAT, max_bad=0, **options):
    return prepare_sft(rows_from(rows, max_bad=max_bad), chat, **{"max_length": 4096, **options})


def shown(data, index=0):
    row = data.rows[index]
    trained = [token for token, flag in zip(row.token_ids, row.trained, strict=True) if flag]
    return TOKENIZER.decode(list(row.token_ids)), TOKENIZER.decode(trained)


# ---- one question and its answer

ONE_TURN = {
    "messages": {"messages": [user("one"), answer("two")]},
    "messages as JSON text": {"messages": json.dumps([user("one"), answer("two")])},
    "sharegpt": {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]},
    "sharegpt with nulls of Arrow": {"conversations": [{"from": "human", "value": "one", "role": None, "content": None},
                                                       {"from": "gpt", "value": "two", "role": None, "content": None}]},
    "conversations with role and content": {"conversations": [user("one"), answer("two")]},
    "prompt and completion": {"prompt": "one", "completion": "two"},
    "prompt and completion as messages": {"prompt": [user("one")], "completion": [answer("two")]},
    "completion as one message": {"prompt": [user("one")], "completion": answer("two")},
    "alpaca": {"instruction": "one", "input": "", "output": "two"},
    "alpaca without input": {"instruction": "one", "output": "two"},
    "question and answer": {"question": "one", "answer": "two"},
    "nested question": {"question": [[user("one")]], "answer": "two"},
    "text parts": {"messages": [user([{"type": "text", "text": "one"}]), answer([{"type": "text", "value": "two"}])]},
}  # fmt: skip


@pytest.mark.parametrize("row", ONE_TURN.values(), ids=list(ONE_TURN))
def test_one_question_and_answer_in_every_shape_is_the_same_row(row):
    assert sft(row).rows == sft(ONE_TURN["messages"]).rows
    assert shown(sft(row)) == ("<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n", "two<|im_end|>")


def test_alpaca_joins_instruction_and_input_and_reads_history_as_context():
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "history": [["a", "b"]], "system": "kind"}
    whole, trained = shown(sft(row))
    turns = ["system\nkind", "user\na", "assistant\nb", "user\nAdd.\n\n1 2", "assistant\n3"]
    assert whole == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    assert trained == "3<|im_end|>"


@pytest.mark.parametrize("history", [[["a"]], [["a", "b", "c"]], "a", [3], [[None, "b"]]])
def test_an_alpaca_history_that_is_no_list_of_pairs_is_a_rejected_row(history):
    row = {"instruction": "Add.", "output": "3", "history": history}
    assert sft(ONE_TURN["alpaca"], row, max_bad=1).report.dropped == {"rejected": 1}


def test_a_system_column_is_the_system_message_of_rows_that_have_none():
    row = ONE_TURN["sharegpt"]
    assert shown(sft({**row, "system": "kind"}))[0].startswith("<|im_start|>system\nkind<|im_end|>\n<|im_start|>user\none")
    own = {"conversations": [{"from": "system", "value": "mine"}, *row["conversations"]]}
    assert "kind" not in shown(sft({**own, "system": "kind"}))[0]
    assert shown(sft({**row, "system": " "}))[0] == shown(sft(row))[0]


# ---- calls and tools

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}]
CALL = {"name": "add", "arguments": {"a": 2}}
TALK = {
    "tools": TOOLS,
    "messages": [user("one"), answer(None, tool_calls=[{"function": CALL}]), {"role": "tool", "content": "4"}, answer("four")],
}
CALLS = {
    "tools as JSON text": {**TALK, "tools": json.dumps(TOOLS)},
    "tools without wrapper": {**TALK, "tools": [TOOLS[0]["function"]]},
    "Python type names": {**TALK, "tools": [{"name": "add", "description": "Adds.", "parameters": {
        "type": "dict", "properties": {"a": {"type": "float"}}}}]},
    "arguments as JSON text": {**TALK, "messages": [
        user("one"), answer("", tool_calls=[{"function": {"name": "add", "arguments": '{"a": 2}'}}]), *TALK["messages"][2:]]},
    "arguments with the nulls of Arrow": {**TALK, "messages": [
        user("one"), answer(None, tool_calls=[{"function": {"name": "add", "arguments": {"a": 2, "unit": None}}}]), *TALK["messages"][2:]]},
    "sharegpt": {"tools": json.dumps(TOOLS), "conversations": [
        {"from": "human", "value": "one"}, {"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "four"}]},
    "a tool_call part": {**TALK, "messages": [
        user("one"), answer([{"type": "tool_call", "value": json.dumps(CALL)}]), {"role": "tool", "content": "4"}, answer("four")]},
    "a tool_use part": {**TALK, "messages": [
        user("one"), answer([{"type": "tool_use", "id": "", "name": "add", "input": {"a": 2}}]), *TALK["messages"][2:]]},
}  # fmt: skip


@pytest.mark.parametrize("row", CALLS.values(), ids=list(CALLS))
def test_a_conversation_with_a_call_in_every_shape_is_the_same_row(row):
    """ms-swift#10125, OpenRLHF#1228: no null reaches the template, and the tools are told."""
    assert sft(row).rows == sft(TALK).rows


def test_calls_are_trained_and_results_are_context():
    """SkyRL#1675."""
    whole, trained = shown(sft(TALK))
    assert "add(a: number)" in whole or "Adds." in whole
    assert trained == '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>four<|im_end|>'


def test_thinking_parts_are_reasoning_that_a_template_without_it_refuses_to_lose():
    row = {"messages": [user("one"), answer([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "two"}])]}
    with pytest.raises(DataError, match="would be lost") as error:
        sft(row)
    assert error.value.where == "rows:1"
    prints = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}{{ '(' + m.reasoning_content + ')' }}"
    prints += (
        "{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    assert shown(sft(row, chat=ChatFormat(tiny_tokenizer(prints))))[1] == "(hm)two<|im_end|>"


def test_a_function_column_is_no_tools_column_unless_it_stands_beside_a_question():
    assert shown(sft({"text": "def f(): ...", "function": "f"}))[1].startswith("ef f()")
    assert sft({**ONE_TURN["messages"], "function": "f"}).rows == sft(ONE_TURN["messages"]).rows


# ---- raw text


def test_a_text_row_trains_every_token_but_the_first_and_its_end():
    row = sft({"text": "the end"}).rows[0]
    assert row.token_ids == (*CHAT.encode("the end"), 2)
    assert row.trained == (False,) + (True,) * (len(row.token_ids) - 1)


@pytest.mark.parametrize("text", ["", " \n", None, 3])
def test_a_text_row_without_text_is_rejected(text):
    assert sft({"text": "a"}, {"text": text}, max_bad=1).report.dropped == {"rejected": 1}


def test_messages_without_a_template_name_the_built_in_ones():
    with pytest.raises(DataError, match="no chat template") as error:
        sft(ONE_TURN["messages"], chat=ChatFormat(tiny_tokenizer(None)))
    assert "chatml" in str(error.value.hint)


def test_a_special_token_that_a_user_typed_stays_text_and_is_noted():
    data = sft({"prompt": "a<|im_end|>b", "completion": "c"})
    assert data.rows[0].token_ids.count(2) == 2
    assert shown(data)[1] == "c<|im_end|>"
    assert [finding.count for finding in data.report.findings if finding.id == "special_text"] == [1]


@pytest.mark.parametrize(
    "messages",
    [[answer("hello"), user("one"), answer("two")], [user("one"), answer("two"), answer("more")]],
)
def test_an_answer_first_and_two_in_a_row_are_trained_where_the_template_allows_it(messages):
    data = sft({"messages": messages})
    assert shown(data)[1] == "".join(f"{item['content']}<|im_end|>" for item in messages if item["role"] == "assistant")


# ---- prompts for reinforcement learning

PROMPTS = {
    "prompt": {"prompt": "one", "answer": "two"},
    "messages": {"messages": [user("one")], "answer": "two"},
    "messages with a label": {"messages": [user("one")], "label": 1},
    "conversation with its answer": {"messages": [user("one"), answer("two")]},
    "sharegpt": {"conversations": [{"from": "human", "value": "one"}]},
    "prompt and completion": {"prompt": "one", "completion": "two"},
    "prompt, completion and label": {"prompt": "one", "completion": "two", "label": True},
    "alpaca": {"instruction": "one", "input": "", "output": "two"},
    "question": {"question": "one"},
    "question and answer": {"question": "one", "answer": "two"},
    "nested question": {"question": [[user("one")]]},
}


@pytest.mark.parametrize("row", PROMPTS.values(), ids=list(PROMPTS))
def test_a_prompt_in_every_shape_is_the_same_and_the_other_columns_are_kept(row):
    prompt = prepare_prompts(rows_from([row]), CHAT).prompts[0]
    assert prompt.messages == (Message("user", "one"),)
    used = {"prompt", "messages", "conversations", "question", "instruction", "input"}
    assert prompt.columns == {name: value for name, value in row.items() if name not in used}


def test_a_benchmark_row_brings_its_function_as_a_tool():
    row = {"id": "0", "question": [[user("one")]], "function": [{"name": "add", "description": "Adds.", "parameters": {
        "type": "dict", "properties": {"a": {"type": "float"}, "b": {"type": "any"}}, "required": ["a"]}}]}  # fmt: skip
    prompt = prepare_prompts(rows_from([row]), CHAT).prompts[0]
    properties = {"a": {"type": "number"}, "b": {}}
    assert prompt.tools == (ToolSpec("add", "Adds.", {"type": "object", "properties": properties, "required": ["a"]}),)
    assert prompt.columns["id"] == "0"


def test_a_row_that_fits_two_formats_has_the_one_that_is_listed_first():
    fields = {"prompt": "a", "instruction": "b", "output": "c", "text": "d"}
    assert detect(fields) == "prompt"
    assert detect(fields | {"completion": "e"}) == "prompt+completion"
    assert tuple(_TESTS) == get_args(Format)
