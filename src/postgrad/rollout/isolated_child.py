"""The process in which a tool with `isolate:` runs. Started by `isolated.IsolatedTool`; imports no torch of its own.

    ("load", spec, base, memory_bytes, processes)   import the function; reply {"tool": …} or {"problem": …}
    ("call", arguments, seconds, key)               reply ["ok", text] or ["error", kind, text, transient]

The arguments are validated here, where their types are. A call is bounded by its owner, who kills this process at the deadline.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from postgrad.errors import RecipeError
from postgrad.protocols import InfrastructureError
from postgrad.rollout.deadline import DeadlineError, deadline
from postgrad.rollout.declare import Tool, call
from postgrad.rollout.failures import ToolError
from postgrad.rollout.functions import function_from_name
from postgrad.rollout.journal import CallPlace, calling
from postgrad.rollout.results import ErrorKind, OutputError, exception_text, message_of, result_text
from postgrad.rollout.signature import ArgumentError
from postgrad.worker.child import serve
from postgrad.worker.limits import limit_cpu, limit_memory
from postgrad.worker.processes import forbid_processes

LONGEST_RESULT = 16 * 2**20
"""Characters. A longer result is an error."""
OUT_OF_MEMORY = "ran out of the memory that it may take"


def main(read_fd: int, write_fd: int) -> None:
    serve(read_fd, write_fd, _Requests().answer)


class _Requests:
    """Answers the requests above."""

    def __init__(self) -> None:
        self._tool: Tool | None = None

    def answer(self, request: Any) -> Any:
        if request[0] == "load":
            _, spec, base, memory_bytes, processes = request
            confined = processes or forbid_processes()  # before the file runs: importing it is its first chance
            try:
                self._tool = function_from_name(spec, Path(base))
            except RecipeError as error:
                return {"problem": [error.what, error.where, error.hint]}
            limit_memory(memory_bytes)
            return {"tool": _described(self._tool), "confined": confined}
        _, arguments, seconds, key = request
        assert self._tool is not None
        limit_cpu(seconds)
        with nullcontext() if key is None else calling(CallPlace(*map(int, key.split(".")))):
            return _answer(self._tool, arguments, seconds)


def _described(tool: Tool) -> dict[str, Any]:
    options = {name: getattr(tool.options, name) for name in tool.options.__slots__}
    return {
        "name": tool.spec.name,
        "description": tool.spec.description,
        "parameters": dict(tool.spec.parameters),
        "options": options,
    }


def _answer(tool: Tool, arguments: dict[str, Any], seconds: float) -> list[Any]:
    try:
        with deadline(seconds):
            text = result_text(call(tool.function, tool.signature.validate(arguments), deadline_s=seconds), max_chars=LONGEST_RESULT + 1)
    except ArgumentError as error:
        return ["error", ErrorKind.ARGUMENTS, str(error), False]
    except OutputError as error:
        return ["error", ErrorKind.OUTPUT, str(error), False]
    except ToolError as error:
        return ["error", error.kind, message_of(error), error.transient]
    except DeadlineError:
        return ["error", ErrorKind.DEADLINE, "", False]
    except InfrastructureError as error:
        return ["error", ErrorKind.INFRASTRUCTURE, message_of(error), True]
    except MemoryError:
        return ["error", ErrorKind.MEMORY, OUT_OF_MEMORY, False]
    except BaseException as error:  # the tool's, `SystemExit` included
        return ["error", ErrorKind.RAISED, exception_text(error), True]
    if len(text) > LONGEST_RESULT:
        return ["error", ErrorKind.OUTPUT, f"returned more than {LONGEST_RESULT} characters", False]
    return ["ok", text]
