"""One side of a comparison as a process of its own: it loads once, then does one step for each line it is given.

1. `Worker`    the parent's end: starts the process, asks, reads answers.
   `Channel`   the process's end: commands in, one JSON line out for each; whatever else it prints goes to stderr.
2. `Meter`     seconds, the processor's seconds, and how busy other processes were meanwhile.
3. memory      resident now, and the peak since `restart_peak` (Linux: VmRSS and VmHWM).

Imports nothing of either side.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_STATUS, _CLEAR, _STAT = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/stat")


ROOT = Path(__file__).parent.parent


def environment(threads: int) -> dict[str, str]:
    fixed = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    return {**os.environ, **fixed}


class Worker:
    """The first answer, `hello`, says what was loaded. Ends the program, with what the process said last, if the process dies."""

    def __init__(self, command: Sequence[str], threads: int, extra: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment(threads), **extra},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self.hello = self._answer()

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(command, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise SystemExit(f"{' '.join(map(str, self._process.args))}\n{self._errors.read()[-3000:]}")  # type: ignore[arg-type]
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()


class Channel:
    """The worker's end. Commands are `check` (a step whose samples are forced), `step`, and whatever else the side knows."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def receive(self) -> str:
        """The next command; the process ends when there is none."""
        line = sys.stdin.readline()
        if not line:
            os._exit(0)
        return line.strip()

    def send(self, message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=self._out, flush=True)


class Meter:
    """What passed since it was made."""

    def __init__(self) -> None:
        self._start, self._own, self._busy = time.perf_counter(), _own(), _busy()

    def seconds(self) -> float:
        return time.perf_counter() - self._start

    def read(self) -> dict[str, float]:
        """seconds; cpu_s: of this process, all threads; others: cores that other processes kept busy."""
        seconds, own, busy = self.seconds(), _own() - self._own, _busy() - self._busy
        return {"seconds": seconds, "cpu_s": own, "others": max(0.0, busy - own) / max(seconds, 1e-9)}


def _own() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _busy() -> float:
    user, nice, system, _, _, irq, softirq, *_ = map(int, _STAT.read_text().splitlines()[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def resident_mib() -> float:
    return _status("VmRSS")


def peak_mib() -> float:
    return _status("VmHWM")


def restart_peak() -> None:
    _CLEAR.write_text("5")


def _status(name: str) -> float:
    return next(int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith(name)) / 1024
