"""The trainer's side of the process in which reward functions run: start it, ask it, replace it.

One process serves a whole run. It is replaced when a call does not answer in time, when it dies (segfault, `os._exit`, killed for
memory) or when a function ran out of memory; the functions are loaded again from the text they were first loaded from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from postgrad.errors import RunError
from postgrad.rewards.child import FunctionSource, Mode, Outcome
from postgrad.worker.parent import Worker, WorkerDied

__all__ = ["RewardWorker", "WorkerDied"]

LOAD_DEADLINE_S = 120.0


class RewardWorker:
    """One killable process that holds the functions of `sources`.

    memory_gb: how much a call may allocate beyond what is loaded; None = no limit.
    """

    def __init__(self, sources: Sequence[FunctionSource], *, memory_gb: float | None = 4.0) -> None:
        self._sources = list(sources)
        self._memory = None if memory_gb is None else int(memory_gb * 2**30)
        self._rows: list[bytes] = []
        self._worker = Worker("postgrad.rewards.child")

    @property
    def starts(self) -> int:
        """Processes started so far."""
        return self._worker.starts

    def describe(self) -> list[dict[str, Any]]:
        """What each function is, in order; the last entry is {"problem": …} when one could not be loaded."""
        self._worker.start()
        described: list[dict[str, Any]] = self._worker.ask(("load", self._sources, self._memory), LOAD_DEADLINE_S)
        return described

    def set_rows(self, rows: Sequence[bytes]) -> None:
        """The batch that later calls refer to by index."""
        self._rows = list(rows)
        if self._worker.alive:
            with contextlib.suppress(WorkerDied):  # it died while idle; the next call starts another one, which gets the rows
                self._worker.ask(("rows", self._rows), LOAD_DEADLINE_S)

    def call(self, function: int, rows: Sequence[int], *, mode: Mode, deadline_s: float, wall_s: float) -> list[Outcome]:
        """One outcome per row. Raises `WorkerDied` after killing the process when no reply comes within `wall_s` seconds."""
        if not self._worker.alive:
            self._restart()
        try:
            outcomes: list[Outcome] = self._worker.ask(("call", function, list(rows), mode, deadline_s), wall_s)
        except WorkerDied as error:
            if error.kind == "timeout":
                raise WorkerDied("timeout", f"took longer than its deadline of {deadline_s:g} s") from None
            raise
        if any(outcome[0] == "failed" and outcome[1] == "memory" for outcome in outcomes):
            self._worker.kill()
        return outcomes

    def close(self) -> None:
        """Kill the process; it holds nothing worth keeping."""
        self._worker.kill()

    def _restart(self) -> None:
        try:
            descriptions = self.describe()
        except WorkerDied as error:
            raise RunError(f"the rewards cannot be loaded a second time: {error}") from None
        if problem := descriptions[-1].get("problem"):
            raise RunError(f"the rewards cannot be loaded a second time: {problem['message']}", where=problem["where"])
        if self._rows:
            self._worker.ask(("rows", self._rows), LOAD_DEADLINE_S)
