"""R11, R12, R13: rewards that could not judge, length, and text that says nothing."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from postgrad.rewards.doctor import needs
from postgrad.rewards.doctor.catalogue import RULES
from postgrad.rewards.doctor.finding import Details, Finding, Fix, Result, decide, found, one, skipped
from postgrad.rewards.doctor.groups import LOOK_AT
from postgrad.rewards.doctor.numbers import pooled_spearman
from postgrad.rewards.doctor.observed import Observed
from postgrad.rewards.doctor.recompute import without
from postgrad.rewards.doctor.shares import with_weights
from postgrad.rewards.ledger import Floats

# R11 ----------------------------------------------------------------------------------------------------------------------------------


def unjudged(observed: Observed) -> Floats:
    """[K] share of the rollouts that each reward left out, although it judged others of the same group, or that it failed on.

    A reward that abstains on a whole group does not apply to that prompt, which is its right; but one that scores nothing at all is 1.
    """
    size, present = observed.group_size, observed.present
    missing = np.isnan(observed.values) & present[:, None]
    scored = ~np.isnan(observed.values)
    some = np.repeat(scored.reshape(-1, size, scored.shape[1]).any(axis=1), size, axis=0)
    failed = Counter(failure.reward for failure in observed.failures)
    counts = np.array([failed[reward.name] for reward in observed.rewards], dtype=np.float64)
    rollouts = max(1, int(present.sum()))
    partly = (missing & some).sum(axis=0)
    share = np.minimum(1.0, np.maximum(partly, counts) / rollouts)
    return np.where(scored.any(axis=0), share, 1.0 if present.any() else np.nan)


def abstained(observed: Observed) -> Result:
    """R11: None, NaN, exceptions and deadlines, per reward."""
    rule = RULES["R11"]
    rollouts = int(observed.present.sum())
    for column, reward in enumerate(observed.rewards):
        failed = sum(failure.reward == reward.name for failure in observed.failures)
        if rollouts and failed >= rollouts:  # no statistics are needed to see it
            return found(rule, 3, _explain_abstained(observed, 1.0, column), observed, still=True)
    return needs.groups(observed, rule, least=1) or decide(
        observed,
        rule,
        unjudged,
        _explain_abstained,
        healthy="every reward judges its rollouts (left out or failed: at most {value})",
    )


def _explain_abstained(where: Observed, share: float, reward: int) -> Details:
    name = where.rewards[reward].name
    kinds = Counter(failure.kind for failure in where.failures if failure.reward == name)
    none = int((np.isnan(where.values[:, reward]) & where.present).sum()) - sum(kinds.values())
    words = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
    message = f"{name} gave no value for {100 * share:.1f} % of the rollouts" + (f" ({words})" if words else " (it returned None)")
    arithmetic = (
        f"{sum(kinds.values())} failures and {max(0, none)} times None in {int(where.present.sum())} rollouts; a whole group of None does "
    )
    arithmetic += "not count: there the reward does not apply"
    evidence = {"value": share, "none": float(max(0, none)), **{f"failed/{kind}": float(count) for kind, count in kinds.items()}}
    fixes = []
    if kinds.get("timeout"):
        fixes.append(Fix("rewards[].deadline_s", "higher", "or make the reward faster: every such rollout trains without it"))
    if set(kinds) - {"timeout"}:
        fixes.append(Fix("rewards[].on_error", "stop", "to see the first failure with its traceback (events.jsonl has them all)"))
    if not kinds:
        fixes.append(Fix("rewards", f"{name} returns a number", "return None only where the reward does not apply to the prompt"))
    return Details(message, evidence, arithmetic, tuple(fixes), _unjudged_rows(where, reward, name))


def _unjudged_rows(where: Observed, reward: int, name: str) -> tuple[str, ...]:
    failed = [f for f in where.failures if f.reward == name and f.row][-LOOK_AT:]
    if failed:
        return tuple(f"step {f.step}, {f.row}, sample {f.sample}: {f.kind} {f.message}".rstrip()[:160] for f in failed)
    missing = np.flatnonzero(np.isnan(where.values[:, reward]) & where.present)[-LOOK_AT:]
    return tuple(where.place(rollout) for rollout in missing)


# R12 ----------------------------------------------------------------------------------------------------------------------------------


def length_correlation(observed: Observed) -> float:
    return pooled_spearman(np.where(observed.present, observed.lengths, np.nan), observed.totals, observed.group_size)


def length(observed: Observed) -> Result:
    """R12: longer is better paid. A negative correlation is at most a note: wrong rollouts that run into a limit are long."""
    rule = RULES["R12"]
    if missing := needs.groups(observed, rule):
        return missing
    if np.isnan(observed.lengths).all():
        return skipped(rule, "no lengths were written", "tokens")
    rho = length_correlation(observed)
    if np.isnan(rho):
        return skipped(rule, "in no group do both lengths and totals vary", "groups whose rollouts differ")
    assert rule.levels is not None
    result = decide(observed, rule, one(length_correlation), _explain_length, healthy="length and total: ρ {value} within groups")
    if isinstance(result, Finding) or rho > -rule.levels.info:
        return result
    message = f"shorter rollouts are better paid: ρ = {rho:.2f} within groups"
    return found(rule, 1, Details(message, _length_evidence(observed, rho), _LENGTH_ARITHMETIC), observed, still=True)


_LENGTH_ARITHMETIC = "Spearman: lengths and totals as ranks within their group, pooled over the groups in which both vary"


def _length_evidence(where: Observed, rho: float) -> dict[str, float]:
    evidence = {"value": rho}
    for name, rewards in (
        ("outcome", [r.role == "outcome" for r in where.rewards]),
        ("shaping", [r.role != "outcome" for r in where.rewards]),
    ):
        chosen = np.array(rewards) & (where.weights != 0)
        if chosen.any() and not chosen.all():
            total = with_weights(where, np.where(chosen, where.weights, 0.0)).totals
            evidence[f"rho/{name}"] = float(np.nan_to_num(pooled_spearman(where.lengths, total, where.group_size)))
    cut = where.truncated == 1.0
    if cut.any() and np.isfinite(where.advantages).any():
        evidence["truncated"] = float(np.nanmean(where.truncated))
        evidence["truncated_and_rewarded"] = float((where.advantages[cut] > 0).mean())
    return evidence


def _explain_length(where: Observed, rho: float, _: int) -> Details:
    evidence = _length_evidence(where, rho)
    message = f"longer rollouts are better paid: ρ = {rho:.2f} within groups"
    message += "" if where.length_unit == "tokens" else f" (length in {where.length_unit})"
    if "truncated_and_rewarded" in evidence:
        cut, paid = 100 * evidence["truncated"], 100 * evidence["truncated_and_rewarded"]
        message += f"; {cut:.0f} % are cut by a limit, and {paid:.0f} % of those have a positive advantage"
    fixes = [Fix("rewards", "soft_overlong", "takes reward from what comes near the limit; it counts sampled tokens only")]
    if (fix := _without_the_longest(where, rho)) is not None:
        fixes.insert(0, fix)
    if evidence.get("truncated_and_rewarded", 0.0) > 0.25:
        fixes.append(_against_cut(where.method))
    return Details(message, evidence, _LENGTH_ARITHMETIC, tuple(fixes), _longest(where))


def _against_cut(method: str) -> Fix:
    if method == "ppo":
        return Fix("loss.missing_end_penalty", "above 0", "a rollout that a limit cut loses it")
    return Fix("loss.mask_truncated", "true", "a rollout that a limit cut is then not trained")


def _without_the_longest(where: Observed, rho: float) -> Fix | None:
    """Drop the reward that carries most of the correlation, if there is one."""
    if len(where.acting) < 2:
        return None
    after = {int(k): length_correlation(with_weights(where, without(where, int(k)))) for k in where.acting}
    known = {k: value for k, value in after.items() if not math.isnan(value)}
    best = min(known, key=lambda k: abs(known[k]), default=None)
    if best is None or known[best] > rho - 0.1:
        return None
    name = where.rewards[best].name
    return Fix("rewards[].weight", f"0 (or less) for {name}", f"{name} carries it", rho, known[best])


def _longest(where: Observed) -> tuple[str, ...]:
    paid = np.where(where.totals >= np.nanmedian(where.totals), np.nan_to_num(where.lengths), -1.0)
    return tuple(where.place(rollout) for rollout in np.argsort(paid)[-LOOK_AT:][::-1])


# R13 ----------------------------------------------------------------------------------------------------------------------------------

_KINDS = ("repeated 3-grams", "duplicates within a group", "empty answers")


FEWEST_COPIES = 32
"""Rollouts that could be copies below which their share is no number."""


def degenerate(observed: Observed) -> Floats:
    """[3] mean share of repeated 3-grams; share of rollouts equal to an earlier one of their group; share of empty ones."""
    return np.array([_mean(observed.repeated), _mean(_copies(observed)), _mean(observed.empty)])


def _copies(observed: Observed) -> Floats:
    """[N] 1 for a copy. Right answers are left out where they are known: many tasks have one, and a policy that found it repeats it."""
    flags = observed.duplicate
    if observed.right is not None:
        flags = np.where(observed.right == 1.0, np.nan, flags)
    return flags if (~np.isnan(flags)).sum() >= FEWEST_COPIES else np.full(len(flags), np.nan)


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def degeneracy(observed: Observed) -> Result:
    """R13: loops, copies and silence."""
    rule = RULES["R13"]
    if missing := needs.groups(observed, rule, least=1):
        return missing
    if np.isnan(degenerate(observed)).all():
        return skipped(rule, "no texts were written", "text")
    return decide(observed, rule, degenerate, _explain_degeneracy, healthy="rollouts say different things (highest share {value})")


def _explain_degeneracy(where: Observed, value: float, kind: int) -> Details:
    values = dict(zip(("repeated", "duplicate", "empty"), degenerate(where).tolist(), strict=True))
    message = f"{_KINDS[kind]}: {100 * value:.0f} %"
    arithmetic = (
        "share of the 3-grams of a rollout that occurred before in it, mean over rollouts",
        "rollouts of at least 8 words, not right, that equal an earlier one of their group ÷ such rollouts",
        "rollouts without text and without a call ÷ rollouts",
    )[kind]
    fixes = (
        (Fix("rewards", "repetition", "takes reward from repeated n-grams"), Fix("rollout.max_tokens", "lower", "a loop then ends sooner")),
        (
            Fix("rollout.temperature", "higher", "copies of one rollout carry no signal"),
            Fix("loss.kl_coef", "0.01–0.04", "holds the policy's spread"),
        ),
        (Fix("rewards", "think_format", "or another reward that an empty answer does not earn"),),
    )[kind]
    flags = ((where.repeated > 0.5), (_copies(where) == 1.0), (where.empty == 1.0))[kind]
    rows = tuple(where.place(rollout) for rollout in np.flatnonzero(flags)[-LOOK_AT:])
    return Details(message, {"value": value, **{k: v for k, v in values.items() if not math.isnan(v)}}, arithmetic, fixes, rows)
