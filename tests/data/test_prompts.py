"""Prompts for reinforcement learning: what the model reads, what the rewards get, never a silent cut."""

from __future__ import annotations

import pytest

from postgrad.chat import ChatFormat
from postgrad.data import prepare_prompts, rows_from
from postgrad.errors import DataError
from postgrad.testing import tiny_tokenizer
from postgrad.types import Message, ToolSpec

CHAT = ChatFormat(tiny_tokenizer())
RAW = ChatFormat(tiny_tokenizer(None))


def prepare(*rows, chat=CHAT, columns=None, max_bad=0, **options):
    return prepare_prompts(rows_from(rows, columns=columns, max_bad=max_bad), chat, **options)


def test_a_text_prompt_becomes_a_user_message_and_the_other_columns_go_to_the_rewards():
    data = prepare({"question": "2+2?", "answer": "4", "level": 1}, columns={"prompt": "question"})
    prompt = data.prompts[0]
    assert prompt.messages == (Message("user", "2+2?"),)
    assert prompt.columns == {"answer": "4", "level": 1}
    assert prompt.raw_text is None
    assert prompt.row == "rows:1"
    assert any("1 text prompts became user messages" in note for note in data.report.notes)


def test_a_text_prompt_stays_raw_when_asked_or_without_template():
    for data in (prepare({"prompt": "Q:"}, text_prompts="raw"), prepare({"prompt": "Q:"}, chat=RAW)):
        assert data.prompts[0].raw_text == "Q:"
        assert data.prompts[0].messages == ()
        assert data.report.tokens == 2
        assert any("raw text" in note for note in data.report.notes)


def test_messages_are_kept_and_answers_at_their_end_left_out_with_a_note():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = prepare({"messages": messages, "answer": 1})
    assert data.prompts[0].messages == (Message("user", "a"),)
    assert data.prompts[0].columns == {"answer": 1}
    assert any("end in an assistant turn" in note for note in data.report.notes)
    assert prepare({"prompt": messages[:1]}).prompts[0].messages == (Message("user", "a"),)


def test_the_system_message_is_put_before_prompts_that_have_none():
    own = {"prompt": [{"role": "system", "content": "mine"}, {"role": "user", "content": "a"}]}
    data = prepare({"prompt": "a"}, system="Be brief.")
    assert data.prompts[0].messages == (Message("system", "Be brief."), Message("user", "a"))
    assert prepare(own, system="Be brief.").prompts[0].messages[0] == Message("system", "mine")


def test_a_long_prompt_is_dropped_and_counted_never_cut():
    data = prepare({"prompt": "a"}, {"prompt": "a" * 100}, max_prompt_tokens=50)
    assert [prompt.row for prompt in data.prompts] == ["rows:1"]
    assert data.report.dropped == {"too_long": 1}
    assert data.report.rows == data.report.kept + 1
    with pytest.raises(DataError, match="the limit is 50") as error:
        prepare({"prompt": "a"}, {"prompt": "a" * 100}, max_prompt_tokens=50, overlong="error")
    assert error.value.where == "rows:2"


def test_tools_and_system_message_count_towards_the_length():
    tool = ToolSpec("add", "Adds.", {"type": "object", "properties": {}})
    alone = prepare({"prompt": "a"}).report.tokens
    assert prepare({"prompt": "a"}, tools=[tool]).report.tokens > alone
    assert prepare({"prompt": "a"}, system="x").report.tokens > alone
    with pytest.raises(DataError, match="1 of 1 rows are longer than max_length"):
        prepare({"prompt": "a"}, tools=[tool], max_prompt_tokens=alone)


def test_a_prompt_that_fits_exactly_is_kept():
    length = prepare({"prompt": "a"}).report.tokens
    assert prepare({"prompt": "a"}, max_prompt_tokens=length).report.kept == 1


@pytest.mark.parametrize("prompt", ["", "  ", None, [], [{"role": "assistant", "content": "x"}], [{"role": "user", "content": None}]])
def test_an_unusable_prompt_is_a_rejected_row(prompt):
    with pytest.raises(DataError) as error:
        prepare({"prompt": "a"}, {"prompt": prompt})
    assert error.value.where == "rows:2"
    assert prepare({"prompt": "a"}, {"prompt": prompt}, max_bad=1).report.dropped == {"rejected": 1}


def test_a_raw_prompt_takes_no_system_message():
    with pytest.raises(DataError, match="needs a chat template"):
        prepare({"prompt": "a"}, chat=RAW, system="x")


def test_columns_of_the_answer_are_kept_for_the_rewards():
    assert prepare({"prompt": "a", "completion": "b"}).prompts[0].columns == {"completion": "b"}
