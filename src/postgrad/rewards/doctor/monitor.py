"""Looks at a run while it goes on, and says what lasts. It warns of nothing early: it says sooner what an audit would say afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from postgrad.rewards.doctor.assemble import About, Sampled, assemble
from postgrad.rewards.doctor.examine import examine
from postgrad.rewards.doctor.finding import SEVERITIES, Finding
from postgrad.rewards.doctor.lines import Record
from postgrad.rewards.doctor.observed import NAMES, WINDOW_GROUPS, Failure, NonFinite, RewardInfo
from postgrad.rewards.doctor.run_files import failures_of, flat, group_of, read_metrics

WINDOWS = 12
"""Windows of groups that are kept: R4 counts up to ten in a row."""


_LOGGED = frozenset(name for names in NAMES.values() for name in names)


def _looked_at(name: str) -> bool:
    return name in _LOGGED or name.startswith("eval/reward")


class Monitor:
    """Takes each batch as it is written to the rollout file, and returns new findings that are warnings or worse.

    A finding is returned once, and once more when it has become graver. Memory is bounded: `WINDOWS` windows of groups (without their
    texts), and the numbers of every step.
    """

    def __init__(self, rewards: Sequence[RewardInfo], *, method: str, recipe: Mapping[str, Any]) -> None:
        self._rewards, self._method, self._settings = tuple(rewards), method, flat(recipe)
        self._groups: deque[Sampled] = deque()
        self._metrics: list[tuple[int, Mapping[str, float]]] = []
        self._nonfinite: list[NonFinite] = []
        self._failures: deque[Failure] = deque()
        self._fresh = 0
        self._said: dict[str, int] = {}

    def see(
        self, records: Iterable[Mapping[str, Any]], *, metrics: Iterable[Record] = (), failures: Iterable[Mapping[str, Any]] = ()
    ) -> list[Finding]:
        """records: lines of a rollout file. metrics: lines of metrics.jsonl since the last call. failures: reward_failure events.

        Checks run when another window of groups is full; in between it returns nothing.
        """
        before = len(self._groups)
        self._groups.extend(group_of(record) for record in records)
        self._fresh += len(self._groups) - before
        numbers, bad = read_metrics(metrics)
        self._metrics += [(step, {name: value for name, value in line.items() if _looked_at(name)}) for step, line in numbers]
        self._nonfinite += bad
        self._failures.extend(failures_of(failures))
        if self._fresh < WINDOW_GROUPS:
            return []
        self._fresh = 0
        self._forget()
        return self._new(examine(assemble(self._groups, self._about())).findings)

    def _about(self) -> About:
        return About(
            "this run", self._method, self._rewards, tuple(self._metrics), tuple(self._failures), tuple(self._nonfinite), self._settings
        )

    def _forget(self) -> None:
        """Whole steps, so that no step is looked at in part."""
        while len(self._groups) > (WINDOWS + 1) * WINDOW_GROUPS:
            oldest = self._groups[0].step
            if len({group.step for group in self._groups}) == 1:
                return
            while self._groups[0].step == oldest:
                self._groups.popleft()
            while self._failures and self._failures[0].step <= oldest:
                self._failures.popleft()

    def _new(self, findings: Sequence[Finding]) -> list[Finding]:
        graver = [f for f in findings if f.severity != "info" and SEVERITIES.index(f.severity) > self._said.get(f.id, 0)]
        self._said |= {finding.id: SEVERITIES.index(finding.severity) for finding in graver}
        return graver
