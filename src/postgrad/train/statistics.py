"""Intervals: a number from a sample is shown with how far it can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % interval."""

    mean: float
    low: float
    high: float
    count: int


def wilson(successes: float, count: int) -> Interval:
    """95 % Wilson score interval of a proportion (Wilson 1927): sensible also at 0 and at 1.

    >>> interval = wilson(0, 240)
    >>> round(interval.high, 4)
    0.0158
    """
    if count == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    p, z2 = successes / count, Z95**2
    centre = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = Z95 * math.sqrt(p * (1 - p) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    return Interval(p, max(0.0, centre - half), min(1.0, centre + half), count)


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Rank correlation, ties sharing their mean rank; 0 where one side is constant (nothing follows anything).

    >>> spearman([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    a, b = (_ranks(values) for values in (x, y))
    centre = (len(a) - 1) / 2
    covariance = sum((i - centre) * (j - centre) for i, j in zip(a, b, strict=True))
    spread = math.sqrt(sum((i - centre) ** 2 for i in a) * sum((j - centre) ** 2 for j in b))
    return covariance / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in range(start, end + 1):
            ranks[order[place]] = (start + end) / 2
        start = end + 1
    return ranks


def mean_interval(values: Sequence[float]) -> Interval:
    """Wilson for values that are all 0 or 1, else mean ± 1.96 standard errors; NaN (abstained) is left out."""
    known = [value for value in values if not math.isnan(value)]
    if all(value in (0.0, 1.0) for value in known):
        return wilson(sum(known), len(known))
    count = len(known)
    mean = sum(known) / count
    if count == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = Z95 * math.sqrt(sum((value - mean) ** 2 for value in known) / (count - 1) / count)
    return Interval(mean, mean - half, mean + half, count)


def paired_interval(differences: Sequence[Sequence[float]], *, level: float = 0.95, resamples: int = 2000) -> Interval:
    """Mean of paired differences and its interval. differences[s]: those of seed s, one per prompt; NaN (one side abstained) is left out.

    The standard error is that of a two-stage bootstrap: seeds are drawn, then prompts within each. Few seeds underestimate how much seeds
    differ, so it is widened: by √(S / (S − 1)), and by Student's t with S − 1 degrees of freedom in the place of the normal quantile.

    NaN for the bounds with fewer than two seeds, for everything without a pair. The draws are fixed, so a result is always the same.
    Source: Davison and Hinkley, Bootstrap Methods, 1997, 3.8; Hesterberg, arXiv 1411.5279, on small samples.

    >>> paired_interval([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]], resamples=500).mean
    0.5
    """
    seeds = [known for known in ([value for value in seed if not math.isnan(value)] for seed in differences) if known]
    count = sum(map(len, seeds))
    if not seeds:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = sum(sum(seed) / len(seed) for seed in seeds) / len(seeds)
    if len(seeds) < 2:
        return Interval(mean, math.nan, math.nan, count)
    half = student_t(level, len(seeds) - 1) * math.sqrt(len(seeds) / (len(seeds) - 1)) * _two_stage_error(seeds, resamples)
    return Interval(mean, mean - half, mean + half, count)


def _two_stage_error(seeds: Sequence[Sequence[float]], resamples: int) -> float:
    noise = np.random.default_rng(0)
    drawn = noise.integers(len(seeds), size=(resamples, len(seeds)))
    means = np.empty(drawn.shape)
    for number, values in enumerate(seeds):
        places = drawn == number
        times = noise.multinomial(len(values), np.full(len(values), 1.0 / len(values)), size=int(places.sum()))
        means[places] = times @ np.asarray(values) / len(values)
    return float(means.mean(axis=1).std())


def student_t(level: float, degrees: int) -> float:
    """The bound that |t| stays under with probability `level`, for Student's t with `degrees` degrees of freedom.

    From the closed form of its distribution (Abramowitz and Stegun 26.7.3 and 26.7.4), by halving.

    >>> round(student_t(0.95, 2), 4), round(student_t(0.99, 4), 4)
    (4.3027, 4.6041)
    """
    low, high = 0.0, math.pi / 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < level else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _within(theta: float, degrees: int) -> float:
    """P(|t| ≤ √degrees · tan θ)."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    if degrees == 1:
        return 2 * theta / math.pi
    term = total = cosine if odd else 1.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total
