"""Operations counted by hand on a small shape, and the workloads' sizes that the table speaks of."""

from __future__ import annotations

import pytest

from benchmarks import flops, workloads
from postgrad.types import TrainRow

SMALL = flops.Shape(layers=2, hidden=4, intermediate=8, heads=2, kv_heads=1, head_width=2, vocabulary=10)
SMOLLM2 = flops.Shape(layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_width=64, vocabulary=49152)


def row(prompt, completion, group=None):
    trained = (False,) * prompt + (True,) * completion
    return TrainRow(tuple(range(prompt + completion)), trained, group, 0 if group is None else prompt)


def test_weights_are_counted_by_layer_and_the_head_apart():
    assert SMALL.linear_weights == 2 * (4 * 4 + 4 * 2 * 2 + 4 * 4 + 3 * 4 * 8)  # q, k and v, o, gate and up and down
    assert SMALL.head_weights == 40


def test_a_token_attends_to_itself_and_all_before_it():
    one_pair = 4 * 2 * 2 * 2  # query·key and weight·value, two operations each, width 2, 2 heads, 2 layers
    assert SMALL.attention(0, 3) == one_pair * (1 + 2 + 3)
    assert SMALL.attention(2, 4) == one_pair * (3 + 4)


def test_a_shared_prompt_is_computed_once_and_a_last_token_never():
    assert list(flops.runs([row(5, 3, 0), row(5, 1, 0), row(2, 2)])) == [(0, 5), (5, 7), (0, 3)]


def test_training_is_three_times_forward_and_the_head_counts_trained_tokens():
    rows = [row(3, 2)]
    body = 2.0 * SMALL.linear_weights * 4 + SMALL.attention(0, 4)
    assert flops.training(SMALL, rows) == 3 * (body + 2.0 * 40 * 2)
    assert flops.training(SMALL, rows, head=False) == 3 * body
    assert flops.reading(SMALL, rows) == body + 2.0 * 40 * 2


def test_a_decoding_step_reads_the_weights_once_and_every_cached_token():
    operations, read = flops.decoding(SMALL, prompt=3, completion=2, group=2, prompts=1, width=4)
    weights = SMALL.linear_weights + 40
    cached = (3 + 2 * 0) + (3 + 2 * 1)  # the shared prompt, and what both rows have written
    assert read == 4 * (2 * weights + cached * 2 * 2 * 1 * 2)
    prefill = 2.0 * SMALL.linear_weights * 3 + SMALL.attention(0, 3)
    assert operations == prefill + 2 * (SMALL.attention(3, 5) + 2.0 * weights * 2)


def test_the_workloads_need_what_the_page_says():
    sft = [row(prompt, completion) for prompt, completion in workloads.SFT_LENGTHS]
    pairs = [row(128, 128, pair) for pair in range(4) for _ in range(2)]
    grpo = [row(256, 128, prompt) for prompt in range(2) for _ in range(8)]
    assert sum(len(item.token_ids) for item in sft) == 2020
    needed = [flops.training(SMOLLM2, rows) / 1e12 for rows in (sft, pairs, grpo)]
    assert needed == [pytest.approx(1.59, abs=0.01), pytest.approx(1.19, abs=0.01), pytest.approx(2.11, abs=0.01)]
