"""The rows that both sides get: their lengths, and that forced samples and rewards make every group train."""

from __future__ import annotations

import pytest

from benchmarks import workloads


@pytest.mark.real_model
def test_every_word_is_one_token_of_the_model():
    from benchmarks.ours import MODEL
    from postgrad.models.loading import load_tokenizer

    tokenizer, _ = load_tokenizer(MODEL)
    ids = tokenizer([f" {word}" for word in workloads.WORDS])["input_ids"]
    assert {len(word) for word in ids} == {1}


def test_rows_have_the_lengths_that_the_page_names():
    rows = workloads.sft_rows()
    assert len(rows) == 8 * workloads.STEPS
    lengths = [(len(row["prompt"].split()), len(row["completion"].split()) + 1) for row in rows[:8]]
    assert tuple(lengths) == workloads.SFT_LENGTHS
    pair = workloads.pair_rows()[0]
    assert [len(pair[name].split()) for name in ("prompt", "chosen", "rejected")] == [128, 127, 127]
    assert pair["chosen"] != pair["rejected"]
    assert len(workloads.prompt_rows()[0]["prompt"].split()) == 256


def test_forced_samples_are_the_same_on_both_sides_and_differ_in_length():
    texts = [workloads.forced_text(row, 48) for row in range(8)]
    assert texts == [workloads.forced_text(row, 48) for row in range(8)]
    assert [len(text.split()) for text in texts] == [47, 42, 37, 32, 27, 22, 17, 12]


def test_the_reward_reads_the_end_of_what_was_sampled():
    ids = [[1, 2, 3], [1, 2, 4], [9] * 50 + [1] * 8]
    assert workloads.spread(["a", "b", "c"], ids) == [0.06, 0.07, 0.08]
