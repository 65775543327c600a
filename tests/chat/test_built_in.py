"""The built-in templates, print for print: each style as it is published, and what happens on a tokenizer that lacks its markers."""

from __future__ import annotations

import pytest

from postgrad.chat import BUILT_IN, ChatFormat, TemplateRefuses
from postgrad.errors import DataError
from postgrad.types import Message, ToolCall, ToolSpec

MARKERS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]"),
    "gemma": ("<bos>", "<start_of_turn>", "<end_of_turn>"),
}
SYSTEM, USER, ANSWER, MORE = Message("system", " Be kind."), Message("user", "hi "), Message("assistant", " yo\n"), Message("user", "and?")
ADD = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
CALLS = (ToolCall("add", {"a": 1}, id="call_0"), ToolCall("add", {"a": "é"}, id="call_1"))
RESULTS = [Message("tool", "1", tool_call_id="call_0", name="add"), Message("tool", "2", tool_call_id="call_1", name="add")]


def tokenizer_with(markers: tuple[str, ...], *, eos: str | None = "<|endoftext|>"):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bos = next((marker for marker in markers if marker in ("<s>", "<bos>", "<|begin_of_text|>")), None)
    names = {"bos_token": bos} | ({"eos_token": "</s>" if "</s>" in markers else eos} if eos else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{key: value for key, value in names.items() if value})
    tokenizer.add_special_tokens({"additional_special_tokens": [*([eos] if eos else []), *markers]})
    return tokenizer


def chat(name: str) -> ChatFormat:
    return ChatFormat(tokenizer_with(MARKERS[name]), template=name)


def prompt(name: str, messages, tools=()) -> str:
    format = chat(name)
    return format.decode_raw(format.prompt_ids(messages, tools))


PROMPTS = {
    "chatml": "<|im_start|>system\n Be kind.<|im_end|>\n<|im_start|>user\nhi <|im_end|>\n<|im_start|>assistant\n yo\n<|im_end|>\n"
    "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n",
    "qwen": "<|im_start|>system\n Be kind.<|im_end|>\n<|im_start|>user\nhi <|im_end|>\n<|im_start|>assistant\n yo\n<|im_end|>\n"
    "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n Be kind.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nhi <|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n yo\n<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nand?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] Be kind.\n\nhi [/INST] yo\n</s>[INST]and?[/INST]",
    "gemma": "<bos><start_of_turn>user\n Be kind.\n\nhi <end_of_turn>\n<start_of_turn>model\n yo\n<end_of_turn>\n"
    "<start_of_turn>user\nand?<end_of_turn>\n<start_of_turn>model\n",
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_prints_its_published_format_with_the_contents_as_they_are(name):
    assert prompt(name, [SYSTEM, USER, ANSWER, MORE]) == PROMPTS[name]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_conversation_round_trips_through_sampled_turns(name):
    """What the model reads and writes turn by turn is the training row, id for id."""
    format = chat(name)
    reply = (*format.encode(ANSWER.content), *format.end_of_turn)
    glue = format.glue([SYSTEM, USER], format.parse(reply).message, [MORE], reply)
    last = (*format.encode("ok"), *format.end_of_turn)
    row = format.conversation([SYSTEM, USER, ANSWER, MORE, Message("assistant", "ok")]).token_ids
    read_and_written = format.prompt_ids([SYSTEM, USER]) + reply + glue + last
    assert row[: len(read_and_written)] == read_and_written
    assert format.decode_raw(row[len(read_and_written) :]) in ("", "\n")


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_ends_turns_with_a_special_token_of_the_tokenizer_and_has_no_note(name):
    format = chat(name)
    end = {"chatml": "<|im_end|>", "qwen": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>"}[name]
    assert format.decode_raw(format.end_of_turn) == end
    assert format.notes == ()


@pytest.mark.parametrize("name", BUILT_IN)
def test_without_its_markers_turns_end_with_the_tokenizers_own_token_and_a_note_says_so(name):
    format = ChatFormat(tokenizer_with(()), template=name)
    encoded = format.conversation([SYSTEM, USER, ANSWER, MORE, ANSWER])
    ends = [token for token, source in zip(encoded.token_ids, encoded.source, strict=True) if source == "assistant" and token == 0]
    assert format.end_of_turn == (0,)
    assert len(ends) == 2
    assert [name in note and "<|endoftext|>" in note for note in format.notes] == ([] if name == "mistral" else [True])


@pytest.mark.parametrize("name", BUILT_IN)
def test_without_any_end_token_training_is_refused(name):
    format = ChatFormat(tokenizer_with((), eos=None), template=name)
    assert format.stop_ids == frozenset()
    with pytest.raises(DataError, match="no end token"):
        format.conversation([USER, ANSWER])


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_source_stands_on_its_own(name):
    """Saved with a model as its chat template, it prints the same: also where the tokenizer's end token replaced the style's."""
    for markers in (MARKERS[name], ()):
        tokenizer = tokenizer_with(markers)
        format = ChatFormat(tokenizer, template=name)
        tokenizer.chat_template = format.template_source
        again = ChatFormat(tokenizer)
        messages = [SYSTEM, USER, ANSWER]
        assert again.conversation(messages) == format.conversation(messages)


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_earlier_turn_is_ever_rewritten(name):
    format = chat(name)
    assert not format.rewrites_history([SYSTEM, USER], ANSWER, [MORE], [ADD])
    assert not format.rewrites_history([USER], Message("assistant", "", CALLS), RESULTS, [ADD])


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_empty_system_message_adds_no_text(name):
    text = prompt(name, [Message("system", ""), USER])
    assert text.endswith(prompt(name, [USER]).removeprefix("<s>").removeprefix("<bos>").removeprefix("<|begin_of_text|>"))


@pytest.mark.parametrize("name", ["mistral", "gemma"])
@pytest.mark.parametrize("messages", [[SYSTEM], [USER, ANSWER, SYSTEM, MORE], [SYSTEM, ANSWER]])
def test_a_system_message_with_no_user_text_to_join_is_refused(name, messages):
    with pytest.raises(TemplateRefuses, match="system message must stand first"):
        chat(name).prompt_ids(messages)


class TestTools:
    def test_only_styles_that_publish_a_way_print_tools_themselves(self):
        assert {name: chat(name).tool_protocol for name in BUILT_IN} == {
            "chatml": "text", "qwen": "template", "llama3": "template", "mistral": "text", "gemma": "text",
        }  # fmt: skip

    def test_qwen_prints_them_as_qwen_2_5_does(self):
        text = prompt("qwen", [Message("system", "Be kind."), USER, Message("assistant", "so:", CALLS), *RESULTS], [ADD])
        assert text == (
            "<|im_start|>system\nBe kind.\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
            '{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": '
            '{"a": {"type": "integer"}}, "required": ["a"]}}}\n</tools>\n\n'
            "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
            '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\nhi <|im_end|>\n<|im_start|>assistant\nso:\n"
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    def test_llama3_calls_are_json_and_nothing_else(self):
        text = prompt("llama3", [USER, Message("assistant", "", CALLS), *RESULTS], [ADD])
        header = "<|start_header_id|>{}<|end_header_id|>\n\n"
        assert text.endswith(
            header.format("assistant")
            + '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": "é"}}<|eot_id|>'
            + header.format("ipython")
            + "1<|eot_id|>"
            + header.format("ipython")
            + "2<|eot_id|>"
            + header.format("assistant")
        )
        assert "Environment: ipython" in text
        with pytest.raises(TemplateRefuses, match="either text or calls"):
            chat("llama3").prompt_ids([USER, Message("assistant", "so:", CALLS), *RESULTS], [ADD])

    @pytest.mark.parametrize("name", BUILT_IN)
    def test_trained_calls_are_read_back(self, name):
        format = chat(name)
        encoded = format.conversation([USER, Message("assistant", "", CALLS)], [ADD])
        trained = [token for token, source in zip(encoded.token_ids, encoded.source, strict=True) if source == "assistant"]
        assert format.parse(trained).message == Message("assistant", "", CALLS)

    @pytest.mark.parametrize("name", BUILT_IN)
    def test_the_glue_after_calls_continues_the_turn_as_the_template_would(self, name):
        format = chat(name)
        turn = Message("assistant", "", CALLS)
        before = format.prompt_ids([SYSTEM, USER], [ADD])
        row = format.last_turn([SYSTEM, USER, turn], [ADD])
        turn_ids = tuple(token for token, source in zip(row.token_ids, row.source, strict=True) if source == "assistant")
        glue = format.glue([SYSTEM, USER], turn, RESULTS, turn_ids, [ADD])
        assert before + turn_ids + glue == format.prompt_ids([SYSTEM, USER, turn, *RESULTS], [ADD])
