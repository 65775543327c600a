"""R14, R15, R16, R17, R19, P1: what the numbers of the updates say about the policy."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from postgrad.rewards.doctor.catalogue import RULES
from postgrad.rewards.doctor.finding import Details, Finding, Fix, Passed, Result, decide, found, one, skipped
from postgrad.rewards.doctor.groups import LOOK_AT
from postgrad.rewards.doctor.numbers import mann_kendall
from postgrad.rewards.doctor.observed import Observed
from postgrad.rewards.ledger import Floats

FALLEN = 0.5
"""H_t / H_0 below which the fall is worth a note."""
GONE = 0.1
"""H_t / H_0 that the projection looks for."""
FIRST = 10
"""Logged values whose mean is H_0."""
SPIKE = 10.0
"""Times the run's median KL that makes a spike."""
TREND, CLEAR = 0.05, 0.01
"""One-sided p below which a trend is one; and is one beyond doubt, so that it excuses something."""

# R14 ----------------------------------------------------------------------------------------------------------------------------------


def entropy(observed: Observed) -> Result:
    """R14: the policy loses its spread while the reward does not rise, so nothing is bought with it. A note, never an alarm."""
    rule = RULES["R14"]
    means = np.array([window.mean("entropy") for window in observed.windows])
    rewards = np.array([_reward(window) for window in observed.windows])
    known = ~(np.isnan(means) | np.isnan(rewards))
    if known.sum() < 4:
        return skipped(rule, f"entropy and reward are known in {known.sum()} windows, a trend needs 4", "entropy")
    means, rewards = means[known], rewards[known]
    start = float(observed.series("entropy")[:FIRST].mean())
    ratio = float(means[-1]) / start if start > 0 else math.nan
    evidence = {"value": ratio, "first": start, "last": float(means[-1])}
    if not (ratio < FALLEN and means[-2] / start < FALLEN):
        return Passed(rule.id, rule.title, f"entropy is at {ratio:.2f} of where it was", evidence)
    recent = rewards[-max(8, len(rewards) // 2) :]
    if mann_kendall(recent)[0] < (CLEAR if len(recent) >= 8 else TREND):  # fewer values cannot be clearer
        return Passed(rule.id, rule.title, f"entropy fell to {ratio:.2f} of where it was while the reward rises", evidence)
    return found(rule, 1, _explain_entropy(observed, means, evidence), observed, still=True)


def _reward(window: Observed) -> float:
    if window.group_count and not np.isnan(window.totals).all():
        return float(np.nanmean(window.totals))
    return window.mean("reward")


_CLIPPED_AT_A_FIFTH = ("grpo", "bnpo", "dr_grpo")
"""Presets that clip a token's ratio, on both sides alike."""


def _entropy_fixes(observed: Observed) -> Iterator[Fix]:
    """What the run does not do already."""
    settings = observed.settings
    if observed.method != "ppo":
        if settings.get("loss.preset", "grpo") in _CLIPPED_AT_A_FIFTH and settings.get("loss.clip_high") is None:
            yield Fix("loss.clip_high", "0.28", "a higher upper clip lets unlikely tokens rise (DAPO)")
        if settings.get("loss.positive_weight", 1.0) == 1.0:
            yield Fix("loss.positive_weight", "0.1", "learning mostly from mistakes keeps the other answers alive (arXiv 2506.01347)")
    yield Fix("loss.kl_coef", "0.01–0.04", "holds the policy near where it was")
    yield Fix("optimizer.learning_rate", "lower", "nothing is gained by the speed while the reward is flat")


def _explain_entropy(observed: Observed, means: np.ndarray, evidence: dict[str, float]) -> Details:
    slope = float(np.polyfit(np.arange(len(means)), np.log(np.maximum(means, 1e-12)), 1)[0])
    left = (math.log(GONE * evidence["first"]) - math.log(max(means[-1], 1e-12))) / slope if slope < 0 else math.inf
    first, last = observed.step_range
    steps = max(0.0, left) * (last - first + 1) / len(means)
    message = f"entropy fell to {evidence['value']:.2f} of where it was, while the reward is flat"
    arithmetic = (
        f"H_t / H_0 = {means[-1]:.3g} / {evidence['first']:.3g}; the trend of ln H reaches {GONE:g} of H_0 in about {steps:.0f} steps"
    )
    return Details(message, {**evidence, "steps_left": steps}, arithmetic, tuple(_entropy_fixes(observed)))


# R15 ----------------------------------------------------------------------------------------------------------------------------------


def kl_per_token(observed: Observed) -> float:
    """Mean KL to the reference per token [nats]; PPO logs it per rollout."""
    direct = observed.mean("kl")
    if not math.isnan(direct):
        return direct
    length = observed.mean("length")
    if math.isnan(length) and not np.isnan(observed.lengths).all():
        length = float(np.nanmean(observed.lengths))
    return observed.mean("kl_sequence") / length if length > 0 else math.nan


def kl_budget(observed: Observed) -> Result:
    """R15: how far from the reference; a spike; or a KL term that does nothing."""
    rule = RULES["R15"]
    if observed.settings.get("loss.kl_coef") == 0 or observed.mean("kl_coef") == 0:
        return skipped(rule, "at kl_coef 0 there is no reference to compare with", "loss.kl_coef")
    if math.isnan(kl_per_token(observed)):
        return skipped(rule, "no KL was logged", "kl")
    result = decide(observed, rule, one(kl_per_token), _explain_kl, healthy="{value} nats per token from the reference")
    if isinstance(result, Finding) and result.severity != "info":
        return result
    if _pinned(observed):
        return found(rule, 2, _explain_pinned(), observed, still=True)
    spike = _spike(observed)
    return result if spike is None or isinstance(result, Finding) else found(rule, 1, spike, observed, still=False)


def _explain_kl(where: Observed, value: float, _: int) -> Details:
    length = float(np.nanmean(where.lengths)) if where.group_count and not np.isnan(where.lengths).all() else where.mean("length")
    evidence = {"value": value}
    arithmetic = f"mean over tokens of the KL estimate: {value:.3g} nats"
    if not math.isnan(length):
        evidence["sequence"] = value * length
        arithmetic += f"; × {length:.0f} tokens = {value * length:.3g} nats per rollout"
    coefficient = where.settings.get("loss.kl_coef")
    current = f"{coefficient:g}" if isinstance(coefficient, int | float) else "the coefficient"
    fixes = (
        Fix("loss.kl_coef", "higher", f"more than {current}"),
        Fix("optimizer.learning_rate", "lower", "smaller steps away from the reference"),
    )
    return Details(f"the policy is {value:.2g} nats per token from the reference", evidence, arithmetic, fixes)


def _pinned(observed: Observed) -> bool:
    """The KL has been exactly 0 throughout, after the first window: with a coefficient that is no measurement."""
    windows = observed.windows[1:]
    values = [value for window in windows for name in ("kl", "kl_sequence") for value in window.series(name)]
    return len(windows) >= 2 and len(values) >= 10 and max(abs(value) for value in values) < 1e-12


def _explain_pinned() -> Details:
    message = (
        "the KL to the reference stays exactly 0, although a reference is kept: the policy does not move, or the reference moves with it"
    )
    fixes = (
        Fix("optimizer.learning_rate", "higher", "if grad_norm is fine and nothing moves"),
        Fix("loss.kl_coef", "0", "if no reference is wanted"),
    )
    return Details(message, {"value": 0.0}, "k3 = 0 exactly where log π = log π_ref on every token", fixes)


def _spike(observed: Observed) -> Details | None:
    assert RULES["R15"].levels is not None
    points = observed.points("kl")
    if len(points) < 8:
        return None
    middle = float(np.median([value for _, value in points]))
    step, highest = max(points, key=lambda point: point[1])
    if highest <= max(SPIKE * middle, RULES["R15"].levels.info):
        return None
    message = f"the KL jumped to {highest:.2g} nats per token at step {step}"
    fix = Fix("optimizer.max_grad_norm", "lower", "one update moved the policy far")
    arithmetic = f"{highest / max(middle, 1e-12):.0f} times the run's median of {middle:.2g}"
    return Details(message, {"value": highest, "median": middle, "step": float(step)}, arithmetic, (fix,), (f"step {step}",))


# R16 ----------------------------------------------------------------------------------------------------------------------------------


def trust_region(observed: Observed) -> Result:
    """R16: tokens that the update was not allowed to move further."""
    rule = RULES["R16"]
    preset = observed.settings.get("loss.preset")
    if preset in ("cispo", "rloo"):
        return skipped(rule, f"{preset} clips no gradient away")
    if preset == "gspo":
        return skipped(rule, "gspo clips whole sequences to a tiny range: a large share is its design")
    if not len(observed.series("clip")):
        return skipped(rule, "no clip fraction was logged", "clip_ratio/region_mean")
    return decide(observed, rule, one(lambda part: part.mean("clip")), _explain_clip, healthy="the clip is active on {value} of the tokens")


def _explain_clip(where: Observed, value: float, _: int) -> Details:
    evidence = {"value": value}
    arithmetic = "tokens with ratio > 1 + ε and advantage > 0, or ratio < 1 − ε and advantage < 0, ÷ tokens"
    for name in ("ratio_p1", "ratio_p99"):
        if not math.isnan(where.mean(name)):
            evidence[name] = where.mean(name)
    if "ratio_p99" in evidence:
        arithmetic += f"; ratio p1 … p99: {evidence.get('ratio_p1', math.nan):.2f} … {evidence['ratio_p99']:.2f}"
    fixes = (
        Fix("optimizer.learning_rate", "lower", "each update then moves less"),
        Fix("batch.epochs", "1", "fewer updates on the same rollouts"),
        Fix("batch.minibatches", "fewer", "the later ones learn from rollouts of an older policy"),
    )
    return Details(f"the clip takes the gradient of {100 * value:.0f} % of the tokens", evidence, arithmetic, fixes)


# R17 ----------------------------------------------------------------------------------------------------------------------------------


def sampler_mismatch(observed: Observed) -> Result:
    """R17: the policy that sampled is not quite the policy that is trained."""
    rule = RULES["R17"]
    if not len(observed.series("mismatch")):
        return skipped(rule, "the sampler's log-probs were not compared with the trainer's", "sampling/logprob_difference")
    return decide(
        observed, rule, one(lambda part: part.mean("mismatch")), _explain_mismatch, healthy="sampler and trainer differ by {value} nats"
    )


def _explain_mismatch(where: Observed, value: float, _: int) -> Details:
    message = f"sampler and trainer give the same tokens log-probs that differ by {value:.2g} nats on average"
    arithmetic = "mean over trained tokens of |log π_trainer − log π_sampler|; with several updates per batch the later ones add to it"
    fixes = (
        *(() if where.method == "ppo" else (Fix("loss.old_logprobs", "sampler", "the ratio then corrects it"),)),
        Fix("dtype", "float32", "rounding of a lower precision is the usual cause"),
        Fix("rollout.temperature", "1.0", "a temperature that only one side applies looks like this"),
    )
    return Details(message, {"value": value}, arithmetic, fixes)


# R19 ----------------------------------------------------------------------------------------------------------------------------------


def non_finite(observed: Observed) -> Result:
    """R19: any number that is none. A NaN that a reward returned is counted as a failure (R11) and reaches no number."""
    rule = RULES["R19"]
    places = [f"step {item.step}: {item.name} is {item.value}" for item in observed.nonfinite]
    if not places:
        return Passed(rule.id, rule.title, "every number is finite")
    message = f"{len(places)} numbers are NaN or infinite, first: {places[0]}"
    fixes = (
        Fix("optimizer.learning_rate", "lower", "an update that is too large is the usual cause"),
        Fix("rewards[].on_nonfinite", "stop", "stops at the first infinite reward, before the update"),
    )
    details = Details(
        message,
        {"value": float(len(places)), "step": float(observed.nonfinite[0].step)},
        "nothing is averaged over them",
        fixes,
        tuple(places[:LOOK_AT]),
    )
    return found(rule, 3, details, observed, still=True)


# P1 -----------------------------------------------------------------------------------------------------------------------------------


def critic(observed: Observed) -> Result:
    """P1: a critic that explains less than the mean makes advantages noisier than no critic. Early on every critic does."""
    rule = RULES["P1"]
    if observed.method not in ("ppo", ""):
        return skipped(rule, "there is no critic", "method: ppo")
    if not len(observed.series("explained_variance")):
        return skipped(rule, "no explained variance was logged", "val/explained_variance")
    count = len(observed.windows)
    late = observed.join(count // 2, count - 1) if count > 1 else observed
    widest = max(observed.series("returns_std"), default=0.0)
    if not len(_explained(late, widest)):
        return skipped(
            rule, "the returns hardly vary any more: the policy earns nearly the same everywhere, and nothing is left to explain"
        )
    return decide(
        late,
        rule,
        one(lambda part: float(np.median(_explained(part, widest))) if len(_explained(part, widest)) else math.nan),
        _explain_critic,
        healthy="the critic explains {value} of the returns' variance",
    )


SETTLED = 0.25
"""Share of the widest spread of returns below which there is nothing left to explain: the policy earns (nearly) the same everywhere."""


def _explained(part: Observed, widest: float) -> Floats:
    """Explained variance of the steps whose returns vary still, and of all where the spread was not logged. Look at the median: a single
    value can be far below 0."""
    spread = dict(part.points("returns_std"))
    return np.array([value for step, value in part.points("explained_variance") if spread.get(step, math.inf) > SETTLED * widest])


def _explain_critic(where: Observed, value: float, _: int) -> Details:
    message = f"the critic explains {value:.2f} of the returns' variance" + (": less than their mean would" if value < 0 else "")
    arithmetic = "1 − Var(returns − values) / Var(returns); 1 is a perfect critic, 0 one that knows only the mean"
    fixes = (
        Fix("critic.learning_rate", "higher", "the critic lags behind the policy"),
        Fix("critic.warmup_steps", "more", "the critic learns first, on the policy as it is"),
        Fix("batch.epochs", "more", "more updates of the critic per iteration"),
    )
    return Details(message, {"value": value}, arithmetic, fixes)
