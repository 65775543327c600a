"""R5, R6, R7: how rewards stand to one another within groups."""

from __future__ import annotations

import itertools
import math

import numpy as np

from postgrad.rewards.doctor import needs
from postgrad.rewards.doctor.catalogue import RULES
from postgrad.rewards.doctor.finding import Details, Fix, Passed, Result, decide, one
from postgrad.rewards.doctor.groups import LOOK_AT
from postgrad.rewards.doctor.numbers import pooled_correlations, r_squared
from postgrad.rewards.doctor.observed import Observed
from postgrad.rewards.doctor.recompute import recomputed, scheme_of, shaping_scaled, sign_flips, without
from postgrad.rewards.doctor.shares import with_weights
from postgrad.rewards.ledger import EQUAL, Floats, centred


def agreement(observed: Observed) -> Floats:
    """[K, K] correlations within groups of the rewards with a weight, each in the direction of its weight."""
    return pooled_correlations(_signed(observed))


def _signed(observed: Observed) -> Floats:
    """x̃ of the rewards with a weight, each in the direction of its weight."""
    signed: Floats = observed.deviations[:, observed.acting] * np.sign(observed.weights[observed.acting])
    return signed


# R5 -----------------------------------------------------------------------------------------------------------------------------------


def _pairs(observed: Observed) -> Floats:
    matrix = agreement(observed)
    return np.array([matrix[i, j] for i, j in itertools.combinations(range(len(matrix)), 2)])


def conflict(observed: Observed) -> Result:
    """R5: what raises one reward lowers the other."""
    rule = RULES["R5"]
    return (
        needs.groups(observed, rule)
        or needs.several(observed, rule)
        or decide(observed, rule, _pairs, _explain_conflict, healthy="no two rewards pull apart (lowest ρ {value})")
    )


def _explain_conflict(where: Observed, rho: float, pair: int) -> Details:
    first, second = list(itertools.combinations(where.acting.tolist(), 2))[pair]
    names = [where.rewards[k].name for k in (first, second)]
    message = f"{names[0]} and {names[1]} pull apart: ρ = {rho:.2f} within groups"
    arithmetic = "ρ = Σ x̃·ỹ / √(Σ x̃² · Σ ỹ²), x̃ = reward less its group's mean, in the direction of its weight, pooled over groups"
    helps = {k: _with_outcome(where, k) for k in (first, second)}
    weaker = min((first, second), key=lambda k: (where.rewards[k].role == "outcome", helps[k], abs(where.rewards[k].weight)))
    evidence = {"value": rho, **{f"rho_outcome/{where.rewards[k].name}": value for k, value in helps.items() if value}}
    fixes = [Fix("rewards", f"{where.rewards[weaker].name} only where the other holds", "pay it for rollouts that earn the other one")]
    if (scheme := scheme_of(where)) is not None:
        flips = sign_flips(recomputed(where, scheme), recomputed(where, scheme, weights=without(where, weaker)))
        evidence["sign_flips_without"] = flips
        why = f"without {where.rewards[weaker].name} the advantage of {100 * flips:.0f} % of the rollouts changes its sign"
        fixes.append(Fix("rewards[].weight", f"0 for {where.rewards[weaker].name}", why))
    return Details(message, evidence, arithmetic, tuple(fixes))


def _with_outcome(where: Observed, reward: int) -> float:
    """Correlation of a reward with the outcome within groups, in the direction of its weight; 0 where there is none."""
    if where.outcome is None:
        return 0.0
    pair = np.stack([where.parts[:, reward], centred(where.outcome, where.group_size)], axis=1)
    return float(np.nan_to_num(pooled_correlations(pair)[0, 1]))


# R6 -----------------------------------------------------------------------------------------------------------------------------------


def explained(observed: Observed) -> Floats:
    """[K'] R² of each reward with a weight on those that correlate positively with it. What pulls apart is R5's matter."""
    centred = _signed(observed)
    matrix = np.nan_to_num(agreement(observed))
    np.fill_diagonal(matrix, 0.0)
    return np.array([r_squared(centred[:, k], centred[:, matrix[k] > 0]) for k in range(len(matrix))])


def redundancy(observed: Observed) -> Result:
    """R6: two rewards that say one thing pay for it twice."""
    rule = RULES["R6"]
    return (
        needs.groups(observed, rule)
        or needs.several(observed, rule)
        or decide(observed, rule, explained, _explain_redundancy, healthy="no reward follows from the others (highest R² {value})")
    )


def _explain_redundancy(where: Observed, value: float, column: int) -> Details:
    matrix = np.nan_to_num(agreement(where))
    np.fill_diagonal(matrix, 0.0)
    partner = int(np.argmax(matrix[column]))
    pair = [int(where.acting[k]) for k in (column, partner)]
    names = [where.rewards[k].name for k in pair]
    message = f"{names[0]} follows from the other rewards, above all from {names[1]}: R² = {value:.2f} within groups"
    arithmetic = (
        f"R² of {names[0]} on the rewards that agree with it, group means taken off; ρ with {names[1]} = {matrix[column, partner]:.2f}"
    )
    drop = min(pair, key=lambda k: (where.rewards[k].role == "outcome", abs(where.rewards[k].weight)))
    evidence = {"value": value, "correlation": float(matrix[column, partner])}
    why = "it is paid twice; raise the other's weight if the sum should stay"
    if (scheme := scheme_of(where)) is not None:
        flips = sign_flips(recomputed(where, scheme), recomputed(where, scheme, weights=without(where, drop)))
        evidence["sign_flips_without"] = flips
        why = f"without it the advantage of {100 * flips:.1f} % of the rollouts changes its sign"
    rest = with_weights(where, without(where, drop))
    remaining = explained(rest)
    after = float(np.nanmax(remaining)) if len(remaining) and not np.isnan(remaining).all() else 0.0
    return Details(message, evidence, arithmetic, (Fix("rewards[].weight", f"0 for {where.rewards[drop].name}", why, value, after),))


# R7 -----------------------------------------------------------------------------------------------------------------------------------


def _inverted(observed: Observed) -> tuple[Floats, Floats]:
    assert observed.outcome is not None
    return inverted_pairs(observed.outcome, observed.compared, observed.group_size)


def inverted_pairs(outcomes: Floats, totals: Floats, group_size: int) -> tuple[Floats, Floats]:
    """(inverted, comparable) pairs [B, G, G]: entry i, j where i has the better outcome. Both [N], NaN = not scored."""
    outcome, total = (values.reshape(-1, group_size) for values in (outcomes, totals))
    better = outcome[:, :, None] > outcome[:, None, :] + EQUAL
    lower = total[:, :, None] < total[:, None, :] - EQUAL
    known = ~(np.isnan(total[:, :, None]) | np.isnan(total[:, None, :]))
    return (better & lower & known).astype(np.float64), (better & known).astype(np.float64)


def inversion_share(observed: Observed) -> float:
    inverted, comparable = _inverted(observed)
    return float(inverted.sum() / comparable.sum()) if comparable.any() else math.nan


def inversion(observed: Observed) -> Result:
    """R7: a worse outcome that is paid more."""
    rule = RULES["R7"]
    if missing := needs.groups(observed, rule) or needs.outcome(observed, rule):
        return missing
    if all(observed.rewards[k].role == "outcome" for k in observed.acting):
        return Passed(rule.id, rule.title, "only the outcome is paid", {"value": 0.0})
    return decide(observed, rule, one(inversion_share), _explain_inversion, healthy="{value} of the pairs rank the worse outcome higher")


def _explain_inversion(where: Observed, share: float, _: int) -> Details:
    inverted, comparable = _inverted(where)
    message = f"in {100 * share:.1f} % of the pairs of a group the worse outcome has the higher total"
    arithmetic = f"{inverted.sum():.0f} of {comparable.sum():.0f} pairs with different outcomes; at 0 no wrong rollout outranks a right one"
    worst = np.argwhere(inverted > 0)[-LOOK_AT:]
    rows = tuple(where.place(int(group * where.group_size + low)) for group, _, low in worst)
    return Details(message, {"value": share, "pairs": float(comparable.sum())}, arithmetic, _inversion_fixes(where, share), rows)


def _inversion_fixes(where: Observed, share: float) -> tuple[Fix, ...]:
    """The largest factor on the shaping weights that ends it, on these rollouts."""
    for factor in (0.75, 0.5, 0.25, 0.1, 0.05):
        after = inversion_share(with_weights(where, shaping_scaled(where, factor)))
        if after <= 0.01:
            return (
                Fix("rewards[].weight", f"{factor:g} × for the shaping rewards", "they then stay under the outcome's gap", share, after),
            )
    return (Fix("rewards", "shaping only for right answers", "no smaller weight of the shaping rewards ends it"),)
