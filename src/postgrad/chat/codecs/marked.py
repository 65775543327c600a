"""The reader shared by all styles that put a marker before every call.

The JSON is read first, so a marker inside a string does not end a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from postgrad.chat.codecs.jsons import call_of_object, dumps, named_call, read_json
from postgrad.chat.codecs.style import Call, CannotWrite, Parsed, outside
from postgrad.types import MalformedCall, ToolCall

NAME = r"[^\s\[\]<>{}|｜]+"
"""A function's name between markers."""


@dataclass(frozen=True, slots=True)
class Marks:
    """open:    what stands before a call
    head:    matches what stands between `open` and the JSON, with a group `name`; None = the JSON object holds the name itself
    tail:    matches what stands between the JSON and `close`
    close:   what ends a call; "" = the end of its JSON
    around:  what stands before and after all calls of a turn, and is no content
    form:    how a call is written, for a model that wrote something else
    """

    open: str
    close: str = ""
    head: re.Pattern[str] | None = None
    tail: re.Pattern[str] = re.compile(r"\s*")
    around: tuple[str, str] = ("", "")
    form: str = ""

    def read(self, text: str) -> Parsed:
        """Content and calls of a turn."""
        parts: list[str] = []
        calls: list[Call] = []
        position = 0
        while (start := text.find(self.open, position)) >= 0:
            parts.append(text[position:start])
            call, position = self._one(text, start + len(self.open), index=len(calls))
            calls.append(call)
        parts.append(text[position:])
        return outside([self._inner(part) for part in parts] if calls else parts, calls), tuple(calls)

    def write(self, content: str, calls: Sequence[ToolCall], form: Callable[[str, str], str], *, between: str = "") -> str:
        """The content, then all calls; `form` writes one from its name and the JSON of its arguments. Only for styles with a `head`."""
        for call in calls:
            if not re.fullmatch(NAME, call.name):
                raise CannotWrite(f"the name {call.name!r} cannot stand between the markers of a call")
        written = between.join(form(call.name, dumps(dict(call.arguments))) for call in calls)
        return content + self.around[0] + written + self.around[1] if calls else content

    def _one(self, text: str, start: int, *, index: int) -> tuple[Call, int]:
        """(call, position after it) for the call whose opening marker ends at `start`."""
        head = self.head.match(text, start) if self.head else None
        if self.head and not head:
            return self._malformed(text, start, f"a call is written {self.form}")
        begin = head.end() if head else start
        value, length, error = read_json(text[begin:])
        if error:
            return self._malformed(text, start, error)
        end = begin + length
        tail = self.tail.match(text, end)
        if tail is None or not text.startswith(self.close, tail.end()):
            return self._malformed(text, start, f"text follows the JSON object before {self.close}")
        written = text[start:end].strip()
        call = named_call(head["name"], value, written, index=index) if head else call_of_object(value, written, index=index)
        return call, (tail.end() + len(self.close) if self.close else end)

    def _malformed(self, text: str, start: int, error: str) -> tuple[Call, int]:
        """(what stands up to the end of the call, as no call; position after it)."""
        following = text.find(self.open, start)
        end = following if following >= 0 else len(text)
        close = text.find(self.close, start, end) if self.close else end
        if close < 0:
            return MalformedCall(self._inner(text[start:end]).strip(), f"the call is not closed with {self.close}"), end
        return MalformedCall(text[start:close].strip(), error), close + len(self.close)

    def _inner(self, text: str) -> str:
        """Text without what stands around all calls."""
        for mark in filter(None, self.around):
            text = text.replace(mark, "")
        return text
