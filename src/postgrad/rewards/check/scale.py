"""4. The scale sheet: how much each reward can move the total. 5. Principle 2: sizes that have no effect."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from postgrad.rewards.advice import design_notes, observed_notes
from postgrad.rewards.check.finding import Finding, Severity, finding
from postgrad.rewards.check.scoring import Scored
from postgrad.rewards.ledger import Scheme
from postgrad.rewards.load import LoadedReward
from postgrad.rewards.score import Scores

_SEVERITIES: dict[str, Severity] = {
    "no-outcome": "warning",
    "shaping-outranks-outcome": "warning",
    "never-scored": "critical",
    "out-of-range": "critical",
    "cancelling": "warning",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One reward on the sheet. moves = |weight| · (highest − lowest), from the declared range or, `observed`, from the values seen.

    NaN where none is declared and none was seen.
    """

    name: str
    role: str
    weight: float
    range: tuple[float, float]
    observed: bool
    moves: float


def scale_sheet(scored: Scored, rewards: Sequence[LoadedReward]) -> list[Line]:
    return [_line(scored, index, reward) for index, reward in enumerate(rewards)]


def _line(scored: Scored, index: int, reward: LoadedReward) -> Line:
    seen = scored.values[:, :, index]
    seen = seen[~np.isnan(seen)]
    low, high = reward.range or ((float(seen.min()), float(seen.max())) if len(seen) else (math.nan, math.nan))
    return Line(reward.name, reward.role, reward.weight, (low, high), reward.range is None, abs(reward.weight) * (high - low))


def check_scale(scored: Scored, rewards: Sequence[LoadedReward], *, scheme: Scheme, weighted: bool) -> Iterator[Finding]:
    """`weighted`: whether the weights are the recipe's. Without a recipe nothing can be said about sizes."""
    if not weighted:
        yield from _allowance(scale_sheet(scored, rewards))
        return
    for note in design_notes(rewards, scheme):
        yield finding(f"scale.{note.id}", _SEVERITIES.get(note.id, "info"), "", note.message)
    for note in observed_notes(rewards, _as_scores(scored, rewards), scheme):
        yield finding(f"scale.{note.id}", _SEVERITIES.get(note.id, "info"), "", f"among good and lazy answers: {note.message}")
    yield from _outranked(scored, rewards)
    for line in scale_sheet(scored, rewards):
        if line.observed and not math.isnan(line.moves):
            yield finding("scale.undeclared", "info", line.name, f"declares no range; {line.range[0]:g} … {line.range[1]:g} was seen")


def _allowance(sheet: Sequence[Line]) -> Iterator[Finding]:
    seen = [line for line in sheet if not math.isnan(line.moves)]
    outcome = sum(line.range[1] - line.range[0] for line in seen if line.role == "outcome")
    shaping = sum(line.range[1] - line.range[0] for line in seen if line.role == "shaping")
    if outcome > 0 and shaping > 0:
        message = f"with weight 1 for the outcome, one weight for all shaping rewards may be at most {outcome / shaping:.3g}"
        yield finding("scale.allowance", "info", "", message, hint="check the recipe itself to test the weights it has")


def _outranked(scored: Scored, rewards: Sequence[LoadedReward]) -> Iterator[Finding]:
    """A rollout that falls short of the good one in the outcome and still earns as much: shown, not only possible."""
    chosen = [reward.role == "outcome" and reward.weight != 0.0 for reward in rewards]
    if not any(chosen) or all(chosen):
        return
    weights = [reward.weight for reward in rewards]
    totals, outcome = scored.totals(weights), scored.totals(weights, chosen)
    short, paid = outcome < outcome[:, :1] - 1e-9, totals >= totals[:, :1] - 1e-9
    for column in np.flatnonzero((short & paid).any(axis=0)):
        rows = [row for row, shown in zip(scored.rows, (short & paid)[:, column], strict=True) if shown]
        name = scored.cases[column][1]
        message = f"a wrong answer ({name}) earns as much as the right one, on {len(rows)} of {len(scored.rows)} samples"
        yield finding(
            "scale.outranked", "critical", "", message, rows=rows, hint="lower the shaping weights, or join them: gate(outcome, shaping)"
        )


def _as_scores(scored: Scored, rewards: Sequence[LoadedReward]) -> Scores:
    """Each sample's good and lazy answers as a group."""
    columns = [column for column, (kind, _) in enumerate(scored.cases) if kind in ("good", "lazy")]
    return Scores(
        names=tuple(reward.name for reward in rewards),
        weights=tuple(reward.weight for reward in rewards),
        roles=tuple(reward.role for reward in rewards),
        values=scored.values[:, columns].reshape(-1, len(rewards)),
        group_size=len(columns),
    )
