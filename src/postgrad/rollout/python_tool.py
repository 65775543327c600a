"""The shipped tools `python` and `python_session`: code that the model wrote, in the sandbox.

`python` starts a new interpreter for every call. `python_session` keeps one for the rollout, with its variables; it is closed with the
rollout. Both are called `python` by the model. What it reads: what the code printed, then the value of its last expression; or both and the
traceback, as an error.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace

from postgrad.protocols import InfrastructureError
from postgrad.rollout.deadline import seconds_left
from postgrad.rollout.declare import tool
from postgrad.rollout.environments import Environment, environment_tools
from postgrad.rollout.failures import ToolError
from postgrad.rollout.functions import Made, function_tool
from postgrad.rollout.results import ErrorKind
from postgrad.sandbox import Isolation, Limits, SandboxError
from postgrad.sandbox.interpreter import Cell, Ended, Interpreter, TooSlow

MEMORY_MB = 1024
CPU_S = 600.0
"""Processor seconds of one interpreter in all; what bounds one call is its deadline."""
_AT_A_TIME = threading.Semaphore(2 * (os.cpu_count() or 1))
"""More interpreters than that at work at once would only wait for one another within their deadlines."""


def stateless(isolation: Isolation) -> Made:
    """The tool `python`: nothing is kept from call to call."""

    @tool(idempotent=True)
    def python(code: str) -> str:
        """Run Python code in a sandbox without network. Returns what it prints and the value of its last expression. Every call starts
        afresh: define what you need in the code.

        Args:
            code: the Python code
        """
        seconds = seconds_left()
        interpreter = _started(isolation)
        try:
            return _run(interpreter, code, seconds)
        finally:
            interpreter.close()

    return Made((replace(function_tool(python, where="python"), gate=_AT_A_TIME),))


def session(isolation: Isolation) -> Made:
    """The tool `python` of an interpreter that lives as long as the rollout."""

    class PythonSession:
        def __init__(self) -> None:
            self._interpreter: Interpreter | None = None
            self._lost = False

        def python(self, code: str) -> str:
            """Run Python code in a sandbox without network. Returns what it prints and the value of its last expression. Variables,
            functions, imports and files are there again in the next call.

            Args:
                code: the Python code
            """
            note = "(the interpreter was started anew: variables and files of earlier calls are gone)\n" if self._lost else ""
            seconds = seconds_left()
            if self._interpreter is None:
                self._interpreter = _started(isolation)
            self._lost = False
            try:
                return note + _run(self._interpreter, code, seconds)
            except ToolError as error:
                if error.kind in (ErrorKind.DEADLINE, ErrorKind.CRASHED):
                    self.close()
                    self._lost = True
                raise ToolError(note + str(error), kind=error.kind) from error

        def close(self) -> None:
            if self._interpreter is not None:
                self._interpreter.close()
                self._interpreter = None

    tools = environment_tools(PythonSession, 0, where="python_session")
    return Made(tuple(replace(item, gate=_AT_A_TIME) for item in tools), (Environment(PythonSession, "python_session"),))


def _started(isolation: Isolation) -> Interpreter:
    """Starting takes nothing from the deadline of the code: it is not the model's."""
    try:
        return Interpreter(isolation=isolation, limits=Limits(cpu_s=CPU_S, memory_mb=MEMORY_MB))
    except SandboxError as error:
        raise InfrastructureError(str(error)) from error


def _run(interpreter: Interpreter, code: str, seconds: float) -> str:
    try:
        cell = interpreter.run(code, deadline_s=seconds)
    except TooSlow as error:
        raise ToolError(_said(error.printed, f"no result within {seconds:.3g} s"), kind=ErrorKind.DEADLINE) from error
    except Ended as error:
        raise ToolError(_said(error.printed, f"the interpreter ended with exit code {error.code}"), kind=ErrorKind.CRASHED) from error
    if cell.error is not None:
        memory = cell.error.rpartition("\n")[2].startswith("MemoryError")
        raise ToolError(_said(cell.printed, cell.error), kind=ErrorKind.MEMORY if memory else ErrorKind.RAISED)
    return _shown(cell)


def _shown(cell: Cell) -> str:
    return _said(cell.printed, cell.value or "") or "(no output)"


def _said(printed: str, rest: str) -> str:
    return "\n".join(part for part in (printed.removesuffix("\n"), rest) if part)
