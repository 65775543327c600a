"""R18: does what is trained on rise together with what is meant? Only a measure that is not trained on can say so: held-out prompts, or
another judge; best both: an outcome reward of weight 0 on held-out prompts.

It speaks when the trained reward rises and the other does not. That is an audit: it says what happened, and warns of nothing early.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from postgrad.rewards.doctor.catalogue import RULES
from postgrad.rewards.doctor.finding import Details, Fix, Passed, Result, found, skipped
from postgrad.rewards.doctor.numbers import mann_kendall, rise
from postgrad.rewards.doctor.observed import Observed
from postgrad.rewards.doctor.policy import CLEAR, TREND
from postgrad.rewards.ledger import Floats

FEWEST = 4
"""Points below which no trend is called one; it must also be there without the last."""

TOGETHER = 0.5
"""A measure that makes more than this part of the trained reward's rise has not parted: greedy held-out answers start higher."""


@dataclass(frozen=True)
class Series:
    """The trained reward and what it is compared with at the same steps, and the scale of each."""

    name: str
    steps: list[int]
    proxy: Floats
    truth: Floats
    proxy_scale: float
    truth_scale: float

    @property
    def share(self) -> float:
        """How much of the proxy's rise the truth makes, each on its own scale."""
        proxy = rise(self.proxy) / self.proxy_scale
        return rise(self.truth) / self.truth_scale / proxy if proxy > 0 else 0.0

    def gap(self, drop: int = 0) -> float:
        """Rise of the proxy less rise of the truth, as shares of their scales, without the last `drop` points."""
        end = len(self.steps) - drop
        return rise(self.proxy[:end]) / self.proxy_scale - rise(self.truth[:end]) / self.truth_scale


def proxy_against_truth(observed: Observed) -> Result:
    """R18, with held-out evaluations, else with a second verifier's column."""
    rule = RULES["R18"]
    found_series = [series for series in (_heldout(observed), _verifier(observed)) if series is not None]
    if not found_series:
        key = "data.eval and evaluation.every, or an outcome reward of weight 0"
        return skipped(rule, "cannot tell: there is no held-out reward and no second verifier", key)
    series = next((series for series in found_series if len(series.steps) > FEWEST), found_series[0])
    if len(series.steps) <= FEWEST:
        why = f"cannot tell: {len(series.steps)} points of {series.name}, a trend that lasts needs {FEWEST + 1}"
        return skipped(rule, why, "evaluation.every")
    return _judge(observed, series)


def _judge(observed: Observed, series: Series) -> Result:
    rule = RULES["R18"]
    assert rule.levels is not None
    gap = series.gap()
    evidence = {
        "value": gap, "proxy_rise": rise(series.proxy), "truth_rise": rise(series.truth), "proxy_p": mann_kendall(series.proxy)[0],
        "truth_p": mann_kendall(series.truth)[0],
    }  # fmt: skip
    level = min(rule.levels.level(gap), rule.levels.level(series.gap(drop=1)))
    clear = CLEAR if len(series.steps) >= 8 else TREND  # fewer values cannot be clearer
    together = evidence["truth_p"] < clear or series.share > TOGETHER
    if evidence["proxy_p"] >= TREND or together or not level:
        return Passed(rule.id, rule.title, f"the trained reward and {series.name} do not part (gap {gap:.2f})", evidence)
    return found(rule, level, _explain(series, evidence), observed, still=True)


def _explain(series: Series, evidence: dict[str, float]) -> Details:
    message = (
        f"the trained reward rose by {evidence['proxy_rise']:.2g} while {series.name} changed by {evidence['truth_rise']:+.2g}: "
        "what is paid and what is meant have parted"
    )
    arithmetic = (
        f"Mann–Kendall: the trained reward rises (p = {evidence['proxy_p']:.3f}), {series.name} does not (p = {evidence['truth_p']:.3f}); "
        f"gap = {evidence['proxy_rise']:.2g}/{series.proxy_scale:.2g} − {evidence['truth_rise']:.2g}/{series.truth_scale:.2g} = "
        f"{evidence['value']:.2f}"
    )
    fixes = (
        Fix("rewards", "a reward that the trick does not earn", "read the best paid rollouts of the last steps"),
        Fix("rewards[].weight", "less for what rose alone", "R3 shows whose signal it was"),
        Fix("loss.kl_coef", "higher", "limits how far the policy can go after the proxy"),
    )
    return Details(message, evidence, arithmetic, fixes, (f"step {series.steps[-1]}",))


def _judges(observed: Observed) -> list[int]:
    """Rewards that say how well the task was done; those that nothing is trained on (weight 0) first."""
    return sorted((k for k, r in enumerate(observed.rewards) if r.role == "outcome"), key=lambda k: observed.rewards[k].weight != 0.0)


def _heldout(observed: Observed) -> Series | None:
    """Evaluations, each with the training reward of the steps nearest to it."""
    names = [f"eval/rewards/{observed.rewards[k].name}/mean" for k in _judges(observed)]
    name = next((name for name in names if observed.points(name)), "eval/reward")
    truth = observed.points(name)
    rewards = _training_rewards(observed)
    if not truth or not rewards:
        return None
    places = np.array([step for step, _ in truth])
    nearest = np.abs(np.array([step for step, _ in rewards])[:, None] - places[None, :]).argmin(axis=1)
    values = np.array([value for _, value in rewards])
    kept = [place for place in range(len(places)) if (nearest == place).any()]
    proxy = np.array([values[nearest == place].mean() for place in kept])
    scale = _total_scale(observed, values)
    own = _reward_scale(observed, name)
    return Series(name, [int(places[k]) for k in kept], proxy, np.array([truth[k][1] for k in kept]), scale, scale if own is None else own)


def _training_rewards(observed: Observed) -> list[tuple[int, float]]:
    """Mean total of each step, from the log, else from the rollouts."""
    if points := observed.points("reward"):
        return points
    by_step = observed.totals.reshape(-1, observed.group_size) if observed.group_count else np.empty((0, 1))
    found_means = []
    for step in np.unique(observed.steps):
        rows = by_step[observed.steps == step]
        if not np.isnan(rows).all():
            found_means.append((int(step), float(np.nanmean(rows))))
    return found_means


def _total_scale(observed: Observed, means: Floats) -> float:
    """How far the total can go: declared, else as far as it was seen to go."""
    acting = [reward for reward in observed.rewards if reward.weight]
    if acting and all(reward.range is not None for reward in acting):
        declared = sum(abs(r.weight) * (r.range[1] - r.range[0]) for r in acting if r.range is not None)
        if declared > 0:
            return declared
    values = observed.totals[np.isfinite(observed.totals)]
    spread = float(np.quantile(values, 0.99) - np.quantile(values, 0.01)) if len(values) else 0.0
    return spread or float(np.ptp(means)) or 1.0


def _reward_scale(observed: Observed, name: str) -> float | None:
    for k, reward in enumerate(observed.rewards):
        if name == f"eval/rewards/{reward.name}/mean":
            if reward.range is not None and reward.range[1] > reward.range[0]:
                return reward.range[1] - reward.range[0]
            values = observed.values[:, k]
            spread = float(np.nanmax(values) - np.nanmin(values)) if not np.isnan(values).all() else 0.0
            return spread or None
    return None


def _verifier(observed: Observed) -> Series | None:
    """The second judge's mean per window: what a file brings, or an outcome reward that only watches (weight 0)."""
    if not np.isnan(observed.verifier).all():
        return _second(observed, "the second verifier", lambda window: window.verifier)
    watching = [k for k in _judges(observed) if observed.rewards[k].weight == 0.0]
    if not watching or np.isnan(observed.values[:, watching[0]]).all():
        return None
    return _second(observed, f"{observed.rewards[watching[0]].name}, which is not trained on,", lambda part: part.values[:, watching[0]])


def _second(observed: Observed, name: str, verdicts: Callable[[Observed], Floats]) -> Series:
    windows = [window for window in observed.windows if not np.isnan(verdicts(window)).all() and not np.isnan(window.totals).all()]
    truth, proxy = (np.array([float(np.nanmean(part(w))) for w in windows]) for part in (verdicts, lambda window: window.totals))
    known = verdicts(observed)[~np.isnan(verdicts(observed))]
    scale = float(known.max() - known.min()) or math.inf
    return Series(name, [w.step_range[1] for w in windows], proxy, truth, _total_scale(observed, proxy), scale)
