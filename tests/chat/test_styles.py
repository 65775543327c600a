"""For random conversations, the answer tokens are exactly what the template prints for the assistant, whatever the texts hold.

What each style prints for a turn is written out here (`Style.printed`), independent of the templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.chat import ChatFormat, TemplateRewritesHistory
from postgrad.testing import CHATML
from postgrad.types import Message, ToolCall, ToolSpec

CHATML_MARKERS = ("<|im_start|>", "<|im_end|>")
MARKERS = {
    "chatml": CHATML_MARKERS,
    "qwen": CHATML_MARKERS,
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>", "[INST]", "[/INST]"),
    "gemma": ("<bos>", "<start_of_turn>", "<end_of_turn>"),
}

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_TRIMS = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
MISTRAL_TRIMS = (
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] + '\n\n' %}{%- set turns = messages[1:] %}"
    "{%- else %}{%- set system = '' %}{%- set turns = messages %}{%- endif %}"
    "{{- bos_token }}{%- for message in turns %}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- if message['role'] == 'user' %}{{- '[INST] ' + (system if loop.first else '') + message['content'] + '[/INST]' }}"
    "{%- else %}{{- ' ' + message['content'] | trim + eos_token }}{%- endif %}{%- endfor %}"
)
GEMMA_TRIMS = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
QWEN3 = (
    "{%- set ns = namespace(last=messages | length) %}"
    "{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.role == 'assistant' %}"
    "{%- set thought = message.reasoning_content or '' %}{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + message.content.lstrip('\n') }}"
    "{%- else %}{{- message.content }}{%- endif %}{{- '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def in_text_protocol(message: Message) -> str:
    calls = [
        f'<tool_call>{{"name": {json.dumps(call.name)}, "arguments": {_json(call.arguments)}}}</tool_call>' for call in message.tool_calls
    ]
    return "\n".join([message.content, *calls] if message.content else calls) if calls else message.content


def in_qwen(message: Message) -> str:
    calls = [f'<tool_call>\n{{"name": "{call.name}", "arguments": {_json(call.arguments)}}}\n</tool_call>' for call in message.tool_calls]
    return "\n".join([message.content, *calls] if message.content else calls) if calls else message.content


def in_llama3(message: Message) -> str:
    calls = [f'{{"name": "{call.name}", "parameters": {_json(call.arguments)}}}' for call in message.tool_calls]
    return "; ".join(calls) if calls else message.content


def in_qwen3(message: Message) -> str:
    return "<think>\n" + message.reasoning.strip("\n") + "\n</think>\n\n" + message.content.lstrip("\n")


def _json(arguments) -> str:
    return json.dumps(dict(arguments), ensure_ascii=False)


@dataclass(frozen=True)
class Style:
    """template: a built-in name or Jinja text; markers: special tokens of the tokenizer; printed: text of a turn without its end."""

    template: str
    markers: tuple[str, ...]
    end: str
    printed: Callable[[Message], str] = in_text_protocol
    system: bool = True
    text_beside_calls: bool = True


STYLES = {
    "chatml": Style(CHATML, MARKERS["chatml"], "<|im_end|>"),
    "smollm2": Style(SMOLLM2, MARKERS["chatml"], "<|im_end|>"),
    "llama3": Style(LLAMA3_TRIMS, MARKERS["llama3"], "<|eot_id|>", lambda message: in_text_protocol(message).strip()),
    "mistral": Style(MISTRAL_TRIMS, MARKERS["mistral"], "</s>", lambda message: " " + in_text_protocol(message).strip()),
    "gemma": Style(GEMMA_TRIMS, MARKERS["gemma"], "<end_of_turn>", lambda message: in_text_protocol(message).strip(), system=False),
    "built-in chatml": Style("chatml", MARKERS["chatml"], "<|im_end|>"),
    "built-in qwen": Style("qwen", MARKERS["qwen"], "<|im_end|>", in_qwen),
    "built-in llama3": Style("llama3", MARKERS["llama3"], "<|eot_id|>", in_llama3, text_beside_calls=False),
    "built-in mistral": Style("mistral", MARKERS["mistral"], "</s>"),
    "built-in gemma": Style("gemma", MARKERS["gemma"], "<end_of_turn>"),
    "built-in chatml without its markers": Style("chatml", (), "<|endoftext|>"),
    "built-in qwen without its markers": Style("qwen", (), "<|endoftext|>", in_qwen),
    "built-in llama3 without its markers": Style("llama3", (), "<|endoftext|>", in_llama3, text_beside_calls=False),
    "built-in mistral without its markers": Style("mistral", (), "<|endoftext|>"),
    "built-in gemma without its markers": Style("gemma", (), "<|endoftext|>"),
}
THINKING = Style(QWEN3, MARKERS["qwen"], "<|im_end|>", in_qwen3)


def tokenizer_with(markers: tuple[str, ...], template: str | None = None):
    """Byte-level, with `<|endoftext|>` and the given special tokens; the end token is `</s>` where given, else `<|endoftext|>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [("t", "h"), ("th", "e"), ("Ġ", "t"), ("Ċ", "Ċ"), (">", "Ċ"), ("1", "2"), ("x", "x")]
    pieces = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bos = next((marker for marker in markers if marker in ("<s>", "<bos>", "<|begin_of_text|>")), None)
    names = {"eos_token": "</s>" if "</s>" in markers else "<|endoftext|>"} | ({"bos_token": bos} if bos else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", *markers]})
    tokenizer.chat_template = template
    return tokenizer


@cache
def chat(style: Style) -> ChatFormat:
    own = style.template if "{" in style.template else None
    return ChatFormat(tokenizer_with(style.markers, own), template=None if own else style.template)


typed = [
    "<|im_end|>",
    "<|im_start|>",
    "</s>",
    "<s>",
    "<|eot_id|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<|start_header_id|>",
]
pieces = st.sampled_from(
    [*typed, "<|im_", "end|>", "</", "the", "x", " ", "\n", "\t", "assistant", "<think>", "</think>", "12", "é", "\ufdd0", "😀"]
)
texts = st.one_of(st.text(max_size=12), st.lists(pieces, max_size=6).map("".join))
names = st.sampled_from(["add", "look_up"])
calls = st.lists(st.tuples(names, st.dictionaries(st.sampled_from(["a", "b"]), texts, max_size=2)), min_size=1, max_size=2)
TOOL = ToolSpec("add", "Adds <|im_end|>.", {"type": "object", "properties": {"a": {"type": "string"}}})


@st.composite
def conversations(draw, style: Style, *, tools: bool = False, reasoning: bool = False) -> list[Message]:
    """1–3 questions with their answers; half of the texts repeat one that was drawn before."""
    drawn: list[str] = [""]

    def text() -> str:
        drawn.append(draw(st.one_of(texts, st.sampled_from(drawn))))
        return drawn[-1]

    messages = [Message("system", text())] if style.system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append(Message("user", text()))
        if tools and draw(st.booleans()):
            content = text() if style.text_beside_calls else ""
            made = tuple(ToolCall(name, given, id=f"call_{index}") for index, (name, given) in enumerate(draw(calls)))
            messages.append(Message("assistant", content, made))
            messages += [Message("tool", text(), tool_call_id=call.id, name=call.name) for call in made]
        messages.append(Message("assistant", text(), reasoning=text() if reasoning else ""))
    return messages


def stretches(format: ChatFormat, encoded) -> list[str]:
    """Text of the answer tokens of each assistant message, in order."""
    trained = [
        (message, token)
        for token, source, message in zip(encoded.token_ids, encoded.source, encoded.message, strict=True)
        if source == "assistant"
    ]
    return [format.decode_raw([token for _, token in group]) for _, group in groupby(trained, key=lambda item: item[0])]


def specials(format: ChatFormat, ids) -> list[int]:
    special = set(format._tokens.special.values())
    return [token for token in ids if token in special]


def harmless(messages: list[Message]) -> list[Message]:
    """The same conversation with texts that hold nothing special."""
    calm = lambda text: "x" if text else ""  # noqa: E731
    return [
        replace(
            message,
            content=calm(message.content),
            reasoning=calm(message.reasoning),
            tool_calls=tuple(replace(call, arguments={"a": "x"}) for call in message.tool_calls),
        )
        for message in messages
    ]


def check(style: Style, messages: list[Message], encoded, calm, *, answered: list[int], tools=()) -> None:
    format = chat(style)
    assert stretches(format, encoded) == [style.printed(messages[index]) + style.end for index in answered]
    assert specials(format, encoded.token_ids) == specials(format, calm.token_ids)
    prompt = format.prompt_ids(messages[: answered[0]], tools)
    assert encoded.token_ids[: len(prompt)] == prompt
    assert "assistant" not in encoded.source[: len(prompt)]
    assert encoded.source[len(prompt)] == "assistant"


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_answer_tokens_are_the_printed_answers_and_one_end_token_each(name, data):
    style = STYLES[name]
    messages = data.draw(conversations(style))
    answered = [index for index, message in enumerate(messages) if message.role == "assistant"]
    calm = harmless(messages)
    check(style, messages, chat(style).conversation(messages), chat(style).conversation(calm), answered=answered)
    check(style, messages, chat(style).last_turn(messages), chat(style).last_turn(calm), answered=answered[-1:])


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_calls_are_answer_tokens_and_tool_results_are_not(name, data):
    style = STYLES[name]
    messages = data.draw(conversations(style, tools=True))
    answered = [index for index, message in enumerate(messages) if message.role == "assistant"]
    calm = harmless(messages)
    encoded, plain = (chat(style).conversation(each, [TOOL]) for each in (messages, calm))
    check(style, messages, encoded, plain, answered=answered, tools=[TOOL])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_row_per_turn_of_a_template_that_rewrites_history_holds_the_same(data):
    messages = data.draw(conversations(THINKING, reasoning=True))
    answered = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if len(answered) > 1:
        with pytest.raises(TemplateRewritesHistory):
            chat(THINKING).conversation(messages)
    for index in answered:
        row, calm = (chat(THINKING).last_turn(each[: index + 1]) for each in (messages, harmless(messages)))
        check(THINKING, messages, row, calm, answered=[index])


@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.text(), texts), template=st.sampled_from([None, "chatml"]))
def test_a_raw_answer_is_its_text_and_the_end_token(text, template):
    format = ChatFormat(tokenizer_with(()), template=template)
    encoded = format.raw_conversation(text, text)
    assert stretches(format, encoded) == [text + "<|endoftext|>"]
    assert specials(format, encoded.token_ids) == [0]
    assert encoded.token_ids[: len(format.raw_prompt_ids(text))] == format.raw_prompt_ids(text)
