"""Technique 3 without any training: what a run's rollouts would have taught without one of its rewards.

1. `ablate`   leaves each reward out in turn and computes the advantages of the same rollouts again, as the run did: its scale, its
              normalisation, its filter. What is compared is compared within groups.
2. `Dropped`  what that changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from postgrad.errors import DataError, RecipeError
from postgrad.rewards.ablation.basis import comparable, filter_of
from postgrad.rewards.base import RewardRole
from postgrad.rewards.doctor.numbers import TINY, in_parts, pooled_correlations, pooled_kendall
from postgrad.rewards.doctor.observed import WINDOW_GROUPS, Observed
from postgrad.rewards.doctor.recompute import recomputed, sign_flips, without
from postgrad.rewards.doctor.relations import inverted_pairs
from postgrad.rewards.filter import FilterMode, keep_groups
from postgrad.rewards.ledger import Flags, Floats, Scheme, compared_total, equal_groups, outcome_total

FLIPS, TAU = 0.01, 0.99
"""Fewer sign flips than the one and a rank correlation above the other: nothing that training could show."""
_CLOSE = 0.9
"""Correlation within groups from which another reward is said to say the same."""
_ZERO = 1e-9
"""Advantages nearer to 0 than this are 0: rounding has no sign."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """What changes without one reward. Pairs are (with it, without it); NaN = cannot be said.

    flips:      share of the rollouts with an advantage whose advantage changes its sign.
    tau:        Kendall's τ-b of the advantages within groups.
    cosine:     of all advantages as one vector with those without the reward: how far the direction of the update turns (1 = not at all).
    other_best: share of the groups with a signal in which none of the best rollouts stays the best.
    equal:      share of the groups whose totals are equal: they train nothing.
    inverted:   share of the pairs of a group in which the worse outcome has the higher total.
    because:    why nothing changes; "" where something does.
    """

    reward: str
    role: RewardRole | None
    weight: float
    flips: float
    tau: float
    cosine: float
    other_best: float
    equal: tuple[float, float]
    inverted: tuple[float, float]
    because: str

    @property
    def visible(self) -> bool:
        return not self.because


@dataclass(frozen=True)
class Ablation:
    """One `Dropped` per reward, and how advantages were computed."""

    observed: Observed
    scheme: Scheme
    filter: FilterMode
    dropped: tuple[Dropped, ...]
    remarks: tuple[str, ...]


def ablate(observed: Observed, names: Sequence[str] = ()) -> Ablation:
    """Leave out the rewards named, or each in turn.

    Raises `DataError` when the run has no rollouts with rewards, `RecipeError` for a name that is no reward of it.
    """
    if not observed.group_count or not observed.rewards:
        hint = "ablation needs rollouts and their rewards: a GRPO or PPO run, or rollouts as docs/doctor.md describes them"
        raise DataError("holds no rollouts with rewards", where=observed.source, hint=hint)
    known = [reward.name for reward in observed.rewards]
    if unknown := [name for name in names if name not in known]:
        raise RecipeError(f"no reward {unknown[0]!r} in this run", where="--reward", hint=f"it has: {', '.join(known)}")
    compared, scheme, remarks = comparable(observed)
    run = _Run(compared, scheme, filter_of(observed))
    chosen = [known.index(name) for name in dict.fromkeys(names)] or range(len(known))
    if len(observed.acting) == 1:
        remarks = [*remarks, f"{known[observed.acting[0]]} is the only reward with a weight: without it there is nothing to learn"]
    if observed.group_count < WINDOW_GROUPS:
        remarks = [*remarks, f"{observed.group_count} groups: statistics over fewer than {WINDOW_GROUPS} say little"]
    return Ablation(observed, scheme, run.filter, tuple(run.dropped(reward) for reward in chosen), (*observed.remarks, *remarks))


# ---- with and without


@dataclass(frozen=True)
class _Signal:
    """[N] totals as rollouts are compared by them, and advantages; NaN = does not count."""

    totals: Floats
    advantages: Floats


@dataclass(frozen=True)
class _Run:
    observed: Observed
    scheme: Scheme
    filter: FilterMode

    def signal(self, weights: Floats) -> _Signal:
        where = self.observed
        totals = compared_total(where.values, weights, where.group_size, normalize=self.scheme.normalize)
        totals = np.where(where.present, totals, np.nan)
        kept = keep_groups(totals, self._outcome(weights), where.group_size, mode=self._mode(weights)).kept
        advantages = recomputed(where, self.scheme, weights=weights, trained=np.array(kept, dtype=np.float64))
        advantages[np.abs(advantages) <= _ZERO] = 0.0
        out = ~where.present
        if where.settings.get("loss.mask_truncated"):
            out = out | (where.truncated == 1.0)
        return _Signal(totals, np.where(out, np.nan, advantages))

    def _outcome(self, weights: Floats) -> Floats | None:
        roles: list[RewardRole] = [reward.role or "shaping" for reward in self.observed.rewards]
        return outcome_total(self.observed.values, weights, roles, self.observed.group_size)

    def _mode(self, weights: Floats) -> FilterMode:
        """Without its only outcome a run could not filter by the outcome; equal totals are left out all the same."""
        return "zero_std" if self.filter == "outcome" and self._outcome(weights) is None else self.filter

    def dropped(self, reward: int) -> Dropped:
        where, size = self.observed, self.observed.group_size
        before, after = self.signal(where.weights), self.signal(without(where, reward))
        info, old, new = where.rewards[reward], before.advantages, after.advantages
        flips, tau = sign_flips(old, new), pooled_kendall(old, new, size)
        return Dropped(
            info.name, info.role, info.weight, flips, tau, _cosine(old, new), other_best(old, new, size),
            (self._equal(before), self._equal(after)), (self._inverted(before), self._inverted(after)),
            self._because(reward) if flips < FLIPS and not tau <= TAU else "",
        )  # fmt: skip

    def _equal(self, signal: _Signal) -> float:
        scored = self.observed.scored
        return float(equal_groups(signal.totals, self.observed.group_size)[scored].mean()) if scored.any() else math.nan

    def _inverted(self, signal: _Signal) -> float:
        """Against the outcome of the whole run, also where the outcome is what was left out."""
        if self.observed.outcome is None:
            return math.nan
        outcome, size = self.observed.outcome, self.observed.group_size
        inverted = comparable = 0.0
        for part in in_parts(len(outcome), size):
            pairs = inverted_pairs(outcome[part], signal.totals[part], size)
            inverted, comparable = inverted + float(pairs[0].sum()), comparable + float(pairs[1].sum())
        return inverted / comparable if comparable else math.nan

    def _because(self, reward: int) -> str:
        where = self.observed
        if where.weights[reward] == 0.0:
            return "it has weight 0"
        if not float((where.deviations[:, reward] ** 2).sum()) > TINY:
            return "it never differs within a group of this run"
        related = np.abs(np.nan_to_num(pooled_correlations(where.deviations)[reward]))
        related[[k for k in range(len(related)) if k == reward or where.weights[k] == 0.0]] = 0.0
        partner = int(np.argmax(related))
        if related[partner] >= _CLOSE:
            return f"not independent ({where.rewards[partner].name} says the same: |ρ| = {related[partner]:.2f} within groups)"
        return "not independent (what it adds to the others changes no order; its weight may be too small)"


def other_best(before: Floats, after: Floats, group_size: int) -> float:
    """Share of the groups with a signal in which none of the best rollouts stays the best; NaN = no group has one."""
    old, new = (_best(advantages.reshape(-1, group_size)) for advantages in (before, after))
    active = np.nan_to_num(np.abs(before)).reshape(-1, group_size).max(axis=1) > _ZERO
    kept = np.asarray((old & new).any(axis=1))
    return 1.0 - float(kept[active].mean()) if active.any() else math.nan


def _best(grouped: Floats) -> Flags:
    """[B, G]: the rollouts with the highest advantage of their group."""
    filled = np.where(np.isnan(grouped), -np.inf, grouped)
    return np.asarray((filled >= filled.max(axis=1, keepdims=True) - _ZERO) & np.isfinite(filled))


def _cosine(before: Floats, after: Floats) -> float:
    counted = ~(np.isnan(before) | np.isnan(after))
    a, b = before[counted], after[counted]
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / scale if scale > TINY else math.nan
