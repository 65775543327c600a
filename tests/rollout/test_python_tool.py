"""The shipped Python tool, with real processes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from postgrad.chat import ChatFormat
from postgrad.errors import RecipeError
from postgrad.protocols import SamplingParams
from postgrad.rollout import RolloutConfig, collect
from postgrad.rollout.execute import ToolLimits, execute
from postgrad.rollout.results import ErrorKind
from postgrad.rollout.tools import Toolbox, load_tools
from postgrad.sandbox import SandboxError
from postgrad.testing import ScriptedPolicy, tiny_tokenizer
from postgrad.types import Message, Prompt, StopReason, ToolCall, ToolResult


@pytest.fixture(params=["python", "python_session"])
def toolbox(request: pytest.FixtureRequest) -> Toolbox:
    """Where this machine has no sandbox, without one: what a sandbox keeps out is tested in tests/sandbox."""
    return load_tools([request.param], Path(), allow_unsafe_exec=True)


def run(toolbox: Toolbox, *codes: str, deadline_s: float = 20.0) -> list[ToolResult]:
    """The results of cells, one after the other in one rollout."""
    session = toolbox.open([{}] * len(toolbox.environments))
    try:
        limits = ToolLimits(deadline_s=deadline_s)
        return [execute([(session, [ToolCall("python", {"code": code})])], limits)[0][0] for code in codes]
    finally:
        session.close()


def test_the_model_is_told_of_one_tool_called_python(toolbox: Toolbox) -> None:
    [spec] = toolbox.specs
    assert spec.name == "python"
    assert "sandbox without network" in spec.description
    assert spec.parameters["properties"] == {"code": {"type": "string", "description": "the Python code"}}


def test_it_reads_what_the_code_prints_and_the_value_of_the_last_expression(toolbox: Toolbox) -> None:
    [printed, value, both, nothing] = run(toolbox, "print('hi')", "2 ** 10", "print('a')\n[1, 2]", "x = 1")
    assert [result.content for result in (printed, value, both, nothing)] == ["hi", "1024", "a\n[1, 2]", "(no output)"]
    assert not any(result.error for result in (printed, value, both, nothing))


def test_an_error_is_read_with_its_traceback_and_what_was_printed_and_is_counted(toolbox: Toolbox) -> None:
    [result] = run(toolbox, "print('a')\n1 / 0")
    assert result.error is ErrorKind.RAISED
    assert result.content.splitlines()[:2] == ["error: python: a", "Traceback (most recent call last):"]
    assert result.content.endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("import os\nprint('last', flush=True)\nos._exit(0)", ErrorKind.CRASHED, "last\nthe interpreter ended with exit code 0"),
        ("x = bytearray(10**11)", ErrorKind.MEMORY, "MemoryError"),
        ("import sys\nsys.exit(0)", ErrorKind.RAISED, "SystemExit: 0"),
    ],
)
def test_every_way_to_fail_has_its_kind(toolbox: Toolbox, code: str, kind: ErrorKind, text: str) -> None:
    [result] = run(toolbox, code)
    assert result.error is kind
    assert result.content.endswith(text)


def test_a_call_ends_at_its_deadline_and_says_what_it_printed(toolbox: Toolbox) -> None:
    began = time.monotonic()
    [result] = run(toolbox, "print('begun')\nwhile True: pass", deadline_s=0.5)
    assert time.monotonic() - began < 2.5  # the start, half a second, the end
    assert result.error is ErrorKind.DEADLINE
    assert result.content == "error: python: begun\nno result within 0.5 s"


def test_output_is_cut_and_marked(toolbox: Toolbox) -> None:
    [result] = run(toolbox, "print('x' * 10**6)")
    assert len(result.content) == 4000
    assert "[cut: " in result.content


def test_python_keeps_nothing_and_a_session_keeps_its_variables() -> None:
    cells = ("x = 3\nopen('note', 'w').close()", "import os\n[x, os.path.exists('note')]")
    assert run(load_tools(["python"], Path(), allow_unsafe_exec=True), *cells)[1].error is ErrorKind.RAISED
    assert run(load_tools(["python_session"], Path(), allow_unsafe_exec=True), *cells)[1].content == "[3, True]"


def test_a_session_that_was_lost_says_so_once() -> None:
    box = load_tools(["python_session"], Path(), allow_unsafe_exec=True)
    lost, after, then = run(box, "x = 1\nimport os\nos._exit(1)", "'x' in globals()", "1")
    note = "(the interpreter was started anew: variables and files of earlier calls are gone)"
    assert [lost.error, after.content, then.content] == [ErrorKind.CRASHED, f"{note}\nFalse", "1"]


def test_rollouts_do_not_share_a_session() -> None:
    box = load_tools(["python_session"], Path(), allow_unsafe_exec=True)
    assert run(box, "x = 1")[0].error == ""
    assert run(box, "x")[0].error is ErrorKind.RAISED


def test_a_rollout_closes_its_interpreter_however_it_ends() -> None:
    box = load_tools(["python_session"], Path(), allow_unsafe_exec=True)
    tokenizer = tiny_tokenizer()
    call = '<tool_call>{"name": "python", "arguments": {"code": "import os; os.getpid()"}}</tool_call>'
    before = children()
    for script, stop in (([call, "done"], StopReason.END), ([call] * 3, StopReason.TURNS)):
        [group] = collect(
            [(0, Prompt("d:0", (Message("user", "Compute."),)))],
            sampler=ScriptedPolicy(script, tokenizer=tokenizer),
            chat=ChatFormat(tokenizer),
            toolbox=box,
            config=RolloutConfig(group_size=2, max_tokens=300, max_turns=3, tool_deadline_s=20),
            params=SamplingParams(),
            seed=0,
            step=0,
        )
        assert {rollout.stop for rollout in group.rollouts} == {stop}
        assert all(result.content.isdigit() for rollout in group.rollouts for result in rollout.tool_results)
    assert children() == before


def test_a_sandbox_that_fails_is_infrastructure_and_never_the_models_fault(toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise SandboxError("no process could be started")

    monkeypatch.setattr("postgrad.rollout.python_tool.Interpreter", broken)
    assert run(toolbox, "1")[0].error is ErrorKind.INFRASTRUCTURE


def test_many_calls_at_once_all_get_their_answer(toolbox: Toolbox) -> None:
    sessions = [toolbox.open([{}] * len(toolbox.environments)) for _ in range(8)]
    try:
        turns = [(session, [ToolCall("python", {"code": f"{number} * 2"})]) for number, session in enumerate(sessions)]
        results = execute(turns, ToolLimits(deadline_s=2.0))
    finally:
        for session in sessions:
            session.close()
    assert [result.content for [result] in results] == [str(2 * number) for number in range(8)]


@pytest.mark.parametrize("name", ["python", "python_session"])
def test_without_a_sandbox_it_is_refused_before_anything_runs_unless_allowed(name: str, no_bwrap: None) -> None:
    with pytest.raises(RecipeError, match="there is no sandbox for code that the model writes") as raised:
        load_tools([name], Path())
    assert raised.value.hint is not None
    assert "allow_unsafe_exec: true" in raised.value.hint
    assert run(load_tools([name], Path(), allow_unsafe_exec=True), "1 + 1")[0].content == "2"
    assert load_tools([name], Path(), to_run=False).specs[0].name == "python"  # telling of it runs nothing


def test_options_of_the_recipe_act_on_it() -> None:
    box = load_tools([{"use": "python", "deadline_s": 0.3}], Path(), allow_unsafe_exec=True)
    [result] = run(box, "while True: pass")
    assert result.content.endswith("no result within 0.3 s")


@pytest.mark.parametrize(
    ("item", "text", "hint"),
    [
        ("pyton", "there is no shipped tool 'pyton'", "did you mean python?"),
        ("calculator", "there is no shipped tool 'calculator'", "shipped tools: python, python_session"),
        ({"use": "python", "isolate": "process"}, "isolate is for functions of yours, and python is shipped", "leave isolate out"),
    ],
)
def test_a_wrong_entry_is_refused_with_a_hint(item: Any, text: str, hint: str) -> None:
    with pytest.raises(RecipeError, match=text) as raised:
        load_tools([item], Path())
    assert raised.value.hint is not None
    assert hint in raised.value.hint


def children() -> int:
    """Processes whose parent this one is."""
    found = 0
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{entry}/stat").read_text()
        except OSError:
            continue
        found += int(stat.rpartition(")")[2].split()[1]) == os.getpid()
    return found
