"""Rows that are token ids already: what is trained stands beside them, and nothing is guessed."""

from __future__ import annotations

import pytest

from postgrad.chat import ChatFormat
from postgrad.data import prepare_sft, rows_from
from postgrad.errors import DataError
from postgrad.testing import tiny_tokenizer

CHAT = ChatFormat(tiny_tokenizer())
A, B, C = 60, 61, 62
END = 2


def prepare(*rows, max_bad=0, **options):
    return prepare_sft(rows_from(rows, max_bad=max_bad), CHAT, **{"max_length": 64, **options})


SHAPES = {
    "labels": {"input_ids": [A, B, C, END], "labels": [-100, -100, C, END]},
    "completion mask": {"input_ids": [A, B, C, END], "completion_mask": [0, 0, 1, 1]},
    "assistant masks": {"input_ids": [A, B, C, END], "assistant_masks": [0, 0, 1, 1]},
    "loss mask": {"input_ids": [A, B, C, END], "loss_mask": [False, False, True, True]},
    "two lists": {"prompt_ids": [A, B], "completion_ids": [C, END]},
    "right padding": {"input_ids": [A, B, C, END, END], "labels": [-100, -100, C, END, -100], "attention_mask": [1, 1, 1, 1, 0]},
    "left padding": {"input_ids": [END, END, A, B, C, END], "completion_mask": [0, 0, 0, 0, 1, 1], "attention_mask": [0, 0, 1, 1, 1, 1]},
    "null labels beside a mask": {"input_ids": [A, B, C, END], "labels": None, "completion_mask": [0, 0, 1, 1]},
}  # fmt: skip


@pytest.mark.parametrize("row", SHAPES.values(), ids=list(SHAPES))
def test_every_shape_gives_the_same_row(row):
    """trl#976, trl#1191: padding is known by the attention mask, never by its id, which is the end token's here."""
    data = prepare(row)
    assert data.rows[0].token_ids == (A, B, C, END)
    assert data.rows[0].trained == (False, False, True, True)
    assert (data.report.answers, data.report.ends) == (1, 1)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [A, B], "labels": [A]}, "2 input_ids but 1 labels"),
        ({"input_ids": [A, B, C], "labels": [B, C, -100]}, r"labels\[0\] is 61; .*labels are not shifted"),
        ({"input_ids": [A, B], "labels": [-100, 0]}, r"labels\[1\] is 0"),
        ({"input_ids": [A, B], "completion_mask": [1]}, "completion_mask must hold one 0 or 1 for each of the 2 ids"),
        ({"input_ids": [A, B], "completion_mask": [0, 2]}, "completion_mask must hold"),
        ({"input_ids": [A, B], "labels": [A, B], "attention_mask": [1]}, "attention_mask must hold"),
        ({"input_ids": [A, 100_000], "labels": [-100, 100_000]}, "the id 100000 is outside the tokenizer's 26[0-9] ids"),
        ({"input_ids": [A, -1], "labels": [-100, -1]}, "the id -1 is outside"),
        ({"input_ids": "ab", "labels": [1, 2]}, "input_ids must be a list of whole numbers"),
        ({"input_ids": [1.5], "labels": [1]}, "whole numbers"),
        ({"input_ids": [], "labels": []}, "no tokens"),
        ({"input_ids": [A, B], "labels": None}, "neither labels nor a mask"),
    ],
)
def test_ids_that_cannot_be_trusted_are_a_rejected_row(row, reason):
    """Soup#1054: a row without labels was trained as a whole."""
    with pytest.raises(DataError, match=reason) as error:
        prepare(SHAPES["labels"], row)
    assert error.value.where == "rows:2"
    assert prepare(SHAPES["labels"], row, max_bad=1).report.dropped == {"rejected": 1}


def test_ids_without_labels_name_the_columns_that_are_missing():
    with pytest.raises(DataError) as error:
        rows_from([{"input_ids": [1, 2, 3]}])
    assert "labels" in str(error.value.hint)


def test_a_row_whose_labels_are_all_ignored_is_dropped_and_counted():
    """trl#6668, trl#1053: such a row would give a loss of 0 or NaN."""
    nothing = {"input_ids": [A, B], "labels": [-100, -100]}
    report = prepare(nothing, SHAPES["labels"]).report
    assert report.dropped == {"nothing marked for training": 1}
    with pytest.raises(DataError, match="no row is left to train on: 2 nothing marked for training of 2"):
        prepare(nothing, nothing)


def test_a_first_token_that_is_marked_is_context_because_nothing_precedes_it():
    assert prepare({"input_ids": [A, B, END], "labels": [A, B, END]}).rows[0].trained == (False, True, True)


def test_answers_that_somebody_else_left_without_end_token_are_refused():
    """axolotl#3754: a model trained on them would never stop."""
    with pytest.raises(DataError, match="1 rows have a trained answer without an end token") as error:
        prepare(SHAPES["labels"], {"input_ids": [A, B, C], "labels": [-100, B, C]})
    assert error.value.where == "rows:2"
    two_turns = {"input_ids": [A, B, A, C, END], "labels": [-100, B, -100, C, END]}
    with pytest.raises(DataError, match="without an end token"):
        prepare(two_turns)


def test_two_beginning_tokens_are_a_finding():
    """OpenRLHF#393."""
    row = {"input_ids": [1, 1, A, END], "labels": [-100, -100, A, END]}
    findings = {finding.id: finding for finding in prepare(row, SHAPES["labels"]).report.findings}
    assert findings["double_bos"].count == 1
    assert findings["double_bos"].rows == ("rows:1",)
    assert "double_bos" not in {finding.id for finding in prepare({"input_ids": [1, A, END], "labels": [-100, A, END]}).report.findings}
