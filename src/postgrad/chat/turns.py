"""Where the assistant turns lie in a rendered conversation, exact to the character.

A turn begins where the generation prompt of the conversation before it ends, and ends with the first end token that the template prints
after that (typed ones are guarded, so it is the template's). Both are checked to be prefixes of the whole conversation; nothing is searched
by content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.chat.facts import Facts
from postgrad.chat.render import SENTINEL, Dicts, Template
from postgrad.chat.tokens import Guard
from postgrad.errors import DataError


class TemplateRewritesHistory(DataError):
    """The template prints an earlier turn differently once later turns follow (thinking models), so no single row holds every turn."""


class GenerationPromptDiffers(DataError):
    """The generation prompt is not the start of the assistant turn that the template prints (it opens `<think>`, the turn drops it)."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation ready to render: template messages, the index of each in the caller's list (-1 = added), tools, and the guard."""

    messages: Dicts
    origin: tuple[int, ...]
    tools: tuple[Mapping[str, Any], ...]
    guard: Guard


@dataclass(frozen=True, slots=True)
class Turn:
    """Text of one assistant turn: all that precedes it, what the model writes, its end token, what the template adds after it."""

    index: int
    prompt: str
    body: str
    end: str
    tail: str


class Turns:
    """Finds turns with one template. `stops` are the strings of the special tokens that end a turn."""

    def __init__(self, template: Template, facts: Facts, stops: Iterable[str]) -> None:
        self._template = template
        self._facts = facts
        self._stop = re.compile("|".join(re.escape(text) for text in sorted(stops, key=len, reverse=True)) or "(?!)")

    def prompt(self, chat: Chat, messages: Dicts) -> str:
        """What the model reads before it answers `messages`."""
        if self._facts.header_is_prompt:
            return self._before_answer(chat, messages)
        return self._template.render(messages, chat.tools, prompt=True)

    def walk(self, chat: Chat, *, only_last: bool) -> tuple[list[Turn], str]:
        """(assistant turns in order, the whole text). Raises `TemplateRewritesHistory` unless each turn stays as first printed."""
        indices = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        turns: list[Turn] = []
        so_far = ""
        for index in indices[-1:] if only_last else indices:
            turn = self.turn(chat, index)
            _check_prefix(turn.prompt, so_far)
            so_far = turn.prompt + turn.body + turn.end
            turns.append(turn)
        if turns and indices[-1] == len(chat.messages) - 1:
            return turns, so_far + turns[-1].tail
        text = self._template.render(chat.messages, chat.tools)
        _check_prefix(text, so_far)
        return turns, text

    def turn(self, chat: Chat, index: int) -> Turn:
        """The assistant turn at `index`, as printed when it is the last message."""
        messages = chat.messages
        prompt = self.prompt(chat, messages[:index]) if index else self._before_answer(chat, [])
        text = self._template.render(messages[: index + 1], chat.tools)
        if not text.startswith(prompt):
            raise GenerationPromptDiffers(
                "the chat template's generation prompt is not how it prints the assistant turn, so training would not match inference",
                hint="use a template whose generation prompt is the start of the assistant turn it prints",
            )
        end = self._end(text, len(prompt))
        return Turn(index, prompt, text[len(prompt) : end.start()], end.group(), text[end.end() :])

    def body(self, text: str, start: int) -> str:
        """The turn that begins at `start`, up to its end token."""
        return text[start : self._end(text, start).start()]

    def from_end_of(self, text: str, mark: str) -> str:
        """`text` from the first end token after the last `mark` on."""
        if mark not in text:
            raise DataError("the chat template prints nothing for an assistant turn", hint="use another template")
        return text[self._end(text, text.rindex(mark)).start() :]

    def _end(self, text: str, start: int) -> re.Match[str]:
        match = self._stop.search(text, start)
        if match is None:
            raise DataError(
                "the chat template puts no end token after an assistant turn, so a model trained on it would never stop",
                hint="add the tokenizer's end token after the assistant content in the template, or use a built-in template",
            )
        return match

    def _before_answer(self, chat: Chat, messages: Dicts) -> str:
        sentinel = unused(SENTINEL, messages)
        text = self._template.render([*messages, {"role": "assistant", "content": sentinel}], chat.tools)
        if sentinel not in text:
            raise DataError("the chat template prints nothing for an assistant turn", hint="use another template")
        return text[: text.rindex(sentinel)]


def unused(word: str, *contents: Any) -> str:
    """`word`, lengthened until none of the contents holds it."""
    text = repr(contents)
    while word in text:
        word += "x"
    return word


def _check_prefix(text: str, so_far: str) -> None:
    if not text.startswith(so_far):
        raise TemplateRewritesHistory(
            "the chat template prints earlier turns differently once later turns follow, so one row cannot hold every turn",
            hint="train the last turn only (train_on: last), or one row per turn",
        )


def last_assistant(messages: Sequence[Mapping[str, Any]]) -> int:
    return max(index for index, message in enumerate(messages) if message["role"] == "assistant")
