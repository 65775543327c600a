"""Which pipes may be read or written now."""

from __future__ import annotations

import select
from collections.abc import Iterable


def ready(seconds: float, *, reading: Iterable[int], writing: Iterable[int] = ()) -> set[int]:
    """The descriptors of `reading` with data or an end and those of `writing` with room, after at most `seconds` (or an hour).

    `poll`, because `select` refuses descriptors from 1,024 on, which a run with many tools reaches.
    """
    poll = select.poll()
    for fd in reading:
        poll.register(fd, select.POLLIN)
    for fd in writing:
        poll.register(fd, select.POLLOUT)
    return {fd for fd, _ in poll.poll(1000 * min(seconds, _LONGEST_S))}


_LONGEST_S = 3600.0
"""`poll` takes no more than 24 days; every caller asks again until its own time is over."""
