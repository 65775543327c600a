"""2. Lazy strategies: what each earns, next to the good answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from postgrad.rewards.check.finding import Finding, Severity, finding
from postgrad.rewards.check.lazy import STRATEGIES
from postgrad.rewards.check.scoring import Scored
from postgrad.rewards.load import LoadedReward

CRITICAL, WARNING = 0.9, 0.5


@dataclass(frozen=True, slots=True)
class Standing:
    """What a strategy earns on average. ratio: its share of what the good answer earns (NaN when that cannot be said), of the outcome
    rewards or of the total, whichever is more. The total counts only with weights that mean something, or when there is no outcome."""

    name: str
    by_reward: tuple[float, ...]
    outcome: float
    total: float
    ratio: float
    rows: tuple[str, ...]


def standings(scored: Scored, rewards: Sequence[LoadedReward], *, weighted: bool) -> list[Standing]:
    """The good answer first, then the strategies from the best paid down."""
    weights = [reward.weight for reward in rewards]
    totals = scored.totals(weights)
    chosen = [reward.role == "outcome" and reward.weight != 0.0 for reward in rewards]
    outcome = scored.totals(weights, chosen) if any(chosen) else np.full_like(totals, np.nan)
    lazy = [column for column, (kind, _) in enumerate(scored.cases) if kind == "lazy"]
    found = [_standing(scored, column, totals, outcome, weighted or not any(chosen)) for column in [0, *lazy]]
    return [found[0], *sorted(found[1:], key=lambda standing: -np.nan_to_num(standing.ratio, nan=-9.0))]


def _standing(scored: Scored, column: int, totals: NDArray[np.float64], outcome: NDArray[np.float64], weighted: bool) -> Standing:
    has = scored.present[:, column]
    means = [_mean(scored.values[has, column, index]) for index in range(scored.values.shape[2])]
    counted = [values for values in (outcome, *([totals] if weighted else [])) if not np.isnan(values).all()]
    ratio = max((_ratio(values, column, has) for values in counted), default=float("nan"))
    paid = [row for row, ok in zip(scored.rows, has & _near(totals if np.isnan(outcome).all() else outcome, column), strict=True) if ok]
    return Standing(scored.cases[column][1], tuple(means), _mean(outcome[has, column]), _mean(totals[has, column]), ratio, tuple(paid))


def _ratio(values: NDArray[np.float64], column: int, has: NDArray[np.bool_]) -> float:
    """Mean of the strategy over mean of the good answer. Where good answers earn nothing above 0, both are counted from the lowest mean of
    any case, because a penalty that is not incurred is what a good answer earns."""
    good, mine = _mean(values[has, 0]), _mean(values[has, column])
    floor = 0.0 if good > 0.0 else min(_mean(values[:, other]) for other in range(values.shape[1]) if not np.isnan(values[:, other]).all())
    return (mine - floor) / (good - floor) if good - floor > 1e-9 else float("nan")


def _near(values: NDArray[np.float64], column: int) -> NDArray[np.bool_]:
    near: NDArray[np.bool_] = np.nan_to_num(values[:, column], nan=-np.inf) >= CRITICAL * values[:, 0]
    return near & (values[:, 0] > 0.0)


def _mean(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def check_strategies(found: Sequence[Standing], rewards: Sequence[LoadedReward]) -> Iterator[Finding]:
    has_outcome = any(reward.role == "outcome" and reward.weight != 0.0 for reward in rewards)
    for standing in found[1:]:
        if not standing.ratio >= WARNING:
            continue
        severity: Severity = "critical" if standing.ratio >= CRITICAL and has_outcome else "warning"
        message = f"a model that {STRATEGIES[standing.name]} earns {standing.ratio:.0%} of what the good answer earns"
        hint = (
            "see the scoreboard for the reward that pays it"
            if has_outcome
            else "this is shaping alone; add the outcome reward and check again"
        )
        yield finding(f"lazy.{standing.name.replace(' ', '_')}", severity, "", message, rows=standing.rows, hint=hint)


def check_failures(scored: Scored) -> Iterator[Finding]:
    """What a reward that scores good answers could not score of changed and lazy ones. In training it abstains there, and a model may learn
    to write such answers."""
    fails_anyway = {failure.reward for failure in scored.failures if failure.case[0] == "good" and not failure.skipped}
    real = [failure for failure in scored.failures if not failure.skipped and failure.reward not in fails_anyway]
    for reward, kind in dict.fromkeys((failure.reward, failure.kind) for failure in real):
        found = [failure for failure in real if (failure.reward, failure.kind) == (reward, kind)]
        cases = ", ".join(dict.fromkeys(failure.case[1] for failure in found))
        message = f"fails on {cases}: {found[0].problem}"
        hint = "an answer that it cannot read should earn the lowest value"
        yield finding(f"contract.cases.{kind}", "warning", reward, message, rows=[failure.row for failure in found], hint=hint)


def check_good(scored: Scored, rewards: Sequence[LoadedReward]) -> Iterator[Finding]:
    """Good answers should earn what a reward can give: else they are not good, or the reward does not see that they are."""
    for index, reward in enumerate(rewards):
        values, seen = scored.good[:, index], scored.values[:, :, index]
        if np.isnan(values).all():
            continue
        low, high = reward.range or (float(np.nanmin(seen)), float(np.nanmax(seen)))
        enough = (low + high) / 2 if reward.role == "outcome" else low
        poor = [row for row, value in zip(scored.rows, values, strict=True) if value <= enough]
        count = int((~np.isnan(values)).sum())
        if high > low and len(poor) > (0.2 * count if reward.role == "outcome" else count - 1):
            what = "no more than half of its range" if reward.role == "outcome" else "its lowest value"
            severity: Severity = "warning" if reward.role == "outcome" else "info"
            hint = (
                "the good answers do not have the form that it asks for (name others: --gold, --rollouts), or it does not see that they do"
            )
            yield finding("good.unpaid", severity, reward.name, f"{len(poor)} of {count} good answers earn {what}", rows=poor, hint=hint)
