"""The few statistics that the checks are made of. numpy in, numpy out; float64; NaN = not counted.

Shapes: N rollouts = B groups × G samples, group after group, as in `rewards.ledger`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from postgrad.rewards.ledger import Floats, centred

TINY = 1e-12
RESAMPLES = 400


def within(values: Floats, group_size: int) -> Floats:
    """Values minus their group's mean, 0 where not counted: x̃."""
    return centred(values, group_size)


def pooled_correlations(deviations: Floats) -> Floats:
    """Correlations [K, K] within groups: Σ x̃ᵢ x̃ⱼ / √(Σ x̃ᵢ² Σ x̃ⱼ²), pooled over groups. NaN where a column never varies.

    >>> pooled_correlations(within(np.array([[1.0, 0.0], [0.0, 1.0], [5.0, 7.0], [5.0, 7.0]]), 2)).round(3).tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
    """
    products = deviations.T @ deviations
    spread = np.sqrt(np.diag(products))
    scale = np.outer(spread, spread)
    correlations: Floats = np.where(scale > TINY, products / np.maximum(scale, TINY), np.nan)
    return correlations


def ranks_within(values: Floats, group_size: int) -> Floats:
    """Rank of each counted value among its group's (ties share their mean rank), minus the mean rank; 0 where not counted."""
    grouped = values.reshape(-1, group_size)
    counted = ~np.isnan(grouped)
    mine, other = grouped[:, :, None], grouped[:, None, :]
    below = (other < mine).sum(axis=2) + 0.5 * (other == mine).sum(axis=2)
    middle = counted.sum(axis=1, keepdims=True) / 2.0
    ranks: Floats = np.where(counted, below - middle, 0.0).reshape(-1)
    return ranks


def pooled_spearman(x: Floats, y: Floats, group_size: int) -> float:
    """Rank correlation within groups, pooled over the groups in which both vary. NaN where there is none.

    >>> pooled_spearman(np.array([1.0, 2.0, 3.0, 9.0, 9.0, 9.0]), np.array([1.0, 5.0, 6.0, 1.0, 2.0, 3.0]), 3)
    1.0
    """
    both = ~(np.isnan(x) | np.isnan(y))
    a, b = (ranks_within(np.where(both, values, np.nan), group_size).reshape(-1, group_size) for values in (x, y))
    active = ((a**2).sum(axis=1) > TINY) & ((b**2).sum(axis=1) > TINY)
    a, b = a[active], b[active]
    scale = math.sqrt(float((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / scale if scale > TINY else math.nan


def pooled_kendall(x: Floats, y: Floats, group_size: int) -> float:
    """τ-b over all pairs within groups: (agreeing − opposite) / √(pairs that x orders · pairs that y orders).

    Values that differ by no more than 1e-9 are tied. 0 where only one of the two orders any pair, NaN where neither does.
    Source: Kendall, 1945.

    >>> pooled_kendall(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0]), 3)  # two of three pairs agree
    0.3333333333333333
    """
    both = ~(np.isnan(x) | np.isnan(y))
    x, y = (np.where(both, values, np.nan) for values in (x, y))
    agreement = ordered_x = ordered_y = 0.0
    for part in in_parts(len(x), group_size):
        a, b = _orders(x[part], group_size), _orders(y[part], group_size)
        agreement += float((a * b).sum())
        ordered_x += float((a**2).sum())
        ordered_y += float((b**2).sum())
    if not ordered_x or not ordered_y:
        return math.nan if ordered_x == ordered_y else 0.0
    return agreement / math.sqrt(ordered_x * ordered_y)


def in_parts(rollouts: int, group_size: int, *, pairs: int = 2**22) -> Iterator[slice]:
    """Slices of whole groups that have about so many pairs of rollouts: what compares all pairs takes no more memory than that.

    >>> list(in_parts(12, 4, pairs=32))
    [slice(0, 8, None), slice(8, 12, None)]
    """
    step = max(1, pairs // group_size**2) * group_size
    return (slice(start, min(start + step, rollouts)) for start in range(0, rollouts, step))


def _orders(values: Floats, group_size: int) -> Floats:
    """[B, G, G]: 1 where the first of a pair is higher, −1 where it is lower, 0 where they are tied or one is not counted."""
    grouped = values.reshape(-1, group_size)
    differences = np.nan_to_num(grouped[:, :, None] - grouped[:, None, :])
    signs: Floats = np.where(np.abs(differences) <= 1e-9, 0.0, np.sign(differences))
    return signs


def group_covariances(deviations: Floats, other: Floats, group_size: int) -> Floats:
    """Covariance [B, K] of each column of x̃ [N, K] with `other` [N] within each group (divided by the group size)."""
    product = deviations * within(other, group_size)[:, None]
    covariances: Floats = product.reshape(-1, group_size, deviations.shape[1]).mean(axis=1)
    return covariances


@lru_cache(maxsize=64)
def _resamples(count: int) -> NDArray[np.int64]:
    """How often each of `count` groups is drawn, per resample: fixed, so a finding is the same every time it is computed."""
    drawn: NDArray[np.int64] = np.random.default_rng(count).multinomial(count, np.full(count, 1.0 / count), size=RESAMPLES)
    return drawn


def bootstrap_interval(per_group: Floats) -> tuple[Floats, Floats]:
    """95 % interval of the mean of each column of per_group [B, K], by drawing whole groups with replacement."""
    means = _resamples(len(per_group)) @ per_group / len(per_group)
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return low, high


def r_squared(target: Floats, predictors: Floats) -> float:
    """Share of the sum of squares of target [N] that the columns of predictors [N, K] reproduce. Both are centred. NaN: no spread."""
    total = float(target @ target)
    if total <= TINY or not predictors.shape[1]:
        return math.nan
    solution = np.linalg.lstsq(predictors, target, rcond=1e-8)[0]
    rest = target - predictors @ solution
    return max(0.0, 1.0 - float(rest @ rest) / total)


def mann_kendall(series: Floats) -> tuple[float, float]:
    """(p of a rise, p of a fall): one-sided Mann–Kendall trend test with the correction for ties. 1.0 for fewer than four values.

    >>> rise, fall = mann_kendall(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    >>> round(rise, 4), round(fall, 4)
    (0.0137, 1.0)
    """
    count = len(series)
    if count < 4:
        return 1.0, 1.0
    signs = np.sign(series[None, :] - series[:, None])
    score = float(np.triu(signs, 1).sum())
    ties = np.unique(series, return_counts=True)[1].astype(float)
    variance = (count * (count - 1) * (2 * count + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18.0
    if variance <= 0:
        return 1.0, 1.0
    up, down = (1.0 - _normal((sign * score - 1.0) / math.sqrt(variance)) if sign * score > 0 else 1.0 for sign in (1.0, -1.0))
    return up, down


def _normal(z: float) -> float:
    return 0.5 * (1.0 + math.erf(z / math.sqrt(2.0)))


def rise(series: Floats) -> float:
    """Mean of the last third minus mean of the first third."""
    third = max(1, len(series) // 3)
    return float(series[-third:].mean() - series[:third].mean())
