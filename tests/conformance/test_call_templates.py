"""The chat templates that TRL 1.16.0 ships, as the models' authors published them: their style of calls is found, calls survive the way
through tokens, and what follows a turn is what the template would print."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from postgrad.chat import ChatFormat, TemplateRefuses
from postgrad.errors import DataError
from postgrad.testing import tiny_tokenizer
from postgrad.types import Message, ToolCall, ToolSpec

pytest.importorskip("trl", reason="TRL is not installed (pip install postgrad[conformance])")
pytestmark = pytest.mark.conformance

FOLDER = Path(str(resources.files("trl") / "chat_templates"))
STYLES = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
    "qwen3_training": "hermes",
    "llama3_1": "llama3",
    "llama3_2": "llama3",
    "lfm2_v2": "pythonic",
    "lfm2_2_5_v2": "pythonic",
    "qwen3_5_nothink": "xml",
    "qwen3_5_think": "xml",
    "qwen3_6": "xml",
    "nemotron_3_nano": "xml",
    "deepseekv3": "deepseek_v3",
}
TEXT = {"deepseekv3"}
"""They print calls and no tools: postgrad tells the tools, in the model's own style."""
ADD = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}, "text": {"type": "string"}}, "required": ["a"]})
CALL = ToolCall("add", {"a": 2, "b": [1.5, None, True], "text": 'it\'s "5"\n<|im_end|>'}, id="call_0")
ASK = Message("user", "2 + 2")
RESULT = Message("tool", "4", tool_call_id="call_0", name="add")
_SPECIAL = re.compile(r"<[|｜][^<>{}'\" ]{1,30}[|｜]>|</?s>|<bos>|<eos>")


def format_of(name: str) -> ChatFormat:
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = tiny_tokenizer(source)
    own = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*own, *sorted(set(_SPECIAL.findall(source)) - set(own))]})
    return ChatFormat(tokenizer)


@pytest.fixture(scope="module", params=STYLES)
def named(request) -> tuple[str, ChatFormat]:
    return request.param, format_of(request.param)


def test_the_style_is_found(named):
    name, format = named
    assert (format.tool_protocol, format.call_style) == ("text" if name in TEXT else "template", STYLES[name])


def test_a_trained_call_reads_back(named):
    name, format = named
    thinks = format._facts.reasoning != "nowhere" and not name.endswith("nothink")
    turn = Message("assistant", "", (CALL,), reasoning="I add." if thinks else "")
    if name == "deepseekv3":  # its generation prompt opens a thought that no rendering prints: nothing of it can be trained as it is
        with pytest.raises(DataError, match="generation prompt is not how it prints"):
            format.last_turn([ASK, turn], [ADD])
        return
    if name == "lfm2_2_5_v2":  # it puts text between quotes as it is: one with a quote in it would be trained as something else
        with pytest.raises(TemplateRefuses, match="read back differently"):
            format.last_turn([ASK, turn], [ADD])
        turn = replace(turn, tool_calls=(ToolCall("add", {"a": 2, "text": "plain"}, id="call_0"),))
    encoded = format.last_turn([ASK, turn], [ADD])
    ids = [token for token, source in zip(encoded.token_ids, encoded.source, strict=True) if source == "assistant"]
    first = encoded.source.index("assistant")
    assert format.parse(ids, [ADD], read=encoded.token_ids[:first]).message == turn


def test_the_glue_is_what_the_template_prints(named):
    name, format = named
    turn = Message("assistant", "", (CALL,))
    try:
        rendered = format.decode_raw(format.prompt_ids([ASK, turn, RESULT], [ADD]))
    except TemplateRefuses:
        pytest.fail(f"{name} refuses an ordinary conversation")
    assert rendered.endswith(format.decode_raw(format.glue([ASK], turn, [RESULT], (), [ADD])))


def test_two_calls_and_a_result_without_an_id_can_always_be_answered(named):
    _, format = named
    two = Message("assistant", "", (CALL, ToolCall("add", {"a": 1}, id="call_1")))
    results = [RESULT, Message("tool", "error: invalid JSON")]
    text = format.decode_raw(format.glue([ASK, two, *results], two, results, (), [ADD]))
    assert text.index("4") < text.index("invalid JSON")
