"""How long the call that is being made may take, for tools that wait for something: `requests.get(url, timeout=seconds_left())`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class DeadlineError(Exception):
    """The call was ended at its deadline."""


_END: ContextVar[float | None] = ContextVar("postgrad_tool_deadline", default=None)


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Within this block `seconds_left` counts down from here. None: there is no deadline."""
    token = _END.set(None if seconds is None else time.monotonic() + seconds)
    try:
        yield
    finally:
        _END.reset(token)


def seconds_left() -> float:
    """Seconds until the deadline of the call in which this is asked; infinite outside of one. Raises `DeadlineError` when it has passed.

    >>> with deadline(5.0):
    ...     0 < seconds_left() <= 5.0
    True
    """
    end = _END.get()
    if end is None:
        return float("inf")
    left = end - time.monotonic()
    if left <= 0:
        raise DeadlineError
    return left
