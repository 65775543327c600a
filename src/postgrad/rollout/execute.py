"""Executes the tool calls of one turn, side by side, each with its deadline.

1. Every call gets exactly one `ToolResult`, in call order, whatever it was: malformed, unknown, wrongly called, failing, hanging.
2. The text that the model reads starts with `error: ` when the call failed; `ToolResult.error` names the kind (`ErrorKind`).
3. Calls of one rollout to one environment run one after the other, in call order; all others run concurrently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from postgrad.protocols import InfrastructureError
from postgrad.rollout.attempt import attempt
from postgrad.rollout.deadline import DeadlineError
from postgrad.rollout.episode import NOTHING_SAID, Standing, put_back, standing, take_snapshot
from postgrad.rollout.failures import ToolError
from postgrad.rollout.journal import CallPlace, Journal, NoJournal, calling
from postgrad.rollout.pool import Expired, Job, Outcome, Pool, Returned
from postgrad.rollout.results import ErrorKind, OutputError, exception_text, message_of, result_text, shorten
from postgrad.rollout.signature import ArgumentError
from postgrad.rollout.tools import BoundTool, ToolSession
from postgrad.types import MalformedCall, ToolCall, ToolResult

Call = ToolCall | MalformedCall
_QUEUE_S = 1e6
"""For a tool behind a gate: how long it waits for its turn depends on other calls, and then it keeps to its deadline by itself."""
_INTERRUPTED = "the run was interrupted during this call; whether it took effect is not known, and it was not repeated"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """deadline_s: seconds one call may take. max_output_tokens: of one result. For both, what the tool itself says goes before.
    max_output_chars: characters of one result, whatever its tokens. workers: calls that run at the same time.
    max_calls_per_turn: the others of a turn are refused. cut: text and a number of tokens → the text, cut and marked where it has more."""

    deadline_s: float = 5.0
    max_output_tokens: int | None = None
    max_output_chars: int = 4000
    max_calls_per_turn: int | None = None
    workers: int = 64
    cut: Callable[[str, int], str] | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a thread brings back for one call."""

    text: str
    error: str = ""
    standing: Standing = NOTHING_SAID
    snapshot: Any = None


def refuse(item: Call, tools: Mapping[str, object], limits: ToolLimits) -> ToolResult | None:
    """The error for text that is no call, or for a call of a tool that does not exist; None for a call that can be tried."""
    if isinstance(item, MalformedCall):
        return _short(ToolResult(None, f"error: {item.error}", ErrorKind.MALFORMED), limits)
    if item.name not in tools:
        text = f"error: no tool is called {item.name!r}; the tools are: {', '.join(tools) or 'none'}"
        return _short(ToolResult(item, text, ErrorKind.UNKNOWN_TOOL), limits)
    return None


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of one turn of a rollout: `lanes` to run, and their `results` once every lane has its outcomes.

    Calls that are refused, and calls that the journal has an end for, need no running. `made`: calls of each tool in earlier turns.
    """

    session: ToolSession
    calls: Sequence[Call]
    limits: ToolLimits
    turn: CallPlace
    journal: Journal
    made: Mapping[str, int] = field(default_factory=dict)

    @property
    def lanes(self) -> list[list[Job[_Answer]]]:
        return [[self._job(number) for number in lane] for lane in self._lanes()]

    def results(self, outcomes: Sequence[Sequence[Outcome[_Answer]]]) -> tuple[ToolResult, ...]:
        """One per call, in call order."""
        answered = {
            number: outcome
            for lane, lane_outcomes in zip(self._lanes(), outcomes, strict=True)
            for number, outcome in zip(lane, lane_outcomes, strict=True)
        }
        return tuple(self._result(number, item, answered.get(number)) for number, item in enumerate(self.calls))

    def _lanes(self) -> list[list[int]]:
        lanes: dict[int, list[int]] = {}
        for number, item in enumerate(self.calls):
            if isinstance(item, ToolCall) and self._refusal(number) is None and not self._settled(number, item):
                lock = self.session.tools[item.name].lock
                lanes.setdefault(-1 - number if lock is None else id(lock), []).append(number)
        return list(lanes.values())

    def _refusal(self, number: int) -> ToolResult | None:
        """The error for a call that is not made: it is none, its tool does not exist, or a limit is reached."""
        item = self.calls[number]
        refusal = refuse(item, self.session.tools, self.limits)
        if refusal is not None or not isinstance(item, ToolCall):
            return refusal
        most, of_turn = self.session.tools[item.name].tool.options.max_calls, self.limits.max_calls_per_turn
        earlier = self.made.get(item.name, 0) + sum(isinstance(call, ToolCall) and call.name == item.name for call in self.calls[:number])
        if most is not None and earlier >= most:
            text = f"error: {item.name} can be called {most} times in all, and has been; this call was not made"
        elif of_turn is not None and number >= of_turn:
            text = f"error: one turn can make {of_turn} calls; this call was not made"
        else:
            return None
        return _short(ToolResult(item, text, ErrorKind.LIMIT), self.limits)

    def _settled(self, number: int, item: ToolCall) -> ToolResult | None:
        """The result that needs no call: the recorded one, or that nobody knows. A new instance has to be brought up to date by calls."""
        bound = self.session.tools[item.name]
        found = self.journal.find(self._place(number), item)
        if found is None or bound.lock is not None:
            return None
        if found.result is None and not bound.tool.options.idempotent:
            return _short(ToolResult(item, f"error: {item.name}: {_INTERRUPTED}", ErrorKind.INTERRUPTED), self.limits)
        return found.result

    def _job(self, number: int) -> Job[_Answer]:
        item = self.calls[number]
        assert isinstance(item, ToolCall)
        bound, place, limits = self.session.tools[item.name], self._place(number), self.limits
        deadline_s = bound.tool.options.deadline_s or limits.deadline_s
        patience_s = deadline_s if bound.tool.gate is None else _QUEUE_S

        def answer() -> _Answer:
            with calling(place):
                return _answer(bound, item, deadline_s=deadline_s, max_chars=limits.max_output_chars, snapshot=self.journal.keeps)

        def run() -> _Answer:
            self.journal.begun(place, item)
            return answer()

        def commit(outcome: Returned[_Answer]) -> None:
            self.journal.ended(place, self._shown(item, _result(item, outcome, limits)), outcome.value.snapshot)

        found = self.journal.find(place, item)
        if found is None or found.result is None:
            return Job(run, patience_s, commit=commit)
        # An environment's: the new instance gets where the old one was.
        return Job(answer if found.snapshot is None else partial(_put_back, bound, found.snapshot), patience_s)

    def _result(self, number: int, item: Call, outcome: Outcome[_Answer] | None) -> ToolResult:
        refusal = self._refusal(number)
        if refusal is not None:
            return refusal
        assert isinstance(item, ToolCall)
        if isinstance(outcome, Returned) and outcome.value.error == ErrorKind.INFRASTRUCTURE:  # also while a state was put back
            return _result(item, outcome, self.limits)
        found = self.journal.find(self._place(number), item)
        if found is not None and found.result is not None:
            return found.result
        if outcome is None:
            settled = self._settled(number, item)
            assert settled is not None
            return settled
        result = self._shown(item, _result(item, outcome, self.limits))
        if isinstance(outcome, Expired):
            self.journal.ended(self._place(number), result)
        return result

    def _shown(self, item: ToolCall, result: ToolResult) -> ToolResult:
        """The result as the model reads it: no longer than it may be, in tokens."""
        most = self.session.tools[item.name].tool.options.max_output_tokens or self.limits.max_output_tokens
        return result if most is None or self.limits.cut is None else replace(result, content=self.limits.cut(result.content, most))

    def _place(self, number: int) -> CallPlace:
        return replace(self.turn, number=number)


def execute(turns: Sequence[tuple[ToolSession, Sequence[Call]]], limits: ToolLimits) -> list[tuple[ToolResult, ...]]:
    """Per turn, one result per call, in call order. Waits for all of them."""
    calls = [Calls(session, items, limits, CallPlace(0, 0, row, 0, 0, 0), NoJournal()) for row, (session, items) in enumerate(turns)]
    pool: Pool[int, _Answer] = Pool(limits.workers)
    results: dict[int, tuple[ToolResult, ...]] = {}
    try:
        for row, item in enumerate(calls):
            pool.start(row, item.lanes)
        while pool.busy:
            results |= {row: calls[row].results(outcomes) for row, outcomes in pool.finished(wait=True)}
    finally:
        pool.abandon()
    return [results[row] for row in range(len(turns))]


def _put_back(bound: BoundTool, snapshot: Any) -> _Answer:
    assert bound.lock is not None
    with bound.lock:
        try:
            put_back(bound.instance, snapshot)
        except InfrastructureError as error:
            return _Answer(exception_text(error), ErrorKind.INFRASTRUCTURE)
    return _Answer("")


def _answer(bound: BoundTool, item: ToolCall, *, deadline_s: float, max_chars: int, snapshot: bool) -> _Answer:
    """Validate, call and write down; runs in the call's own thread, so that user code can hang or raise at each of the three."""
    if bound.lock is None:
        return _try(bound, item, deadline_s=deadline_s, max_chars=max_chars)
    with bound.lock:  # an earlier call that was abandoned may still be at work on this environment
        answer = _try(bound, item, deadline_s=deadline_s, max_chars=max_chars)
        try:
            kept = take_snapshot(bound.instance) if snapshot else None
            return replace(answer, standing=standing(bound.instance), snapshot=kept)
        except InfrastructureError as error:
            return _Answer(f"{item.name}: {exception_text(error)}", ErrorKind.INFRASTRUCTURE)


def _try(bound: BoundTool, item: ToolCall, *, deadline_s: float, max_chars: int) -> _Answer:
    try:
        value = attempt(bound, bound.tool.signature.validate(item.arguments), deadline_s=deadline_s)
    except ArgumentError as error:
        return _Answer(f"{item.name}: {error}", ErrorKind.ARGUMENTS)
    except DeadlineError:
        return _Answer(_deadline_text(item, deadline_s), ErrorKind.DEADLINE)
    except ToolError as error:
        return _Answer(f"{item.name}: {message_of(error)}", error.kind)
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
    said = (answer.standing.reward, answer.standing.done)
    if not answer.error:
        return ToolResult(item, answer.text, "", outcome.seconds, *said)
    return _short(ToolResult(item, f"error: {answer.text}", answer.error, outcome.seconds, *said), limits)


def _deadline_text(item: ToolCall, seconds: float) -> str:
    return f"{item.name}: no result within {seconds:g} s"


def _short(result: ToolResult, limits: ToolLimits) -> ToolResult:
    return replace(result, content=shorten(result.content, max_chars=limits.max_output_chars))
