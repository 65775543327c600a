"""Runs jobs concurrently in daemon threads, each with a deadline that the caller's thread enforces.

1. Jobs come in lanes under a key. Jobs of one lane run one after the other; lanes run side by side, at most `workers` at a time.
2. A job past its deadline is abandoned: its thread is left to itself, its result, if one ever comes, goes to `Job.discard`, and it no
   longer counts as a worker. The threads are daemons, so that they cannot keep the program from ending.
3. The caller asks what has finished, or waits in an interruptible call: Ctrl-C raises `KeyboardInterrupt` there at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

_K = TypeVar("_K")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Job(Generic[_T]):
    """`run` is called in a thread; an exception that it lets escape is raised in the caller. `discard` gets a result that came late;
    `commit` is called in the thread with the outcome that counts, before anybody else sees it."""

    run: Callable[[], _T]
    deadline_s: float
    discard: Callable[[_T], None] | None = None
    commit: Callable[[Returned[_T]], None] | None = None


@dataclass(frozen=True, slots=True)
class Returned(Generic[_T]):
    value: _T
    seconds: float


@dataclass(frozen=True, slots=True)
class Expired:
    """The deadline passed. `seconds` is the deadline."""

    seconds: float


class _Attempt(Generic[_K, _T]):
    """One job on one thread. `finish` and `abandon` exclude each other: exactly one of them wins."""

    def __init__(self, key: _K, lane: int, job: Job[_T], finished: SimpleQueue[_Attempt[_K, _T]]) -> None:
        self.key = key
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
            if self.job.commit is not None and isinstance(self.outcome, Returned):
                try:
                    self.job.commit(self.outcome)
                except BaseException as error:
                    self.error = error
            self._finished.put(self)
            return True

    def abandon(self) -> bool:
        """Give up on the thread; False when the job has just finished and waits in the queue."""
        with self._lock:
            already, self._settled = self._settled, True
            return not already


Outcome = Returned[_T] | Expired


@dataclass(slots=True)
class _Work(Generic[_T]):
    """The lanes of one key: what has come of each so far."""

    lanes: Sequence[Sequence[Job[_T]]]
    outcomes: list[list[Outcome[_T]]]

    @property
    def done(self) -> bool:
        return all(len(outcomes) == len(lane) for lane, outcomes in zip(self.lanes, self.outcomes, strict=True))


class Pool(Generic[_K, _T]):
    """Takes lanes of jobs under a key at any time, and gives a key back once all of its jobs have an outcome."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._works: dict[_K, _Work[_T]] = {}
        self._waiting: deque[tuple[_K, int]] = deque()
        self._running: set[_Attempt[_K, _T]] = set()
        self._settled: SimpleQueue[_Attempt[_K, _T]] = SimpleQueue()

    @property
    def busy(self) -> bool:
        """Whether a key is still to come back."""
        return bool(self._works)

    def start(self, key: _K, lanes: Sequence[Sequence[Job[_T]]]) -> None:
        """Begin as soon as workers are free. A key may be used again once it came back."""
        assert key not in self._works
        self._works[key] = _Work(lanes, [[] for _ in lanes])
        self._waiting.extend((key, lane) for lane, jobs in enumerate(lanes) if jobs)
        self._fill()

    def finished(self, *, wait: bool) -> list[tuple[_K, list[list[Outcome[_T]]]]]:
        """Keys all of whose jobs have returned or expired, with the outcomes lane by lane; waits for the first when asked to.

        Raises what a job let escape.
        """
        while True:
            for attempt in self._ended(wait=wait and not any(work.done for work in self._works.values())):
                self._running.discard(attempt)
                if attempt.error is not None:
                    raise attempt.error
                work = self._works[attempt.key]
                work.outcomes[attempt.lane].append(attempt.outcome)
                if len(work.outcomes[attempt.lane]) < len(work.lanes[attempt.lane]):
                    self._waiting.append((attempt.key, attempt.lane))
            self._fill()
            done = [key for key, work in self._works.items() if work.done]
            if done or not wait or not self.busy:
                return [(key, self._works.pop(key).outcomes) for key in done]

    def abandon(self) -> None:
        """Leave every thread to itself; nothing comes back any more."""
        for attempt in self._running:
            attempt.abandon()
        self._running.clear()
        self._waiting.clear()
        self._works.clear()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._workers:
            key, lane = self._waiting.popleft()
            work = self._works[key]
            self._running.add(_Attempt(key, lane, work.lanes[lane][len(work.outcomes[lane])], self._settled))

    def _ended(self, *, wait: bool) -> list[_Attempt[_K, _T]]:
        """Attempts that have settled or expired by now; with `wait`, at least one of those that are running."""
        ended: list[_Attempt[_K, _T]] = []
        if wait and self._running:
            patience = min(attempt.expires for attempt in self._running) - time.monotonic()
            with suppress(Empty):
                ended.append(self._settled.get(timeout=min(max(patience, 0.0), threading.TIMEOUT_MAX)))
        with suppress(Empty):
            while True:
                ended.append(self._settled.get_nowait())
        now = time.monotonic()
        return ended + [attempt for attempt in self._running if attempt.expires <= now and attempt.abandon()]


def run_lanes(lanes: Sequence[Sequence[Job[_T]]], *, workers: int) -> list[list[Outcome[_T]]]:
    """The outcome of every job, lane by lane, in order."""
    pool: Pool[None, _T] = Pool(workers)
    try:
        pool.start(None, lanes)
        [(_, outcomes)] = pool.finished(wait=True)
    finally:
        pool.abandon()
    return outcomes
