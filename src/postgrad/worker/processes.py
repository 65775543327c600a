"""Keeps the code that a worker process runs from starting processes: a fork bomb ends at its first fork."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys


def forbid_processes() -> bool:
    """From here on this thread, and the threads that it starts, cannot start a process: fork, clone and spawn fail with EPERM.

    False where that cannot be had. On Linux it is a system-call filter (x86-64 and arm64), because the limit on the number of
    processes counts those of the whole user and does not hold for root; elsewhere it is that limit.
    """
    if sys.platform != "linux":
        resource.setrlimit(resource.RLIMIT_NPROC, (0, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
        return os.getuid() != 0
    calls = _CALLS.get(platform.machine())
    return calls is not None and _filter(calls)


# Classic BPF, as in the kernel's documentation of SECCOMP_SET_MODE_FILTER: the program reads `struct seccomp_data`
# (number at byte 0, architecture at 4, arguments from 16) and returns what becomes of the call.

_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_CLONE_THREAD = 0x00010000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_CLONE3 = 435  # its flags lie in memory, which a filter cannot read: without it libc falls back on clone
_CALLS = {  # architecture, clone, and the calls that only ever start a process
    "x86_64": (0xC000003E, 56, (57, 58)),
    "aarch64": (0xC00000B7, 220, ()),
}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def _filter(calls: tuple[int, int, tuple[int, ...]]) -> bool:
    program = _instructions(*calls)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    filled = _Program(len(program), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    return bool(prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(filled), 0, 0) == 0)


def _instructions(architecture: int, clone: int, starts: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """(code, jump if true, jump if false, operand). Each test is followed by the return that it guards."""
    program = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _FAIL | _EPERM),
        (_LOAD, 0, 0, 0),
        (_ABOVE, 0, 1, 0x40000000),  # x86-64 numbers its calls a second time from here (x32)
        (_RETURN, 0, 0, _FAIL | _EPERM),
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _FAIL | _ENOSYS),
    ]
    for number in starts:
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | _EPERM)]
    return [
        *program,
        (_EQUAL, 1, 0, clone),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, 16),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _FAIL | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
