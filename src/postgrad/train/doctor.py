"""The reward doctor in a run: it watches while the run goes on, and writes doctor.json at its end.

It never stops a run. A fault inside a check is a fault of postgrad, not of the run: it becomes an event with its traceback and one note,
and training goes on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from postgrad.rewards.advice import Declared
from postgrad.rewards.doctor import Monitor, RewardInfo, examine, observe
from postgrad.rewards.doctor.lines import Tail
from postgrad.rewards.doctor.render import as_json, line_of, summary
from postgrad.rewards.score import RewardFailure
from postgrad.train.files import write_json
from postgrad.train.loop import Reporter
from postgrad.train.recipe import Recipe, RLRecipe, SFTRecipe
from postgrad.train.run_directory import RunDirectory


@dataclass
class RewardWatch:
    """Looks at each batch as it is recorded; what lasts is noted once, and kept as an event."""

    directory: RunDirectory
    reporter: Reporter
    monitor: Monitor
    rewards: Sequence[Declared]
    metrics: Tail
    declared: bool = field(default=False, init=False)
    failed: bool = field(default=False, init=False)

    @classmethod
    def of(cls, recipe: RLRecipe, rewards: Sequence[Declared], directory: RunDirectory, reporter: Reporter) -> RewardWatch:
        known = [RewardInfo(reward.name, reward.weight, reward.role, reward.range) for reward in rewards]
        monitor = Monitor(known, method=recipe.method, recipe=recipe.model_dump(mode="json"))
        return cls(directory, reporter, monitor, rewards, Tail(directory.path / "metrics.jsonl"))

    def __call__(self, step: int, records: Sequence[Mapping[str, Any]], failures: Sequence[RewardFailure]) -> None:
        if not self.declared:
            self._declare(step)
        if not self.failed:
            self.failed = not guarded(self.directory, self.reporter, lambda: self._see(step, records, failures))

    def _declare(self, step: int) -> None:
        """What the rewards are, for whoever reads the run later: the recipe alone does not say which one is the task."""
        self.declared = True
        entries = [{"name": r.name, "weight": r.weight, "role": r.role, "range": r.range} for r in self.rewards]
        self.directory.event("rewards", step=step, rewards=entries)

    def _see(self, step: int, records: Sequence[Mapping[str, Any]], failures: Sequence[RewardFailure]) -> None:
        events = [{"event": "reward_failure", "step": step, **asdict(failure)} for failure in failures]
        for finding in self.monitor.see(records, metrics=self.metrics.new(), failures=events):
            if finding.id == "P1":
                continue  # `CriticWatch` says it, with the numbers of each iteration
            self.reporter.note(f"step {step}: {finding.severity} {line_of(finding)}")
            self.directory.event("finding", step=step, id=finding.id, severity=finding.severity, text=line_of(finding))


def write_diagnosis(recipe: Recipe, directory: RunDirectory, reporter: Reporter) -> None:
    """doctor.json and one line, at the end of a run. SFT has no rewards and gets none."""
    if isinstance(recipe, SFTRecipe):
        return

    def write() -> None:
        diagnosis = examine(observe(directory.path))
        write_json(directory.path / "doctor.json", as_json(diagnosis))
        reporter.note(f"doctor: {summary(diagnosis)}; postgrad doctor {directory.path} shows them")

    guarded(directory, reporter, write)


def guarded(directory: RunDirectory, reporter: Reporter, examination: Callable[[], None]) -> bool:
    """Run an examination; False when it failed. The one place where any exception is caught: hours of training must not be lost to a
    mistake in a statistic. Nothing is hidden: the traceback is in events.jsonl and a note says so."""
    try:
        examination()
    except Exception as error:
        directory.event("doctor_failed", reason=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
        reporter.note(
            f"the doctor failed and looks no further, the run goes on: {type(error).__name__}: {error} (traceback in events.jsonl)"
        )
        return False
    return True
