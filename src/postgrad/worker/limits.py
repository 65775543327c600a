"""Limits that a worker process sets itself before it runs the code of others."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def limit_memory(allowance: int | None) -> None:
    """Let the process grow by `allowance` bytes from here. Counted on what is loaded already, so importing torch costs nothing."""
    if allowance is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = _data_bytes() + allowance
    resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _data_bytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmData"))


def limit_cpu(seconds: float) -> None:
    """A call that outlives its owner (killed with SIGKILL while C code holds the interpreter) ends by itself."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime + (seconds + 10.0) * (os.cpu_count() or 1)) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
