"""Runs a program that nobody trusts against hidden tests, in processes of their own.

    reward worker ── examiner (runs the tests, holds the verdict) ── candidate (runs the program)

The candidate answers calls over a pipe with plain data; it never sees the tests or the verdict. Both get an empty environment and an
empty folder, the candidate limits on CPU seconds, memory, file size and processes. With bubblewrap (`bwrap`) they have no network, their
own process ids and a read-only view of the system; without it a program runs with the rights of your user: it can read your files, reach
the network and leave processes behind.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Sandbox = Literal["auto", "bwrap", "rlimits"]

_EXAMINER = Path(__file__).with_name("examiner.py")
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """A program and its tests: `statements` (each one test), `text` (one test) or `script` ((input, output) pairs)."""

    program: str
    kind: Literal["statements", "text", "script"]
    tests: tuple[Any, ...]
    entry_point: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds for all tests together (wall clock, and CPU of each process), and memory of each process."""

    timeout_s: float
    memory_mb: int


@dataclass(frozen=True, slots=True)
class Verdict:
    passed: int
    total: int


def run(job: Job, *, sandbox: Sandbox, limits: Limits) -> Verdict | None:
    """How many tests pass. None when the tests themselves cannot be run; then nothing is known about the program.

    Raises `OSError` or `RuntimeError` when the sandbox cannot be set up.
    """
    command = [sys.executable, "-I", "-B", str(_EXAMINER)]
    request = json.dumps({**asdict(job), **asdict(limits), "python": sys.executable})
    with tempfile.TemporaryDirectory(prefix="postgrad-code-") as folder:
        process = subprocess.Popen(
            [*_wrapper(sandbox, folder), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}, start_new_session=True,
        )  # fmt: skip
        try:
            written, _ = process.communicate(request.encode(), timeout=limits.timeout_s + _GRACE_S)
        except subprocess.TimeoutExpired:
            return Verdict(0, len(job.tests))  # too slow is wrong
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _close(process)
    return _read(written, job)


def _read(written: bytes, job: Job) -> Verdict | None:
    """The last line is the verdict. An examiner that died without one was killed by the program: nothing else could have done it."""
    lines = written.decode(errors="replace").splitlines()
    if not lines:
        return Verdict(0, len(job.tests))
    verdict = json.loads(lines[-1])
    return None if verdict is None else Verdict(verdict["passed"], verdict["total"])


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _wrapper(sandbox: Sandbox, folder: str) -> list[str]:
    if sandbox == "rlimits":
        return []
    problem = bwrap_problem()
    if problem is None:
        return _bwrap(folder)
    if sandbox == "bwrap":
        raise RuntimeError(f"no sandbox: {problem}")
    return []


@functools.cache
def bwrap_problem() -> str | None:
    """Why bubblewrap cannot be used here; None when it can. Tried once."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*_bwrap(folder), "true"], capture_output=True, text=True, check=False, timeout=10)
    return None if done.returncode == 0 else f"bwrap does not work here: {done.stderr.strip()}"


def _bwrap(folder: str) -> list[str]:
    hidden = [
        option for path in ("/home", "/root", "/tmp", "/run", "/mnt", "/media") if Path(path).is_dir() for option in ("--tmpfs", path)
    ]
    needed = [option for path in _needed() for option in ("--ro-bind", path, path)]
    program = shutil.which("bwrap") or "bwrap"
    return [
        program, "--unshare-all", "--die-with-parent", "--new-session", "--ro-bind", "/", "/", *hidden, *needed, "--dev", "/dev",
        "--proc", "/proc", "--bind", folder, folder, "--chdir", folder, "--",
    ]  # fmt: skip


def _needed() -> list[str]:
    """Folders of Python and of this file, wherever they are."""
    return sorted({str(Path(path).resolve()) for path in (sys.prefix, sys.base_prefix, _EXAMINER.parent)} | {sys.prefix})
