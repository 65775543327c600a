"""What tools answered, written down before it is used, so that a run that was killed does not do their work twice.

    begun   a line before a call starts
    ended   a line with its result, written in the moment in which the result counts: one that comes after its deadline is none

A run that does a step again finds the calls of the first time by their place. One that had ended is not made again; its result is the
recorded one, seconds included. Of one that had begun and not ended nobody knows whether it took effect: it is made again when its tool
is declared idempotent, else the model is told so. A method of an environment acts on an instance that is new, so it is called again
(or its snapshot restored) and the recorded result used.

What is recorded for a place counts only while the model asks the same there.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from postgrad.types import ToolCall, ToolResult

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class CallPlace:
    """Which call of a run: of this step, prompt (its index in the run), sample, try of the rollout (0, or 1 after it began anew), turn,
    and number within the turn."""

    step: int
    prompt: int
    sample: int
    attempt: int
    turn: int
    number: int

    def __str__(self) -> str:
        return f"{self.step}.{self.prompt}.{self.sample}.{self.attempt}.{self.turn}.{self.number}"


@dataclass(frozen=True, slots=True)
class Recorded:
    """What an earlier run left of a call. result None: it had begun. snapshot: of its environment after it, None when there is none."""

    result: ToolResult | None
    snapshot: Any = None


_CURRENT: ContextVar[CallPlace | None] = ContextVar("postgrad_call", default=None)


def call_key() -> str:
    """Inside a tool: a name for this call that no other call of the run has, and that it has again when a run that was killed makes it
    once more. With it a tool can do its work exactly once: look whether the work of this name has been done."""
    place = _CURRENT.get()
    if place is None:
        raise RuntimeError("call_key() is for tools, while they are called in a rollout")
    return str(place)


@contextmanager
def calling(place: CallPlace) -> Iterator[None]:
    token = _CURRENT.set(place)
    try:
        yield
    finally:
        _CURRENT.reset(token)


class Journal(Protocol):
    """Of one step. Calls begin and end in threads."""

    keeps: bool
    """Whether anything is written down at all."""

    def find(self, place: CallPlace, call: ToolCall) -> Recorded | None: ...
    def begun(self, place: CallPlace, call: ToolCall) -> None: ...
    def ended(self, place: CallPlace, result: ToolResult, snapshot: Any = None) -> None: ...


class NoJournal:
    """Remembers nothing."""

    keeps = False

    def find(self, place: CallPlace, call: ToolCall) -> Recorded | None:
        return None

    def begun(self, place: CallPlace, call: ToolCall) -> None: ...
    def ended(self, place: CallPlace, result: ToolResult, snapshot: Any = None) -> None: ...


Journals = Callable[[int], AbstractContextManager[Journal]]
"""The journal of a step, by its number."""


def no_journals(step: int) -> AbstractContextManager[Journal]:
    return nullcontext(NoJournal())


class FileJournal:
    """A file of JSON lines, one write each. A line that was cut off while it was written, or damaged since, is as if it had not been
    written: of a call whose end is lost nobody knows what became of it. Made by the first line."""

    keeps = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file: int | None = None
        self._found = _read(path)

    def find(self, place: CallPlace, call: ToolCall) -> Recorded | None:
        begun, ended = self._found.get(str(place), (None, None))
        if begun is None:  # where the line of its beginning was damaged, only that there was a call is known
            return None if ended is None else Recorded(None)
        if begun["name"] != call.name or begun["arguments"] != call.arguments:
            return None
        if ended is None:
            return Recorded(None)
        said = (ended.get("reward"), ended.get("done", False))
        return Recorded(ToolResult(call, ended["content"], ended["error"], ended["seconds"], *said), ended.get("snapshot"))

    def begun(self, place: CallPlace, call: ToolCall) -> None:
        self._write({"begun": str(place), "name": call.name, "arguments": call.arguments})

    def ended(self, place: CallPlace, result: ToolResult, snapshot: Any = None) -> None:
        kept = {} if snapshot is None else {"snapshot": snapshot}
        kept |= {} if result.reward is None else {"reward": result.reward}
        kept |= {"done": True} if result.done else {}
        self._write({"ended": str(place), "content": result.content, "error": str(result.error), "seconds": result.seconds, **kept})

    def __enter__(self) -> FileJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _write(self, record: Mapping[str, Any]) -> None:
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")
        with self._lock:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                if _torn(self._path):
                    os.write(self._file, b"\n")
            while line:  # a full disk takes a part first, and then says so
                line = line[os.write(self._file, line) :]


def _torn(path: Path) -> bool:
    """Whether the last line was cut off."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"


def _read(path: Path) -> dict[str, tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]]:
    """(begun, ended) by place; what was written last counts, and a new beginning makes an older end void."""
    found: dict[str, tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]] = {}
    if not path.exists():
        return found
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        record = _record(line)
        if record is None:
            log.warning("%s:%d is no record of a call (cut off, or damaged) and is left out", path, number)
        elif "begun" in record:
            found[record["begun"]] = (record, None)
        else:
            found[record["ended"]] = (found.get(record["ended"], (None, None))[0], record)
    return found


_BEGUN: Mapping[str, type | tuple[type, ...]] = {"begun": str, "name": str, "arguments": dict}
_ENDED: Mapping[str, type | tuple[type, ...]] = {"ended": str, "content": str, "error": str, "seconds": (int, float)}


def _record(line: bytes) -> Mapping[str, Any] | None:
    """None for what is no record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and any(
        all(isinstance(record.get(key), kind) for key, kind in keys.items()) for keys in (_BEGUN, _ENDED)
    )
    return record if whole else None
