"""The command line that puts a process into a sandbox, and why there can be none.

The process has no network, its own process ids, and a file system of its own: the system's and Python's folders, read-only, and one
writable folder in memory with a size. It has no capability and, when the caller is root, a user id that nobody else has, because limits
on the number of processes do not hold for root. `seccomp` takes away system calls that would undo a limit.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from pathlib import Path

from postgrad.sandbox import seccomp
from postgrad.sandbox.limits import Limits

INSIDE = Path(__file__).with_name("inside")
WORK = "/tmp/home"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/etc/ld.so.cache", "/etc/ld.so.conf",
           "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")  # fmt: skip
_SHARED_MEMORY = 2**20
_UNUSED_IDS = (2**30, 2**31 - 2)
_TRANSIENT_IDS = (61184, 65519)
"""Where a container maps only the first 65536 ids: those that systemd keeps for services that come and go."""

APT = "apt-get install bubblewrap"
OR_UNSAFE = (
    "or set allow_unsafe_exec: true, and code that the model writes runs with your own rights: it can read, change and send anything"
)


def missing() -> tuple[str, str] | None:
    """(what is missing, what to do) when a sandbox is out of the question; None when it can be tried."""
    if not sys.platform.startswith("linux"):
        return f"bubblewrap needs Linux, this is {sys.platform}", "run on Linux"
    if not seccomp.known_machine():
        return f"there is no system call filter for this processor ({os.uname().machine})", "run on x86_64 or aarch64"
    if shutil.which("bwrap") is None:
        return "bubblewrap (bwrap) is not installed", f"install it ({APT})"
    return None


def command(*, limits: Limits, seccomp_fd: int) -> list[str]:
    """What stands before the command that is to be confined. `seccomp_fd` is read once, and must be passed on."""
    program = shutil.which("bwrap")
    assert program is not None
    return [
        program, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try", *_rights(),
        "--die-with-parent", "--new-session", "--seccomp", str(seccomp_fd), "--hostname", "sandbox",
        "--size", str(limits.disk_mb * 2**20), "--perms", "1777", "--tmpfs", "/tmp", "--perms", "0777", "--dir", WORK,
        *_read_only(),
        "--dev", "/dev", "--remount-ro", "/dev", "--size", str(_SHARED_MEMORY), "--perms", "1777", "--tmpfs", "/dev/shm",
        "--remount-ro", "/", "--chdir", WORK, "--",
    ]  # fmt: skip


def _rights() -> list[str]:
    """Without root a user namespace; as root no capability but those by which the process gives up being root."""
    if os.geteuid() != 0:
        return ["--unshare-user"]
    return ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]


def new_user_id() -> int | None:
    """For a process that starts as root; None when it does not."""
    if os.geteuid() != 0:
        return None
    low, high = _UNUSED_IDS if _maps(_UNUSED_IDS[1]) else _TRANSIENT_IDS
    return random.SystemRandom().randint(low, high)


def _maps(user_id: int) -> bool:
    rows = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= user_id < first + count for first, _, count in rows)


def _read_only() -> list[str]:
    """The system's folders (links as links), Python's wherever they are, and the code that runs inside."""
    options, shown = [], []
    for path in _SYSTEM:
        if os.path.islink(path) and not path.startswith("/etc"):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            shown.append((path, path))
    inside = tuple(f"{path}/" for path in _SYSTEM)
    python = {sys.prefix, os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix), sys.base_prefix}
    shown += [(path, path) for path in sorted(python) if not f"{path}/".startswith(inside)]
    shown.append((str(INSIDE), "/sandbox/inside"))
    parents = {str(parent) for _, place in shown for parent in Path(place).parents} - {"/", "/tmp"}
    for parent in sorted(parents - {place for _, place in shown}):
        options += ["--perms", "0755", "--dir", parent]  # bubblewrap makes those that are missing readable by root alone
    for source, place in shown:
        options += ["--ro-bind", source, place]
    return options
