"""The template rendered without transformers' wrapper: the same text, and left alone where a tokenizer has a way of its own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.chat import ChatFormat
from postgrad.chat.templates import BUILT_IN
from postgrad.testing import tiny_tokenizer
from postgrad.types import Message, ToolCall, ToolSpec

TOOL = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
FORMATS = {name: ChatFormat(tiny_tokenizer(), template=name) for name in BUILT_IN}
TEXT = st.text(alphabet="ab <|>{}%'\"\n\\é", max_size=12)


@st.composite
def conversations(draw: Any) -> list[Message]:
    turns = []
    for _ in range(draw(st.integers(1, 3))):
        turns.append(Message("user", draw(TEXT)))
        calls = (ToolCall("add", {"a": draw(st.integers()), "b": [draw(TEXT), None]}, id="call_0"),) if draw(st.booleans()) else ()
        turns.append(Message("assistant", draw(TEXT), tool_calls=calls))
    return turns


@settings(deadline=None, max_examples=80)
@given(conversations(), st.sampled_from(sorted(FORMATS)), st.booleans(), st.booleans())
def test_the_text_is_what_the_tokenizer_itself_renders(messages, name, with_tool, prompt):
    template = FORMATS[name]._template
    assert template._render != template._wrapped
    dicts, tools = template.dicts(messages), [TOOL.to_json()] if with_tool else []

    def printed(render: Any) -> Any:
        try:
            return render(dicts, tools, prompt)
        except Exception as error:
            return type(error), str(error)

    assert printed(template._render) == printed(template._wrapped)


@pytest.mark.parametrize("how", ["instance", "class"])
def test_a_tokenizer_that_renders_in_its_own_way_is_asked(how):
    tokenizer = tiny_tokenizer()

    def own(self: Any, conversation: Any, **options: Any) -> str:
        return "".join(f"[{message['role']}]{message['content']}<|im_end|>" for message in conversation) + "[assistant]"

    if how == "instance":
        tokenizer.apply_chat_template = own.__get__(tokenizer)
    else:
        tokenizer.__class__ = type("Own", (type(tokenizer),), {"apply_chat_template": own})
    chat = ChatFormat(tokenizer)
    assert chat._template._render == chat._template._wrapped
    assert "[user]hi" in chat._template.render([{"role": "user", "content": "hi"}], prompt=True)
