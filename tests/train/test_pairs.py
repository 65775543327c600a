"""Pairs as training rows: what is scored, what is shared, and how a micro-batch's numbers become pairs again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from postgrad.chat import ChatFormat
from postgrad.data import Pair, prepare_preferences, rows_from
from postgrad.data.preferences import Answer
from postgrad.models.engine import LocalEngine
from postgrad.testing import ARCHITECTURES, tiny_model, tiny_tokenizer
from postgrad.train.pairs import answer_row, pair_rows, scored_row, sides_of, token_counts
from postgrad.types import Message


def answer(*ids: int) -> Answer:
    return Answer(ids, (True,) * len(ids))


PAIRS = (
    Pair("rows:1", (1, 50, 60), answer(70, 71, 2), answer(80, 2)),
    Pair("rows:2", (1, 51), answer(72), answer(81, 82, 83, 84, 85, 86, 2)),
    Pair("rows:3", (1, 52, 53, 54, 55), Answer((73, 9, 74, 2), (True, False, True, True)), answer(87)),
)


def textbook(model: Any, prompt: tuple[int, ...], side: Answer) -> list[float]:
    """log π of each scored token after everything before it."""
    ids = prompt + side.token_ids
    with torch.no_grad():
        table = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    start = len(prompt)
    return [table[start + at - 1, token].item() for at, token in enumerate(side.token_ids) if side.scored[at]]


# rows ------------------------------------------------------------------------------------------------------------------------------


def test_a_pair_is_two_rows_behind_one_prompt_chosen_first():
    rows = pair_rows(PAIRS[:2])
    assert [row.token_ids for row in rows] == [
        (1, 50, 60, 70, 71, 2),
        (1, 50, 60, 80, 2),
        (1, 51, 72),
        (1, 51, 81, 82, 83, 84, 85, 86, 2),
    ]
    assert [(row.group, row.shared_prefix) for row in rows] == [(0, 3), (0, 3), (1, 2), (1, 2)]
    assert [row.per_row["index"] for row in rows] == [0, 1, 2, 3]


def test_the_prompt_is_never_scored_and_other_turns_inside_an_answer_are_not_either():
    """OpenRLHF#235."""
    row = pair_rows(PAIRS)[4]
    assert row.trained == (False,) * 5 + (True, False, True, True)


def test_both_sides_read_the_prompt_that_inference_sees():
    """trl#2054, alignment-handbook#116: the header of the answer belongs to the prompt."""
    chat = ChatFormat(tiny_tokenizer())
    data = prepare_preferences(
        rows_from([{"prompt": "Q t ", "chosen": "he 1", "rejected": "h"}]), chat, max_length=100
    )  # the tokenizer has a merge "the"
    prompt = chat.prompt_ids([Message("user", "Q t ")])
    assert chat.decode_raw(prompt).endswith("<|im_start|>assistant\n")
    rows = pair_rows(data.pairs)
    for row in rows:
        assert row.token_ids[: row.shared_prefix] == prompt
        assert row.trained == (False,) * len(prompt) + (True,) * (len(row.token_ids) - len(prompt))


def test_the_references_numbers_stand_at_the_scored_tokens():
    reference = [[-1.0, -2.0, -3.0], [-4.0]]
    rows = pair_rows(PAIRS[2:], reference)
    assert rows[0].per_token["reference_logprobs"] == [0.0] * 5 + [-1.0, 0.0, -2.0, -3.0]
    assert rows[1].per_token["reference_logprobs"] == [0.0] * 5 + [-4.0]
    assert "reference_logprobs" not in pair_rows(PAIRS)[0].per_token


@pytest.mark.parametrize("reference", [[-1.0, -2.0], [-1.0, -2.0, -3.0, -4.0], []])
def test_another_number_of_reference_log_probs_than_scored_tokens_is_refused(reference):
    with pytest.raises(ValueError, match="3 scored tokens"):
        answer_row((1, 5), answer(6, 7, 2), 0, group=None, reference=reference)


def test_an_answer_without_a_scored_token_is_refused():
    """ETO#14: a loss that stays at 0.6931 because nothing was scored."""
    pair = replace(PAIRS[0], rejected=Answer((80, 2), (False, False)))
    with pytest.raises(ValueError, match="answer 1 has no token to score"):
        pair_rows([pair])


def test_a_scored_row_is_read_at_its_last_token():
    row = scored_row((1, 5, 6), 7, group=2, shared=1)
    assert row.trained == (False, False, False, True)
    assert row.token_ids[:3] == (1, 5, 6)
    assert (row.group, row.shared_prefix, row.per_row) == (2, 1, {"index": 7.0})


# log-probs -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["packed", "padded"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_answers_log_probs_are_the_textbooks_however_rows_are_batched(architecture, path):
    """trl#6800, DeepSpeedExamples#316: positions and padding change nothing, and no prompt token is in the sum."""
    model = tiny_model(architecture)
    expected = [value for pair in PAIRS for side in (pair.chosen, pair.rejected) for value in textbook(model, pair.prompt_ids, side)]
    for budget in (1, 12, 100):
        engine = LocalEngine(model, tokens_per_micro_batch=budget)
        if path == "padded":
            engine._refusals[id(model)] = "for this test"
        actual = [value for row in engine.logprobs(pair_rows(PAIRS)) for value in row]
        assert actual == pytest.approx(expected, abs=2e-5)


# and back --------------------------------------------------------------------------------------------------------------------------


def rows(*index: float) -> Any:
    return SimpleNamespace(per_row={"index": torch.tensor(index)})


def test_sides_are_found_in_any_order_of_rows():
    sides = sides_of(rows(5, 0, 4, 9, 1, 8))
    assert sides.chosen.tolist() == [1, 2, 5]
    assert sides.rejected.tolist() == [4, 0, 3]
    assert sides.pair.tolist() == [0, 2, 4]


@pytest.mark.parametrize("index", [(0,), (0, 2), (1, 2), (0, 1, 3), (0, 1, 2, 5), (1, 0, 0, 1)])
def test_a_torn_pair_is_refused(index):
    with pytest.raises(ValueError, match="one side of a pair"):
        sides_of(rows(*index))


def test_tokens_are_counted_under_the_mask():
    assert token_counts(torch.tensor([[True, True, False], [True, False, False]])).tolist() == [2, 1]
