"""A helper process that encodes chunks of rows. It talks in pickles over its own pipes, and needs nothing of the caller's main module.

`Helper` starts it. It first reads a job, then (part, chunk) pairs until its input ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import traceback
from typing import Any, BinaryIO

from postgrad.errors import DataError, PostgradError, RunError


def packed(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


class Helper:
    """One helper process. `call` waits for its answer and raises what the job raised there. The job goes with the first call."""

    def __init__(self, job: bytes) -> None:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-c", "from postgrad.data.worker import main; main()"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._unsent = job

    def call(self, part: int, chunk: Any) -> Any:
        try:
            self._send(self._unsent + packed((part, chunk)))
            self._unsent = b""
            assert self._process.stdout is not None
            kind, value = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            code = self._process.wait()
            what = f"a helper process ended while it read rows (exit code {code})"
            raise RunError(what, hint="it may have run out of memory; with one process: POSTGRAD_DATA_HELPERS=0") from error
        if kind == "error":
            what, where, hint = value
            raise DataError(what, where=where, hint=hint)
        if kind == "bug":
            raise RuntimeError(f"in a helper process:\n{value}")
        return value

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was still to be sent has no reader any more
                    pipe.close()

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    with contextlib.suppress(EOFError, BrokenPipeError):  # the other side is gone
        job = pickle.load(requests)
        while True:
            part, chunk = pickle.load(requests)
            pickle.dump(_answer(job, part, chunk), answers, protocol=pickle.HIGHEST_PROTOCOL)
            answers.flush()


def _answer(job: Any, part: int, chunk: Any) -> tuple[str, Any]:
    try:
        return "result", job.encode_chunk(part, chunk)
    except PostgradError as error:
        return "error", (error.what, error.where, error.hint)
    except Exception:  # a bug keeps its traceback on the way back
        return "bug", traceback.format_exc()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the caller decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that prints may get into the answers
    serve(sys.stdin.buffer, answers)
