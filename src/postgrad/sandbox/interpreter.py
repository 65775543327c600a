"""A Python interpreter in the sandbox, for code that a model wrote: cells in one namespace, each with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from dataclasses import dataclass

from postgrad.sandbox.guest import Guest
from postgrad.sandbox.isolation import Isolation
from postgrad.sandbox.limits import Limits
from postgrad.sandbox.ready import ready

LONGEST_OUTPUT = 2**16
"""Bytes of what a cell prints that are kept; the rest is read and thrown away."""
_LONGEST_REPLY = 2**20
_HEADER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell did.

    printed: on stdout and stderr. value: repr of its last expression, None where there is none. error: the traceback.
    """

    printed: str
    value: str | None = None
    error: str | None = None


class TooSlow(Exception):
    """The cell did not end in time; the interpreter was killed. `printed` is what it had written by then."""

    def __init__(self, printed: str) -> None:
        super().__init__("the cell did not end in time")
        self.printed = printed


class Ended(Exception):
    """The interpreter ended, by the cell's own doing (`os._exit`, too much memory in C code, a crash) or a limit."""

    def __init__(self, printed: str, code: int | None) -> None:
        super().__init__(f"the interpreter ended with exit code {code}")
        self.printed = printed
        self.code = code


class Interpreter:
    """Raises `SandboxError` when it cannot be started. After `TooSlow` and `Ended` it is gone: make a new one."""

    def __init__(self, *, isolation: Isolation, limits: Limits) -> None:
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._output, output = os.pipe()
        settings = {"requests": requests, "replies": replies}
        try:
            self._guest = Guest("interpreter", settings, isolation=isolation, limits=limits, fds=(requests, replies), stdout=output)
            self._guest.wait_ready()
        except BaseException:
            self._close_ends()
            raise
        finally:
            for fd in (requests, replies, output):
                os.close(fd)

    def run(self, code: str, *, deadline_s: float) -> Cell:
        """Run a cell. Raises `TooSlow` or `Ended`."""
        end = time.monotonic() + deadline_s
        data = json.dumps({"code": code}).encode()
        printed, reply = bytearray(), bytearray()
        unsent = memoryview(_HEADER.pack(len(data)) + data)
        os.set_blocking(self._requests, False)
        while True:
            left = end - time.monotonic()
            if left <= 0:
                self.close()
                raise TooSlow(_text(printed))
            able = ready(left, reading=[self._output, self._replies], writing=[self._requests] if unsent else [])
            if self._requests in able:
                with contextlib.suppress(BrokenPipeError):
                    unsent = unsent[os.write(self._requests, unsent) :]
            if self._output in able:
                _keep(os.read(self._output, 2**16), printed, LONGEST_OUTPUT)
            if self._replies in able:
                chunk = os.read(self._replies, 2**16)
                reply += chunk
                if not chunk or len(reply) > _LONGEST_REPLY:
                    raise self._ended(printed)
                if len(reply) >= _HEADER.size and len(reply) >= _HEADER.size + _HEADER.unpack(reply[: _HEADER.size])[0]:
                    return self._cell(printed, bytes(reply[_HEADER.size :]))

    def close(self) -> None:
        self._guest.close()
        self._close_ends()

    def _cell(self, printed: bytearray, reply: bytes) -> Cell:
        self._drain(printed)
        try:
            found = json.loads(reply)
            value, error = found["value"], found["error"]
        except (ValueError, TypeError, KeyError):
            raise self._ended(printed) from None  # the cell wrote to the interpreter's own channel
        return Cell(_text(printed), None if value is None else str(value), None if error is None else str(error))

    def _ended(self, printed: bytearray) -> Ended:
        code = self._guest.wait(0.5)
        self._drain(printed)
        self.close()
        return Ended(_text(printed), code)

    def _drain(self, printed: bytearray) -> None:
        """What was written before the reply and has not been read."""
        for _ in range(64):  # a process left behind may go on writing for ever
            if not ready(0.0, reading=[self._output]):
                return
            chunk = os.read(self._output, 2**16)
            if not chunk:
                return
            _keep(chunk, printed, LONGEST_OUTPUT)

    def _close_ends(self) -> None:
        for name in ("_requests", "_replies", "_output"):
            fd = getattr(self, name)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)


def _keep(chunk: bytes, printed: bytearray, most: int) -> None:
    printed += chunk[: most - len(printed)]


def _text(printed: bytearray) -> str:
    return printed.decode(errors="replace")
