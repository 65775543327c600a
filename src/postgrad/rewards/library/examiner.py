"""The two processes of `sandbox`, started by path: the examiner runs the tests, the candidate runs the program. Standard library only.

examiner.py              reads a job on stdin, writes one JSON line {"passed": n, "total": n}, or null when the tests cannot run
examiner.py candidate    runs the program on file descriptor 3 and answers calls on file descriptor 4

Values travel as pickles that can hold nothing but plain data (None, bool, numbers, text, bytes, list, tuple, dict, set); anything else
stays with the candidate and is named by a handle, which equals nothing. Nothing that the program defines runs in the examiner.
"""

from __future__ import annotations

import builtins
import functools
import io
import json
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

HEADER = struct.Struct("<Q")
LONGEST_REPLY = 64 * 2**20
MODULES = ("collections", "datetime", "functools", "heapq", "itertools", "json", "math", "random", "re", "statistics", "string")
"""What tests use without importing it: the examiner's own, so that no program can put something else in their place."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)


class CannotPass(Exception):
    """A test hands the program something that is no plain data."""


class Lost(Exception):
    """The candidate is gone."""


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
    """The examiner's end of the pipe to the candidate."""

    def __init__(self, text: str, python: str, limits: dict[str, Any]) -> None:
        program, program_in = os.pipe()
        calls, self.calls = os.pipe()
        self.replies, replies = os.pipe()
        command = [python, "-I", "-B", __file__, "candidate", str(program), str(calls), str(replies)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(program, calls, replies))
        for fd in (program, calls, replies):
            os.close(fd)
        with os.fdopen(program_in, "wb") as stream:
            stream.write(json.dumps({"program": text, **limits}).encode())
        self.handles: dict[int, Handle] = {}
        self.asked = 0
        kind, names = self._unpack(_read(self.replies))
        if kind != "value":
            raise Lost  # it raised where it was defined
        self.names = [name for name in names if not hasattr(builtins, name) and name not in MODULES]

    def ask(self, *request: Any) -> Any:
        self.asked += 1
        data = _Packer.pack(request)
        try:
            _write(self.calls, data)
        except BrokenPipeError:
            raise Lost from None
        return self._reply()

    def _reply(self) -> Any:
        kind, value = self._unpack(_read(self.replies))
        if kind == "value":
            return value
        found = getattr(builtins, str(value), None)
        known = isinstance(found, type) and issubclass(found, Exception)
        raise (found if known else RuntimeError)(str(value))  # type: ignore[misc]

    def _unpack(self, data: bytes) -> Any:
        reader = _Unpacker(io.BytesIO(data))
        reader.program = self
        try:
            kind, value = reader.load()
        except (pickle.UnpicklingError, ValueError, TypeError, EOFError, IndexError, AttributeError, MemoryError, OverflowError) as error:
            raise Lost from error  # what the program made of its own end of the pipe
        return kind, value


class _Packer(pickle.Pickler):
    """Plain data by value, handles by number, nothing else."""

    @classmethod
    def pack(cls, value: Any) -> bytes:
        buffer = io.BytesIO()
        cls(buffer, protocol=4).dump(value)
        return buffer.getvalue()

    def persistent_id(self, value: Any) -> Any:
        if type(value) in PLAIN:
            return None
        if type(value) is Handle:
            return value._number
        raise CannotPass(type(value).__name__)


class _Unpacker(pickle.Unpickler):
    program: Program

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "complex"):
            return complex
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")

    def persistent_load(self, number: Any) -> Any:
        return self.program.handles.setdefault(int(number), Handle(self.program, int(number)))


def _write(fd: int, data: bytes) -> None:
    view = memoryview(HEADER.pack(len(data)) + data)
    while view:
        view = view[os.write(fd, view) :]


def _read(fd: int) -> bytes:
    def exactly(size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            chunk = os.read(fd, min(size - len(received), 2**20))
            if not chunk:
                raise Lost
            received += chunk
        return bytes(received)

    size = HEADER.unpack(exactly(HEADER.size))[0]
    if size > LONGEST_REPLY:
        raise Lost
    return exactly(size)


# ---- the examiner


def examine(job: dict[str, Any]) -> dict[str, int] | None:
    limits = {name: job[name] for name in ("timeout_s", "memory_mb")}
    if job["kind"] == "script":
        return _scripts(job, limits)
    if any(_compiled(test) is None for test in job["tests"]):
        return None
    failed = {"passed": 0, "total": len(job["tests"])}
    try:
        program = Program(job["program"], job["python"], limits)
    except Lost:
        return failed
    test = _statement if job["kind"] == "statements" else _suite
    try:
        results = [test(text, _namespace(program, job["entry_point"]), job["entry_point"]) for text in job["tests"]]
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


def _statement(text: str, space: dict[str, Any], entry_point: str) -> bool:
    return _passes(lambda: exec(_compiled(text), space))


def _suite(text: str, space: dict[str, Any], entry_point: str) -> bool:
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


def _scripts(job: dict[str, Any], limits: dict[str, Any]) -> dict[str, int]:
    import tempfile

    end = time.monotonic() + limits["timeout_s"]
    passed = 0
    with tempfile.NamedTemporaryFile("w", suffix=".py", dir=".", delete=False, encoding="utf-8") as file:
        file.write(job["program"])
    for given, wanted in job["tests"]:
        command = [job["python"], "-I", "-B", __file__, "script", file.name, json.dumps(limits)]
        with tempfile.TemporaryFile() as output:
            left = end - time.monotonic()
            if left <= 0:
                break
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.DEVNULL)
            try:
                process.communicate(given.encode(), timeout=left)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                break
            except BrokenPipeError:
                process.wait()
            output.seek(0)
            printed = output.read(LONGEST_REPLY).decode(errors="replace")
        passed += _lines(printed) == _lines(wanted)
    return {"passed": passed, "total": len(job["tests"])}


def _lines(text: str) -> list[list[str]]:
    """Words by line: white space at the ends of lines and empty lines at the end do not count."""
    return [line.split() for line in text.rstrip().splitlines()]


# ---- the candidate


def serve(program_fd: int, calls: int, replies: int) -> NoReturn:
    with os.fdopen(program_fd, "rb") as stream:
        job = json.loads(stream.read())
    _limit(job)
    for fd in (calls, replies):
        os.set_inheritable(fd, False)
    objects: list[Any] = []
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.stdin = io.StringIO("")

    def answer(act: Callable[[], Any]) -> None:
        try:
            reply = ("value", _held(act(), objects))
        except SystemExit:
            os._exit(0)
        except BaseException as error:
            reply = ("raised", next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"))
        _write(replies, _Keeper.pack_with(reply, objects))

    def define() -> list[str]:
        exec(compile(job["program"], "<program>", "exec"), module.__dict__)
        return _public(module)

    answer(define)
    while True:
        answer(functools.partial(_act, _Finder.unpack_with(_read(calls), objects), module))


def _public(module: types.ModuleType) -> list[str]:
    """What the program itself defines and can be called."""
    return [name for name, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == "__main__"]


def _act(request: Any, module: types.ModuleType) -> Any:
    kind, subject, *rest = request
    if kind == "name":
        return getattr(module, subject)(*rest[0], **rest[1])
    if kind == "iter":
        return iter(subject)
    if kind == "next":
        return next(([item] for item in subject), [])
    return getattr(subject, rest[0]) if kind == "get" else subject(*rest[0], **rest[1])


def _held(value: Any, objects: list[Any]) -> Any:
    """Subclasses of plain types as the plain type (Counter → dict, a named tuple → tuple); what is no data is held and named."""
    if value is None:
        return None
    scalars: tuple[Any, ...] = (bool, int, float, complex, str, bytes)
    for kind in scalars:
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if isinstance(value, dict):
        return {_held(key, objects): _held(item, objects) for key, item in value.items()}
    for group in (list, tuple, set, frozenset):
        if isinstance(value, group):
            return group(_held(item, objects) for item in value)
    return _Kept(value, objects)


class _Kept:
    """Marks an object that stays here."""

    def __init__(self, value: Any, objects: list[Any]) -> None:
        objects.append(value)
        self.number = len(objects) - 1


class _Keeper(pickle.Pickler):
    @classmethod
    def pack_with(cls, value: Any, objects: list[Any]) -> bytes:
        buffer = io.BytesIO()
        cls(buffer, protocol=4).dump(value)
        return buffer.getvalue()

    def persistent_id(self, value: Any) -> Any:
        return value.number if type(value) is _Kept else None


class _Finder(pickle.Unpickler):
    objects: list[Any]

    @classmethod
    def unpack_with(cls, data: bytes, objects: list[Any]) -> Any:
        reader = cls(io.BytesIO(data))
        reader.objects = objects
        return reader.load()

    def persistent_load(self, number: Any) -> Any:
        return self.objects[number]


# ---- limits


def _limit(job: dict[str, Any]) -> None:
    seconds, memory = int(job["timeout_s"]) + 1, int(job["memory_mb"]) * 2**20
    for name, value in (("CPU", seconds), ("AS", memory), ("FSIZE", 2**24), ("NPROC", 0), ("CORE", 0)):
        _set_limit(getattr(resource, f"RLIMIT_{name}"), value)


def _set_limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _die_with_parent(*, private: bool) -> None:
    """The process dies when its parent does; `private`: and no other process of the user may read its memory. Linux only."""
    import ctypes

    try:
        library = ctypes.CDLL(None)
        library.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if private:
            library.prctl(4, 0)  # PR_SET_DUMPABLE
    except (OSError, AttributeError):
        return


def main(arguments: list[str]) -> None:
    _die_with_parent(private=not arguments)
    if arguments[:1] == ["candidate"]:
        serve(*map(int, arguments[1:]))
    elif arguments[:1] == ["script"]:
        _limit(json.loads(arguments[2]))
        with open(arguments[1], encoding="utf-8") as file:
            text = file.read()
        exec(compile(text, "<program>", "exec"), {"__name__": "__main__"})
    else:
        output = os.dup(1)
        os.dup2(2, 1)  # whatever a test prints is no verdict
        job = json.loads(sys.stdin.buffer.read())
        verdict = examine(job)
        os.write(output, json.dumps(verdict).encode() + b"\n")
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
