"""What a check says: a finding, that it passed, or why it could not look.

A value is judged per window. A severity counts once two neighbouring windows show it: one window is chance more often than not. A run
that is too short for two windows gets notes and no alarms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from postgrad.rewards.doctor.observed import Observed
from postgrad.rewards.ledger import Floats

Severity = Literal["info", "warn", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warn", "critical")


@dataclass(frozen=True, slots=True)
class Levels:
    """From where on a value is worth a note, a warning, or is critical. The limit itself is still good.

    below: low values are bad. inclusive: the limit itself counts (for counts).
    """

    info: float
    warn: float = math.inf
    critical: float = math.inf
    below: bool = False
    inclusive: bool = False

    def level(self, value: float) -> int:
        """0 = nothing, 1 = info, 2 = warn, 3 = critical; NaN is nothing."""
        limits = (self.info, self.warn, self.critical)
        if self.below:
            return sum(value < limit for limit in limits if math.isfinite(limit))
        return sum(value >= limit if self.inclusive else value > limit for limit in limits)

    def shown(self) -> str:
        sign = "<" if self.below else "≥" if self.inclusive else ">"
        return f"{sign} " + " / ".join(f"{limit:g}" if math.isfinite(limit) else "–" for limit in (self.info, self.warn, self.critical))


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the catalogue. `levels` None: the check decides without a number per window."""

    id: str
    title: str
    looks_at: str
    levels: Levels | None
    reference: str


@dataclass(frozen=True, slots=True)
class Fix:
    """A recipe key, the value to give it, and why. before, after: the finding's number, now and with the change, on the same rollouts."""

    key: str
    value: str
    why: str
    before: float | None = None
    after: float | None = None

    @property
    def verified(self) -> bool:
        return self.after is not None


@dataclass(frozen=True, slots=True)
class Finding:
    """steps: first and last step that show it. still: whether it was so at the end. rows: where to look."""

    id: str
    title: str
    severity: Severity
    message: str
    evidence: Mapping[str, float]
    arithmetic: str
    fixes: tuple[Fix, ...]
    reference: str
    rows: tuple[str, ...]
    steps: tuple[int, int]
    still: bool


@dataclass(frozen=True, slots=True)
class Passed:
    id: str
    title: str
    message: str
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Skipped:
    """reason: what is missing. key: what would enable the check (a recipe key, or a field of the file)."""

    id: str
    title: str
    reason: str
    key: str = ""


Result = Finding | Passed | Skipped


@dataclass(frozen=True, slots=True)
class Details:
    """What a check adds to a value that passed a limit."""

    message: str
    evidence: Mapping[str, float]
    arithmetic: str
    fixes: tuple[Fix, ...] = ()
    rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """level 0–3 that persisted; `column`: which of the measured numbers; `where`: the windows that showed it, as one."""

    level: int
    column: int
    where: Observed
    still: bool
    confirmed: bool


Measure = Callable[[Observed], Floats]


def one(measure: Callable[[Observed], float]) -> Measure:
    """A single number as a measure."""
    return lambda observed: np.array([measure(observed)])


def judge(observed: Observed, measure: Measure, levels: Levels) -> Verdict:
    """Measure every window; the column with the highest level that two neighbouring windows share."""
    windows = observed.windows
    table = np.stack([measure(window) for window in windows])
    verdicts = [_judge_column(observed, table[:, column], levels, column) for column in range(table.shape[1])]
    if not verdicts:
        return Verdict(0, 0, observed, False, False)
    return max(verdicts, key=lambda verdict: (verdict.level, verdict.where.group_count))


def _judge_column(observed: Observed, values: Floats, levels: Levels, column: int) -> Verdict:
    known = [index for index, value in enumerate(values) if not math.isnan(value)]
    reached = [levels.level(float(values[index])) for index in known]
    if not known:
        return Verdict(0, column, observed, False, False)
    confirmed = len(known) > 1
    level = max(min(pair) for pair in itertools.pairwise(reached)) if confirmed else min(1, reached[0])
    if not level:
        return Verdict(0, column, observed, False, confirmed)
    first, last = _stretch(reached, level)
    still = last == len(known) - 1
    return Verdict(level, column, observed.join(known[first], known[last]), still, confirmed)


def _stretch(reached: Sequence[int], level: int) -> tuple[int, int]:
    """First and last place of the longest run that reaches the level; the latest of equals."""
    best, start = (0, 0, 0), None
    for place, value in enumerate([*reached, 0]):
        if value >= level:
            start = place if start is None else start
        elif start is not None:
            best = max(best, (place - start, start, place - 1))
            start = None
    return best[1], best[2]


def decide(observed: Observed, rule: Rule, measure: Measure, explain: Callable[[Observed, float, int], Details], *, healthy: str) -> Result:
    """Judge by windows, then explain the number over all windows that show it. `healthy` is a sentence with `{value}`."""
    assert rule.levels is not None
    verdict = judge(observed, measure, rule.levels)
    values = measure(verdict.where)
    if not verdict.level:
        value = _worst(values, rule.levels)
        shown = "no number" if math.isnan(value) else f"{value:.3g}"
        return Passed(rule.id, rule.title, healthy.format(value=shown), {} if math.isnan(value) else {"value": value})
    details = explain(verdict.where, float(values[verdict.column]), verdict.column)
    return found(rule, verdict.level, details, verdict.where, still=verdict.still)


def _worst(values: Floats, levels: Levels) -> float:
    known = values[~np.isnan(values)]
    if not len(known):
        return math.nan
    return float(known.min() if levels.below else known.max())


def found(rule: Rule, level: int, details: Details, where: Observed, *, still: bool) -> Finding:
    return Finding(
        rule.id, rule.title, SEVERITIES[level - 1], details.message, details.evidence, details.arithmetic, details.fixes, rule.reference,
        details.rows, where.step_range, still,
    )  # fmt: skip


def skipped(rule: Rule, reason: str, key: str = "") -> Skipped:
    return Skipped(rule.id, rule.title, reason, key)
