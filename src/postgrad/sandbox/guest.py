"""One process of `inside/`, started in the sandbox, seen from outside."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, BinaryIO, Literal

from postgrad.errors import reason
from postgrad.sandbox import bubblewrap, seccomp
from postgrad.sandbox.isolation import Isolation, SandboxError
from postgrad.sandbox.limits import Limits
from postgrad.sandbox.ready import ready

Mode = Literal["nothing", "candidate", "examiner", "script", "interpreter"]

START_S = 10.0
"""Seconds in which a process must have started: more is a fault of the machine, not of the code."""
_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside.start import main; main()"
_FIRST_TO_GO = ("/bin/sh", "-c", 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"', "sh")
"""When the machine's memory runs out all the same, Linux ends this process and not the run."""
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"} | dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)


class Guest:
    """Started by its constructor, killed by `kill` or at the end of a `with` block, with everything that it started.

    settings: what the mode needs, as JSON. fds: descriptors that it keeps under their numbers. stdin, stdout: files or descriptors of the
    code that runs; left out = nothing to read, and what it prints is thrown away.
    """

    def __init__(
        self,
        mode: Mode,
        settings: Mapping[str, Any],
        *,
        isolation: Isolation,
        limits: Limits,
        fds: Sequence[int] = (),
        stdin: BinaryIO | int = subprocess.DEVNULL,
        stdout: BinaryIO | int = subprocess.DEVNULL,
    ) -> None:
        with contextlib.ExitStack() as files, contextlib.ExitStack() as kept:
            self._errors: BinaryIO = kept.enter_context(tempfile.TemporaryFile())
            confined = isolation is Isolation.BUBBLEWRAP
            folder = bubblewrap.WORK if confined else kept.enter_context(tempfile.TemporaryDirectory(prefix="postgrad-unsafe-"))
            given = {
                "mode": mode,
                "limits": asdict(limits),
                "confined": confined,
                "user_id": bubblewrap.new_user_id() if confined else None,
                "settings": dict(settings),
            }
            told = files.enter_context(_file_of(json.dumps(given).encode()))
            self._status, status = os.pipe()
            kept.callback(os.close, self._status)
            files.callback(os.close, status)
            passed = [told.fileno(), status, *fds]
            around: list[str] = []
            if confined:
                rules = files.enter_context(_file_of(seccomp.program()))
                around = bubblewrap.command(limits=limits, seccomp_fd=rules.fileno())
                passed.append(rules.fileno())
            where = "/sandbox" if confined else str(bubblewrap.INSIDE.parent)
            first = _FIRST_TO_GO if sys.platform.startswith("linux") else ()
            command = [*first, *around, sys.executable, "-I", "-B", "-c", _BOOT, where, str(told.fileno()), str(status)]
            try:
                self._process = _start(
                    lambda: subprocess.Popen(
                        command,
                        stdin=stdin,
                        stdout=stdout,
                        stderr=self._errors,
                        pass_fds=passed,
                        cwd="/" if confined else folder,
                        start_new_session=True,
                        env=_ENVIRONMENT | {"HOME": folder, "TMPDIR": "/tmp" if confined else folder},
                    )
                )
            except OSError as error:
                raise SandboxError(f"the process could not be started: {reason(error)}") from error
            self._kept = kept.pop_all()

    def wait_ready(self) -> None:
        """Return once its limits hold and the code is about to run. Raises `SandboxError` when it does not get that far."""
        end = time.monotonic() + START_S
        while (left := end - time.monotonic()) > 0:
            if ready(left, reading=[self._status]):
                if os.read(self._status, 1):
                    return
                self.kill()
                raise SandboxError(self._said() or "the process ended before it began")
        self.kill()
        raise SandboxError(f"the process did not start within {START_S:g} s")

    def wait(self, seconds: float) -> int | None:
        """Its exit code (128 + signal when it was killed); None when it still runs."""
        try:
            code = self._process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            return None
        return 128 - code if code < 0 else code

    def kill(self) -> None:
        """End it and all that it started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        self.kill()
        self._kept.close()

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read(4000).decode(errors="replace").strip()


def _file_of(data: bytes) -> BinaryIO:
    """A file without a name, to be read from its start."""
    file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(data)
    file.flush()
    file.seek(0)
    return file


def _start(popen: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Start a process from a thread that lasts: Linux ends a process that dies with its parent when the parent's *thread* ends."""
    return _starter(os.getpid()).submit(popen).result()


@functools.cache
def _starter(pid: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="postgrad-sandbox")
