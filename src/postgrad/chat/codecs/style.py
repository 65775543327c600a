"""What a style of writing tool calls is: it writes calls into a turn and reads them out of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from postgrad.types import MalformedCall, ToolCall, ToolSpec

Call = ToolCall | MalformedCall
Parsed = tuple[str, tuple[Call, ...]]
"""(content outside the calls, calls in order)"""


class CannotWrite(ValueError):
    """The style has no way to write this call, such as a parameter `from` in Python's syntax."""


@dataclass(frozen=True, slots=True)
class CallStyle:
    """write:   the text of a turn, from its content and calls. Raises `CannotWrite`.
    parse:   content and calls of a turn's text; never raises. `parse(write(content, calls))` gives back content and calls.
    markers: strings that a tokenizer may have as special tokens and that `parse` must see (other special tokens are dropped before).
    typed:   for a style whose text does not say what type a value has: a call that `parse` read, with the types that its tool asks for.
    """

    name: str
    write: Callable[[str, Sequence[ToolCall]], str]
    parse: Callable[[str], Parsed]
    markers: tuple[str, ...] = ()
    typed: Callable[[ToolCall, Sequence[ToolSpec]], ToolCall] | None = None

    def read(self, text: str, tools: Sequence[ToolSpec]) -> Parsed:
        """`parse`, and the types of the values where only the tools say them."""
        content, calls = self.parse(text)
        if self.typed is None:
            return content, calls
        return content, tuple(self.typed(call, tools) if isinstance(call, ToolCall) else call for call in calls)


def joined(content: str, written: str) -> str:
    """The content and, on lines of their own, the calls."""
    return f"{content}\n{written}" if content else written


def outside(parts: Sequence[str], calls: Sequence[Call]) -> str:
    """Text outside the calls: exactly as written when there are none, else its parts without the white space around them."""
    if not calls:
        return "".join(parts)
    return "\n".join(part for part in (part.strip() for part in parts) if part)
