"""Formats found by column names, and the map that makes other rows fit."""

from __future__ import annotations

import pytest

from postgrad.chat import ChatFormat
from postgrad.data import mix, prepare_prompts, prepare_sft, rows_from
from postgrad.data.files import CHUNK_ROWS
from postgrad.errors import DataError, RecipeError
from postgrad.testing import tiny_tokenizer

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"messages": MESSAGES}, "messages"),
        ({"conversations": [], "tools": "[]"}, "sharegpt"),
        ({"conversations": MESSAGES, "chosen": {}, "rejected": {}}, "preference"),
        ({"chosen_messages": [], "rejected_messages": []}, "preference"),
        ({"prompt": "a", "completion": "b"}, "prompt+completion"),
        ({"prompt": "a", "completion": "b", "label": True}, "unpaired"),
        ({"messages": MESSAGES, "kto_tag": False}, "unpaired"),
        ({"prompt": "a", "completion": "b", "label": 3}, "prompt+completion"),
        ({"prompt": "a", "answer": "b"}, "prompt"),
        ({"prompt": "a", "label": 1}, "prompt"),
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca"),
        ({"question": "a", "answer": "b"}, "question+answer"),
        ({"question": "a", "function": []}, "question"),
        ({"text": "a"}, "text"),
        ({"input_ids": [1], "labels": [1]}, "tokens"),
        ({"prompt_ids": [1], "completion_ids": [1]}, "tokens"),
        ({"prompt": {"messages": []}, "rollouts": []}, "rollouts"),
    ],
)
def test_formats_are_found_by_column_names(row, format):
    assert rows_from([row]).format == format


def test_two_formats_in_one_file_are_an_error_with_counts_and_place():
    rows = rows_from([{"messages": MESSAGES}] * 3 + [{"prompt": "a"}] * 2, name="f")
    for read in (rows.read, lambda: prepare_prompts(rows, ChatFormat(tiny_tokenizer()))):
        with pytest.raises(DataError, match=r"two formats in one file: messages \(3 rows\) and prompt \(2 rows\)") as error:
            read()
        assert error.value.where == "f:4"


def test_in_a_mixture_the_file_with_two_formats_is_named_with_its_own_counts(monkeypatch):
    monkeypatch.setattr("postgrad.data.files.CHUNK_ROWS", 2)
    good, bad = rows_from([{"prompt": "a"}] * 5, name="good"), rows_from([{"prompt": "a"}, {"question": "b"}, {"text": "c"}], name="bad")
    for parts in ([good, bad], [bad, good]):
        with pytest.raises(
            DataError, match=r"3 formats in one file: prompt \(1 rows\) and question \(1 rows\) and text \(1 rows\)"
        ) as error:
            prepare_prompts(mix(parts), ChatFormat(tiny_tokenizer()))
        assert error.value.where == "bad:2"


def test_unknown_columns_are_listed_with_a_map_to_copy():
    with pytest.raises(DataError, match="columns found: input, output") as error:
        rows_from([{"input": "a", "output": "b"}])
    assert "{user: input, assistant: output}" in str(error.value.hint)


def test_a_misspelt_column_is_told_the_nearest_format():
    with pytest.raises(DataError, match="columns found: mesages; nearest format: messages"):
        rows_from([{"mesages": MESSAGES}])


def test_token_ids_without_text_are_refused_not_trained_as_a_whole():
    """Soup#1054: rows of ids without labels were trained on their prompts."""
    with pytest.raises(DataError) as error:
        rows_from([{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}])
    assert "which of them are the answer" in str(error.value.hint)


def test_half_a_pair_is_not_taken_for_a_conversation():
    with pytest.raises(DataError) as error:
        rows_from([{"conversations": MESSAGES, "chosen": {}}])
    assert "a pair needs both sides" in str(error.value.hint)


def test_roles_make_messages_and_empty_parts_are_left_out():
    columns = {"system": "persona", "user": ["instruction", "input"], "assistant": "output"}
    rows = rows_from(
        [
            {"instruction": "Add.", "input": "1 2", "output": "3", "persona": "kind", "id": 7},
            {"instruction": "Say hi.", "input": "", "output": "hi", "persona": None, "id": 8},
        ],
        columns=columns,
    )
    assert rows.format == "messages"
    assert rows.read()[0].fields == {
        "id": 7,
        "messages": [
            {"role": "system", "content": "kind"},
            {"role": "user", "content": "Add.\n\n1 2"},
            {"role": "assistant", "content": "3"},
        ],
    }
    assert rows.read()[1].fields["messages"][0] == {"role": "user", "content": "Say hi."}


def test_a_prompt_column_leaves_the_others_to_the_rewards():
    row = rows_from([{"question": "2+2?", "answer": "4"}], columns={"prompt": "question"}).read()[0]
    assert row.fields == {"prompt": "2+2?", "answer": "4"}


def test_roles_without_an_answer_make_a_prompt():
    rows = rows_from([{"q": "2+2?", "answer": "4"}], columns={"user": "q"})
    assert rows.format == "prompt"
    assert rows.read()[0].fields == {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"}


def test_all_mapped_columns_that_no_row_has_are_told_with_what_is_there():
    with pytest.raises(DataError) as error:
        rows_from([{"question": "a", "z": 1}], columns={"prompt": "qestion", "completion": "reply"}, name="r.jsonl")
    assert error.value.what == "no row has the column 'qestion' (mapped to prompt) and the column 'reply' (mapped to completion)"
    assert (error.value.where, error.value.hint) == ("r.jsonl", "did you mean question? found: question, z")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"promt": "q"}, "unknown field 'promt'"),
        ({"prompt": 3}, "takes a column name"),
        ({"prompt": []}, "takes a column name"),
        ({"prompt": "q", "user": "q"}, "mixes prompt/completion and roles"),
        ({"assistant": "a"}, "without a question"),
        ({"completion": "a"}, "without a question"),
        ({"prompt": "q", "chosen": "a"}, "a pair needs both sides"),
    ],
)
def test_a_map_that_means_nothing_is_a_recipe_error(columns, message):
    with pytest.raises(RecipeError, match=message):
        rows_from([{"q": "a", "a": "b"}], columns=columns)


def test_pairs_under_other_names_are_mapped():
    rows = rows_from(
        [{"query": "q", "better": "b", "worse": "w", "id": 1}], columns={"user": "query", "chosen": "better", "rejected": "worse"}
    )
    assert rows.format == "preference"
    assert rows.read()[0].fields == {"id": 1, "prompt": [{"role": "user", "content": "q"}], "chosen": "b", "rejected": "w"}


def test_a_map_takes_away_columns_that_would_make_another_format():
    rows = rows_from([{"q": "one", "a": "two", "messages": MESSAGES, "chosen": "x"}], columns={"prompt": "q", "completion": "a"})
    assert rows.format == "prompt+completion"
    assert rows.read()[0].fields == {"prompt": "one", "completion": "two"}


def test_a_mapped_column_that_only_later_rows_have_is_found():
    rows = [{"q": "a", "a": "b"}] * (CHUNK_ROWS + 1) + [{"q": "a", "a": "b", "about": "Be brief."}]
    data = prepare_sft(
        rows_from(rows, columns={"user": "q", "assistant": "a", "system": "about"}), ChatFormat(tiny_tokenizer()), max_length=99
    )
    assert len(data.rows[-1].token_ids) > len(data.rows[0].token_ids)
