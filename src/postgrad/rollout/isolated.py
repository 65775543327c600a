"""A function that runs in worker processes, each of which is killed when a call passes its deadline and replaced for the next.

1. The function's file is imported in the worker only, never in the trainer.
2. A worker answers one call at a time; as many workers as the tool's gate lets calls through, each started when it is first needed.
3. Nobody is told of a worker's death but the call that it died in: `DEADLINE`, `CRASHED` or `MEMORY`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import LifoQueue
from typing import Any

from postgrad.errors import RecipeError
from postgrad.protocols import InfrastructureError
from postgrad.rollout.deadline import DeadlineError, seconds_left
from postgrad.rollout.declare import Tool, ToolOptions
from postgrad.rollout.failures import ToolError
from postgrad.rollout.journal import call_key
from postgrad.rollout.results import ErrorKind
from postgrad.rollout.secrets import Secrets, read_variables
from postgrad.rollout.signature import ArgumentError
from postgrad.types import ToolSpec
from postgrad.worker.parent import Worker, WorkerDied

log = logging.getLogger(__name__)
LOAD_DEADLINE_S = 60.0
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """memory_bytes: what the worker may allocate beyond what is loaded. processes: whether it may start processes.
    environment: the variables it gets by name, besides a few that every program needs."""

    memory_bytes: int
    processes: bool = False
    environment: tuple[str, ...] = ()


class IsolatedTool:
    """Calls `spec` (`file.py:function`, relative to `base`) in at most `workers` processes.

    Raises `RecipeError` when the function cannot be loaded there.
    """

    def __init__(self, spec: str, base: Path, confinement: Confinement, *, workers: int) -> None:
        self._spec = spec
        self._request = ("load", spec, str(base.resolve()), confinement.memory_bytes, confinement.processes)
        variables = read_variables(confinement.environment, key="isolate.env")
        self._secrets = Secrets(variables.values())
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ} | variables
        self._workers = [Worker("postgrad.rollout.isolated_child", environment=environment) for _ in range(workers)]
        self._free: LifoQueue[Worker] = LifoQueue()  # the one used last is the one that runs
        for worker in reversed(self._workers):
            self._free.put(worker)
        self._loaded = self._load(self._workers[0])
        if not self._loaded["confined"]:
            log.warning("%s: this system cannot keep a worker from starting processes", spec)

    def tool(self) -> Tool:
        """The function as a tool: what the model is told comes from the worker, and so does what `@tool` set."""
        told = self._loaded["tool"]
        spec = ToolSpec(told["name"], told["description"], told["parameters"])
        return Tool(spec, _CheckedThere(), self, ToolOptions(**told["options"]))

    def __call__(self, **arguments: Any) -> str:
        worker = self._free.get()
        try:
            return self._call(worker, arguments)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """Kill every worker."""
        for worker in self._workers:
            worker.kill()

    def _call(self, worker: Worker, arguments: Mapping[str, Any]) -> str:
        seconds = seconds_left()
        if not worker.alive:
            self._start_again(worker)  # the time that this takes is not the call's
        try:
            reply = worker.ask(("call", dict(arguments), seconds, _key()), seconds)
        except WorkerDied as died:
            if died.kind == "timeout":
                raise DeadlineError from died
            raise ToolError(str(died), kind=ErrorKind.CRASHED, transient=True) from died
        if reply[0] == "ok":
            return self._secrets.hide(str(reply[1]))
        _, kind, text, transient = reply
        if kind == ErrorKind.MEMORY:
            worker.kill()
        raise _failure(ErrorKind(kind), self._secrets.hide(text), transient=transient)

    def _start_again(self, worker: Worker) -> None:
        """What went well when the run began is not the model's fault now."""
        try:
            self._load(worker)
        except RecipeError as error:
            raise InfrastructureError(f"{self._spec} cannot be loaded a second time: {error.what}") from error

    def _load(self, worker: Worker) -> dict[str, Any]:
        try:
            worker.start()
            reply: dict[str, Any] = worker.ask(self._request, LOAD_DEADLINE_S)
        except WorkerDied as died:
            hint = "importing the file must end by itself, and may start no process unless isolate.processes is true"
            raise RecipeError(f"cannot be imported: {died}", where=self._spec, key="use", hint=hint) from died
        if "problem" in reply:
            what, where, hint = reply["problem"]
            worker.kill()
            raise RecipeError(what, where=where, key="use", hint=hint)
        return reply


class _CheckedThere:
    """Arguments that the worker validates."""

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return dict(arguments)


def _failure(kind: ErrorKind, text: str, *, transient: bool) -> Exception:
    if kind is ErrorKind.ARGUMENTS:
        return ArgumentError(text)
    if kind is ErrorKind.DEADLINE:
        return DeadlineError()
    if kind is ErrorKind.INFRASTRUCTURE:
        return InfrastructureError(text)
    return ToolError(text, kind=kind, transient=transient)


def _key() -> str | None:
    """`call_key()` as it is here; None outside of a rollout."""
    try:
        return call_key()
    except RuntimeError:
        return None
