"""Every process in the sandbox begins here: it gives up its rights, takes its limits, says that it is ready, and becomes what it was
started for.

arguments: the descriptor with the settings (JSON), and the one on which it says that it is ready.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

_OPEN_FILES = 256


def main() -> NoReturn:
    told, status = map(int, sys.argv[1:])
    with os.fdopen(told, "rb") as file:
        given: dict[str, Any] = json.loads(file.read())
    settings = given["settings"]
    _give_up_rights(given["user_id"])
    _set_limits(given["limits"], confined=given["confined"], own_user=given["user_id"] is not None)
    if not given["confined"]:
        _die_with_parent()
    os.dup2(1, 2)
    by_line = given["mode"] == "interpreter"  # a cell that is killed has said what it printed
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=by_line)  # type: ignore[union-attr]
    os.write(status, b"+")
    os.close(status)
    if given["mode"] == "candidate":
        from .candidate import serve

        serve(settings["program"], calls=settings["calls"], replies=settings["replies"])
    if given["mode"] == "examiner":
        from .examiner import judge

        judge(settings)
    if given["mode"] == "interpreter":
        from .interpreter import serve as serve_cells

        serve_cells(requests=settings["requests"], replies=settings["replies"])
    if given["mode"] == "script":
        exec(compile(settings["program"], "<program>", "exec"), {"__name__": "__main__"})
    sys.exit(0)


def _give_up_rights(user_id: int | None) -> None:
    """Root becomes a user that nobody else is; with its user id it loses every capability."""
    if user_id is not None:
        os.setgroups([])
        os.setresgid(user_id, user_id, user_id)
        os.setresuid(user_id, user_id, user_id)


def _set_limits(limits: dict[str, Any], *, confined: bool, own_user: bool) -> None:
    # Beside this process the sandbox's first one counts when it has the same user. Unconfined, every process of the user would count.
    processes = limits["processes"] + (0 if own_user else 1) if confined else 0
    _set("CPU", int(limits["cpu_s"]) + 1)
    _set("AS", limits["memory_mb"] * 2**20)
    _set("FSIZE", limits["disk_mb"] * 2**20)
    _set("NPROC", processes)
    _set("NOFILE", _OPEN_FILES)
    _set("CORE", 0)


def _set(name: str, value: int) -> None:
    kind = getattr(resource, f"RLIMIT_{name}")
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _die_with_parent() -> None:
    """Linux only; elsewhere the caller's kill has to do."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return
