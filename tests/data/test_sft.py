"""Which tokens are trained, and what becomes of every row."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.chat import ChatFormat
from postgrad.data import load_rows, prepare_sft, rows_from
from postgrad.errors import DataError
from postgrad.testing import CHATML, tiny_tokenizer
from postgrad.types import ToolSpec

TOKENIZER = tiny_tokenizer()
CHAT = ChatFormat(TOKENIZER)
END = 2

THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def answer(text, **marks):
    return {"role": "assistant", "content": text, **marks}


TWO_TURNS = [user("one"), answer("two"), user("three"), answer("four")]


def prepare(*conversations, chat=CHAT, **options):
    rows = rows_from([{"messages": list(messages)} for messages in conversations])
    return prepare_sft(rows, chat, **{"max_length": 1024, **options})


def trained_text(data, index=0):
    row = data.rows[index]
    return TOKENIZER.decode([token for token, flag in zip(row.token_ids, row.trained, strict=True) if flag])


# ---- which tokens


def test_every_finished_answer_ends_with_a_trained_end_token_although_pad_is_the_same_id():
    """trl#1623, trl#976: the end token is also the padding id and stands untrained at the end of every user turn."""
    data = prepare(TWO_TURNS)
    assert trained_text(data) == "two<|im_end|>four<|im_end|>"
    ends = [flag for token, flag in zip(data.rows[0].token_ids, data.rows[0].trained, strict=True) if token == END]
    assert ends == [False, True, False, True]


@given(st.lists(st.text(min_size=1, max_size=8).filter(str.strip), min_size=2, max_size=6))
def test_trained_end_tokens_are_as_many_as_answers(texts):
    """Megatron-Bridge#4265."""
    messages = [user(text) if index % 2 == 0 else answer(text) for index, text in enumerate(texts)]
    data = prepare(messages)
    row = data.rows[0]
    trained_ends = sum(flag for token, flag in zip(row.token_ids, row.trained, strict=True) if token == END)
    assert trained_ends == len(texts) // 2
    assert trained_text(data) == "".join(f"{text}<|im_end|>" for text in texts[1::2])


def test_last_trains_the_last_turn_and_no_earlier_end_token():
    """LlamaFactory#10827."""
    assert trained_text(prepare(TWO_TURNS, train_on="last")) == "four<|im_end|>"


def test_all_trains_everything_but_the_first_token():
    row = prepare(TWO_TURNS, train_on="all").rows[0]
    assert row.trained == (False,) + (True,) * (len(row.token_ids) - 1)


def test_all_cannot_leave_out_a_message_whose_span_is_unknown():
    with pytest.raises(DataError, match="train_on: all cannot leave out"):
        prepare([{**user("one"), "weight": 0}, answer("two")], train_on="all")
    kept = prepare([user("one"), answer("two", weight=0)], train_on="all")
    assert trained_text(kept) == "user\none<|im_end|>\n"


def test_the_first_answer_token_is_trained_directly_after_the_prompt():
    """verl#3287, alpaca-lora#306."""
    data = prepare([user("one"), answer("two")])
    prompt = TOKENIZER.apply_chat_template([user("one")], add_generation_prompt=True)["input_ids"]
    row = data.rows[0]
    assert list(row.token_ids[: len(prompt)]) == prompt
    assert row.trained.index(True) == len(prompt)


def test_ids_are_those_of_the_tokenizer_on_the_whole_conversation():
    whole = TOKENIZER.apply_chat_template(TWO_TURNS)["input_ids"]
    assert list(prepare(TWO_TURNS).rows[0].token_ids) == whole


def test_sources_name_header_and_newline_as_glue():
    """SkyRL#710: neither the header nor the newline after the end token is trained."""
    data = prepare([user("one"), answer("two")])
    glue = [token for token, source in zip(data.rows[0].token_ids, data.sources[0], strict=True) if source == "glue"]
    assert TOKENIZER.decode(glue) == "<|im_start|>assistant\n\n"
    assert all(source == "assistant" for source, flag in zip(data.sources[0], data.rows[0].trained, strict=True) if flag)


def test_a_message_can_be_left_out_of_training():
    data = prepare([user("one"), answer("two", train=False), user("three"), answer("four")])
    assert trained_text(data) == "four<|im_end|>"
    zero = prepare([user("one"), answer("two"), user("three"), answer("four", loss_weight=0.0)])
    assert trained_text(zero) == "two<|im_end|>"


def test_a_message_can_be_trained_although_the_recipe_says_last():
    assert trained_text(prepare([user("one"), answer("two", train=True), *TWO_TURNS[2:]], train_on="last")) == "two<|im_end|>four<|im_end|>"


def test_a_conversation_with_nothing_marked_is_dropped_and_counted():
    data = prepare(TWO_TURNS, [user("one"), answer("two", train=False)])
    assert data.report.dropped == {"nothing marked for training": 1}
    assert data.report.kept == 1


def test_tool_turns_are_context_and_calls_are_trained():
    """SkyRL#1675: rows with tool messages were dropped."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}]}
    data = prepare([user("one"), call, {"role": "tool", "content": "SECRET", "tool_call_id": "c"}, answer("four")])
    assert trained_text(data) == '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>four<|im_end|>'
    assert "SECRET" in TOKENIZER.decode(data.rows[0].token_ids)


def test_tools_of_a_row_are_rendered_and_those_of_the_run_where_the_row_has_none():
    """OpenRLHF#1228: the tools column was dropped before rendering."""
    tool = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
    rows = rows_from([{"messages": TWO_TURNS, "tools": json.dumps([tool])}, {"messages": TWO_TURNS, "tools": None}])
    data = prepare_sft(rows, CHAT, max_length=1024, tools=[ToolSpec("sub", "Subtracts.", {"type": "object", "properties": {}})])
    assert "add(): Adds." in TOKENIZER.decode(data.rows[0].token_ids)
    assert "sub(): Subtracts." in TOKENIZER.decode(data.rows[1].token_ids)


# ---- prompt and completion


def test_text_prompts_become_messages_of_the_template_and_the_report_says_so():
    data = prepare_sft(rows_from([{"prompt": "one", "completion": "two"}]), CHAT, max_length=99)
    assert data.rows == prepare([user("one"), answer("two")]).rows
    assert any("1 text prompts became user messages" in note for note in data.report.notes)


def test_prompt_and_completion_may_be_messages_and_earlier_answers_are_context():
    row = {"prompt": [user("one"), answer("two"), user("three")], "completion": [answer("four")]}
    data = prepare_sft(rows_from([row]), CHAT, max_length=99)
    assert trained_text(data) == "four<|im_end|>"
    assert data.rows[0].token_ids == prepare(TWO_TURNS).rows[0].token_ids


@pytest.mark.parametrize("chat", [CHAT, ChatFormat(tiny_tokenizer(None))])
def test_raw_text_is_prompt_then_answer_then_end_token(chat):
    data = prepare_sft(rows_from([{"prompt": "Q t", "completion": "he 4"}]), chat, max_length=99, text_prompts="raw")
    row = data.rows[0]
    assert row.token_ids == (*chat.encode("Q t"), *chat.encode("he 4"), END)  # "the" is one token of this tokenizer when encoded at once
    assert chat.merges_at("Q t", "he 4")
    assert trained_text(data) == "he 4<|im_end|>"


def test_raw_text_with_an_empty_prompt_never_trains_a_token_without_context():
    row = rows_from([{"prompt": "", "completion": "ab"}])
    data = prepare_sft(row, ChatFormat(tiny_tokenizer(None)), max_length=99)
    assert data.rows[0].trained == (False, True, True)


# ---- over-long rows


SHORT, LONG = [user("q"), answer("a")], [user("q"), answer("a" * 200)]


def test_a_limit_that_does_not_bind_changes_nothing():
    """torchtune#2792."""
    length = len(prepare(TWO_TURNS).rows[0].token_ids)
    for overlong in ("drop", "cut", "error"):
        assert prepare(TWO_TURNS, max_length=length, overlong=overlong).rows == prepare(TWO_TURNS).rows


def test_drop_counts_the_long_row_and_names_the_kept_one():
    data = prepare(LONG, SHORT, max_length=60, overlong="drop")
    assert data.row_names == ["rows:2"]
    assert data.report.dropped == {"too_long": 1}
    assert (data.report.rows, data.report.kept, data.report.cut) == (2, 1, 0)


def test_truncated_answer_is_never_given_an_end_token():
    """transformers#19742."""
    data = prepare(LONG, max_length=60, overlong="cut")
    row, whole = data.rows[0], prepare(LONG).rows[0]
    assert row.token_ids == whole.token_ids[:60]
    assert row.trained == whole.trained[:60]
    assert row.trained[-1]
    assert row.token_ids[-1] != END
    assert data.report.cut == 1
    assert any("a cut answer has no end token" in note for note in data.report.notes)


def test_a_cut_that_leaves_no_answer_token_is_a_drop():
    prompt = len(TOKENIZER.apply_chat_template([user("q")], add_generation_prompt=True)["input_ids"])
    data = prepare(LONG, LONG, SHORT, max_length=prompt + 3, overlong="cut")
    assert data.report.cut == 2
    longer = prepare([user("q" * 100), answer("a")], SHORT, max_length=60, overlong="cut")
    assert longer.report.dropped == {"too_long": 1}


def test_error_names_the_row():
    with pytest.raises(DataError, match="max_length is 60") as error:
        prepare(SHORT, LONG, max_length=60, overlong="error")
    assert error.value.where == "rows:2"


def test_nothing_trainable_says_how_many_rows_and_what_the_shortest_needs():
    conversations = [SHORT] * 64
    needs = len(prepare(SHORT).rows[0].token_ids)
    with pytest.raises(
        DataError, match=rf"64 of 64 rows have no completion token inside max_length=16; the shortest needs {needs}"
    ) as error:
        prepare(*conversations, max_length=16)
    assert str(needs) in str(error.value.hint)
    assert prepare(*conversations, max_length=needs).report.kept == 64


def test_under_cut_the_shortest_needs_its_prompt_and_one_token():
    with pytest.raises(DataError) as error:
        prepare(*[SHORT] * 3, max_length=16, overlong="cut")
    needed = int(error.value.what.rsplit(" ", 1)[1])
    assert prepare(*[SHORT] * 3, max_length=needed, overlong="cut").rows[0].trained_tokens == 1
    with pytest.raises(
        DataError, match=rf"3 of 3 rows have no completion token inside max_length={needed - 1}; the shortest needs {needed}"
    ):
        prepare(*[SHORT] * 3, max_length=needed - 1, overlong="cut")


def test_mostly_cut_data_is_an_error():
    with pytest.raises(DataError, match="15 of 20 rows are cut"):
        prepare(*[LONG] * 15, *[SHORT] * 5, max_length=60, overlong="cut")


# ---- the report


def test_every_row_is_accounted_for():
    rows = [{"messages": conversation} for conversation in (TWO_TURNS, LONG, [user("no answer")])]
    data = prepare_sft(rows_from(rows, max_bad=1), CHAT, max_length=150)
    report = data.report
    assert report.rows == report.kept + sum(report.dropped.values()) == 3
    assert report.dropped == {"too_long": 1, "rejected": 1}
    assert report.trained_tokens == sum(row.trained_tokens for row in data.rows)
    assert report.tokens == sum(len(row.token_ids) for row in data.rows)
    assert report.rejected[0].name == "rows:3"


def test_the_summary_is_three_lines_with_every_count():
    rows = rows_from([{"prompt": "one", "completion": "two"}, {"prompt": "one", "completion": "x" * 300}], name="toy")
    lines = prepare_sft(rows, CHAT, max_length=100).report.lines()
    assert len(lines) == 3
    assert lines[0] == "data: toy, prompt+completion: 2 rows, 1 kept, 1 dropped (1 too_long)"
    assert "of which 4 trained" in lines[1]
    assert lines[2].startswith("found: ")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([user("one")], "no assistant turn"),
        ([user("one"), answer("")], "an assistant turn is empty"),
        ([user("one"), answer(None)], "has no content"),
        ([user("one"), {"role": "robot", "content": "x"}], "unknown role"),
    ],
)
def test_a_bad_row_stops_with_its_place_or_is_counted(messages, reason):
    with pytest.raises(DataError, match=reason) as error:
        prepare(TWO_TURNS, messages)
    assert error.value.where == "rows:2"
    rows = rows_from([{"messages": TWO_TURNS}, {"messages": messages}], max_bad=1)
    assert prepare_sft(rows, CHAT, max_length=99).report.dropped == {"rejected": 1}


def test_a_conversation_that_the_template_refuses_is_a_bad_row():
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHATML
    rows = rows_from([{"messages": [answer("a"), *TWO_TURNS]}, {"messages": TWO_TURNS}], max_bad=1)
    report = prepare_sft(rows, ChatFormat(tiny_tokenizer(strict)), max_length=999).report
    assert report.dropped == {"rejected": 1}
    assert "user first" in report.rejected[0].reason


def test_a_template_fault_stops_at_once_although_bad_rows_are_allowed():
    chat = ChatFormat(tiny_tokenizer(CHATML.replace("<|im_end|>", "")))
    with pytest.raises(DataError, match="no end token") as error:
        prepare_sft(rows_from([{"messages": TWO_TURNS}], max_bad=10), chat, max_length=999)
    assert error.value.where == "rows:1"


def test_rejected_lines_of_the_file_are_counted_too(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": TWO_TURNS}) + "\n{broken\n")
    report = prepare_sft(load_rows(path, max_bad=1), CHAT, max_length=999).report
    assert (report.rows, report.kept, report.dropped) == (2, 1, {"rejected": 1})


def test_prompts_without_answers_are_refused():
    with pytest.raises(DataError, match=r"sft needs .* and these are prompt rows") as error:
        prepare_sft(rows_from([{"prompt": "one"}]), CHAT, max_length=99)
    assert "{prompt: question, completion: answer}" in str(error.value.hint)


# ---- templates that rewrite earlier turns


def test_a_thinking_template_gives_one_row_per_turn_and_one_note():
    """trl#5213: every row of a thinking model warned, and its span was wrong."""
    chat = ChatFormat(tiny_tokenizer(THINKING))
    data = prepare(TWO_TURNS, TWO_TURNS, chat=chat)
    assert data.row_names == ["rows:1 message 1", "rows:1 message 3", "rows:2 message 1", "rows:2 message 3"]
    assert trained_text(data, 0) == "<think>\n\n</think>\ntwo<|im_end|>"
    assert trained_text(data, 1) == "<think>\n\n</think>\nfour<|im_end|>"
    assert data.report.kept == 2
    assert [note for note in data.report.notes if "one row per turn" in note] == [
        "2 conversations became one row per turn, because the template rewrites earlier turns"
    ]
    prompt = tiny_tokenizer(THINKING).apply_chat_template(TWO_TURNS[:3], add_generation_prompt=True)["input_ids"]
    assert list(data.rows[1].token_ids[: len(prompt)]) == prompt


def test_turns_that_are_too_long_in_a_kept_conversation_are_noted():
    chat = ChatFormat(tiny_tokenizer(THINKING))
    data = prepare([user("one"), answer("two"), user("q" * 200), answer("four")], chat=chat, max_length=120)
    assert data.row_names == ["rows:1 message 1"]
    assert any("1 single turns" in note for note in data.report.notes)
