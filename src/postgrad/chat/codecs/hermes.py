"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3, and postgrad's own text protocol. One call a line.

Source: the chat templates of NousResearch's Hermes and of Qwen.
"""

from __future__ import annotations

from collections.abc import Sequence

from postgrad.chat.codecs.jsons import dumps
from postgrad.chat.codecs.marked import Marks
from postgrad.chat.codecs.style import CallStyle, Parsed, joined
from postgrad.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_MARKS = Marks(OPEN, CLOSE)


def write(content: str, calls: Sequence[ToolCall]) -> str:
    written = [OPEN + dumps({"name": call.name, "arguments": dict(call.arguments)}) + CLOSE for call in calls]
    return joined(content, "\n".join(written)) if calls else content


def parse(text: str) -> Parsed:
    """
    >>> parse('Hm.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Hm.', (ToolCall(name='add', arguments={'a': 1}, id='call_0'),))
    """
    return _MARKS.read(text)


HERMES = CallStyle("hermes", write, parse, (OPEN, CLOSE))
