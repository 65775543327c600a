"""Changes one layer of a good rollout and nothing else. A reward should notice only what it is about.

structure     a limit cut it · a stray </think> · an empty turn before it
reasoning     other words and numbers in the thinking
tool_calls    other arguments · another tool
tool_results  other results · (and a call that failed, which calls and results share)
final         another answer
length        white space and tokens at the end

A changed text has as many words and marks as before, so that no reward for length is disturbed by the way.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from postgrad.rewards.check.samples import Draft, token_ids
from postgrad.types import Message, StopReason

LAYERS = ("structure", "reasoning", "tool_calls", "tool_results", "final", "length")
ERROR = "a call that failed"
"""A mutant of two layers: it counts for the one that the reward declares."""

_THOUGHT = re.compile(r"(<think>)(.*?)(</think>)", re.DOTALL)
_MORE_TOKENS = 200


def mutants(good: Draft) -> Iterator[tuple[str, str, Draft]]:
    """(layer, name, changed rollout) for every change that is possible."""
    for layer, name, changed in _all(good):
        if changed is not None and changed != good:
            yield layer, name, changed


def _all(good: Draft) -> Iterator[tuple[str, str, Draft | None]]:
    yield "structure", "cut by a limit", replace(good, stop=StopReason.TURN_TOKENS)
    if "</think>" in good.final:
        before, _, after = good.final.rpartition("</think>")
        second = good.with_final(f"{before}</think></think>{after}")
        yield "structure", "a second </think>", replace(second, extra_tokens=-len(token_ids("</think>")))
    if len(good.messages) > 1:
        yield "structure", "an empty turn before it", replace(good, messages=(Message("assistant", ""), *good.messages))
    yield "reasoning", "other thinking", _every(good, _other_thinking)
    yield "tool_calls", "other arguments", _every(good, _other_arguments)
    yield "tool_calls", "another tool", _every(good, _other_tool)
    yield "tool_results", "other results", _every(good, _other_result)
    if any(message.role == "tool" for message in good.messages) and not good.errors:
        yield "tool_results", ERROR, replace(good, errors=((0, "the tool failed"),))
    yield "final", "another answer", good.with_final(wrong(good.final)) if good.final else None
    yield (
        "length",
        "white space at the end",
        replace(good.with_final(good.final + " \n" * 40), extra_tokens=_MORE_TOKENS) if good.final else None,
    )


def wrong(text: str) -> str:
    """Another answer of the same shape: what stands after the thinking, disguised; of JSON only the values.

    >>> wrong("<think>6 * 7</think>42 apples")
    '<think>6 * 7</think>75 nccyrf'
    """
    thought, end, answer = text.rpartition("</think>")
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return thought + end + disguise(answer)
    return thought + end + (disguise(answer) if not isinstance(value, dict | list) else json.dumps(_disguised(value), ensure_ascii=False))


def disguise(text: str) -> str:
    """Every number and every word replaced by another, one for one.

    >>> disguise("$1,234.50 for 7 apples")
    '$4,567.83 sbe 1 nccyrf'
    """
    shifted = re.sub(r"\d+", lambda match: _other_digits(match.group()), text)
    turned = codecs.encode(shifted, "rot13")
    return turned if turned != text else text[::-1]


def _other_digits(digits: str) -> str:
    """Each digit plus 3; a leading 7 becomes 1, so that no number starts with a 0."""
    rest = "".join(str((int(digit) + 3) % 10) for digit in digits)
    return "1" + rest[1:] if rest[0] == "0" else rest


def _disguised(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _disguised(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_disguised(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value + 3
    return disguise(value) if isinstance(value, str) else value


def _every(good: Draft, change: Any) -> Draft:
    return replace(good, messages=tuple(change(message) for message in good.messages))


def _other_thinking(message: Message) -> Message:
    content = _THOUGHT.sub(lambda match: match[1] + disguise(match[2]) + match[3], message.content)
    return replace(message, content=content, reasoning=disguise(message.reasoning)) if message.role == "assistant" else message


def _other_arguments(message: Message) -> Message:
    return replace(message, tool_calls=tuple(replace(call, arguments=_disguised(call.arguments)) for call in message.tool_calls))


def _other_tool(message: Message) -> Message:
    return replace(message, tool_calls=tuple(replace(call, name=disguise(call.name)) for call in message.tool_calls))


def _other_result(message: Message) -> Message:
    return replace(message, content=wrong(message.content)) if message.role == "tool" else message
