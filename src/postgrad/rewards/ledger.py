"""What the rewards add up to, and who is owed what of an advantage. numpy in, numpy out; float64.

Shapes: N rollouts = B prompts × G samples, group after group; K rewards. values [N, K], NaN = abstained.

A reward that abstains on a rollout is left out of its own statistics and is neutral in the sum: it counts with its group's mean, so it
moves neither that rollout nor its siblings. Counting it as 0 instead would punish or favour the siblings (trl#5902).

With totals S = Σ_k w_k r_k the advantage splits exactly over the rewards:

    A = (S − mean_g S) / (std S + ε) = Σ_k w_k (r_k − mean_g r_k) / (std S + ε)

The same holds when every reward is normalised within its group before the sum, and when positive advantages are weighed by λ: each
share is then weighed as its advantage is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from postgrad.rewards.base import RewardRole

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Scale = Literal["group", "batch", "none", "leave_one_out"]
Normalize = Literal["sum_then_normalize", "normalize_then_sum"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """How advantages are made of rewards: what the sum is divided by, what is normalised first, and what positive ones are weighed by.

    scale: group | batch | none | leave_one_out; without effect under normalize_then_sum, which scales by group, then by batch.
    """

    scale: Scale
    normalize: Normalize = "sum_then_normalize"
    positive_weight: float = 1.0

    @property
    def each_normalized(self) -> bool:
        """Each reward is normalised in its group before the sum: ranges have no effect, weights have."""
        return self.normalize == "normalize_then_sum"

    @property
    def divides_by_group(self) -> bool:
        """What a group has two levels of gets the same advantages, whatever the levels are."""
        return self.each_normalized or self.scale == "group"


EQUAL = 1e-6
"""Rewards of a group that differ by at most EQUAL · max(1, max |r|) are equal: rounding, not signal (as in `formulas.advantages`)."""


def group_means(values: ArrayLike, group_size: int) -> Floats:
    """Mean over the rollouts of each group that are not NaN, repeated for each rollout: [N, ...] → [N, ...]. NaN where all are.

    Computed from differences to one of the values, so the mean of equal values is that value exactly.
    """
    grouped = _grouped(values, group_size)
    counted = ~np.isnan(grouped)
    first = np.take_along_axis(grouped, np.argmax(counted, axis=1, keepdims=True), axis=1)
    offsets = np.where(counted, grouped - first, 0.0).sum(axis=1, keepdims=True)
    counts = counted.sum(axis=1, keepdims=True)
    means = first + offsets / np.maximum(counts, 1)
    return np.broadcast_to(means, grouped.shape).reshape(np.shape(values)).astype(np.float64)


def centred(values: ArrayLike, group_size: int) -> Floats:
    """Values minus their group's mean; 0 where abstained, and exactly 0 throughout a group of equal values."""
    array = np.asarray(values, dtype=np.float64)
    deviations: Floats = np.where(np.isnan(array), 0.0, array - group_means(array, group_size))
    return deviations


def weighted_total(values: ArrayLike, weights: ArrayLike, group_size: int) -> Floats:
    """S [N] = Σ_k w_k r_k, where an abstaining reward counts with its group's mean (with nothing if the whole group abstains).

    NaN where every reward with a weight abstained: such a rollout is left out of its group.

    >>> weighted_total([[1.0, 0.2], [0.0, np.nan]], [1.0, 1.0], 2).tolist()
    [1.2, 0.2]
    """
    array, weight = _checked(values, weights)
    acting = weight != 0.0
    abstained = np.isnan(array)
    filled = np.where(abstained, np.nan_to_num(group_means(array, group_size)), array)
    total: Floats = filled[:, acting] @ weight[acting]
    total[abstained[:, acting].all(axis=1)] = np.nan
    return total


def compared_total(
    values: ArrayLike, weights: ArrayLike, group_size: int, *, normalize: Normalize = "sum_then_normalize", eps: float = 1e-4
) -> Floats:
    """What the rollouts of a group are compared by [N]: the weighted total or, with normalize_then_sum, the weighted sum of the rewards
    that were each normalised within the group. Equal values of a group mean advantage 0. NaN where nothing was scored.

    Two rewards that cancel in the total need not cancel here:

    >>> values = [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    >>> equal_groups(compared_total(values, [1.0, 1.0], 3), 3).tolist()
    [True]
    >>> compared_total([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [1.0, 2.0], 3, normalize="normalize_then_sum").round(2).tolist()
    [0.0, 1.73, -1.73]
    """
    array, weight = _checked(values, weights)
    if normalize == "sum_then_normalize":
        return weighted_total(array, weight, group_size)
    return _normalized_total(array, weight, normalized(array, group_size, eps=eps) * weight)


def outcome_total(values: ArrayLike, weights: ArrayLike, roles: Sequence[RewardRole], group_size: int) -> Floats | None:
    """The total [N] over the rewards with role outcome; None when there is none (with a weight)."""
    array, weight = _checked(values, weights)
    outcome = np.array([role == "outcome" for role in roles], dtype=bool)
    if not (outcome & (weight != 0.0)).any():
        return None
    return weighted_total(array[:, outcome], weight[outcome], group_size)


def group_spread(totals: ArrayLike, group_size: int) -> Floats:
    """Sample standard deviation (n − 1) of each group's counted totals: [N] → [B]. 0 exactly where they are equal or fewer than two."""
    deviations = centred(totals, group_size).reshape(-1, group_size)
    counts = (~np.isnan(_grouped(totals, group_size))).sum(axis=1)
    spread: Floats = np.sqrt((deviations**2).sum(axis=1) / np.maximum(counts - 1, 1))
    spread[equal_groups(totals, group_size)] = 0.0
    return spread


def equal_groups(totals: ArrayLike, group_size: int) -> Flags:
    """[B] True where a group's counted totals are equal up to rounding, or fewer than two are counted."""
    grouped = _grouped(totals, group_size)
    counted = ~np.isnan(grouped)
    highest = np.where(counted, grouped, -np.inf).max(axis=1)
    lowest = np.where(counted, grouped, np.inf).min(axis=1)
    size = np.where(counted, np.abs(grouped), 0.0).max(axis=1)
    equal: Flags = highest - lowest <= EQUAL * np.maximum(1.0, size)  # one value: 0; none: −∞
    return equal


@dataclass(frozen=True, slots=True)
class AdvantageSplit:
    """shares [N, K]: what each reward contributed to each advantage. residual: largest |advantage − Σ shares| (0 up to rounding)."""

    names: tuple[str, ...]
    shares: Floats
    advantages: Floats
    residual: float


def split_advantages(
    values: ArrayLike,
    weights: ArrayLike,
    advantages: ArrayLike,
    *,
    names: Sequence[str],
    group_size: int,
    scale: Scale,
    normalize: Normalize = "sum_then_normalize",
    positive_weight: float = 1.0,
    eps: float = 1e-4,
) -> AdvantageSplit:
    """Split advantages [N] that were computed elsewhere over the rewards they came from.

    values [N, K] with NaN = abstained, weights [K]. `scale`, `normalize`, `positive_weight` and `eps` are those the advantages were
    computed with:
    sum_then_normalize: share_k = w_k (r_k − mean_g r_k) · f, with f = 1/(std_g S + ε) for group, 1/(std S + ε) over the batch for batch,
    1 for none and n/(n − 1) for leave_one_out, n being the rollouts of the group that are counted;
    normalize_then_sum: share_k = w_k n_k / (std Σ + ε) over the batch, with n_k = (r_k − mean_g r_k) / (std_g r_k + ε); no `scale`;
    positive_weight λ: every share of a rollout whose shares add up to more than 0, times λ.

    Raises `ValueError` when the shares do not add up to the advantages within 1e-6 · max(1, |advantage|): then the two were not
    computed from the same rewards, or the advantages not in float64.
    """
    array, weight = _checked(values, weights)
    given = np.asarray(advantages, dtype=np.float64)
    if given.shape != (len(array),) or len(names) != array.shape[1]:
        raise ValueError(f"values {array.shape}, but advantages {given.shape} and {len(names)} names")
    shares = _shares(array, weight, group_size, scale, normalize, positive_weight, eps)
    difference = np.abs(given - shares.sum(axis=1))
    wrong = ~(difference <= 1e-6 * np.maximum(1.0, np.abs(given)))  # written so that NaN is wrong too
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"the shares of rollout {row} add up to {shares[row].sum():.9g}, its advantage is {given[row]:.9g}")
    return AdvantageSplit(tuple(names), shares, given, float(difference.max(initial=0.0)))


def _shares(
    values: Floats, weights: Floats, group_size: int, scale: Scale, normalize: Normalize, positive_weight: float, eps: float
) -> Floats:
    if normalize == "sum_then_normalize":
        shares = _shares_of_sum(values, weights, group_size, scale, eps)
    else:
        shares = _shares_of_normalized(values, weights, group_size, eps)
    weighed: Floats = np.where(shares.sum(axis=1, keepdims=True) > 0.0, positive_weight * shares, shares)
    return weighed


def _shares_of_sum(values: Floats, weights: Floats, group_size: int, scale: Scale, eps: float) -> Floats:
    totals = weighted_total(values, weights, group_size)
    factors = np.repeat(_factors(totals, group_size, scale, eps), group_size)
    shares = centred(values, group_size) * weights * factors[:, None]
    shares[np.isnan(totals)] = 0.0
    return shares


def _factors(totals: Floats, group_size: int, scale: Scale, eps: float) -> Floats:
    """What a centred total of each group is multiplied by: [B]; 0 for a group of equal totals."""
    counts = (~np.isnan(_grouped(totals, group_size))).sum(axis=1)
    if scale == "group":
        factors = 1.0 / (group_spread(totals, group_size) + eps)
    elif scale == "batch":
        counted = totals[~np.isnan(totals)]
        spread = counted.std(ddof=1) if len(counted) > 1 else 0.0
        factors = np.full(len(counts), 1.0 / (spread + eps))
    elif scale == "none":
        factors = np.ones(len(counts))
    else:
        factors = counts / np.maximum(counts - 1, 1)
    result: Floats = np.where(equal_groups(totals, group_size), 0.0, factors)
    return result


def _shares_of_normalized(values: Floats, weights: Floats, group_size: int, eps: float) -> Floats:
    """Each reward normalised within its group, the sum normalised over the batch. An abstaining reward adds 0, its normalised mean."""
    shares = normalized(values, group_size, eps=eps) * weights
    totals = _normalized_total(values, weights, shares)
    return shares * _factors(totals, len(totals), "group", eps)


def normalized(values: ArrayLike, group_size: int, *, eps: float = 1e-4) -> Floats:
    """n_k = (r_k − mean_g r_k) / (std_g r_k + ε) of each reward by itself: [N, K] → [N, K], 0 where abstained or equal."""
    table = np.asarray(values, dtype=np.float64)
    factors = [np.repeat(_factors(column, group_size, "group", eps), group_size) for column in table.T]
    parts: Floats = centred(table, group_size) * np.stack(factors, axis=1)
    return parts


def _normalized_total(values: Floats, weights: Floats, parts: Floats) -> Floats:
    total: Floats = np.where(np.isnan(values[:, weights != 0.0]).all(axis=1), np.nan, parts.sum(axis=1))
    return total


def _checked(values: ArrayLike, weights: ArrayLike) -> tuple[Floats, Floats]:
    array, weight = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    if array.ndim != 2 or weight.shape != array.shape[1:]:
        raise ValueError(f"values are [rollouts, rewards] with one weight per reward, got {array.shape} and {weight.shape}")
    if np.isinf(array).any() or not np.isfinite(weight).all():
        raise ValueError("an infinite reward or weight")
    return array, weight


def _grouped(values: ArrayLike, group_size: int) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if group_size < 1 or len(array) % group_size:
        raise ValueError(f"{len(array)} rollouts are no whole groups of {group_size}")
    return array.reshape(-1, group_size, *array.shape[1:])


def recomputed_advantages(
    values: ArrayLike,
    weights: ArrayLike,
    *,
    group_size: int,
    scale: Scale,
    normalize: Normalize = "sum_then_normalize",
    positive_weight: float = 1.0,
    eps: float = 1e-4,
) -> Floats:
    """Advantages [N] from rewards alone, as `split_advantages` explains them: what other weights would have given the same rollouts.

    >>> recomputed_advantages([[1.0], [0.0], [np.nan]], [2.0], group_size=3, scale="none").tolist()
    [1.0, -1.0, 0.0]
    """
    array, weight = _checked(values, weights)
    total: Floats = _shares(array, weight, group_size, scale, normalize, positive_weight, eps).sum(axis=1)
    return total
