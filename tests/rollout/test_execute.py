"""Calls are executed side by side, each within its deadline, and every one of them is answered."""

from __future__ import annotations

import asyncio
import datetime
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postgrad.rollout import ErrorKind, InfrastructureError, ToolError, make_toolbox, tool
from postgrad.rollout.execute import Call, ToolLimits, execute
from postgrad.rollout.pool import Expired, Job, Returned, _Attempt, run_lanes
from postgrad.rollout.results import result_text, shorten
from postgrad.rollout.tools import ToolSession
from postgrad.types import MalformedCall, ToolCall, ToolResult


def session(*tools: Any) -> ToolSession:
    toolbox = make_toolbox(tools)
    return toolbox.open([{} for _ in toolbox.environments])


def run(
    *calls: Call, tools: tuple[Any, ...], deadline_s: float = 20.0, max_output_chars: int = 1000, workers: int = 8
) -> tuple[ToolResult, ...]:
    limits = ToolLimits(deadline_s=deadline_s, max_output_chars=max_output_chars, workers=workers)
    return execute([(session(*tools), calls)], limits)[0]


def returns(value: Any) -> Callable[[], Any]:
    def give() -> Any:
        """Give."""
        return value

    return give


def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


def fail(text: str = "no such city") -> None:
    """Fail."""
    raise ValueError(text)


@tool(deadline_s=0.2)
def hang() -> None:
    """Hang."""
    time.sleep(30)


# ---- errors that the model is told


def test_an_unknown_tool_lists_the_names_there_are() -> None:
    [result] = run(ToolCall("sub", {}), tools=(add, fail))
    assert result.error == ErrorKind.UNKNOWN_TOOL
    assert result.content == "error: no tool is called 'sub'; the tools are: add, fail"


def test_a_malformed_call_is_answered_with_its_own_error() -> None:
    [result] = run(MalformedCall("{", "invalid JSON: x"), tools=(add,))
    assert result == ToolResult(None, "error: invalid JSON: x", "malformed")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [({}, "missing required argument 'a'"), ({"a": 1, "c": 2}, "unexpected argument 'c'"), ({"a": "1"}, "argument 'a' is \"1\"")],
)
def test_wrong_arguments_name_their_path_and_the_tool_does_not_run(arguments: dict[str, Any], part: str) -> None:
    [result] = run(ToolCall("add", arguments), tools=(add,))
    assert result.error == ErrorKind.ARGUMENTS
    assert result.content.startswith("error: add: ")
    assert part in result.content


@pytest.mark.parametrize(
    "error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), RecursionError()]
)
def test_whatever_a_tool_raises_is_an_answer(error: BaseException) -> None:
    def explode() -> None:
        """Explode."""
        raise error

    async def explode_async() -> None:
        """Explode."""
        raise error

    for result in run(ToolCall("explode", {}), ToolCall("explode_async", {}), tools=(explode, explode_async)):
        assert result.error == ErrorKind.RAISED
        assert type(error).__name__ in result.content


def test_an_exception_that_cannot_print_itself_is_still_named() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def explode() -> None:
        """Explode."""
        raise Broken

    [result] = run(ToolCall("explode", {}), tools=(explode,))
    assert result.content == "error: explode: Broken"


@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt])
def test_an_exception_that_ends_the_program_when_it_is_printed_ends_nothing(raised: type[BaseException]) -> None:
    class Fatal(Exception):
        def __str__(self) -> str:
            raise raised

    class FatalForTheModel(ToolError):
        def __str__(self) -> str:
            raise raised

    def explode(model: bool) -> None:
        """Explode."""
        raise FatalForTheModel("x") if model else Fatal

    results = run(ToolCall("explode", {"model": False}), ToolCall("explode", {"model": True}), tools=(explode,))
    assert [(result.error, result.content) for result in results] == [
        ("raised", "error: explode: Fatal"),
        ("raised", "error: explode: "),
    ]


def test_a_tool_error_of_ones_own_needs_no_constructor_of_ours() -> None:
    class NoSuchCity(ToolError):
        def __init__(self, city: str) -> None:
            self.city = city

    def find(city: str) -> None:
        """Find."""
        raise NoSuchCity(city)

    [result] = run(ToolCall("find", {"city": "Oslo"}), tools=(find,))
    assert (result.error, result.content) == (ErrorKind.RAISED, "error: find: Oslo")
    with pytest.raises(ValueError, match="weird"):
        ToolError("x", kind="weird")  # type: ignore[arg-type]


def test_a_result_that_cannot_be_written_is_an_answer_and_not_the_end_of_the_run() -> None:
    def power(kind: str) -> object:
        """Give something odd."""
        view = memoryview(b"x")
        view.release()
        return {"int": 10**5000, "inside": {"a": [10**5000]}, "view": view, "exit": (sys.exit(1) for _ in range(1))}[kind]

    for kind in ("int", "inside", "view", "exit"):
        [result] = run(ToolCall("power", {"kind": kind}), tools=(power,))
        assert result.error == ErrorKind.OUTPUT, kind
        assert "which cannot be written as JSON: " in result.content


def test_an_infrastructure_error_is_a_kind_of_its_own() -> None:
    def remote() -> None:
        """Call."""
        raise InfrastructureError("server down")

    [result] = run(ToolCall("remote", {}), tools=(remote,))
    assert result.error == ErrorKind.INFRASTRUCTURE
    assert "server down" in result.content


# ---- deadlines


def test_a_hung_tool_is_left_behind_and_the_others_are_answered() -> None:
    started = time.monotonic()
    first, second = run(ToolCall("hang", {}), ToolCall("add", {"a": 1}), tools=(hang, add))
    assert (first.error, first.content, first.seconds) == (ErrorKind.DEADLINE, "error: hang: no result within 0.2 s", 0.2)
    assert second.content == "2"
    assert time.monotonic() - started < 10


def test_hung_tools_do_not_use_up_the_workers() -> None:
    calls = [ToolCall("hang", {})] * 3 + [ToolCall("add", {"a": 1})]
    results = run(*calls, tools=(hang, add), workers=1)
    assert [result.error for result in results] == ["deadline"] * 3 + [""]


def test_a_tools_own_deadline_replaces_the_recipes() -> None:
    @tool(deadline_s=0.2)
    def slow() -> None:
        """Sleep."""
        time.sleep(20)

    @tool(deadline_s=60)
    def slower() -> str:
        """Sleep."""
        time.sleep(0.6)
        return "done"

    first, second = run(ToolCall("slow", {}), ToolCall("slower", {}), tools=(slow, slower), deadline_s=0.4)
    assert first.error == ErrorKind.DEADLINE
    assert second.content == "done"


def test_the_deadline_counts_from_the_start_of_the_call_not_from_its_place_in_the_queue() -> None:
    def nap() -> str:
        """Nap."""
        time.sleep(0.2)
        return "rested"

    results = run(*[ToolCall("nap", {})] * 12, tools=(nap,), deadline_s=2.0, workers=1)  # the last one starts after 2.2 s
    assert [result.content for result in results] == ["rested"] * 12


def test_an_async_tool_is_cancelled_at_its_deadline() -> None:
    cancelled = threading.Event()

    async def wait() -> None:
        """Wait."""
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    [result] = run(ToolCall("wait", {}), tools=(wait,), deadline_s=0.2)
    assert (result.error, result.content) == (ErrorKind.DEADLINE, "error: wait: no result within 0.2 s")
    assert cancelled.wait(5)


def test_a_tools_own_timeout_error_is_no_deadline() -> None:
    async def ask() -> None:
        """Ask."""
        raise TimeoutError("the city did not answer")

    [result] = run(ToolCall("ask", {}), tools=(ask,))
    assert result.error == ErrorKind.RAISED


def test_a_result_that_takes_for_ever_to_write_down_meets_the_deadline_too() -> None:
    def slowly() -> Any:
        time.sleep(30)
        yield 1

    [result] = run(ToolCall("give", {}), tools=(returns(slowly()),), deadline_s=0.3)
    assert result.error == ErrorKind.DEADLINE


# ---- order and concurrency


def test_results_come_in_call_order_whatever_finishes_first() -> None:
    def nap(seconds: float) -> float:
        """Nap."""
        time.sleep(seconds)
        return seconds

    async def anap(seconds: float) -> float:
        """Nap."""
        await asyncio.sleep(seconds)
        return seconds

    calls = (
        ToolCall("nap", {"seconds": 0.3}, "a"),
        MalformedCall("x", "bad"),
        ToolCall("anap", {"seconds": 0.1}, "b"),
        ToolCall("nope", {}, "c"),
        ToolCall("nap", {"seconds": 0.0}, "d"),
    )
    results = run(*calls, tools=(nap, anap))
    assert [result.call.id if result.call else "" for result in results] == ["a", "", "b", "c", "d"]
    assert [result.content for result in results if not result.error] == ["0.3", "0.1", "0.0"]


def test_one_failing_call_leaves_its_siblings_alone() -> None:
    first, second, third = run(ToolCall("add", {"a": 1}), ToolCall("fail", {}), ToolCall("add", {"a": 2}), tools=(add, fail))
    assert (first.content, second.error, third.content) == ("2", "raised", "3")


def test_calls_of_all_rollouts_run_at_the_same_time() -> None:
    barrier = threading.Barrier(6)

    def meet() -> str:
        """Meet."""
        barrier.wait(20)
        return "met"

    rollouts = [(session(meet), [ToolCall("meet", {})] * 2) for _ in range(3)]
    results = execute(rollouts, ToolLimits(deadline_s=20, workers=6))
    assert [result.content for row in results for result in row] == ["met"] * 6


def test_no_more_calls_run_at_once_than_there_are_workers() -> None:
    lock, running, peak = threading.Lock(), 0, 0

    def busy() -> None:
        """Be busy."""
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    run(*[ToolCall("busy", {})] * 12, tools=(busy,), workers=3)
    assert peak <= 3


class Log:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def note(self, n: int, seconds: float = 0.0) -> str:
        """Note."""
        time.sleep(seconds)
        self.seen.append(n)
        return ",".join(map(str, self.seen))


def test_calls_to_one_environment_run_in_call_order() -> None:
    results = run(ToolCall("note", {"n": 1, "seconds": 0.2}), ToolCall("note", {"n": 2}), ToolCall("note", {"n": 3}), tools=(Log,))
    assert [result.content for result in results] == ["1", "1,2", "1,2,3"]


def test_waiting_for_an_earlier_call_to_the_environment_costs_no_deadline() -> None:
    call = ToolCall("note", {"n": 1, "seconds": 0.5})
    assert [result.error for result in run(*[call] * 6, tools=(Log,), deadline_s=2.4)] == [""] * 6  # the last one starts after 2.5 s


def test_an_abandoned_call_keeps_its_environment_to_itself() -> None:
    results = run(ToolCall("note", {"n": 1, "seconds": 3}), ToolCall("note", {"n": 2}), tools=(Log,), deadline_s=0.2)
    assert [result.error for result in results] == ["deadline", "deadline"]


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5), st.integers(1, 4))
def test_the_pool_answers_every_job_in_its_place(lanes: list[list[int]], workers: int) -> None:
    jobs = [[Job(lambda value=value: value, 20.0) for value in lane] for lane in lanes]
    outcomes = run_lanes(jobs, workers=workers)
    assert [[outcome.value for outcome in lane if isinstance(outcome, Returned)] for lane in outcomes] == lanes


def test_a_fault_of_postgrads_own_in_a_thread_is_raised_not_answered() -> None:
    def bug() -> None:
        raise TypeError("bug")

    with pytest.raises(TypeError, match="bug"):
        run_lanes([[Job(bug, 5.0)]], workers=1)


def test_a_result_that_comes_after_the_deadline_is_discarded_properly() -> None:
    discarded: list[str] = []
    done = threading.Event()

    def late() -> str:
        time.sleep(0.4)
        return "late"

    def discard(value: str) -> None:
        discarded.append(value)
        done.set()

    [[outcome]] = run_lanes([[Job(late, 0.1, discard)]], workers=1)
    assert outcome == Expired(0.1)
    assert done.wait(5)
    assert discarded == ["late"]


def test_a_job_that_ends_late_has_expired_even_if_nobody_looked_at_the_clock() -> None:
    finished: SimpleQueue[Any] = SimpleQueue()
    discarded = threading.Event()
    _Attempt(None, 0, Job(lambda: time.sleep(0.2), 0.05, lambda _: discarded.set()), finished)
    assert finished.get(timeout=20).outcome == Expired(0.05)
    assert discarded.wait(5)


# ---- the program itself


def python(code: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


HANGING = """
    import signal, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests with SIGINT ignored
    from postgrad.rollout import make_toolbox
    from postgrad.rollout.execute import ToolLimits, execute
    from postgrad.types import ToolCall
    def hang() -> None:
        "Hang."
        time.sleep(600)
    session = make_toolbox([hang]).open([])
    print("ready", flush=True)
    print(execute([(session, [ToolCall("hang", {})])], ToolLimits(deadline_s=DEADLINE))[0][0].error, flush=True)
"""


def test_a_hung_tool_does_not_keep_the_program_from_ending() -> None:
    process = python(HANGING.replace("DEADLINE", "0.2"))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.split(), err) == (0, ["ready", "deadline"], "")


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_a_real_ctrl_c_interrupts_the_wait_for_tools() -> None:
    process = python(HANGING.replace("DEADLINE", "500"))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in err
    assert process.returncode != 0


# ---- what a tool returns


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is\n", "as it is\n"),
        (None, "null"),
        (True, "true"),
        (3.5, "3.5"),
        ({"a": [1, None]}, '{"a": [1, null]}'),
        ("é", "é"),
        ({"é": 1}, '{"é": 1}'),
        (datetime.date(2024, 1, 2), '"2024-01-02"'),
        (b"\x00\xff", "2 bytes, base64: AP8="),
        ("half \ud800 pair", "half ? pair"),
        ("", ""),
    ],
)
def test_results_become_text(value: Any, text: str) -> None:
    [result] = run(ToolCall("give", {}), tools=(returns(value),))
    assert (result.content, result.error) == (text, "")


def circular() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize("value", [object(), {"x": object()}, circular(), lambda: 1])
def test_what_cannot_be_written_as_text_is_an_output_error(value: Any) -> None:
    [result] = run(ToolCall("give", {}), tools=(returns(value),))
    assert result.error == ErrorKind.OUTPUT
    assert result.content.startswith("error: give: returned ")


@pytest.mark.parametrize("value", ["x" * 5_000_000, b"x" * 5_000_000, ["x" * 1000] * 5000])
def test_a_huge_result_is_cut_and_marked(value: Any) -> None:
    [result] = run(ToolCall("give", {}), tools=(returns(value),), max_output_chars=200)
    assert len(result.content) == 200
    assert "… [cut: " in result.content
    assert result.error == ""


def test_the_limit_of_a_result_is_counted_in_characters() -> None:
    assert result_text("é" * 100, max_chars=100) == "é" * 100
    assert shorten("é" * 101, max_chars=100).endswith("… [cut: 101 characters]")
    assert len(shorten("abcdef", max_chars=3)) == 3


def test_a_huge_error_is_cut_as_well() -> None:
    [result] = run(ToolCall("fail", {"text": "x" * 100_000}), tools=(fail,), max_output_chars=100)
    assert len(result.content) == 100
    [result] = run(MalformedCall("", "y" * 100_000), tools=(fail,), max_output_chars=100)
    assert len(result.content) == 100


def test_seconds_are_measured() -> None:
    def nap() -> None:
        """Nap."""
        time.sleep(0.1)

    [result] = run(ToolCall("nap", {}), tools=(nap,))
    assert 0.1 <= result.seconds < 5
