"""Which pipes may be read or written now."""

from __future__ import annotations

import select
from collections.abc import Iterable


def ready(seconds: float, *, reading: Iterable[int], writing: Iterable[int] = ()) -> set[int]:
    """The descriptors of `reading` with data or an end and those of `writing` with room, after at most `seconds`.

    `poll`, because `select` refuses descriptors from 1,024 on, which a run with many tools reaches.
    """
    poll = select.poll()
    for fd in reading:
        poll.register(fd, select.POLLIN)
    for fd in writing:
        poll.register(fd, select.POLLOUT)
    return {fd for fd, _ in poll.poll(1000 * seconds)}
