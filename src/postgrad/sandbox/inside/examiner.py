"""Runs the tests and holds the verdict, in a sandbox of its own: nothing that the program does can reach it but plain data.

What the program returns and is no plain data is named by a handle, which equals only itself. Nothing that the program defines runs here.
"""

from __future__ import annotations

import builtins
import json
import os
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from .wire import Lost, pack, receive, send, unpack

MODULES = ("collections", "datetime", "functools", "heapq", "itertools", "json", "math", "random", "re", "statistics", "string")
"""What tests use without importing it: the examiner's own, so that no program can put something else in their place."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)


class CannotPass(Exception):
    """A test hands the program something that is no plain data."""


class Handle:
    """An object that stayed with the candidate. It can be called, and its methods can; it equals only itself."""

    def __init__(self, program: Program, number: int) -> None:
        self._program, self._number = program, number

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._program.ask("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.ask("get", self, name)

    def __iter__(self) -> Iterator[Any]:
        """One item at a time, as the program makes them. `in` compares these, so the program's own idea of equality is never asked."""
        source = self._program.ask("iter", self)
        while item := self._program.ask("next", source):
            yield item[0]


class Program:
    """The examiner's end of the pipes to the candidate."""

    def __init__(self, *, calls: int, replies: int) -> None:
        self._calls, self._replies = calls, replies
        self._handles: dict[int, Handle] = {}
        self.asked = 0
        kind, names = self._receive()
        if kind != "value":
            raise Lost  # it raised where it was defined
        self.names = [name for name in names if not hasattr(builtins, name) and name not in MODULES]

    def ask(self, *request: Any) -> Any:
        self.asked += 1
        data = pack(request, _number_of)
        try:
            send(self._calls, data)
        except BrokenPipeError:
            raise Lost from None
        kind, value = self._receive()
        if kind == "value":
            return value
        found = getattr(builtins, str(value), None)
        known = isinstance(found, type) and issubclass(found, Exception)
        raise (found if known else RuntimeError)(str(value))  # type: ignore[misc]

    def _receive(self) -> tuple[Any, Any]:
        message = unpack(receive(self._replies), self._handle)
        if type(message) is not tuple or len(message) != 2:
            raise Lost
        return message

    def _handle(self, number: int) -> Handle:
        return self._handles.setdefault(number, Handle(self, number))


def _number_of(item: Any) -> int | None:
    if type(item) in PLAIN:
        return None
    if type(item) is Handle:
        return item._number
    raise CannotPass(type(item).__name__)


def judge(job: dict[str, Any]) -> NoReturn:
    """Writes one JSON line on the descriptor `verdict`: {"passed": n, "total": n}, or null when the tests cannot run."""
    verdict = json.dumps(examine(job)).encode() + b"\n"
    os.write(job["verdict"], verdict)
    os._exit(0)


def examine(job: dict[str, Any]) -> dict[str, int] | None:
    if any(_compiled(test) is None for test in job["tests"]):
        return None
    failed = {"passed": 0, "total": len(job["tests"])}
    try:
        program = Program(calls=job["calls"], replies=job["replies"])
    except Lost:
        return failed
    test = _statement if job["kind"] == "statements" else _suite
    try:
        results = [test(text, _namespace(program, job["entry_point"])) for text in job["tests"]]
    except CannotPass:
        return None
    return {"passed": sum(results), "total": len(results)} if program.asked else _never_asked(failed, results)


def _never_asked(failed: dict[str, int], results: list[bool]) -> dict[str, int] | None:
    """Tests that pass without asking the program say nothing; those that fail (its function is not there) do."""
    return None if all(results) else failed


def _compiled(text: str) -> Any:
    try:
        return compile(text, "<test>", "exec")
    except (SyntaxError, ValueError):
        return None


def _namespace(program: Program, entry_point: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "tests", **{name: __import__(name) for name in MODULES}}
    for name in program.names:
        space[name] = _Function(program, name)
    if entry_point in space:
        space["candidate"] = space[entry_point]
    return space


class _Function:
    """A function or class of the program, asked by its name."""

    def __init__(self, program: Program, name: str) -> None:
        self._program, self.__name__ = program, name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._program.ask("name", self.__name__, arguments, named)


def _statement(text: str, space: dict[str, Any]) -> bool:
    return _passes(lambda: exec(_compiled(text), space))


def _suite(text: str, space: dict[str, Any]) -> bool:
    """The text itself, then its check(candidate), its unittest classes and its test functions; a skipped test fails."""
    import unittest

    module = types.ModuleType("tests")
    module.__dict__.update(space)
    if not _passes(lambda: exec(_compiled(text), module.__dict__)):
        return False
    own = {name: value for name, value in vars(module).items() if value is not space.get(name)}
    if isinstance(check := own.get("check"), types.FunctionType):
        return "candidate" in space and _passes(lambda: check(space["candidate"]))
    cases = [value for value in own.values() if isinstance(value, type) and issubclass(value, unittest.TestCase)]
    return all(map(_unittest, cases)) and all(
        _passes(value) for name, value in own.items() if name.startswith("test") and isinstance(value, types.FunctionType)
    )


def _unittest(case: Any) -> bool:
    import unittest

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result.testsRun > 0 and result.wasSuccessful() and not result.skipped and not result.expectedFailures


def _passes(call: Callable[[], Any]) -> bool:
    try:
        call()
    except CannotPass:
        raise
    except BaseException:
        return False
    return True
