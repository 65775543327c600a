"""The loop that every method shares: step, log, evaluate, checkpoint, stop cleanly, resume exactly.

A method is an object with a `step` and a `state`; the loop knows nothing else of it. Everything random in a step is keyed by
(seed, step), so a resumed run needs no generator state: it is bit-equal to one that was never stopped.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from postgrad.errors import Interrupted, RunError
from postgrad.formulas import NonFiniteError
from postgrad.train import checkpoint
from postgrad.train.files import fault, write_json
from postgrad.train.recipe import Base
from postgrad.train.run_directory import RunDirectory


class Trained(Protocol):
    """Weights and moments that a checkpoint stores and restores."""

    def save_state(self, folder: Path) -> None: ...
    def load_state(self, folder: Path) -> None: ...


class Method(Protocol):
    """What the loop needs of a training method."""

    @property
    def engine(self) -> Trained: ...

    total_steps: int
    headline: tuple[str, ...]
    """Names of the 4–6 metrics that a person watches."""

    def step(self, step: int) -> dict[str, float]:
        """Optimizer step number `step` (1-based); returns its metrics."""
        ...

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics on the evaluation set after `step` steps, names starting with `eval/`; empty when there is none."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON of everything beside the engine that the next step depends on (position in the data, rollout buffer)."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def export(self, folder: Path) -> None:
        """Write the finished model; a method that trains none writes its result beside that folder."""
        ...


class Reporter(Protocol):
    """Who is told how the run goes. `train` prints nothing itself."""

    def started(self, *, name: str, total_steps: int, first_step: int, headline: Sequence[str], notes: Sequence[str]) -> None: ...
    def stepped(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def evaluated(self, metrics: Mapping[str, float]) -> None: ...
    def working(self, what: str, count: int) -> None: ...
    def note(self, text: str) -> None: ...
    def finished(self, *, folder: Path) -> None: ...


class SilentReporter:
    """Reports to nobody; for tests and for use as a library."""

    def started(self, *, name: str, total_steps: int, first_step: int, headline: Sequence[str], notes: Sequence[str]) -> None: ...
    def stepped(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def evaluated(self, metrics: Mapping[str, float]) -> None: ...
    def working(self, what: str, count: int) -> None: ...
    def note(self, text: str) -> None: ...
    def finished(self, *, folder: Path) -> None: ...


@dataclass
class StopRequest:
    """Set by the first SIGINT or SIGTERM; the second one ends the process at once."""

    signal: int | None = None


@contextmanager
def graceful_signals() -> Iterator[StopRequest]:
    """Turn the first SIGINT/SIGTERM into a request to stop after the step. Does nothing outside the main thread."""
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request.signal is not None:
            os._exit(128 + number)
        request.signal = number

    try:
        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:
        yield request
        return
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Timer:
    """Seconds spent per named part of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        taken = {f"time/{name}_s": value for name, value in self.seconds.items()}
        self.seconds.clear()
        return taken


def fit(method: Method, run: RunDirectory, recipe: Base, reporter: Reporter, *, name: str, notes: Sequence[str]) -> Path:
    """Train from the newest checkpoint (or from the start) to the end; returns `run.result`, the folder of the finished model.

    Raises `Interrupted` after SIGINT/SIGTERM (the step was finished and saved) and `RunError` for a fault inside the run.
    """
    first = _resume(method, run, reporter)
    reporter.started(name=name, total_steps=method.total_steps, first_step=first, headline=method.headline, notes=notes)
    with graceful_signals() as stop:
        if first == 0:
            metrics = method.evaluate(0)
            run.log(0, metrics)
            reporter.evaluated(metrics)
            _stop_if_asked(stop, 0, run)
        for step in range(first + 1, method.total_steps + 1):
            metrics = _one_step(method, step, run, evaluation_every=recipe.evaluation_every)
            reporter.stepped(step, metrics)
            last = step == method.total_steps
            if last or stop.signal is not None or step % recipe.checkpoint.every == 0:
                _save(method, run, step, keep=recipe.checkpoint.keep)
            if not last:
                _stop_if_asked(stop, step, run)
    fault("run:before_export")
    method.export(run.model)
    run.finish({"steps": method.total_steps, "metrics": _last_metrics(run)})
    reporter.finished(folder=run.result)
    return run.result


def _one_step(method: Method, step: int, run: RunDirectory, *, evaluation_every: int | None) -> dict[str, float]:
    start = time.perf_counter()
    try:
        metrics = method.step(step)
    except (RunError, NonFiniteError) as error:
        raise _stopped(step, error, run) from error
    metrics["time/step_s"] = time.perf_counter() - start
    fault(f"step:{step}")
    if step == method.total_steps or (evaluation_every and step % evaluation_every == 0):
        metrics |= method.evaluate(step)
    run.log(step, metrics)
    return metrics


def _stopped(step: int, error: RunError | NonFiniteError, run: RunDirectory) -> RunError:
    """The fault as the user sees it: which step, and what is safe. Neither error lets the optimizer step happen."""
    run.event("stopped", step=step, reason=str(error))
    good = checkpoint.newest(run.checkpoints).folder
    safe = f"the last good checkpoint is {good.name if good else 'none'}"
    if isinstance(error, RunError):
        return RunError(f"step {step}: {error.what}", where=error.where, hint=f"{error.hint}; {safe}" if error.hint else safe)
    return RunError(f"step {step}: {error}", hint=safe)


def _save(method: Method, run: RunDirectory, step: int, *, keep: int) -> None:
    def write(folder: Path) -> None:
        method.engine.save_state(folder)
        write_json(folder / "trainer.json", {"step": step, "state": method.state()})

    checkpoint.save(run.checkpoints, step, write, keep=keep)
    run.forget_journals(until=checkpoint.oldest_step(run.checkpoints))
    run.event("checkpoint", step=step)


def _resume(method: Method, run: RunDirectory, reporter: Reporter) -> int:
    """Load the newest checkpoint that verifies; returns its step, 0 when there is none yet."""
    found = checkpoint.require_newest(run.checkpoints)
    for reason in found.skipped:
        reporter.note(f"skipped a checkpoint that does not verify: {reason}")
        run.event("checkpoint_skipped", reason=reason)
    if found.folder is not None:
        method.engine.load_state(found.folder)
        record = json.loads((found.folder / "trainer.json").read_text(encoding="utf-8"))
        method.load_state(record["state"])
        reporter.note(f"resuming after step {found.step}")
        run.event("resumed", step=found.step)
    run.forget_after(found.step if found.folder else -1)
    return found.step


def _stop_if_asked(stop: StopRequest, step: int, run: RunDirectory) -> None:
    if stop.signal is not None:
        run.event("interrupted", step=step, signal=stop.signal)
        raise Interrupted(f"stopped after step {step}; everything is saved", signal=stop.signal, hint=f"postgrad resume {run.path}")


def _last_metrics(run: RunDirectory) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for record in run.metrics():
        merged |= record
    return merged
