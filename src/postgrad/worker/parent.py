"""The owner's side of a worker process: start it, ask it, kill it at a deadline.

Requests are pickles (the owner is trusted); replies are JSON (the code that the worker runs need not be). Both travel over pipes of
their own, so whatever the code prints cannot be taken for a reply.
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
from collections.abc import Mapping
from typing import Any, Literal

from postgrad.worker.child import HEADER

LONGEST_REPLY = 64 * 2**20
"""Bytes. A longer reply is not read; its process is killed."""
_BOOT = "import sys; sys.path[:] = {path!r}; from {module} import main; main({read}, {write})"
_POLL_S = 0.2


class WorkerDied(Exception):
    """The process was killed at the deadline (`timeout`), or ended or answered nonsense by itself (`crash`)."""

    def __init__(self, kind: Literal["timeout", "crash"], message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Worker:
    """One killable process that answers requests one at a time, in order. Not for use by two threads at once.

    module:      its `main(read_fd, write_fd)` is what the process runs; see `child.serve`.
    environment: all environment variables that the process gets; None = those of this process.
    """

    def __init__(self, module: str, *, environment: Mapping[str, str] | None = None) -> None:
        self._module = module
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._to = self._from = -1
        self.starts = 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """A new process in the place of the one there was."""
        self.kill()
        child_read, self._to = os.pipe()
        self._from, child_write = os.pipe()
        path = [entry or os.getcwd() for entry in sys.path]
        code = _BOOT.format(path=path, module=self._module, read=child_read, write=child_write)
        own = os.environ if self._environment is None else self._environment
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code], stdin=subprocess.DEVNULL, pass_fds=(child_read, child_write), start_new_session=True,
                env={**own, "PYTHONHASHSEED": "0"},  # code that walks a set answers alike after a restart
            )  # fmt: skip
        finally:
            os.close(child_read)
            os.close(child_write)
        os.set_blocking(self._to, False)
        self.starts += 1

    def ask(self, request: Any, seconds: float) -> Any:
        """The reply. Raises `WorkerDied` when none comes in time; the process has then been killed."""
        data = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        end = time.monotonic() + seconds
        try:
            self._write(HEADER.pack(len(data)) + data, end, seconds)
            size = HEADER.unpack(self._read(HEADER.size, end, seconds))[0]
            if size > LONGEST_REPLY:
                raise WorkerDied("crash", f"the process answered with {size} bytes")
            return _loaded(self._read(size, end, seconds))
        except BaseException:  # also KeyboardInterrupt: a reply that is still to come would answer the next request
            self.kill()
            raise

    def kill(self) -> None:
        """End the process and everything it started in its session, now."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._process = None

    def _write(self, data: bytes, end: float, seconds: float) -> None:
        view = memoryview(data)
        try:
            while view:
                self._wait(self._to, select.POLLOUT, end, seconds)
                with contextlib.suppress(BlockingIOError):
                    view = view[os.write(self._to, view) :]
        except BrokenPipeError:
            raise WorkerDied("crash", self._cause()) from None

    def _read(self, size: int, end: float, seconds: float) -> bytes:
        received = bytearray()
        while len(received) < size:
            self._wait(self._from, select.POLLIN, end, seconds)
            chunk = os.read(self._from, min(size - len(received), 2**20))
            if not chunk:
                raise WorkerDied("crash", self._cause())
            received += chunk
        return bytes(received)

    def _wait(self, fd: int, event: int, end: float, seconds: float) -> None:
        """Until the pipe is ready. A grandchild may keep it open after the process is gone, so that is asked for as well."""
        poll = select.poll()
        poll.register(fd, event)
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise WorkerDied("timeout", f"no answer within {seconds:g} s")
            if poll.poll(1000 * min(left, _POLL_S)):
                return
            if not self.alive:
                raise WorkerDied("crash", self._cause())

    def _cause(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            return "closed its end of the channel"
        if code < 0:
            return f"the process was killed by {signal.Signals(-code).name}"
        return f"the process ended with exit code {code}"


def _loaded(reply: bytes) -> Any:
    try:
        return json.loads(reply)
    except ValueError:
        raise WorkerDied("crash", "the process answered with something that is no JSON") from None
