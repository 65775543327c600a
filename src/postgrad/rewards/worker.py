"""The trainer's side of the process in which reward functions run: start it, ask it, kill it at a deadline, replace it.

One process serves a whole run. It is replaced when a call does not answer in time, when it dies (segfault, `os._exit`, killed for
memory) or when a function ran out of memory; the functions are loaded again from the text they were first loaded from.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from postgrad.errors import RunError
from postgrad.rewards.child import HEADER, FunctionSource, Mode, Outcome

LOAD_DEADLINE_S = 120.0
_BOOT = "import sys; sys.path[:] = {path!r}; from postgrad.rewards.child import main; main({read}, {write})"


class WorkerDied(Exception):
    """The process was killed at the deadline (`timeout`) or ended by itself (`crash`)."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RewardWorker:
    """One killable process that holds the functions of `sources`.

    memory_gb: how much a call may allocate beyond what is loaded; None = no limit.
    """

    def __init__(self, sources: Sequence[FunctionSource], *, memory_gb: float | None = 4.0) -> None:
        self._sources = list(sources)
        self._memory = None if memory_gb is None else int(memory_gb * 2**30)
        self._rows: list[bytes] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._to = self._from = -1
        self.starts = 0

    def describe(self) -> list[dict[str, Any]]:
        """What each function is, in order; the last entry is {"problem": …} when one could not be loaded."""
        return self._start()

    def set_rows(self, rows: Sequence[bytes]) -> None:
        """The batch that later calls refer to by index."""
        self._rows = list(rows)
        if self._process is not None:
            try:
                self._ask(("rows", self._rows), LOAD_DEADLINE_S)
            except WorkerDied:
                self.kill()  # it died while idle; the next call starts another one, which gets the rows

    def call(self, function: int, rows: Sequence[int], *, mode: Mode, deadline_s: float, wall_s: float) -> list[Outcome]:
        """One outcome per row. Raises `WorkerDied` after killing the process when no reply comes within `wall_s` seconds."""
        if self._process is None or self._process.poll() is not None:
            self._restart()
        try:
            outcomes: list[Outcome] = self._ask(("call", function, list(rows), mode, deadline_s), wall_s)
        except WorkerDied as error:
            self.kill()
            if error.kind == "timeout":
                raise WorkerDied("timeout", f"took longer than its deadline of {deadline_s:g} s") from None
            raise
        if any(outcome[0] == "failed" and outcome[1] == "memory" for outcome in outcomes):
            self.kill()
        return outcomes

    def kill(self) -> None:
        """End the process and everything it started, now."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._process = None

    def close(self) -> None:
        """Kill the process; it holds nothing worth keeping."""
        self.kill()

    def _restart(self) -> None:
        try:
            descriptions = self._start()
        except WorkerDied as error:
            raise RunError(f"the rewards cannot be loaded a second time: {error}") from None
        if problem := descriptions[-1].get("problem"):
            raise RunError(f"the rewards cannot be loaded a second time: {problem['message']}", where=problem["where"])
        if self._rows:
            self._ask(("rows", self._rows), LOAD_DEADLINE_S)

    def _start(self) -> list[dict[str, Any]]:
        self.kill()
        child_read, self._to = os.pipe()
        self._from, child_write = os.pipe()
        path = [entry or os.getcwd() for entry in sys.path]
        command = [sys.executable, "-P", "-c", _BOOT.format(path=path, read=child_read, write=child_write)]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}  # a reward that walks a set answers alike after a restart
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(child_read, child_write), start_new_session=True, env=environment
            )
        finally:
            os.close(child_read)
            os.close(child_write)
        self.starts += 1
        descriptions: list[dict[str, Any]] = self._ask(("load", self._sources, self._memory), LOAD_DEADLINE_S)
        return descriptions

    def _ask(self, request: tuple[Any, ...], seconds: float) -> Any:
        data = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        end = time.monotonic() + seconds
        try:
            _write_all(self._to, HEADER.pack(len(data)) + data)
        except BrokenPipeError:
            raise WorkerDied("crash", self._cause()) from None
        size = HEADER.unpack(self._read(HEADER.size, end, seconds))[0]
        return json.loads(self._read(size, end, seconds))

    def _read(self, size: int, end: float, seconds: float) -> bytes:
        assert self._process is not None
        received = bytearray()
        poll = select.poll()
        poll.register(self._from, select.POLLIN)
        while len(received) < size:
            left = end - time.monotonic()
            if left <= 0:
                raise WorkerDied("timeout", f"no answer within {seconds:g} s")
            if not poll.poll(1000 * min(left, 0.2)):
                if self._process.poll() is not None:  # a grandchild may keep the pipe open after the process is gone
                    raise WorkerDied("crash", self._cause())
                continue
            chunk = os.read(self._from, size - len(received))
            if not chunk:
                raise WorkerDied("crash", self._cause())
            received += chunk
        return bytes(received)

    def _cause(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return "closed its end of the channel"
        if code < 0:
            return f"the process was killed by {signal.Signals(-code).name}"
        return f"the process ended with exit code {code}"


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
