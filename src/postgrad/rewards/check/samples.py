"""Good answers, and rollouts made of messages without any model.

No tokenizer is loaded, so a token here is a word, a number, a mark or a stretch of white space: lengths can be compared with one another,
not with a model's.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from postgrad.types import Message, Prompt, Rollout, Segment, Source, StopReason, ToolResult

_PIECE = re.compile(r"\w+|\s+|[^\w\s]")
_END = "<|im_end|>"
_LONGEST = 50_000
"""Characters of a message that become tokens; no model writes more."""
_END_ID, _CUT_ID = 0, 2
"""A finished turn ends with the one, a cut one with the other, so that both have as many tokens."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A rollout before it has tokens.

    errors: by index of the tool message, what went wrong with its call. extra_tokens: tokens that the last turn has beyond its words
    (negative: that it lacks).
    """

    messages: tuple[Message, ...]
    stop: StopReason = StopReason.END
    errors: tuple[tuple[int, str], ...] = ()
    extra_tokens: int = 0

    @property
    def final(self) -> str:
        return self.messages[-1].content if self.messages and self.messages[-1].role == "assistant" else ""

    def with_final(self, content: str) -> Draft:
        """The same rollout with another last message of the assistant."""
        if not self.messages or self.messages[-1].role != "assistant":
            return replace(self, messages=(*self.messages, Message("assistant", content)))
        return replace(self, messages=(*self.messages[:-1], replace(self.messages[-1], content=content)))

    def rollout(self, sample: int = 0) -> Rollout:
        segments = [_segment(message, last=index == len(self.messages) - 1, draft=self) for index, message in enumerate(self.messages)]
        return Rollout(
            segments=tuple(segments),
            messages=self.messages,
            stop=self.stop,
            sample=sample,
            tool_results=_results(self.messages, dict(self.errors)),
            text="\n".join(written(message) for message in self.messages),
            raw_text="\n".join(written(message) + _end(message, index, self) for index, message in enumerate(self.messages)),
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt with a good rollout."""

    prompt: Prompt
    good: Draft

    @property
    def row(self) -> str:
        return self.prompt.row


@dataclass(frozen=True, slots=True)
class Case:
    """One rollout to score: the good one of a sample, a mutant of it, or a lazy strategy.

    kind: good, lazy, or the layer that was changed. name: which strategy or mutant.
    """

    kind: str
    name: str
    draft: Draft


def say(text: str) -> Draft:
    """A rollout of one assistant message."""
    return Draft((Message("assistant", text),))


def written(message: Message) -> str:
    """A message as the model writes it: thinking, content, calls."""
    if message.role != "assistant":
        return message.content
    thought = f"<think>{message.reasoning}</think>" if message.reasoning else ""
    calls = (f"<tool_call>\n{json.dumps(_call_json(message, i), ensure_ascii=False)}\n</tool_call>" for i in range(len(message.tool_calls)))
    return "\n".join(filter(None, (thought + message.content, *calls)))


def token_ids(text: str) -> tuple[int, ...]:
    """One id per piece of the text; equal pieces have equal ids.

    >>> len(token_ids("2 plus 2.")), token_ids("2 2")[0] == token_ids("2 2")[2]
    (6, True)
    """
    return tuple(map(_token_id, _PIECE.findall(text[:_LONGEST])))


@lru_cache(maxsize=65536)
def _token_id(piece: str) -> int:
    return zlib.crc32(piece.encode(errors="surrogatepass")) & 0x7FFFFFFF


def _call_json(message: Message, index: int) -> dict[str, object]:
    call = message.tool_calls[index]
    return {"name": call.name, "arguments": dict(call.arguments)}


def _end(message: Message, index: int, draft: Draft) -> str:
    cut = draft.stop.truncated and index == len(draft.messages) - 1
    return _END if message.role == "assistant" and not cut else ""


def _segment(message: Message, *, last: bool, draft: Draft) -> Segment:
    ids = token_ids(written(message))
    if message.role != "assistant":
        return Segment(Source.TOOL, ids)
    if not last:
        ids += (_END_ID,) if ids else ()
    else:
        ids = (*ids[: len(ids) + min(0, draft.extra_tokens)], *(1,) * draft.extra_tokens, _CUT_ID if draft.stop.truncated else _END_ID)
    return Segment(Source.MODEL, ids, (-0.1,) * len(ids))


def _results(messages: Sequence[Message], errors: dict[int, str]) -> tuple[ToolResult, ...]:
    """Each tool message with the call that it answers: by id where there is one, else in order. The calls of a last turn are the answer
    itself (tools that nothing runs): they succeeded."""
    waiting = [call for message in messages for call in message.tool_calls]
    results = []
    for index, message in enumerate(message for message in messages if message.role == "tool"):
        named = next((call for call in waiting if message.tool_call_id and call.id == message.tool_call_id), None)
        call = named or (waiting[0] if waiting else None)
        if call is not None:
            waiting.remove(call)
        results.append(ToolResult(call, message.content, errors.get(index, "")))
    last = messages[-1].tool_calls if messages else ()
    return (*results, *(ToolResult(call, "") for call in last))
