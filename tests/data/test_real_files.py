"""Real files of the field, through the real tokenizer."""

from __future__ import annotations

import time

import pytest

from postgrad.chat import ChatFormat
from postgrad.data import load_rows, prepare_prompts, prepare_sft

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    from postgrad.models.loading import load_tokenizer

    tokenizer, stop_ids = load_tokenizer("smollm2-135m")
    return ChatFormat(tokenizer, stop_ids=stop_ids)


def last_trained(data):
    return {[token for token, flag in zip(row.token_ids, row.trained, strict=True) if flag][-1] for row in data.rows}


def test_alpaca_through_the_columns_map_in_seconds(shared_data, chat):
    rows = load_rows(shared_data / "alpaca_en_demo.json", columns={"user": ["instruction", "input"], "assistant": "output"})
    start = time.monotonic()
    data = prepare_sft(rows, chat, max_length=1024)
    assert time.monotonic() - start < 20
    assert (data.report.rows, data.report.kept) == (999, 999)
    assert last_trained(data) == {2}


def test_typed_content_parts_and_weights(shared_data, chat):
    data = prepare_sft(load_rows(shared_data / "v1_sft_demo.jsonl"), chat, max_length=512)
    report = data.report
    assert report.rows == 500
    assert report.kept == 500 - report.dropped.get("too_long", 0) == len(data.rows)
    assert last_trained(data) == {2}


def test_sharegpt_tool_conversations_keep_their_tool_turns(shared_data, chat):
    data = prepare_sft(load_rows(shared_data / "glaive_toolcall_en_demo.json"), chat, max_length=20_000)
    assert data.report.kept == data.report.rows
    text = chat.decode_raw(data.rows[0].token_ids)
    trained = chat.decode_raw([token for token, flag in zip(data.rows[0].token_ids, data.rows[0].trained, strict=True) if flag])
    assert "<|im_start|>tool\n" in text
    assert "search_recipes(ingredients: array of string (The ingredients to search for))" in text
    assert '<tool_call>{"name": "search_recipes"' in trained
    assert "<|im_start|>" not in trained


def test_gsm8k_prompts(shared_data, chat):
    rows = load_rows(shared_data / "gsm8k_test_first660.jsonl", columns={"prompt": "question"})
    data = prepare_prompts(rows, chat, max_prompt_tokens=120)
    assert data.report.rows == 660 == data.report.kept + data.report.dropped["too_long"]
    assert set(data.prompts[0].columns) == {"answer"}
