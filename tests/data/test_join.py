"""Answers in a file of their own: joined by a column, counted, never guessed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from postgrad.chat import ChatFormat
from postgrad.data import Reading, Work, audit, load_rows, prepare_prompts, prepare_sft
from postgrad.data.audit import Finding
from postgrad.data.cache import Cache
from postgrad.data.join import Join
from postgrad.errors import DataError
from postgrad.testing import tiny_tokenizer

FUNCTION = {
    "name": "area",
    "description": "Area.",
    "parameters": {
        "type": "dict",
        "properties": {
            "base": {"type": "float"},
            "corners": {"type": "tuple", "items": {"type": "integer"}},
            "unit": {"type": "string"},
            "what": {"type": "any"},
        },
        "required": ["base"],
    },
}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat(tiny_tokenizer())


def question(number: int) -> dict[str, Any]:
    return {"id": f"q{number}", "question": [[{"role": "user", "content": f"Area of {number}?"}]], "function": [FUNCTION]}


def answer(number: int) -> dict[str, Any]:
    return {"id": f"q{number}", "ground_truth": [{"area": {"base": [number, float(number)], "unit": ["cm", ""]}}]}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Join]:
    """Questions, and their answers in another order, with one too many."""
    questions = write(tmp_path / "questions.jsonl", [question(number) for number in range(5)])
    answers = write(tmp_path / "answers.jsonl", [answer(number) for number in (4, 2, 0, 1, 3, 7)])
    return questions, Join(answers, "id")


def test_questions_get_their_answers_by_id_and_are_prompts_with_gold_calls(files, chat):
    rows = load_rows(files[0], join=files[1])
    assert rows.format == "question+calls"
    data = prepare_prompts(rows, chat)
    assert len(data.prompts) == 5
    for number, prompt in enumerate(data.prompts):
        assert [message.content for message in prompt.messages] == [f"Area of {number}?"]
        assert prompt.columns["tool_calls"] == prompt.columns["ground_truth"] == answer(number)["ground_truth"]
        assert (prompt.columns["id"], prompt.tools[0].name) == (f"q{number}", "area")


def test_their_gold_calls_are_answers_to_train_on(files, chat):
    data = prepare_sft(load_rows(files[0], join=files[1]), chat, max_length=2000)
    trained = [chat.decode([token for token, flag in zip(row.token_ids, row.trained, strict=True) if flag]) for row in data.rows]
    assert trained == [f'<tool_call>{{"name": "area", "arguments": {{"base": {number}}}}}</tool_call>' for number in range(5)]


def test_pythons_types_in_the_schemas_become_jsons_and_are_told(files, chat):
    rows = load_rows(files[0], join=files[1])
    (prompt, *_) = prepare_prompts(rows, chat).prompts
    assert prompt.tools[0].parameters == {
        "type": "object",
        "properties": {
            "base": {"type": "number"},
            "corners": {"type": "array", "items": {"type": "integer"}},
            "unit": {"type": "string"},
            "what": {},
        },
        "required": ["base"],
    }
    found: dict[str, Finding] = {finding.id: finding for finding in audit(rows, chat, Reading(method="grpo")).findings}
    assert found["schema_types"].count == 5
    assert "(any, dict, float, tuple in the first)" in found["schema_types"].message
    assert found["row_tools"].count == 5


def test_who_joins_is_told_so(files, chat):
    lines = prepare_prompts(load_rows(files[0], join=files[1]), chat).report.lines()
    assert any("each row has the columns of the row of answers.jsonl with the same id" in line for line in lines)


def test_a_column_that_the_map_names_may_come_from_the_other_file(tmp_path, chat):
    questions = write(tmp_path / "q.jsonl", [{"key": 1, "query": "hi"}, {"key": 2, "query": "ho"}])
    answers = write(tmp_path / "a.jsonl", [{"key": 2, "reply": "HO"}, {"key": 1, "reply": "HI"}])
    rows = load_rows(questions, columns={"prompt": "query", "completion": "reply"}, join=Join(answers, "key"))
    assert [row.fields["completion"] for row in rows.read()] == ["HI", "HO"]


def test_the_held_out_share_is_the_same_with_and_without_answers(files):
    def heldout(**options: Any) -> list[str]:
        return [row.fields["id"] for row in load_rows(files[0], **options).split_off(0.5, 1)[1].read()]

    assert heldout() == heldout(join=files[1])
    assert 0 < len(heldout()) < 5


def test_helper_processes_join_too(files, chat):
    rows = load_rows(files[0], join=files[1])
    alone, helped = (prepare_prompts(rows, chat, work=Work(helpers=count)).prompts for count in (0, 1))
    assert alone == helped
    assert pickle.loads(pickle.dumps(files[1])) == files[1]


def test_a_question_without_an_answer_is_rejected_and_named(tmp_path, files):
    write(tmp_path / "answers.jsonl", [answer(number) for number in (0, 1, 3, 4)])
    with pytest.raises(DataError, match=r"answers.jsonl has no row with id = 'q2' \(1 row rejected") as error:
        load_rows(files[0], join=files[1]).read()
    assert error.value.where == "questions.jsonl:3"
    assert len(load_rows(files[0], join=files[1], max_bad=1).read()) == 4


@pytest.mark.parametrize(
    ("rows", "what", "where"),
    [
        ([answer(0), answer(0)], "a second row has id = 'q0'", "answers.jsonl:2"),
        ([{"ground_truth": []}], "the row has no 'id'", "answers.jsonl:1"),
        ([{"id": None}], "the row has no 'id'", "answers.jsonl:1"),
        ([answer(0), "{"], "broken JSON", "answers.jsonl:2"),
    ],
)
def test_a_file_of_answers_that_cannot_be_joined_is_an_error(tmp_path, files, rows, what, where):
    write(tmp_path / "answers.jsonl", rows)
    with pytest.raises(DataError, match=what) as error:
        load_rows(files[0], join=files[1])
    assert error.value.where == where


def test_a_file_of_answers_that_is_not_there(files):
    with pytest.raises(DataError, match="no such file") as error:
        load_rows(files[0], join=Join(Path("nowhere.jsonl"), "id"))
    assert error.value.hint == "check data.join.file"
    with pytest.raises(DataError, match="no such file") as error:
        load_rows(files[0], join=Join(files[1].path.with_name("answer.jsonl"), "id"))
    assert error.value.hint == f"did you mean {files[1].path}?"


def test_a_column_that_no_answer_has_is_refused_with_the_nearest(files):
    with pytest.raises(DataError, match="the row has no 'idd'") as error:
        Join(files[1].path, "idd").table()
    assert error.value.hint == "did you mean id?"


def test_a_question_without_the_column_and_a_contradiction_are_rejected(tmp_path):
    questions = write(
        tmp_path / "q.jsonl", [{"id": 1, "question": "a", "level": 2}, {"question": "b"}, {"id": 3, "question": "c", "level": 1}]
    )
    answers = write(tmp_path / "a.jsonl", [{"id": 1, "level": 3, "answer": "x"}, {"id": 3, "level": 1, "answer": "y"}])
    with pytest.raises(DataError, match="2 rows rejected") as error:
        load_rows(questions, join=Join(answers, "id")).read()
    assert error.value.where == "q.jsonl:1"
    assert "the column 'level' has another value in a.jsonl" in error.value.what
    (row,) = load_rows(questions, join=Join(answers, "id"), max_bad=2).read()
    assert row.fields["answer"] == "y"


def test_tokens_are_made_anew_when_the_answers_change(tmp_path, files, chat):
    cache = Cache(tmp_path / "cache", min_bytes=1)

    def trained() -> list[str]:
        rows = prepare_sft(load_rows(files[0], join=files[1]), chat, max_length=2000, cache=cache).rows
        return [chat.decode(row.token_ids) for row in rows]

    before = trained()
    assert trained() == before
    write(tmp_path / "answers.jsonl", [answer(number) | {"ground_truth": [{"area": {"base": [9]}}]} for number in range(5)])
    assert all('{"base": 9}' in text for text in trained())


def test_no_call_at_all_is_gold_for_a_reward_and_nothing_to_imitate(tmp_path, chat):
    rows = load_rows(write(tmp_path / "q.jsonl", [{"question": "hi", "tool_calls": []}]))
    assert rows.format == "question+calls"
    assert prepare_prompts(rows, chat).prompts[0].columns["tool_calls"] == []
    with pytest.raises(DataError, match="the right answer is no call at all"):
        prepare_sft(rows, chat, max_length=2000)


@pytest.mark.parametrize("gold", [None, "42", 7, [1]])
def test_a_ground_truth_that_is_no_call_is_a_column_like_any_other(tmp_path, gold):
    rows = load_rows(write(tmp_path / "q.jsonl", [{"question": "6 * 7?", "ground_truth": gold}]))
    assert rows.format == "question"
