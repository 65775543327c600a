"""Intervals: a number from a sample is shown with how far it can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
