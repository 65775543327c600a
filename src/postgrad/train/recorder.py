"""Writes what happened in a batch: the rollout file, every reward failure, each note once, and what the doctor finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from postgrad.rewards.advice import Declared, observed_notes
from postgrad.rewards.ledger import Scheme
from postgrad.train.doctor import RewardWatch
from postgrad.train.experience import Experience
from postgrad.train.judged import JudgedGroup
from postgrad.train.judging import Scored
from postgrad.train.loop import Reporter
from postgrad.train.run_directory import RunDirectory


@dataclass
class IterationRecorder:
    """The same for a PPO iteration: each rollout with its rewards, its score, and the mean of its tokens' advantages."""

    directory: RunDirectory
    reporter: Reporter
    watch: RewardWatch
    said: set[str] = field(default_factory=set)

    def __call__(self, step: int, experience: Experience) -> None:
        records = experience.records(step)
        self.directory.write_rollouts(step, records)
        for failure in experience.raw.scores.failures:
            self.directory.event("reward_failure", step=step, **asdict(failure))
            kind = f"failure {failure.reward} {failure.kind}"
            if kind not in self.said:
                self.said.add(kind)
                self.reporter.note(str(failure))
        self.watch(step, records, experience.raw.scores.failures)


@dataclass
class Recorder:
    directory: RunDirectory
    reporter: Reporter
    rewards: Sequence[Declared]
    scheme: Scheme
    watch: RewardWatch
    said: set[str] = field(default_factory=set)

    def __call__(self, step: int, scored: Scored, judged: Sequence[JudgedGroup]) -> None:
        records = [group.record(step) for group in judged]
        self.directory.write_rollouts(step, records)
        for failure in scored.scores.failures:
            self.directory.event("reward_failure", step=step, **asdict(failure))
            self._once(f"failure {failure.reward} {failure.kind}", str(failure))
        for note in observed_notes(self.rewards, scored.scores, self.scheme):
            self._once(note.id, note.message)
        self.watch(step, records, scored.scores.failures)

    def _once(self, kind: str, text: str) -> None:
        if kind not in self.said:
            self.said.add(kind)
            self.reporter.note(text)
            self.directory.event("note", kind=kind, text=text)
