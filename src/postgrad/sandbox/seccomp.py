"""The system calls that nothing in the sandbox may make, as a BPF program for `bwrap --seccomp`.

Refused with EPERM: tracing and reading other processes, new namespaces, mounts, keys, BPF, io_uring, and every way to hold memory that no
limit of a process counts (memfd, System V segments). Sockets exist of the kinds that a network namespace confines, which AF_VSOCK is not.

seccomp(2) describes the data a filter reads; the instructions are those of bpf(4).
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_BITS, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}."""
_CONFINED_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""


@dataclass(frozen=True, slots=True)
class _Machine:
    audit: int
    clone: int
    socket: int
    refused: tuple[int, ...]


_COMMON = (425, 428, 429, 430, 431, 432, 433, 438, 442, 447)
"""io_uring_setup open_tree move_mount fsopen fsconfig fsmount fspick pidfd_getfd mount_setattr memfd_secret: one number everywhere."""
_CLONE3 = 435
# In both: ptrace process_vm_readv process_vm_writev memfd_create shmget msgget semget mq_open userfaultfd bpf perf_event_open keyctl
# add_key request_key unshare setns mount umount2 pivot_root chroot open_by_handle_at name_to_handle_at kexec_load kcmp
_MACHINES = {
    "x86_64": _Machine(
        0xC000003E, 56, 41,
        (101, 310, 311, 319, 29, 68, 64, 240, 323, 321, 298, 250, 248, 249, 272, 308, 165, 166, 155, 161, 304, 303, 246, 312),
    ),
    "aarch64": _Machine(
        0xC00000B7, 220, 198,
        (117, 270, 271, 279, 194, 186, 190, 180, 282, 280, 241, 219, 217, 218, 97, 268, 40, 39, 41, 51, 265, 264, 104, 272),
    ),
}  # fmt: skip


def known_machine() -> bool:
    """Whether there is a filter for this processor."""
    return platform.machine() in _MACHINES


def program() -> bytes:
    """The filter for this processor. Raises `KeyError` where `known_machine` is False."""
    machine = _MACHINES[platform.machine()]
    return b"".join(
        [
            _instruction(_LOAD, _ARCHITECTURE),
            _instruction(_JUMP_IF_EQUAL, machine.audit, 1, 0),
            _instruction(_RETURN, _KILL),
            _instruction(_LOAD, _NUMBER),
            *_when(_JUMP_IF_AT_LEAST, _X32, _refuse(errno.EPERM)),
            *_when(_JUMP_IF_EQUAL, _CLONE3, _refuse(errno.ENOSYS)),  # its flags cannot be read here; libraries then use clone
            *[part for number in (*_COMMON, *machine.refused) for part in _when(_JUMP_IF_EQUAL, number, _refuse(errno.EPERM))],
            *_when(
                _JUMP_IF_EQUAL,
                machine.clone,
                [
                    _instruction(_LOAD, _FIRST_ARGUMENT),
                    *_when(_JUMP_IF_BITS, _NEW_NAMESPACES, _refuse(errno.EPERM)),
                    _instruction(_RETURN, _ALLOW),
                ],
            ),
            *_when(
                _JUMP_IF_EQUAL,
                machine.socket,
                [
                    _instruction(_LOAD, _FIRST_ARGUMENT),
                    *[part for family in _CONFINED_FAMILIES for part in _when(_JUMP_IF_EQUAL, family, [_instruction(_RETURN, _ALLOW)])],
                    *_refuse(errno.EAFNOSUPPORT),
                ],
            ),
            _instruction(_RETURN, _ALLOW),
        ]
    )


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _when(test: int, value: int, then: list[bytes]) -> list[bytes]:
    return [_instruction(test, value, 0, len(then)), *then]


def _refuse(code: int) -> list[bytes]:
    return [_instruction(_RETURN, _ERROR | code)]
