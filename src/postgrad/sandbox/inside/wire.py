"""Messages between examiner and candidate: a length, then a pickle that can hold nothing but plain data and numbers of objects.

Plain data: None, bool, numbers, text, bytes, list, tuple, dict, set. Anything else stays where it was made and is named by a number.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Callable
from typing import Any

_HEADER = struct.Struct("<Q")
LONGEST = 16 * 2**20
"""Bytes of one message."""


class Lost(Exception):
    """The other process is gone, or what it sent is no message."""


def send(fd: int, data: bytes) -> None:
    view = memoryview(_HEADER.pack(len(data)) + data)
    while view:
        view = view[os.write(fd, view) :]


def receive(fd: int) -> bytes:
    size: int = _HEADER.unpack(_exactly(fd, _HEADER.size))[0]
    if size > LONGEST:
        raise Lost
    return _exactly(fd, size)


def _exactly(fd: int, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = os.read(fd, min(size - len(received), 2**20))
        if not chunk:
            raise Lost
        received += chunk
    return bytes(received)


def pack(value: Any, number_of: Callable[[Any], int | None]) -> bytes:
    """`number_of` names an object that stays here; None = it travels by value."""

    class Packer(pickle.Pickler):
        def persistent_id(self, item: Any) -> int | None:
            return number_of(item)

    buffer = io.BytesIO()
    Packer(buffer, protocol=4).dump(value)
    return buffer.getvalue()


def unpack(data: bytes, object_of: Callable[[int], Any]) -> Any:
    """Raises `Lost` for anything but plain data, whoever sent it."""

    class Unpacker(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) == ("builtins", "complex"):
                return complex
            raise pickle.UnpicklingError(f"{module}.{name} is no plain data")

        def persistent_load(self, number: Any) -> Any:
            return object_of(int(number))

    try:
        return Unpacker(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, ValueError, TypeError, EOFError, LookupError, AttributeError, MemoryError, OverflowError) as error:
        raise Lost from error
