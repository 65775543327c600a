"""Rows to examples: what is read, what is answered, in one shape for every format.

A text prompt (and text completion) becomes a user (and assistant) message when the model has a chat template, because an
instruct model never learned to stop after raw text; `text_prompts="raw"` keeps it raw, and so does a model without a template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from postgrad.chat import ChatFormat
from postgrad.data.files import Row
from postgrad.data.messages import BadRow, read_messages, read_tools
from postgrad.types import Message, ToolSpec

TextPrompts = Literal["chat", "raw"]


@dataclass(frozen=True, slots=True)
class Example:
    """`messages` hold prompt and answer. For raw text both are in `raw` (prompt, completion) and `messages` is empty."""

    row: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    raw: tuple[str, str] | None = None


def effective_text_prompts(text_prompts: TextPrompts, chat: ChatFormat) -> TextPrompts:
    return text_prompts if chat.has_template else "raw"


def training_example(row: Row, format: str, text_prompts: TextPrompts) -> Example:
    """A conversation with an answer. Raises `BadRow`."""
    tools = read_tools(row.fields.get("tools"))
    if format == "messages":
        messages = read_messages(_messages_of(row.fields))
    else:
        prompt, completion = row.fields.get("prompt"), row.fields.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str) and text_prompts == "raw":
            return Example(row.name, (), tools, raw=(prompt, _not_empty(completion, "completion")))
        messages = _prompt_messages(prompt) + _completion_messages(completion)
    _check_answers(messages)
    return Example(row.name, messages, tools)


def prompt_messages(row: Row, format: str) -> tuple[tuple[Message, ...], bool]:
    """(messages that the model answers, whether answers at their end were left out). Raises `BadRow`."""
    messages = read_messages(_messages_of(row.fields)) if format == "messages" else _prompt_messages(row.fields.get("prompt"))
    end = len(messages)
    while end and messages[end - 1].role == "assistant":
        end -= 1
    if not end:
        raise BadRow("the prompt has no message for the model to answer")
    return messages[:end], end < len(messages)


def is_text_prompt(row: Row, format: str) -> bool:
    return format != "messages" and isinstance(row.fields.get("prompt"), str)


def other_columns(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the rewards get: every column except the prompt itself."""
    return {name: value for name, value in fields.items() if name not in ("prompt", "messages", "conversations")}


def _check_answers(messages: tuple[Message, ...]) -> None:
    answers = [message for message in messages if message.role == "assistant"]
    if not answers:
        raise BadRow("the conversation has no assistant turn, so there is nothing to train")
    if any(not message.content.strip() and not message.tool_calls and message.train is not False for message in answers):
        raise BadRow("an assistant turn is empty; training it would teach the model to say nothing")


def _messages_of(fields: Mapping[str, Any]) -> Any:
    return fields["messages"] if fields.get("messages") is not None else fields.get("conversations")


def _prompt_messages(prompt: Any) -> tuple[Message, ...]:
    """Assistant turns inside a prompt are context."""
    if isinstance(prompt, str):
        return (Message("user", _not_empty(prompt, "prompt")),)
    return tuple(replace(message, train=False) if message.role == "assistant" else message for message in read_messages(prompt))


def _completion_messages(completion: Any) -> tuple[Message, ...]:
    if isinstance(completion, str):
        return (Message("assistant", _not_empty(completion, "completion")),)
    if isinstance(completion, Mapping):
        completion = [completion]
    return read_messages(completion)


def _not_empty(text: str, what: str) -> str:
    if not text.strip():
        raise BadRow(f"the {what} is empty")
    return text
