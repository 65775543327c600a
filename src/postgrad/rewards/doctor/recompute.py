"""Advantages once more, on the same rollouts, with other weights, another filter or another normalisation: what a fix would have done."""

from __future__ import annotations

import dataclasses

import numpy as np

from postgrad.rewards.doctor.observed import Observed
from postgrad.rewards.ledger import Floats, Scheme, recomputed_advantages

__all__ = ["SCHEMES", "Scheme", "recomputed", "scheme_of", "shaping_scaled", "sign_flips", "without"]

SCHEMES = (
    Scheme("group"), Scheme("none"), Scheme("batch"), Scheme("leave_one_out"), Scheme("group", "normalize_then_sum"),
)  # fmt: skip
TOLERANCE = 1e-3
"""Advantages that were logged in float32, or with another ε, still count as reproduced."""


def scheme_of(observed: Observed) -> Scheme | None:
    """The scheme that reproduces the advantages of the run's first windows; None when none does (a critic's, per-turn credit)."""
    part = observed.join(0, min(2, len(observed.windows)) - 1)
    if not np.isfinite(part.advantages).any() or not np.abs(np.nan_to_num(part.advantages)).max():
        return None
    weight = observed.settings.get("loss.positive_weight", 1.0)
    schemes = (dataclasses.replace(scheme, positive_weight=float(weight)) for scheme in SCHEMES)
    return next((scheme for scheme in schemes if _reproduces(part, scheme)), None)


def _reproduces(observed: Observed, scheme: Scheme) -> bool:
    known = ~np.isnan(observed.advantages) & observed.present
    difference = np.abs(recomputed(observed, scheme) - observed.advantages)[known]
    return bool((difference <= TOLERANCE * np.maximum(1.0, np.abs(observed.advantages[known]))).all())


def recomputed(
    observed: Observed, scheme: Scheme, *, weights: Floats | None = None, values: Floats | None = None, trained: Floats | None = None
) -> Floats:
    """Advantages [N] with other weights [K], values [N, K] or kept groups [B]. Groups that are not trained get 0."""
    chosen = observed.weights if weights is None else weights
    kept = np.repeat(observed.trained if trained is None else trained.astype(bool), observed.group_size) & observed.present
    table = np.where(kept[:, None], observed.values if values is None else values, np.nan)
    options = dataclasses.asdict(scheme)
    if scheme.scale != "batch" and scheme.normalize == "sum_then_normalize":
        return recomputed_advantages(table, chosen, group_size=observed.group_size, **options)
    result = np.zeros(len(table))
    steps = np.repeat(observed.steps, observed.group_size)
    for step in np.unique(observed.steps):
        rows = steps == step
        result[rows] = recomputed_advantages(table[rows], chosen, group_size=observed.group_size, **options)
    return result


def sign_flips(before: Floats, after: Floats) -> float:
    """Share of the rollouts with a signal whose advantage changes its sign."""
    active = np.abs(np.nan_to_num(before)) > 1e-9
    return float((np.sign(before[active]) != np.sign(after[active])).mean()) if active.any() else 0.0


def without(observed: Observed, reward: int) -> Floats:
    """The weights with one reward's set to 0."""
    weights = observed.weights.copy()
    weights[reward] = 0.0
    return weights


def shaping_scaled(observed: Observed, factor: float) -> Floats:
    """The weights with those of all rewards but the outcome's multiplied."""
    return np.array([r.weight if r.role == "outcome" else factor * r.weight for r in observed.rewards])
