"""R3, R4, R8, R10: whose signal it is that the advantages carry."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from postgrad.rewards.doctor import needs
from postgrad.rewards.doctor.catalogue import RULES
from postgrad.rewards.doctor.finding import Details, Finding, Fix, Passed, Result, decide, found, one, skipped
from postgrad.rewards.doctor.groups import outcome_filtered
from postgrad.rewards.doctor.numbers import bootstrap_interval, group_covariances
from postgrad.rewards.doctor.observed import Observed
from postgrad.rewards.doctor.recompute import Scheme, recomputed, scheme_of, shaping_scaled
from postgrad.rewards.ledger import Floats, equal_groups, weighted_total

DEAD = 0.02
"""Share of the signal below which a reward has no say."""
NEAR_MAXIMUM = 0.02
"""Distance to a reward's maximum, as a share of its range, at which it is saturated."""

# R3 -----------------------------------------------------------------------------------------------------------------------------------


def signal_shares(observed: Observed) -> Floats:
    """s_k [K]: mean over active groups of w_k·Cov(r_k, S)/Var(S); they add up to 1. NaN without an active group.

    Where each reward is normalised before the sum, r_k is the normalised reward and S the sum of those.
    """
    total = observed.parts.sum(axis=1)
    active = ~equal_groups(total, observed.group_size) & observed.trained
    if not active.any():
        return np.full(len(observed.rewards), np.nan)
    covariances = group_covariances(observed.parts, total, observed.group_size)[active]
    shares: Floats = (covariances / covariances.sum(axis=1, keepdims=True)).mean(axis=0)
    return shares


def _shaping_share(observed: Observed) -> float:
    shares = signal_shares(observed)
    return float(sum(share for share, reward in zip(shares, observed.rewards, strict=True) if reward.role != "outcome"))


def signal_share(observed: Observed) -> Result:
    """R3: who owns the advantages; and which reward has no say."""
    rule = RULES["R3"]
    if missing := needs.group_baseline(observed, rule) or needs.groups(observed, rule) or needs.several(observed, rule):
        return missing
    missing = needs.outcome(observed, rule)
    result = missing or decide(observed, rule, one(_shaping_share), _explain_share, healthy="shaping owns {value} of the advantages")
    dead = _dead(observed)
    if dead and not isinstance(result, Finding):
        return found(rule, 1, _explain_dead(observed, dead), observed, still=True)
    return result


def _dead(observed: Observed) -> tuple[int, ...]:
    """Rewards with a weight and next to no share in every one of at least two windows. A share below −DEAD is R4's matter."""
    shares = np.stack([signal_shares(window) for window in observed.windows])
    if len(shares) < 2 or np.isnan(shares).all():
        return ()
    silent = np.all(np.isnan(shares) | (np.abs(shares) < DEAD), axis=0)
    return tuple(int(k) for k in observed.acting if silent[k])


def _explain_share(where: Observed, share: float, _: int) -> Details:
    shares = signal_shares(where)
    named = {reward.name: float(value) for reward, value in zip(where.rewards, shares, strict=True)}
    words = ", ".join(f"{name} {100 * value:.0f} %" for name, value in sorted(named.items(), key=lambda item: -item[1]))
    message = f"shaping rewards own {100 * share:.0f} % of the advantages: the policy learns them first ({words})"
    arithmetic = (
        "s = mean over active groups of w·Cov(r, S)/Var(S), the part of each advantage that a reward accounts for; the parts add up to 1"
    )
    evidence = {"value": share, **{f"share/{name}": value for name, value in named.items()}}
    return Details(message, evidence, arithmetic, _share_fixes(where, share))


def _share_fixes(where: Observed, share: float) -> tuple[Fix, ...]:
    """Scale the shaping weights down until the outcome owns half of the signal."""
    for factor in (0.5, 0.25, 0.1):
        after = _shaping_share(with_weights(where, shaping_scaled(where, factor)))
        if after <= 0.5:
            return (Fix("rewards[].weight", f"{factor:g} × for the shaping rewards", "gives the outcome the larger part", share, after),)
    why = "the shaping rewards also decide groups in which the outcome is constant: leave those groups out"
    return (Fix("loss.filter", "outcome", why, share, _shaping_share(outcome_filtered(where))),)


def with_weights(observed: Observed, weights: Floats) -> Observed:
    rewards = tuple(dataclasses.replace(r, weight=float(w)) for r, w in zip(observed.rewards, weights, strict=True))
    totals = weighted_total(observed.values, weights, observed.group_size)
    return dataclasses.replace(observed, rewards=rewards, totals=totals)


def _explain_dead(observed: Observed, dead: tuple[int, ...]) -> Details:
    names = " and ".join(observed.rewards[k].name for k in dead)
    shares = signal_shares(observed)
    message = f"{names} own{'s' if len(dead) == 1 else ''} less than 2 % of the advantages: no visible effect"
    evidence = {f"share/{observed.rewards[k].name}": float(np.nan_to_num(shares[k])) for k in dead}
    fixes = [Fix("rewards[].weight", "0 or larger", "a reward without a say is either not needed or weighs too little")]
    if (fix := _normalize_fix(observed, dead[0])) is not None:
        fixes.insert(0, fix)
    return Details(message, evidence, "s = mean over active groups of w·Cov(r, S)/Var(S)", tuple(fixes))


def _normalize_fix(observed: Observed, reward: int) -> Fix | None:
    """Each reward normalised before the sum, where that gives the silent one a say."""
    if observed.method == "ppo" or not observed.weights[reward]:
        return None
    settings = {**observed.settings, "loss.normalize": "normalize_then_sum"}
    before, after = (float(signal_shares(run)[reward]) for run in (observed, dataclasses.replace(observed, settings=settings)))
    if math.isnan(after) or after < DEAD:
        return None
    why = f"normalises each reward before they are added: {observed.rewards[reward].name} is then heard, whatever its range"
    return Fix("loss.normalize", "normalize_then_sum", why, before, after)


# R4 -----------------------------------------------------------------------------------------------------------------------------------


def pushed(observed: Observed) -> tuple[Floats, Floats, Floats]:
    """(mean, low, high) [K] of Cov(r_k, A) over the groups that train, in the direction of the reward's weight; NaN without such groups.

    Below 0: the update makes rollouts likelier that have less of this reward.
    """
    signs = np.sign(observed.weights)
    grouped = np.abs(np.nan_to_num(observed.advantages)).reshape(-1, observed.group_size)
    active = grouped.max(axis=1) > 1e-9
    if active.sum() < 2:
        nothing = np.full(len(signs), np.nan)
        return nothing, nothing, nothing
    per_group = group_covariances(observed.deviations, observed.advantages, observed.group_size)[active] * signs
    low, high = bootstrap_interval(per_group)
    return per_group.mean(axis=0), low, high


def sacrificed(observed: Observed) -> Result:
    """R4: a reward that training makes smaller, although its weight asks for more. Windows in a row are counted, per reward."""
    rule = RULES["R4"]
    if missing := needs.groups(observed, rule) or needs.advantages(observed, rule) or needs.several(observed, rule):
        return missing
    assert rule.levels is not None
    below = np.stack([pushed(window)[2] < 0 for window in observed.windows])
    runs = [_longest(below[:, k].tolist()) for k in range(below.shape[1])]
    worst = max(observed.acting, key=lambda k: runs[k][0])
    length, start = runs[worst]
    if not length:
        return Passed(rule.id, rule.title, "training pushes no reward down", {"value": 0.0})
    where = observed.join(start, start + length - 1)
    details = _explain_sacrificed(where, int(worst), length)
    return found(rule, rule.levels.level(length), details, where, still=start + length == len(below))


def _longest(flags: list[bool]) -> tuple[int, int]:
    """(length, start) of the longest run of True, the latest of equals."""
    best, run = (0, 0), 0
    for place, flag in enumerate(flags):
        run = run + 1 if flag else 0
        best = max(best, (run, place - run + 1))
    return best


def _explain_sacrificed(where: Observed, reward: int, windows: int) -> Details:
    name = where.rewards[reward].name
    mean, low, high = (float(part[reward]) for part in pushed(where))
    lasting = f"{windows} windows in a row" if windows > 1 else "in one window"
    message = f"training pushes {name} down, although its weight asks for more ({lasting})"
    arithmetic = (
        f"mean over groups of Cov({name}, advantage) = {mean:.3g}, 95 % interval [{low:.3g}, {high:.3g}] from whole groups drawn again"
    )
    evidence = {"value": float(windows), "covariance": mean, "low": low, "high": high}
    return Details(message, evidence, arithmetic, _sacrificed_fixes(where, reward, mean))


def _sacrificed_fixes(where: Observed, reward: int, before: float) -> tuple[Fix, ...]:
    """The smallest factor on the weight that ends it, on these rollouts."""
    scheme = scheme_of(where)
    name, weight = where.rewards[reward].name, where.rewards[reward].weight
    if scheme is None:
        return (Fix("rewards[].weight", f"more for {name}", "what outweighs it now has the larger spread within groups"),)
    for factor in (1.5, 2.0, 3.0, 5.0, 10.0):
        weights = where.weights.copy()
        weights[reward] *= factor
        after = dataclasses.replace(where, advantages=recomputed(where, scheme, weights=weights))
        if pushed(after)[1][reward] >= 0:
            why = f"{name} is then no longer pushed down"
            return (Fix("rewards[].weight", f"{factor * weight:g} for {name}", why, before, float(pushed(after)[0][reward])),)
    return (Fix("rewards[].weight", f"less for what works against {name}", "even 10 × its weight does not end it (see R5)"),)


# R8 -----------------------------------------------------------------------------------------------------------------------------------


def resolution_of(observed: Observed) -> float:
    """Distinct advantages ÷ distinct reward vectors, over the trained groups with more than one vector. NaN without one."""
    vectors = _distinct(observed.values[:, observed.acting], observed)
    levels = _distinct(observed.advantages[:, None], observed)
    counted = (vectors > 1) & observed.trained
    return float(levels[counted].sum() / vectors[counted].sum()) if counted.any() else math.nan


def _distinct(table: Floats, observed: Observed) -> Floats:
    """[B] how many different rows (to 1e-6) the scored rollouts of each group have."""
    rounded = np.where(np.isnan(table), -1e300, np.round(table, 6))
    scored = ~np.isnan(observed.totals)
    size = observed.group_size
    grouped = rounded.reshape(-1, size, table.shape[1])
    same = (grouped[:, :, None, :] == grouped[:, None, :, :]).all(axis=3)
    usable = scored.reshape(-1, size)
    earlier = np.tril(np.ones((size, size), dtype=bool), -1)
    repeated = (same & earlier & usable[:, None, :]).any(axis=2)
    counts: Floats = (usable & ~repeated).sum(axis=1).astype(np.float64)
    return counts


def resolution(observed: Observed) -> Result:
    """R8: rollouts with different rewards end up with one advantage."""
    rule = RULES["R8"]
    return (
        needs.group_baseline(observed, rule)
        or needs.groups(observed, rule)
        or needs.advantages(observed, rule)
        or needs.several(observed, rule)
        or decide(observed, rule, one(resolution_of), _explain_resolution, healthy="{value} distinct advantages per distinct reward vector")
    )


def _explain_resolution(where: Observed, value: float, _: int) -> Details:
    message = f"different rewards end up in one advantage: {value:.2f} distinct advantages per distinct reward vector"
    arithmetic = "within each trained group: number of different advantages ÷ number of different vectors of rewards, summed over groups"
    after = resolution_of(dataclasses.replace(where, advantages=recomputed(where, Scheme("group", "normalize_then_sum"))))
    fixes = [Fix("rewards[].weight", "unequal", "equal weights make 1 + 0 and 0 + 1 the same")]
    if after > value:
        fixes.insert(0, Fix("loss.normalize", "normalize_then_sum", "normalises each reward before they are added", value, after))
    return Details(message, {"value": value}, arithmetic, tuple(fixes))


# R10 ----------------------------------------------------------------------------------------------------------------------------------


def fullness(observed: Observed) -> Floats:
    """[K] where the mean stands between a reward's lowest and highest value, 1 = highest; NaN while it varies or has no known range."""
    found_at = np.full(len(observed.rewards), np.nan)
    for k, reward in enumerate(observed.rewards):
        values = observed.values[:, k]
        scored = values[~np.isnan(values)]
        if reward.range is None or reward.range[1] <= reward.range[0] or not len(scored):
            continue
        low, high = reward.range
        varies = (~equal_groups(values, observed.group_size)).mean() > NEAR_MAXIMUM
        found_at[k] = math.nan if varies else (scored.mean() - low) / (high - low)
    return found_at


def saturation(observed: Observed) -> Result:
    """R10: a reward that everything earns separates nothing any more."""
    rule = RULES["R10"]
    if missing := needs.groups(observed, rule):
        return missing
    if all(reward.range is None for reward in observed.rewards):
        return skipped(rule, "no reward declares its range", "@reward(range=...)")
    return decide(observed, rule, fullness, _explain_saturation, healthy="no reward stands still at its maximum")


def _explain_saturation(where: Observed, value: float, reward: int) -> Details:
    name = where.rewards[reward].name
    low, high = where.rewards[reward].range or (0.0, 0.0)
    mean = float(np.nanmean(where.values[:, reward]))
    message = f"{name} stands at its maximum and no longer varies: it separates no rollouts"
    arithmetic = f"mean {mean:.3f} of a range {low:g} … {high:g}; it differs within fewer than 2 % of the groups"
    fix = Fix("rewards", f"{name} as a gate", "once learned, it need not be paid for: keep it as a condition of the outcome, or drop it")
    return Details(message, {"value": value, "mean": mean}, arithmetic, (fix,))
