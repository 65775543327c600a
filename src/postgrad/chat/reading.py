"""The text of an assistant turn as reasoning, content and calls; and whether a template prints a turn so that it reads the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.chat.codecs import CallStyle
from postgrad.chat.facts import Facts
from postgrad.chat.render import TemplateRefuses
from postgrad.chat.tokens import Guard, Tokens
from postgrad.types import MalformedCall, Message, ToolCall, ToolSpec

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """One sampled turn. `calls` are in the order written; `message.tool_calls` holds the well-formed ones."""

    message: Message
    calls: tuple[ToolCall | MalformedCall, ...]


def opens_thinking(prompt: str) -> bool:
    """True when the text that a turn continues has already opened its reasoning."""
    return prompt.rstrip().endswith(_OPEN)


def thought_in_content(message: Message) -> Message:
    """The message with its reasoning as text, for templates that look for it there."""
    if not message.reasoning:
        return message
    content = f"{_OPEN}\n{message.reasoning}\n{_CLOSE}\n\n{message.content}"
    return Message(message.role, content, message.tool_calls, message.tool_call_id, message.name, train=message.train)


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads turns of one chat format: `style` says how its calls are written."""

    tokens: Tokens
    facts: Facts
    style: CallStyle

    def sampled(self, token_ids: list[int], tools: Sequence[ToolSpec], *, opened: bool) -> ParsedTurn:
        """A turn from its ids without the end token. `opened`: it continues a reasoning that the prompt has opened."""
        special = self.tokens.special
        keep = frozenset(special[marker] for marker in self.style.markers if marker in special)
        return self.read(self.tokens.decode(token_ids, keep=keep), tools, opened=opened)

    def without_calls(self, token_ids: list[int], *, opened: bool) -> Message:
        """The same where no tools were offered: what looks like a call is text."""
        reasoning, content = self._split(self.tokens.decode(token_ids), opened=opened)
        return Message("assistant", content, reasoning=reasoning)

    def printed(self, body: str, guard: Guard, tools: Sequence[ToolSpec], *, opened: bool) -> ParsedTurn:
        """A turn from what a template printed of it."""
        return self.read(guard.remove(self.tokens.shown(body, keep=self.style.markers)), tools, opened=opened)

    def read(self, text: str, tools: Sequence[ToolSpec], *, opened: bool) -> ParsedTurn:
        reasoning, rest = self._split(text, opened=opened)
        content, calls = self.style.read(rest, tools)
        good = tuple(call for call in calls if isinstance(call, ToolCall))
        return ParsedTurn(Message("assistant", content, tool_calls=good, reasoning=reasoning), calls)

    def _split(self, text: str, *, opened: bool) -> tuple[str, str]:
        """(reasoning, the rest) for templates that know `<think>`; other text is left whole."""
        opens = text.lstrip().startswith(_OPEN)
        if not self.facts.thinks or not (opens or opened):
            return "", text
        thought, closed, rest = (text.lstrip().removeprefix(_OPEN) if opens else text).partition(_CLOSE)
        return thought.strip("\n"), rest.lstrip("\n") if closed else ""

    def require_same(self, message: Message, printed: ParsedTurn, body: str) -> None:
        """Raises `TemplateRefuses` when a turn with calls is printed without its content, or reads back as other calls."""
        made = [(call.name, call.arguments) if isinstance(call, ToolCall) else call.error for call in printed.calls]
        if _json(made) != _json(_calls(message)):
            raise TemplateRefuses(
                f"the turn's calls, as they are printed in the {self.style.name} style, read back differently: "
                f"{_short(_calls(message))} became {_short(made)}",
                hint="use tool_protocol: text",
            )
        if _bare(message.content) not in _bare(body):
            raise TemplateRefuses("the chat template leaves out the text beside a turn's calls", hint="use tool_protocol: text")


def same(left: Message, right: Message) -> bool:
    """True when two turns hold the same reasoning, content (white space around them aside) and calls."""
    texts = [(message.reasoning.strip(), message.content.strip(), _json(_calls(message))) for message in (left, right)]
    return texts[0] == texts[1]


def _calls(message: Message) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, dict(call.arguments)) for call in message.tool_calls]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _bare(text: str) -> str:
    """Without white space, which templates trim."""
    return "".join(text.split())
