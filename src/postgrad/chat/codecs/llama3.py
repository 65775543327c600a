"""`{"name": …, "parameters": {…}}`: Llama 3.1 to 3.3. Calls have no markers: one is recognised where a line begins with such an object.

Several objects are separated by `;` or white space, as vLLM's parser `llama3_json` wants them. Other JSON is content.
Source: the chat template of Llama-3.1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from postgrad.chat.codecs.jsons import call_of_object, dumps, read_json
from postgrad.chat.codecs.style import Call, CallStyle, Parsed, joined, outside
from postgrad.types import MalformedCall, ToolCall

_TAG = "<|python_tag|>"
_LINE = re.compile(rf"^(?:{re.escape(_TAG)})?(?=\{{)", re.MULTILINE)
_KEYS = ("parameters", "arguments")


def write(content: str, calls: Sequence[ToolCall]) -> str:
    return (
        joined(content, "; ".join(dumps({"name": call.name, "parameters": dict(call.arguments)}) for call in calls)) if calls else content
    )


def parse(text: str) -> Parsed:
    """
    >>> parse('{"name": "add", "parameters": {"a": 1}}')
    ('', (ToolCall(name='add', arguments={'a': 1}, id='call_0'),))
    >>> parse('{"answer": 3}')
    ('{"answer": 3}', ())
    """
    text_ = text.strip()
    parts: list[str] = []
    calls: list[Call] = []
    position = 0
    for line in _LINE.finditer(text_):
        if line.end() < position or not _looks_like_call(text_[line.end() :]):
            continue
        parts.append(text_[position : line.start()])
        position = _calls(text_, line.end(), calls)
    return (outside([*parts, text_[position:]], calls), tuple(calls)) if calls else (text, ())


def _calls(text: str, start: int, calls: list[Call]) -> int:
    """Appends the calls that begin at `start`, one after the other; the position after them."""
    position = start
    while _looks_like_call(text[start:]):
        value, length, error = read_json(text[start:])
        if error:
            calls.append(MalformedCall(text[start:], error))
            return len(text)
        position = start + length
        calls.append(call_of_object(value, text[start:position], index=len(calls), keys=_KEYS))
        gap = re.compile(rf"[;\s]*(?:{re.escape(_TAG)})?").match(text, position)
        start = gap.end() if gap else position
    return position


def _looks_like_call(text: str) -> bool:
    """True when the text opens a JSON object with the keys of a call."""
    value, _, error = read_json(text)
    if not error:
        return isinstance(value, dict) and "name" in value and any(key in value for key in _KEYS)
    return re.match(r'\{\s*"name"\s*:', text) is not None


LLAMA3 = CallStyle("llama3", write, parse)
