"""Entries of `tools:` and their options: what is refused, what is repeated, what is kept out of texts."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from postgrad.errors import RecipeError
from postgrad.rollout import ErrorKind, InfrastructureError, ToolError, load_tools, make_toolbox, seconds_left, tool
from postgrad.rollout.deadline import DeadlineError, deadline
from postgrad.rollout.execute import ToolLimits, execute
from postgrad.rollout.items import ToolItem
from postgrad.rollout.schema import SchemaArguments
from postgrad.rollout.secrets import Secrets
from postgrad.rollout.signature import ArgumentError
from postgrad.rollout.tools import Toolbox
from postgrad.types import ToolCall, ToolResult

CODE = '''
from postgrad.rollout import tool

@tool(idempotent=True, max_calls=3, deadline_s=2.0)
def look(place: str) -> str:
    """Look."""
    return place

def write(text: str) -> str:
    """Write."""
    return text

class Game:
    """A game."""
    def move(self) -> str:
        """Move."""
        return "moved"
    def win(self) -> str:
        """Win."""
        return "won"
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(CODE)
    return tmp_path


def run(toolbox: Toolbox, name: str, *, deadline_s: float = 20.0, **arguments: Any) -> ToolResult:
    session = toolbox.open([{} for _ in toolbox.environments])
    return execute([(session, [ToolCall(name, arguments)])], ToolLimits(deadline_s=deadline_s))[0][0]


# ---- entries


def test_a_text_is_an_entry_with_use(folder: Path) -> None:
    assert load_tools(["tools.py:look"], folder).specs == load_tools([{"use": "tools.py:look"}], folder).specs


def test_an_entry_is_written_down_as_it_was_said() -> None:
    assert ToolItem.model_validate("tools.py:look").model_dump() == "tools.py:look"
    said = {"use": "tools.py:look", "isolate": {"memory_gb": 1.0, "processes": False, "env": []}, "retry": 1}
    assert ToolItem.model_validate(said).model_dump() == said
    assert ToolItem.model_validate(ToolItem.model_validate(said).model_dump()) == ToolItem.model_validate(said)


@pytest.mark.parametrize(
    ("item", "files"),
    [
        ("tools.py:look", ("tools.py",)),
        ({"openapi": {"document": "shop.yaml"}}, ("shop.yaml",)),
        ({"mcp": {"command": ["/usr/bin/python", "server.py", "--verbose"]}}, ("server.py", "--verbose")),
        ({"mcp": {"url": "http://127.0.0.1:1"}}, ()),
    ],
)
def test_an_entry_knows_what_may_be_a_file(item: Any, files: tuple[str, ...]) -> None:
    assert ToolItem.model_validate(item).files == files


@pytest.mark.parametrize("item", [{"used": "tools.py:look"}, {}, 3, {"use": "tools.py:look", "deadline_s": 0}])
def test_an_entry_that_means_nothing_is_a_recipe_error(folder: Path, item: Any) -> None:
    with pytest.raises(RecipeError) as caught:
        load_tools([item], folder)
    assert str(caught.value.key).startswith("tools[0]")


@pytest.mark.parametrize(
    ("item", "key", "where"),
    [
        ("pyton", "use", None),
        ("tools.py:nothing", "use", "tools.py:nothing"),
        ("nowhere.py:f", "use", "nowhere.py:f"),
        ({"use": "tools.py:nothing", "isolate": "process"}, "use", "tools.py:nothing"),
        ({"use": "tools.py:look", "isolate": {"env": ["NOT_SET_AT_ALL"]}}, "isolate.env", None),
        ({"use": "python", "isolate": "process"}, "isolate", None),
        ({"use": "tools.py:write", "retry": 2}, "retry", None),
        ({"openapi": {"document": "nowhere.json"}}, "openapi", "nowhere.json"),
        ({"openapi": {"document": "api.json", "include": ["look"]}}, "openapi.include", None),
        ({"openapi": {"document": "api.json", "exclude": ["look"]}}, "openapi.exclude", None),
        ({"openapi": {"document": "api.json", "headers_from_env": {"X": "NOT_SET_AT_ALL"}}}, "openapi.headers_from_env", None),
        ({"openapi": {"document": "api.json"}}, "openapi.base_url", None),
        ({"mcp": {"url": "http://127.0.0.1:1", "headers_from_env": {"X": "NOT_SET_AT_ALL"}}}, "mcp.headers_from_env", None),
        ({"mcp": {"command": ["/nowhere/server"]}}, "mcp", None),
    ],
)
def test_a_fault_of_an_entry_is_told_with_its_key_and_the_file(folder: Path, item: Any, key: str, where: str | None) -> None:
    (folder / "api.json").write_text('{"openapi": "3.1.0", "paths": {"/x": {"get": {"operationId": "get_x"}}}}')
    with pytest.raises(RecipeError) as caught:
        load_tools(["tools.py:look", item], folder)
    assert (caught.value.key, caught.value.where) == (f"tools[1].{key}", where)


# ---- options


def test_the_recipe_goes_before_the_decorator(folder: Path) -> None:
    [one] = load_tools([{"use": "tools.py:look", "deadline_s": 7.0, "terminal": True, "max_output_tokens": 5}], folder).tools
    assert (one.options.deadline_s, one.options.terminal, one.options.max_output_tokens, one.options.max_calls) == (7.0, True, 5, 3)


def test_options_of_a_class_are_those_of_all_its_tools(folder: Path) -> None:
    toolbox = load_tools([{"use": "tools.py:Game", "deadline_s": 7.0}], folder)
    assert [one.options.deadline_s for one in toolbox.tools] == [7.0, 7.0]


def test_retry_is_for_idempotent_tools_only(folder: Path) -> None:
    assert load_tools([{"use": "tools.py:look", "retry": 2}], folder).tools[0].options.retry == 2
    assert load_tools([{"use": "tools.py:write", "retry": 2, "idempotent": True}], folder).tools[0].options.retry == 2
    for item in ({"use": "tools.py:write", "retry": 2}, {"use": "tools.py:look", "retry": 2, "idempotent": False}):
        with pytest.raises(RecipeError, match="is not known to be idempotent"):
            load_tools([item], folder)


@pytest.mark.parametrize(
    "options", [{"retry": 1}, {"retry": -1, "idempotent": True}, {"max_calls": 0}, {"max_output_tokens": 0}, {"deadline_s": -1.0}]
)
def test_the_decorator_refuses_what_means_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        tool(**options)


# ---- repeated calls


class Flaky:
    """Fails so many times."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def attempts(*errors: BaseException, retry: int, deadline_s: float = 20.0) -> tuple[ToolResult, int]:
    flaky = Flaky(*errors)

    @tool(idempotent=True, retry=retry)
    def go() -> str:
        """Go."""
        return flaky()

    return run(make_toolbox([go]), "go", deadline_s=deadline_s), flaky.calls


@pytest.mark.parametrize("error", [ValueError("x"), InfrastructureError("x"), ToolError("x", transient=True)])
def test_a_failure_that_may_pass_is_tried_again(error: Exception) -> None:
    result, calls = attempts(error, retry=1)
    assert (result.content, calls) == ("done", 2)


def test_the_last_failure_counts() -> None:
    result, calls = attempts(ValueError("first"), ValueError("second"), ValueError("third"), retry=1)
    assert (result.content, calls) == ("error: go: ValueError: second", 2)


def test_a_considered_answer_is_not_asked_for_again() -> None:
    result, calls = attempts(ToolError("no such city"), retry=3)
    assert (result.error, result.content, calls) == (ErrorKind.RAISED, "error: go: no such city", 1)


def test_without_retry_a_tool_is_called_once() -> None:
    assert attempts(ValueError("x"), retry=0)[1] == 1


def test_an_end_that_a_tool_calls_is_not_repeated() -> None:
    assert attempts(SystemExit(1), retry=3)[1] == 1


def test_retries_share_one_deadline() -> None:
    started = time.monotonic()
    result, calls = attempts(*[ValueError("x")] * 50, retry=50, deadline_s=0.6)  # pauses of 0.1, 0.2, 0.4 s
    assert result.error in (ErrorKind.RAISED, ErrorKind.DEADLINE)
    assert calls == 3
    assert time.monotonic() - started < 5


# ---- the deadline, as a tool sees it


def test_a_tool_may_ask_how_long_it_may_take() -> None:
    def wait() -> float:
        """Wait."""
        return seconds_left()

    async def wait_async() -> float:
        """Wait."""
        return seconds_left()

    toolbox = make_toolbox([wait, wait_async])
    for name in ("wait", "wait_async"):
        assert 0 < float(run(toolbox, name, deadline_s=9.0).content) <= 9.0


def test_outside_of_a_call_there_is_no_deadline_and_after_one_it_has_passed() -> None:
    assert seconds_left() == float("inf")
    with deadline(0.001):
        time.sleep(0.01)
        with pytest.raises(DeadlineError):
            seconds_left()
    assert seconds_left() == float("inf")


def test_a_gate_lets_so_many_calls_through() -> None:
    from dataclasses import replace

    lock, here, most = threading.Lock(), 0, 0

    def enter() -> None:
        """Enter."""
        nonlocal here, most
        with lock:
            here += 1
            most = max(most, here)
        time.sleep(0.05)
        with lock:
            here -= 1

    toolbox = make_toolbox([enter])
    toolbox = Toolbox(tuple(replace(one, gate=threading.Semaphore(2)) for one in toolbox.tools))
    results = execute([(toolbox.open([]), [ToolCall("enter", {})] * 8)], ToolLimits(deadline_s=0.15))  # all together take 0.2 s
    assert ([result.error for result in results[0]], most) == ([""] * 8, 2)


# ---- what belongs to a run


def test_the_fingerprint_is_of_what_the_model_is_told(folder: Path) -> None:
    before = load_tools(["tools.py:look"], folder).fingerprint
    (folder / "tools.py").write_text(CODE.replace("return place", "return place + place"))
    assert load_tools(["tools.py:look"], folder).fingerprint == before
    (folder / "tools.py").write_text(CODE.replace('"""Look."""', '"""Look closely."""'))
    assert load_tools(["tools.py:look"], folder).fingerprint != before


def test_everything_is_closed_even_when_one_thing_cannot_be() -> None:
    closed: list[int] = []

    def fail() -> None:
        closed.append(2)
        raise OSError("cannot")

    toolbox = Toolbox(closers=(lambda: closed.append(1), fail, lambda: closed.append(3)))
    with pytest.raises(OSError, match="cannot"), toolbox:
        pass
    assert sorted(closed) == [1, 2, 3]


# ---- secrets


def test_secrets_are_hidden_longest_first() -> None:
    secrets = Secrets(["Bearer abcdefgh", "abcdef"])
    assert secrets.hide("Bearer abcdefgh, abcdefgh, abcdef, abc") == "[secret], [secret], [secret], abc"


def test_short_values_are_no_secrets() -> None:
    assert Secrets(["1", "", "debug"]).hide("debug 1") == "debug 1"


# ---- arguments against a schema


def problems(schema: dict[str, Any], arguments: dict[str, Any]) -> str:
    with pytest.raises(ArgumentError) as caught:
        SchemaArguments(schema, tool="t", where="w").validate(arguments)
    return str(caught.value)


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a", "b"]}


def test_every_wrong_argument_is_named_once() -> None:
    assert problems(OBJECT, {}) == "missing required argument 'a'; missing required argument 'b'"
    assert problems({**OBJECT, "additionalProperties": False}, {"a": 1, "b": "x", "c": 1, "d": 2}) == (
        "unexpected argument 'c' (it takes: a, b); unexpected argument 'd' (it takes: a, b)"
    )


@pytest.mark.parametrize(
    ("schema", "value", "message"),
    [
        ({"type": "integer"}, "1", "argument 'x' is \"1\": should be integer"),
        ({"type": ["integer", "null"]}, "1", "should be integer or null"),
        ({"enum": ["a", 2]}, "b", 'should be "a" or 2'),
        ({"const": 1}, 2, "should be 1"),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "x", "should be integer or should be boolean"),
        ({"minimum": 3}, 1, "does not fit minimum: 3"),
        ({"type": "array", "items": {"type": "object", "required": ["y"]}}, [{}], "missing required argument 'x[0].y'"),
        ({"type": "string", "maxLength": 2}, "y" * 100, f"argument 'x' is \"{'y' * 59}…: does not fit maxLength: 2"),
    ],
)
def test_a_wrong_value_is_shown_with_what_was_wanted(schema: dict[str, Any], value: Any, message: str) -> None:
    assert message in problems({"type": "object", "properties": {"x": schema}}, {"x": value})


def test_at_most_five_problems_are_told() -> None:
    names = [f"p{index}" for index in range(9)]
    assert problems({"type": "object", "required": names}, {}).endswith("'p4'; and 4 more")


def test_patterns_are_no_extra_arguments() -> None:
    schema = {"type": "object", "patternProperties": {"^x_": {}}, "additionalProperties": False}
    assert problems(schema, {"x_1": 1, "y": 2}) == "unexpected argument 'y' (it takes: no arguments)"


def test_valid_arguments_come_back_as_they_are() -> None:
    arguments = {"a": 1, "b": "x", "more": [None]}
    assert SchemaArguments(OBJECT, tool="t", where="w").validate(arguments) == arguments


@pytest.mark.parametrize("value", [float("nan"), {1, 2}])
def test_what_is_no_json_is_refused(value: Any) -> None:
    assert "not valid JSON" in problems({"type": "object"}, {"x": value})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, "no valid JSON Schema"),
        ({"$ref": "https://example.org/schema.json"}, "which it does not contain"),
        ({"properties": {"x": {"$ref": "#/$defs/missing"}}}, "which it does not contain"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_a_recipe_error(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        SchemaArguments(schema, tool="t", where="w")


def test_references_within_a_schema_are_followed() -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": {"type": "object", "required": ["n"]}}}
    assert problems(schema, {"x": {}}) == "missing required argument 'x.n'"


# ---- files of careless users


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("class Odd(BaseException): ...\nraise Odd('x')", r"cannot be imported: Odd: x \(.*odd.py:2 in <module>"),
        ("class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd", "cannot be imported: Odd "),
        ("def __getattr__(name): raise ValueError('no')", "cannot be imported: ValueError: no"),
        ("@tool(deadline_s='5')\ndef f() -> int: ...", r"deadline_s is a positive number of seconds, got '5' \(.*odd.py:2 in <module>"),
        ("@tool(deadline_s=float('nan'))\ndef f() -> int: ...", "deadline_s is a positive number of seconds, got nan"),
        ("@tool(max_calls=1.5)\ndef f() -> int: ...", "max_calls is a positive number, got 1.5"),
        ("@tool(name='two words')\ndef f() -> int: ...", "name is a word without spaces, quotes and brackets, got 'two words'"),
        ("@tool(name='')\ndef f() -> int: ...", "name is a word"),
        ("class f:\n    reset = 5\n    def g(self) -> int:\n        'G.'", "f.reset is no method"),
        ("class f:\n    def g() -> int:\n        'G.'", "tool `g` is a method without self"),
        ("import abc\nclass f(abc.ABC):\n    @abc.abstractmethod\n    def g(self) -> int:\n        'G.'", "f is abstract"),
        ("f = dict", "its parameters cannot be read"),
    ],
)
def test_a_file_with_a_mistake_is_told_in_one_message(tmp_path: Path, code: str, message: str) -> None:
    head = "from postgrad.rollout import tool\n" if "@tool" in code else ""
    (tmp_path / "odd.py").write_text(head + code)
    with pytest.raises(RecipeError, match=message):
        load_tools(["odd.py:f"], tmp_path)
