"""A conversation with tools as a template without tool support can print it: the text protocol, applied to messages.

1. Tools go into the system message (or before the first user message where the template has no system role).
2. Calls go into the assistant's content, in the style that is given. What is guarded before stays text; the markers that a style writes
   are special tokens where the tokenizer has them.
3. Results stay tool messages where the template prints that role, and are user messages in `<tool_response>` tags where it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from postgrad.chat.codecs import RESULT_CLOSE, RESULT_OPEN, CallStyle, describe_tools
from postgrad.chat.tokens import Guard
from postgrad.types import Message, ToolCall, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Which roles the template prints."""

    system: bool
    tool: bool


def guarded(guard: Guard, message: Message) -> Message:
    """The message with the special-token strings in its texts and calls marked as typed."""
    mark = guard.apply
    calls = tuple(ToolCall(mark(call.name), mark(call.arguments), id=mark(call.id)) for call in message.tool_calls)
    return replace(
        message, content=mark(message.content), reasoning=mark(message.reasoning), name=mark(message.name),
        tool_call_id=mark(message.tool_call_id), tool_calls=calls,
    )  # fmt: skip


def guarded_tool(guard: Guard, tool: ToolSpec) -> ToolSpec:
    return ToolSpec(guard.apply(tool.name), guard.apply(tool.description), guard.apply(tool.parameters))


def lower(messages: Sequence[Message], tools: Sequence[ToolSpec], roles: Roles, style: CallStyle) -> list[tuple[int, Message]]:
    """(index of the original message, or -1 for an added one; message) pairs in the text protocol. Raises `codecs.CannotWrite`."""
    lowered: list[tuple[int, Message]] = []
    for index, message in enumerate(messages):
        if message.role == "tool" and not roles.tool:
            follows = index > 0 and messages[index - 1].role == "tool"
            _append_result(lowered, index, message, joined=follows)
        elif message.tool_calls:
            lowered.append((index, replace(message, content=style.write(message.content, message.tool_calls), tool_calls=())))
        else:
            lowered.append((index, message))
    return _with_tools(lowered, describe_tools(tools, style), roles) if tools else lowered


def _append_result(lowered: list[tuple[int, Message]], index: int, message: Message, *, joined: bool) -> None:
    """Results of one turn share one user message: templates without a tool role mostly want strict alternation."""
    text = f"{RESULT_OPEN}\n{message.content}\n{RESULT_CLOSE}"
    if joined:
        first, previous = lowered.pop()
        lowered.append((first, replace(previous, content=f"{previous.content}\n{text}")))
    else:
        lowered.append((index, Message("user", text)))


def _with_tools(lowered: list[tuple[int, Message]], text: str, roles: Roles) -> list[tuple[int, Message]]:
    if lowered and lowered[0][1].role == "system":
        index, system = lowered[0]
        return [(index, replace(system, content=f"{system.content}\n\n{text}")), *lowered[1:]]
    if roles.system or not lowered or lowered[0][1].role != "user":
        return [(-1, Message("system", text)), *lowered]
    index, user = lowered[0]
    return [(index, replace(user, content=f"{text}\n\n{user.content}")), *lowered[1:]]
