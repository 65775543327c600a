"""Makes one call of one tool: when it is its turn, within its deadline, and again when a failure may pass and the tool allows it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from postgrad.rollout.deadline import deadline, seconds_left
from postgrad.rollout.declare import BoundTool, call
from postgrad.rollout.failures import ToolError

_FIRST_PAUSE_S = 0.1


def attempt(bound: BoundTool, arguments: Mapping[str, Any], *, deadline_s: float) -> Any:
    """What the tool returns. All attempts together take `deadline_s` seconds at most, counted from when the tool's gate opens.

    A call is repeated, up to the tool's `retry` times and after a pause that doubles, when it raised something unforeseen, when its
    infrastructure failed, or when its `ToolError` is `transient`. The last failure is the one that counts.
    """
    options = bound.tool.options
    with bound.tool.gate or nullcontext(), deadline(deadline_s):
        for repeated in range(options.retry):
            try:
                return call(bound.function, arguments, deadline_s=seconds_left())
            except Exception as error:
                pause = _FIRST_PAUSE_S * 2**repeated
                if not _may_pass(error) or pause >= seconds_left():
                    raise
                time.sleep(pause)
        return call(bound.function, arguments, deadline_s=seconds_left())


def _may_pass(error: Exception) -> bool:
    return error.transient if isinstance(error, ToolError) else True
