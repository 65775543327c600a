"""Runs a program that nobody trusts against hidden tests.

calls (statements, text)   two sandboxes: the examiner runs the tests and holds the verdict, the candidate runs the program and answers the
                           examiner's calls with plain data. Neither sees a process or a file of the other.
scripts                    a sandbox for each test: the program reads the input and prints; the comparison is made out here.

So the program never sees a test, and has no way to the verdict.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from postgrad.sandbox.guest import Guest
from postgrad.sandbox.isolation import Isolation
from postgrad.sandbox.limits import Limits
from postgrad.sandbox.ready import ready

LONGEST_OUTPUT = 4 * 2**20
"""Bytes that a script may print."""


@dataclass(frozen=True, slots=True)
class Job:
    """A program and its tests: `statements` (each one test), `text` (one test) or `script` ((input, output) pairs)."""

    program: str
    kind: Literal["statements", "text", "script"]
    tests: tuple[Any, ...]
    entry_point: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    passed: int
    total: int


def run(job: Job, *, isolation: Isolation, timeout_s: float, memory_mb: int) -> Verdict | None:
    """How many tests pass within `timeout_s` seconds for all of them. None when the tests themselves cannot be run.

    Raises `SandboxError` when the sandbox fails; then nothing is known about the program.
    """
    limits = Limits(cpu_s=timeout_s, memory_mb=memory_mb)
    if job.kind == "script":
        return _scripts(job, isolation, timeout_s, limits)
    for _ in range(2):
        written = _calls(job, isolation, timeout_s, limits)
        if written is None:
            return Verdict(0, len(job.tests))  # too slow is wrong
        if written:
            verdict = json.loads(written)
            return None if verdict is None else Verdict(verdict["passed"], verdict["total"])
    # Once, the machine may have killed the examiner. Twice, it was what the program sent (or, without a sandbox, did).
    return Verdict(0, len(job.tests))


def _calls(job: Job, isolation: Isolation, timeout_s: float, limits: Limits) -> bytes | None:
    """The verdict as the examiner wrote it, b"" when it died without one, None when time ran out."""
    with ExitStack() as stack:
        with _pipes(3) as ((calls, calls_in), (replies, replies_in), (verdict, verdict_in)):
            kept = os.dup(verdict)
            stack.callback(os.close, kept)
            given = {"program": job.program, "calls": calls, "replies": replies_in}
            candidate = stack.enter_context(Guest("candidate", given, isolation=isolation, limits=limits, fds=(calls, replies_in)))
            told: dict[str, Any] = {"kind": job.kind, "tests": job.tests, "entry_point": job.entry_point}
            told |= {"calls": calls_in, "replies": replies, "verdict": verdict_in}
            examiner = stack.enter_context(Guest("examiner", told, isolation=isolation, limits=limits, fds=(calls_in, replies, verdict_in)))
        candidate.wait_ready()
        examiner.wait_ready()
        return _read(kept, seconds=timeout_s)


@contextmanager
def _pipes(count: int) -> Iterator[list[tuple[int, int]]]:
    """(reading, writing) ends, closed in this process at the end of the block."""
    pipes = [os.pipe() for _ in range(count)]
    try:
        yield pipes
    finally:
        for fd in (fd for pipe in pipes for fd in pipe):
            os.close(fd)


def _read(fd: int, *, seconds: float, most: int = 2**16) -> bytes | None:
    """All that is written until the other end is closed; None when that takes too long, or is more than `most` bytes."""
    end = time.monotonic() + seconds
    received = bytearray()
    while (left := end - time.monotonic()) > 0 and len(received) <= most:
        if ready(left, reading=[fd]):
            chunk = os.read(fd, 2**16)
            if not chunk:
                return bytes(received)
            received += chunk
    return None


def _scripts(job: Job, isolation: Isolation, timeout_s: float, limits: Limits) -> Verdict:
    end = time.monotonic() + timeout_s
    passed = 0
    for given, wanted in job.tests:
        if time.monotonic() >= end:
            break
        printed = _script(job.program, str(given), isolation, limits, end)
        passed += printed is not None and _lines(printed) == _lines(wanted)
    return Verdict(passed, len(job.tests))


def _script(program: str, given: str, isolation: Isolation, limits: Limits, end: float) -> str | None:
    """What the program prints before it ends well; None when it does not, in time."""
    with ExitStack() as stack:
        stdin = stack.enter_context(tempfile.TemporaryFile())
        stdin.write(given.encode())
        stdin.seek(0)
        reading, writing = os.pipe()
        stack.callback(os.close, reading)
        try:
            guest = stack.enter_context(
                Guest("script", {"program": program}, isolation=isolation, limits=limits, stdin=stdin, stdout=writing)
            )
        finally:
            os.close(writing)
        guest.wait_ready()
        printed = _read(reading, seconds=end - time.monotonic(), most=LONGEST_OUTPUT)
        if printed is None or guest.wait(end - time.monotonic()) != 0:
            return None
        return printed.decode(errors="replace")


def _lines(text: str) -> list[list[str]]:
    """Words by line: white space at the ends of lines and empty lines at the end do not count."""
    return [line.split() for line in text.rstrip().splitlines()]
