"""Executes the tool calls of one round: every call of every rollout, side by side, each with its deadline.

1. Every call gets exactly one `ToolResult`, in call order, whatever it was: malformed, unknown, wrongly called, failing, hanging.
2. The text that the model reads starts with `error: ` when the call failed; `ToolResult.error` names the kind (`ErrorKind`).
3. Calls of one rollout to one environment run one after the other, in call order; all others run concurrently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from postgrad.protocols import InfrastructureError
from postgrad.rollout.pool import Expired, Job, Returned, run_lanes
from postgrad.rollout.results import ErrorKind, OutputError, exception_text, result_text, shorten
from postgrad.rollout.signature import ArgumentError
from postgrad.rollout.tools import BoundTool, DeadlineError, ToolSession, call
from postgrad.types import MalformedCall, ToolCall, ToolResult

Call = ToolCall | MalformedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """deadline_s: seconds one call may take, unless its tool says otherwise. max_output_chars: characters of one result.
    workers: calls that run at the same time."""

    deadline_s: float = 5.0
    max_output_chars: int = 4000
    workers: int = 64


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a thread brings back for one call."""

    text: str
    error: str = ""


def refuse(item: Call, tools: Mapping[str, object], limits: ToolLimits) -> ToolResult | None:
    """The error for text that is no call, or for a call of a tool that does not exist; None for a call that can be tried."""
    if isinstance(item, MalformedCall):
        return _short(ToolResult(None, f"error: {item.error}", ErrorKind.MALFORMED), limits)
    if item.name not in tools:
        text = f"error: no tool is called {item.name!r}; the tools are: {', '.join(tools) or 'none'}"
        return _short(ToolResult(item, text, ErrorKind.UNKNOWN_TOOL), limits)
    return None


def execute(turns: Sequence[tuple[ToolSession, Sequence[Call]]], limits: ToolLimits) -> list[tuple[ToolResult, ...]]:
    """Per turn, one result per call, in call order."""
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    results: dict[tuple[int, int], ToolResult] = {}
    for row, (session, calls) in enumerate(turns):
        for column, item in enumerate(calls):
            refusal = refuse(item, session.tools, limits)
            if refusal is not None:
                results[row, column] = refusal
            elif isinstance(item, ToolCall):
                lock = session.tools[item.name].lock
                lane = (row, column) if lock is None else (-1, id(lock))
                lanes.setdefault(lane, []).append((row, column))
    places = list(lanes.values())
    outcomes = run_lanes([[_job(turns, place, limits) for place in lane] for lane in places], workers=limits.workers)
    for lane_places, lane_outcomes in zip(places, outcomes, strict=True):
        for (row, column), outcome in zip(lane_places, lane_outcomes, strict=True):
            item = turns[row][1][column]
            assert isinstance(item, ToolCall)
            results[row, column] = _result(item, outcome, limits)
    return [tuple(results[row, column] for column in range(len(calls))) for row, (_, calls) in enumerate(turns)]


def _job(turns: Sequence[tuple[ToolSession, Sequence[Call]]], place: tuple[int, int], limits: ToolLimits) -> Job[_Answer]:
    row, column = place
    session, calls = turns[row]
    item = calls[column]
    assert isinstance(item, ToolCall)
    bound = session.tools[item.name]
    deadline_s = bound.tool.options.deadline_s or limits.deadline_s
    return Job(partial(_answer, bound, item, deadline_s=deadline_s, max_chars=limits.max_output_chars), deadline_s)


def _answer(bound: BoundTool, item: ToolCall, *, deadline_s: float, max_chars: int) -> _Answer:
    """Validate, call and write down; runs in the call's own thread, so that user code can hang or raise at each of the three."""
    if bound.lock is None:
        return _try(bound, item, deadline_s=deadline_s, max_chars=max_chars)
    with bound.lock:  # an earlier call that was abandoned may still be at work on this environment
        return _try(bound, item, deadline_s=deadline_s, max_chars=max_chars)


def _try(bound: BoundTool, item: ToolCall, *, deadline_s: float, max_chars: int) -> _Answer:
    try:
        value = call(bound.function, bound.tool.signature.validate(item.arguments), deadline_s=deadline_s)
    except ArgumentError as error:
        return _Answer(f"{item.name}: {error}", ErrorKind.ARGUMENTS)
    except DeadlineError:
        return _Answer(_deadline_text(item, deadline_s), ErrorKind.DEADLINE)
    except InfrastructureError as error:
        return _Answer(f"{item.name}: {exception_text(error)}", ErrorKind.INFRASTRUCTURE)
    except BaseException as error:  # the tool's: even SystemExit in a tool is an answer to the model, not an end of the run
        return _Answer(f"{item.name}: {exception_text(error)}", ErrorKind.RAISED)
    try:
        return _Answer(result_text(value, max_chars=max_chars))
    except OutputError as error:
        return _Answer(f"{item.name}: {error}", ErrorKind.OUTPUT)


def _result(item: ToolCall, outcome: Returned[_Answer] | Expired, limits: ToolLimits) -> ToolResult:
    if isinstance(outcome, Expired):
        return ToolResult(item, f"error: {_deadline_text(item, outcome.seconds)}", ErrorKind.DEADLINE, outcome.seconds)
    answer = outcome.value
    if not answer.error:
        return ToolResult(item, answer.text, "", outcome.seconds)
    return _short(ToolResult(item, f"error: {answer.text}", answer.error, outcome.seconds), limits)


def _deadline_text(item: ToolCall, seconds: float) -> str:
    return f"{item.name}: no result within {seconds:g} s"


def _short(result: ToolResult, limits: ToolLimits) -> ToolResult:
    return ToolResult(result.call, shorten(result.content, max_chars=limits.max_output_chars), result.error, result.seconds)
