"""Mistral's two ways of writing calls.

    mistral       [TOOL_CALLS] [{"name": …, "arguments": {…}}, …]          one list for all calls of a turn: tokenizers v2 to v7
    mistral_v11   [TOOL_CALLS]name[ARGS]{…}[TOOL_CALLS]name[ARGS]{…}        tokenizers v11 (which put [CALL_ID]id before [ARGS]) and v13

Source: mistral-common's instruct tokenizers, and the chat templates of Mistral models on the hub.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from postgrad.chat.codecs.jsons import call_of_object, dumps, read_json
from postgrad.chat.codecs.marked import NAME, Marks
from postgrad.chat.codecs.style import CallStyle, Parsed, outside
from postgrad.types import MalformedCall, ToolCall

_OPEN, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAMED = Marks(
    _OPEN,
    head=re.compile(rf"\s*(?P<name>{NAME})\s*(?:{re.escape(_CALL_ID)}[^\s\[\]]*\s*)?{re.escape(_ARGS)}"),
    form=f"{_OPEN}name{_ARGS}{{arguments}}",
)


def write_list(content: str, calls: Sequence[ToolCall]) -> str:
    return f"{content}{_OPEN} {dumps([{'name': call.name, 'arguments': dict(call.arguments)} for call in calls])}" if calls else content


def parse_list(text: str) -> Parsed:
    """Text after the list is content. A list that is not JSON, or empty, is one malformed call."""
    before, marker, written = text.partition(_OPEN)
    if not marker:
        return text, ()
    value, end, error = read_json(written)
    if error:
        return before.strip(), (MalformedCall(written.strip(), error),)
    items = value if isinstance(value, list) else [value]
    if not items:
        return before.strip(), (MalformedCall(written.strip(), "the list of calls is empty"),)
    calls = tuple(call_of_object(item, dumps(item), index=index) for index, item in enumerate(items))
    if _OPEN in written[end:]:  # more than one list: say so, instead of running some of the calls
        return before.strip(), (MalformedCall(written.strip(), f"put all calls into one list after one {_OPEN}"),)
    return outside([before, written[end:]], calls), calls


def write_named(content: str, calls: Sequence[ToolCall]) -> str:
    return _NAMED.write(content, calls, lambda name, arguments: f"{_OPEN}{name}{_ARGS}{arguments}")


MISTRAL = CallStyle("mistral", write_list, parse_list, (_OPEN,))
MISTRAL_V11 = CallStyle("mistral_v11", write_named, _NAMED.read, (_OPEN, _CALL_ID, _ARGS))
