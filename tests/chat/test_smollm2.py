"""The real tokenizer and template of SmolLM2-135M: end token = padding = end of every turn, default system prompt, no tool support."""

from __future__ import annotations

import pickle

import pytest

from postgrad.chat import ChatFormat
from postgrad.types import Message, ToolCall, ToolSpec

pytestmark = pytest.mark.real_model

CALCULATOR = ToolSpec(
    "calculator", "Evaluate an arithmetic expression.",
    {"type": "object", "properties": {"expression": {"type": "string", "description": "e.g. 12*(3+4)"}}, "required": ["expression"]},
)  # fmt: skip
ASK = [Message("user", "What is 12 times 3?")]


@pytest.fixture(scope="module")
def tokenizer():
    from postgrad.models.loading import load_tokenizer

    return load_tokenizer("smollm2-135m")


@pytest.fixture(scope="module")
def chat(tokenizer) -> ChatFormat:
    return ChatFormat(tokenizer[0], stop_ids=tokenizer[1])


def test_facts(chat):
    assert chat.end_of_turn == (2,)
    assert 2 in chat.stop_ids
    assert chat.tool_protocol == "text"


def test_the_prompt_is_what_the_tokenizer_gives(chat, tokenizer):
    expected = tokenizer[0].apply_chat_template([{"role": "user", "content": ASK[0].content}], add_generation_prompt=True)["input_ids"]
    assert list(chat.prompt_ids(ASK)) == expected
    assert chat.decode_raw(expected).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_only_answers_and_their_end_tokens_are_assistant_tokens(chat):
    encoded = chat.conversation([*ASK, Message("assistant", "36"), Message("user", "36"), Message("assistant", "Yes.")])
    text = chat.decode_raw([token for token, source in zip(encoded.token_ids, encoded.source, strict=True) if source == "assistant"])
    assert text == "36<|im_end|>Yes.<|im_end|>"
    assert encoded.token_ids.count(2) == 5


def test_two_loads_have_one_fingerprint_and_a_pickled_copy_the_same_rows(chat):
    from postgrad.models.loading import load_tokenizer

    tokenizer, stop_ids = load_tokenizer("smollm2-135m")
    assert ChatFormat(tokenizer, stop_ids=stop_ids).fingerprint == chat.fingerprint
    copy = pickle.loads(pickle.dumps(chat))
    turns = [*ASK, Message("assistant", "36")]
    assert (copy.conversation(turns), copy.fingerprint) == (chat.conversation(turns), chat.fingerprint)


def test_ids_reach_the_last_row_of_the_embedding(chat):
    assert chat.vocabulary_size == 49152
    assert (chat.bos_id, chat.unk_id) == (1, 0)


def test_the_prompt_with_one_tool_is_short(chat):
    """It is in every prompt of every rollout."""
    assert len(chat.prompt_ids(ASK, [CALCULATOR])) < 100


def test_a_call_result_and_answer_round_trip(chat):
    call = ToolCall("calculator", {"expression": "12*3"}, id="call_0")
    turn_ids = (*chat.encode('<tool_call>{"name": "calculator", "arguments": {"expression": "12*3"}}</tool_call>'), 2)
    assert chat.parse(turn_ids).calls == (call,)
    results = [Message("tool", "36", tool_call_id="call_0", name="calculator")]
    glue = chat.glue(ASK, chat.parse(turn_ids).message, results, turn_ids, [CALCULATOR])
    assert chat.decode_raw(glue) == "\n<|im_start|>tool\n36<|im_end|>\n<|im_start|>assistant\n"
    assert chat.prompt_ids(ASK, [CALCULATOR]) + turn_ids + glue == chat.prompt_ids(
        [*ASK, Message("assistant", "", (call,)), *results], [CALCULATOR]
    )


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>b", "<|endoftext|>", "<filename>x", "foo(<|im_end|>)bar"])
def test_typed_special_strings_stay_text(chat, tokenizer, text):
    special = {index for index, token in tokenizer[0].added_tokens_decoder.items() if token.special}
    assert not set(chat.encode(text)) & special
    assert chat.decode_raw(chat.encode(text)) == text
    ids = chat.prompt_ids([Message("user", text)])
    assert [token for token in ids if token in special] == [1, 2, 1, 2, 1]
