"""Functions in processes of their own: whatever they do to their process, the trainer goes on and the next call is answered."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postgrad.errors import RecipeError
from postgrad.rollout import ErrorKind, load_tools
from postgrad.rollout.execute import ToolLimits, execute
from postgrad.rollout.tools import Toolbox
from postgrad.types import ToolCall, ToolResult

CODE = '''
import ctypes, os, subprocess, sys, threading, time
from postgrad.rollout import InfrastructureError, ToolError, call_key, seconds_left, tool

state = {"calls": 0}

@tool(name="act", idempotent=True)
def act(kind: str, value: float = 0.0) -> object:
    """Do something.

    Args:
        kind: what
    """
    state["calls"] += 1
    if kind == "sleep":
        time.sleep(value)
    elif kind == "exit":
        os._exit(int(value))
    elif kind == "system_exit":
        sys.exit(3)
    elif kind == "segfault":
        ctypes.string_at(0)
    elif kind == "memory":
        return len(bytearray(int(value)))
    elif kind == "memory_bomb":
        held = []
        while True:
            held.append(bytearray(2**22))
    elif kind == "fork_bomb":
        while True:
            os.fork()
    elif kind == "subprocess":
        return subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True).stdout
    elif kind == "text":
        return "x" * int(value)
    elif kind == "print":
        print("x" * int(value))
        sys.stdout.flush()
        os.write(1, b"\\x05\\x00\\x00\\x00\\x00\\x00\\x00\\x00[1,2]")
        os.write(2, b"more")
    elif kind == "close":
        os.closerange(3, 2**16)
    elif kind == "thread":
        threading.Thread(target=time.sleep, args=(60,)).start()
    elif kind == "lock":
        import re
        re.match(r"(a+)+$", "a" * 40 + "b")
    elif kind == "raise":
        raise ValueError("no such city")
    elif kind == "tool_error":
        raise ToolError("no such city")
    elif kind == "infrastructure":
        raise InfrastructureError("server down")
    elif kind == "object":
        return object()
    elif kind == "environment":
        return dict(os.environ)
    elif kind == "left":
        return seconds_left()
    elif kind == "key":
        return call_key()
    elif kind == "pid":
        return os.getpid()
    return state["calls"]

async def wait(seconds: float) -> str:
    """Wait."""
    import asyncio
    await asyncio.sleep(seconds)
    return "rested"

def meet(folder: str, name: str) -> str:
    """Wait for another."""
    open(os.path.join(folder, name), "w").close()
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)
    return "met"

def flaky(path: str) -> str:
    """Fail once."""
    if not os.path.exists(path):
        open(path, "w").close()
        os._exit(1)
    return "done"

class Game:
    """A game."""
    def move(self) -> None:
        """Move."""
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("isolated")
    (folder / "tools.py").write_text(CODE)
    return folder


@pytest.fixture(scope="module")
def toolbox(folder: Path) -> Iterator[Toolbox]:
    item = {"use": "tools.py:act", "isolate": {"memory_gb": 0.25}, "concurrency": 1}
    with load_tools([item], folder) as toolbox:
        yield toolbox


def run(toolbox: Toolbox, *calls: ToolCall, deadline_s: float = 30.0, max_output_chars: int = 1000) -> tuple[ToolResult, ...]:
    limits = ToolLimits(deadline_s=deadline_s, max_output_chars=max_output_chars)
    return execute([(toolbox.open([]), calls)], limits)[0]


def act(toolbox: Toolbox, kind: str, value: float = 0.0, **options: Any) -> ToolResult:
    [result] = run(toolbox, ToolCall("act", {"kind": kind, "value": value}), **options)
    return result


def alive(toolbox: Toolbox) -> bool:
    return act(toolbox, "nothing").error == ""


# ---- what the model is told is the same as without isolation


def test_the_spec_and_the_options_come_from_the_function(toolbox: Toolbox, folder: Path) -> None:
    [there] = toolbox.tools
    [here] = load_tools(["tools.py:act"], folder).tools
    assert there.spec == here.spec
    assert there.options == here.options


def test_results_and_errors_read_as_they_do_without_isolation(toolbox: Toolbox, folder: Path) -> None:
    here = load_tools(["tools.py:act"], folder)
    for call in [
        ToolCall("act", {"kind": "raise"}),
        ToolCall("act", {"kind": "tool_error"}),
        ToolCall("act", {"kind": "object"}),
        ToolCall("act", {"kind": "text", "value": 3}),
        ToolCall("act", {"kind": 3}),
        ToolCall("act", {}),
        ToolCall("act", {"kind": "infrastructure"}),
    ]:
        [isolated], [plain] = run(toolbox, call), run(here, call)
        assert (isolated.content, isolated.error) == (plain.content, plain.error)


def test_an_exit_is_a_failure_like_any_other(toolbox: Toolbox) -> None:
    result = act(toolbox, "system_exit")
    assert (result.error, result.content) == (ErrorKind.RAISED, "error: act: SystemExit: 3")


def test_an_async_function_runs_there_too(folder: Path) -> None:
    with load_tools([{"use": "tools.py:wait", "isolate": "process", "concurrency": 1}], folder) as toolbox:
        done, late = run(toolbox, ToolCall("wait", {"seconds": 0.1}), ToolCall("wait", {"seconds": 30}), deadline_s=1.0)
    assert (done.content, late.error) == ("rested", ErrorKind.DEADLINE)


def test_the_file_is_not_imported_here(folder: Path) -> None:
    (folder / "elsewhere.py").write_text(f'import os\nPID = os.getpid()\ndef f() -> bool:\n    """F."""\n    return PID == {os.getpid()}\n')
    with load_tools([{"use": "elsewhere.py:f", "isolate": "process", "concurrency": 1}], folder) as toolbox:
        assert run(toolbox, ToolCall("f", {}))[0].content == "false"


def test_a_tool_is_told_how_long_it_may_take(toolbox: Toolbox) -> None:
    assert 0 < float(act(toolbox, "left", deadline_s=30.0).content) <= 30.0


def test_a_tool_finds_the_key_of_its_call(toolbox: Toolbox) -> None:
    assert act(toolbox, "key").content == "0.0.0.0.0.0"


# ---- what a tool may do to its process


def test_a_hung_call_is_killed_at_its_deadline_and_the_next_one_is_answered(toolbox: Toolbox) -> None:
    started = time.monotonic()
    result = act(toolbox, "sleep", 60, deadline_s=0.3)
    assert time.monotonic() - started < 5
    assert (result.error, result.content) == (ErrorKind.DEADLINE, "error: act: no result within 0.3 s")
    assert act(toolbox, "nothing", deadline_s=5.0).content == "1"  # a new process, whose start is not the call's time


def test_code_that_never_lets_go_of_the_interpreter_is_killed_too(toolbox: Toolbox) -> None:
    assert act(toolbox, "lock", deadline_s=0.3).error == ErrorKind.DEADLINE
    assert alive(toolbox)


@pytest.mark.parametrize(
    ("kind", "value", "cause"),
    [("exit", 7, "the process ended with exit code 7"), ("segfault", 0, "the process was killed by SIGSEGV")],
)
def test_a_crash_is_a_failure_of_its_own_kind(toolbox: Toolbox, kind: str, value: float, cause: str) -> None:
    result = act(toolbox, kind, value)
    assert (result.error, result.content) == (ErrorKind.CRASHED, f"error: act: {cause}")
    assert alive(toolbox)


@pytest.mark.parametrize(("kind", "value"), [("memory", 2**29), ("memory_bomb", 0)])
def test_memory_is_limited(toolbox: Toolbox, kind: str, value: float) -> None:
    result = act(toolbox, kind, value)
    assert (result.error, result.content) == (ErrorKind.MEMORY, "error: act: ran out of the memory that it may take")
    assert act(toolbox, "nothing").content == "1"  # a new process


def test_memory_within_the_limit_is_there(toolbox: Toolbox) -> None:
    assert act(toolbox, "memory", 2**26).content == str(2**26)


def test_a_fork_bomb_ends_at_its_first_fork(toolbox: Toolbox) -> None:
    result = act(toolbox, "fork_bomb")
    assert result.error == ErrorKind.RAISED
    assert "PermissionError" in result.content
    assert alive(toolbox)


def test_a_process_may_be_started_where_the_recipe_says_so(toolbox: Toolbox, folder: Path) -> None:
    assert "PermissionError" in act(toolbox, "subprocess").content
    item = {"use": "tools.py:act", "isolate": {"processes": True}, "concurrency": 1}
    with load_tools([item], folder) as allowed:
        assert act(allowed, "subprocess").content == "1\n"


def test_threads_may_be_started_and_do_not_keep_the_process(toolbox: Toolbox) -> None:
    assert act(toolbox, "thread").error == ""
    assert alive(toolbox)


def test_five_megabytes_come_back_and_are_cut(toolbox: Toolbox) -> None:
    result = act(toolbox, "text", 5_000_000, max_output_chars=100)
    assert len(result.content) == 100
    assert result.content.endswith("… [cut: 5000000 characters]")


def test_a_result_that_is_too_long_to_bring_back_is_an_error(toolbox: Toolbox) -> None:
    result = act(toolbox, "text", 2**24 + 1)
    assert (result.error, result.content) == (ErrorKind.OUTPUT, "error: act: returned more than 16777216 characters")


def test_what_a_tool_prints_is_no_answer(toolbox: Toolbox) -> None:
    first = int(act(toolbox, "nothing").content)
    assert [act(toolbox, "print", 100_000).content, act(toolbox, "nothing").content] == [str(first + 1), str(first + 2)]


def test_a_tool_that_closes_every_file_has_crashed(toolbox: Toolbox) -> None:
    assert act(toolbox, "close").error == ErrorKind.CRASHED
    assert alive(toolbox)


def test_a_process_that_was_killed_while_idle_is_replaced_without_blame(toolbox: Toolbox) -> None:
    os.kill(int(act(toolbox, "pid").content), 9)
    time.sleep(0.1)
    assert act(toolbox, "nothing").content == "1"


# ---- many calls


def test_calls_wait_for_a_process_and_the_wait_is_not_theirs(toolbox: Toolbox) -> None:
    """Six calls of 0.3 s on one process, each with a deadline of one second: the last one begins after 1.5 s."""
    call = ToolCall("act", {"kind": "sleep", "value": 0.3})
    alive(toolbox)
    assert [result.error for result in run(toolbox, *[call] * 6, deadline_s=1.0)] == [""] * 6


def test_several_processes_answer_side_by_side(folder: Path, tmp_path: Path) -> None:
    with load_tools([{"use": "tools.py:meet", "isolate": "process", "concurrency": 2}], folder) as toolbox:
        calls = [ToolCall("meet", {"folder": str(tmp_path), "name": name}) for name in "ab"]
        assert [result.content for result in run(toolbox, *calls, deadline_s=60.0)] == ["met", "met"]


def test_a_crash_is_retried_where_the_tool_is_idempotent(folder: Path, tmp_path: Path) -> None:
    item = {"use": "tools.py:flaky", "isolate": "process", "concurrency": 1, "idempotent": True, "retry": 1}
    with load_tools([item], folder) as toolbox:
        [result] = run(toolbox, ToolCall("flaky", {"path": str(tmp_path / "been_here")}))
    assert (result.content, result.error) == ("done", "")


# ---- what it may read


def test_it_gets_no_variable_but_those_named_and_their_values_stay_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_TOOL", "s3cret-value")
    monkeypatch.setenv("TOKEN_OF_TRAINER", "another-value")
    item = {"use": "tools.py:act", "isolate": {"env": ["TOKEN_OF_TOOL"]}, "concurrency": 1}
    with load_tools([item], folder) as toolbox:
        text = act(toolbox, "environment", max_output_chars=10_000).content
    assert '"TOKEN_OF_TOOL": "[secret]"' in text
    assert "TOKEN_OF_TRAINER" not in text
    assert "s3cret" not in text


# ---- faults before the run


@pytest.mark.parametrize(
    ("use", "isolate", "message"),
    [
        ("tools.py:Game", "process", "isolate is for functions, and Game is a class"),
        ("tools.py:nothing", "process", "has no `nothing`"),
        ("nowhere.py:f", "process", "does not exist"),
        ("broken.py:f", "process", "ZeroDivisionError"),
        ("exits.py:f", "process", "cannot be imported: the process ended with exit code 1"),
        ("forks.py:f", "process", "PermissionError"),
        ("tools.py:act", {"env": ["NOT_SET_AT_ALL"]}, "isolate.env: the environment variable NOT_SET_AT_ALL is not set"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_a_recipe_error(folder: Path, use: str, isolate: Any, message: str) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "exits.py").write_text("import os\nos._exit(1)\n")
    (folder / "forks.py").write_text("import os\nos.fork()\n")
    with pytest.raises(RecipeError, match=message) as caught:
        load_tools([{"use": use, "isolate": isolate}], folder)
    place = ("tools[0].isolate.env", None) if "env" in isolate else ("tools[0].use", use)
    assert (caught.value.key, caught.value.where) == place


def test_a_system_that_cannot_keep_processes_away_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from postgrad.rollout import isolated

    monkeypatch.setattr(isolated.IsolatedTool, "_load", lambda self, worker: {"confined": False, "tool": {}})
    with caplog.at_level(logging.WARNING):
        isolated.IsolatedTool("tools.py:act", folder, isolated.Confinement(memory_bytes=2**30), workers=1)
    assert "cannot keep a worker from starting processes" in caplog.text
