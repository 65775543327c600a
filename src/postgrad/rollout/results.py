"""What a tool returned or raised → the text the model reads. Every kind of failure has one name, under which it is counted."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from pydantic_core import to_jsonable_python


class ErrorKind(StrEnum):
    """Why a call failed: the value of `ToolResult.error`."""

    MALFORMED = "malformed"
    """The text between the call markers was no call."""
    UNKNOWN_TOOL = "unknown_tool"
    """No tool has this name."""
    ARGUMENTS = "arguments"
    """The arguments do not fit the tool's schema."""
    RAISED = "raised"
    """The tool raised, `SystemExit` and `KeyboardInterrupt` included."""
    DEADLINE = "deadline"
    """The tool did not return in time."""
    OUTPUT = "output"
    """The tool returned something that cannot be written as text."""
    CRASHED = "crashed"
    """The process in which the tool runs died."""
    MEMORY = "memory"
    """The tool ran out of the memory that it may take (`isolate.memory_gb`)."""
    LIMIT = "limit"
    """The rollout had made all the calls that it may make, so this one was not made."""
    INTERRUPTED = "interrupted"
    """The run was killed during the call, and the tool is not declared idempotent, so it was not called again."""
    INFRASTRUCTURE = "infrastructure"
    """The tool raised `InfrastructureError`: not the model's fault, never shown to it."""


class OutputError(Exception):
    """A tool returned something that cannot be written as text."""


def result_text(value: Any, *, max_chars: int) -> str:
    """A string as it is, bytes as a base64 note, anything else as JSON (dataclasses, models, dates and enums included).

    At most `max_chars` characters, and marked where it was cut. Characters that no encoding can carry (lone surrogates) become `?`.

    >>> result_text({"rows": 2}, max_chars=100), result_text(None, max_chars=100), result_text(b"hi", max_chars=100)
    ('{"rows": 2}', 'null', '2 bytes, base64: aGk=')
    """
    if isinstance(value, str):
        text = str.__str__(value)  # a subclass may print itself as something else
    else:
        try:
            text = _bytes_text(bytes(value), max_chars) if isinstance(value, bytes | bytearray | memoryview) else _json_text(value)
        except BaseException as error:  # the value's own code runs here (serialisers, iterators): whatever it raises is its fault
            raise OutputError(f"returned {type(value).__name__}, which cannot be written as JSON: {exception_text(error)}") from error
    return shorten(text, max_chars=max_chars)


def _bytes_text(value: bytes, max_chars: int) -> str:
    return f"{len(value)} bytes, base64: {base64.b64encode(value[:max_chars]).decode()}"


def _json_text(value: Any) -> str:
    return json.dumps(to_jsonable_python(value, bytes_mode="base64"), ensure_ascii=False)


def shorten(text: str, *, max_chars: int) -> str:
    """At most `max_chars` characters, the mark included.

    >>> shorten("x" * 100, max_chars=30)
    'xxxxxxx… [cut: 100 characters]'
    """
    if len(text) > max_chars:
        mark = f"… [cut: {len(text)} characters]"
        text = (text[: max(max_chars - len(mark), 0)] + mark)[:max_chars]
    return text.encode("utf-8", "replace").decode("utf-8")


def shorten_tokens(text: str, max_tokens: int, *, encode: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str]) -> str:
    """At most `max_tokens` tokens of the text, and a mark behind them where it was cut."""
    ids = encode(text)
    return text if len(ids) <= max_tokens else f"{decode(ids[:max_tokens])}… [cut: {len(ids)} tokens]"


def exception_text(error: BaseException) -> str:
    """`ValueError: no such city`, or the type alone when the exception says nothing."""
    message = message_of(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def message_of(error: BaseException) -> str:
    """What the exception says; "" when it cannot: its `__str__` is user code, which may raise anything."""
    try:
        return str.__str__(str(error))  # a subclass of str may write itself otherwise
    except BaseException:
        return ""
