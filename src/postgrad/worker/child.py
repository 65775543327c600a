"""What every worker process does: take a request, answer it, die with its owner. Standard library only."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

HEADER = struct.Struct("<Q")
"""The length of the request or reply that follows, in bytes."""


def serve(read_fd: int, write_fd: int, answer: Callable[[Any], Any]) -> None:
    """Answer requests, one at a time and in order, until the owner closes the pipe; then end the process.

    What the code under `answer` prints goes to stderr.
    """
    _detach(read_fd, write_fd)
    with os.fdopen(read_fd, "rb") as requests, os.fdopen(write_fd, "wb") as replies:
        while header := requests.read(HEADER.size):
            data = json.dumps(answer(pickle.loads(requests.read(HEADER.unpack(header)[0])))).encode()
            replies.write(HEADER.pack(len(data)) + data)
            replies.flush()
    os._exit(0)  # threads that the code left behind must not keep the process alive


def _detach(*channel: int) -> None:
    """Keep the channel from grandchildren, send prints to stderr, and die with the owner."""
    for fd in channel:
        os.set_inheritable(fd, False)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()


def _die_with(owner: int) -> None:
    while os.getppid() == owner:
        time.sleep(1.0)
    os._exit(1)
