"""Runs jobs concurrently in daemon threads, each with a deadline that the caller's thread enforces.

1. Jobs of one lane run one after the other; lanes run side by side, at most `workers` at a time.
2. A job past its deadline is abandoned: its thread is left to itself, its result, if one ever comes, goes to `Job.discard`, and it no
   longer counts as a worker. The threads are daemons, so that they cannot keep the program from ending.
3. The caller waits in an interruptible call: Ctrl-C raises `KeyboardInterrupt` there at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Job(Generic[_T]):
    """`run` is called in a thread; an exception that it lets escape is raised in the caller. `discard` gets a result that came late."""

    run: Callable[[], _T]
    deadline_s: float
    discard: Callable[[_T], None] | None = None


@dataclass(frozen=True, slots=True)
class Returned(Generic[_T]):
    value: _T
    seconds: float


@dataclass(frozen=True, slots=True)
class Expired:
    """The deadline passed. `seconds` is the deadline."""

    seconds: float


class _Attempt(Generic[_T]):
    """One job on one thread. `finish` and `abandon` exclude each other: exactly one of them wins."""

    def __init__(self, lane: int, job: Job[_T], finished: SimpleQueue[_Attempt[_T]]) -> None:
        self.lane = lane
        self.job = job
        self.outcome: Returned[_T] | Expired = Expired(job.deadline_s)
        self.error: BaseException | None = None
        self._finished = finished
        self._lock = threading.Lock()
        self._settled = False
        self._started = time.monotonic()
        self.expires = self._started + job.deadline_s
        threading.Thread(target=self._run, name="postgrad-job", daemon=True).start()

    def _run(self) -> None:
        try:
            value = self.job.run()
        except BaseException as error:
            self.error = error
            self._settle()
            return
        seconds = time.monotonic() - self._started
        if seconds <= self.job.deadline_s:
            self.outcome = Returned(value, seconds)
        late = not self._settle() or isinstance(self.outcome, Expired)
        if late and self.job.discard is not None:
            self.job.discard(value)

    def _settle(self) -> bool:
        """Hand the attempt to the caller; False when it has been abandoned."""
        with self._lock:
            if self._settled:
                return False
            self._settled = True
            self._finished.put(self)
            return True

    def abandon(self) -> bool:
        """Give up on the thread; False when the job has just finished and waits in the queue."""
        with self._lock:
            already, self._settled = self._settled, True
            return not already


def run_lanes(lanes: Sequence[Sequence[Job[_T]]], *, workers: int) -> list[list[Returned[_T] | Expired]]:
    """The outcome of every job, lane by lane, in order."""
    outcomes: list[list[Returned[_T] | Expired]] = [[] for _ in lanes]
    finished: SimpleQueue[_Attempt[_T]] = SimpleQueue()
    running: dict[int, _Attempt[_T]] = {}
    waiting = deque(index for index, lane in enumerate(lanes) if lane)
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                lane = waiting.popleft()
                running[lane] = _Attempt(lane, lanes[lane][len(outcomes[lane])], finished)
            for attempt in _settled(running, finished):
                del running[attempt.lane]
                if attempt.error is not None:
                    raise attempt.error
                outcomes[attempt.lane].append(attempt.outcome)
                if len(outcomes[attempt.lane]) < len(lanes[attempt.lane]):
                    waiting.append(attempt.lane)
    finally:
        for attempt in running.values():
            attempt.abandon()
    return outcomes


def _settled(running: dict[int, _Attempt[_T]], finished: SimpleQueue[_Attempt[_T]]) -> list[_Attempt[_T]]:
    """Wait for the next job to finish or the next deadline to pass."""
    patience = min(attempt.expires for attempt in running.values()) - time.monotonic()
    try:
        return [finished.get(timeout=max(patience, 0.0))]
    except Empty:
        now = time.monotonic()
        return [attempt for attempt in running.values() if attempt.expires <= now and attempt.abandon()]
