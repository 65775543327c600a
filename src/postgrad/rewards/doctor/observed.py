"""What the doctor looks at: one run as arrays, whoever wrote it.

Shapes: B groups of G rollouts, N = B·G, group after group in the order of the run; K rewards. NaN = not scored, or not known. A group that
is smaller than the others is filled up with rollouts that are not `present`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.rewards.base import RewardRole
from postgrad.rewards.ledger import EQUAL, Flags, Floats, centred, compared_total, group_means, group_spread, normalized, outcome_total

WINDOW_GROUPS = 32
"""Fewest groups that a statistic is pooled over."""
WINDOW_STEPS = 20
"""Steps of a window where there are no rollouts (preference runs)."""
NAMES: Mapping[str, tuple[str, ...]] = {
    "entropy": ("entropy", "policy/entropy_avg"),
    "kl": ("kl",),
    "kl_sequence": ("objective/kl",),
    "kl_coef": ("objective/kl_coef",),
    "length": ("completions/mean_length",),
    "clip": ("clip_ratio/region_mean", "policy/clipfrac_avg"),
    "ratio_p1": ("ratio/p1",),
    "ratio_p99": ("ratio/p99",),
    "mismatch": ("sampling/logprob_difference", "sampling/sampling_logp_difference/mean"),
    "reward": ("reward", "objective/scores"),
    "explained_variance": ("val/explained_variance",),
    "returns_std": ("val/returns_std",),
}
"""What the checks call a number, and the names under which runs of postgrad and TRL log it."""


@dataclass(frozen=True, slots=True)
class RewardInfo:
    """A reward as far as it is known. role None = nobody said."""

    name: str
    weight: float = 1.0
    role: RewardRole | None = None
    range: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A rollout that a reward failed on. row: the prompt's file:line."""

    step: int
    reward: str
    kind: str
    row: str = ""
    sample: int = -1
    message: str = ""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """A number that is none: the step, what was called so, and how it was written."""

    step: int
    name: str
    value: str


Metrics = tuple[tuple[int, Mapping[str, float]], ...]


@dataclass(frozen=True, eq=False)
class Observed:
    """One run, or a part of one.

    source:     where it was read.            method: grpo, ppo, dpo, reward, or "" when unknown.
    steps:      [B] optimizer step.           prompts: [B] file:line, or another name of the prompt.
    trained:    [B] False = the filter left the group out of the batch.
    values:     [N, K].                       totals, advantages: [N].
    present:    [N] False = padding, or a rollout that something outside the model spoiled.
    lengths:    [N] sampled tokens (or characters, see `length_unit`).
    truncated, empty, duplicate: [N] 1 or 0: a limit cut it; nothing was written; an earlier rollout of its group is the same.
    repeated:   [N] share of its 3-grams that occurred before in the same rollout.
    verifier:   [N] what a second, independent judge says.
    bounds:     lowest and highest total of the outcome rewards; None = no scale on which right and wrong could be told apart.
    metrics:    (step, numbers) in order.     settings: recipe keys with dots, e.g. {"loss.kl_coef": 0.04}.
    remarks:    what a reader of the result should know about the reading.
    """

    source: str
    method: str
    rewards: tuple[RewardInfo, ...]
    group_size: int
    steps: NDArray[np.int64]
    prompts: tuple[str, ...]
    trained: Flags
    values: Floats
    totals: Floats
    advantages: Floats
    present: Flags
    lengths: Floats
    truncated: Floats
    empty: Floats
    duplicate: Floats
    repeated: Floats
    verifier: Floats
    bounds: tuple[float, float] | None = None
    metrics: Metrics = ()
    failures: tuple[Failure, ...] = ()
    nonfinite: tuple[NonFinite, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    length_unit: str = "tokens"
    remarks: tuple[str, ...] = ()

    @property
    def group_count(self) -> int:
        return len(self.steps)

    @cached_property
    def weights(self) -> Floats:
        return np.array([reward.weight for reward in self.rewards], dtype=np.float64)

    @cached_property
    def acting(self) -> NDArray[np.int64]:
        """Places of the rewards that have a weight."""
        return np.flatnonzero(self.weights)

    @cached_property
    def deviations(self) -> Floats:
        """x̃ [N, K]: rewards minus their group's mean, 0 where not scored."""
        return centred(self.values, self.group_size)

    @cached_property
    def scored(self) -> Flags:
        """[B] groups with a total."""
        return np.asarray((~np.isnan(self.totals)).reshape(-1, self.group_size).any(axis=1))

    @cached_property
    def _each_normalized(self) -> bool:
        """Whether each reward is normalised by itself before the sum."""
        return bool(len(self.rewards)) and self.settings.get("loss.normalize") == "normalize_then_sum"

    @cached_property
    def compared(self) -> Floats:
        """[N] what the rollouts of a group are compared by: the totals, unless each reward is normalised before the sum."""
        if not self._each_normalized:
            return self.totals
        return compared_total(self.values, self.weights, self.group_size, normalize="normalize_then_sum")

    @cached_property
    def parts(self) -> Floats:
        """[N, K] what each reward adds to that, less the group's mean."""
        each = normalized(self.values, self.group_size) if self._each_normalized else self.deviations
        weighted: Floats = each * self.weights
        return weighted

    @cached_property
    def flat(self) -> Flags:
        """[B] groups whose compared totals are equal: their spread is rounding."""
        means = np.nan_to_num(group_means(self.compared, self.group_size)[:: self.group_size])
        return np.asarray(group_spread(self.compared, self.group_size) <= EQUAL * np.maximum(1.0, np.abs(means)))

    @cached_property
    def outcome(self) -> Floats | None:
        """[N] weighted total of the outcome rewards; None when no reward has that role."""
        if not self.rewards:
            return None
        roles: list[RewardRole] = [reward.role or "shaping" for reward in self.rewards]
        return outcome_total(self.values, self.weights, roles, self.group_size)

    @cached_property
    def right(self) -> Floats | None:
        """[N] 1 where the outcome is in the upper half of its scale, 0 where it is not, NaN where it was not scored."""
        if self.outcome is None or self.bounds is None:
            return None
        low, high = self.bounds
        flags = self.outcome >= (low + high) / 2 if high > low else self.outcome > 0
        return np.where(np.isnan(self.outcome), np.nan, flags.astype(np.float64))

    @cached_property
    def step_range(self) -> tuple[int, int]:
        """First and last step; what was measured before the first (step 0) does not count."""
        steps = [*self.steps.tolist(), *(step for step, _ in self.metrics if step > 0)]
        return (min(steps), max(steps)) if steps else (0, 0)

    def series(self, name: str) -> Floats:
        """The finite values of a number of `NAMES`, in order of the steps; empty when it was not logged."""
        return np.array([value for _, value in self.points(name)], dtype=np.float64)

    def points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a number of `NAMES`, or of a logged name itself."""
        names = NAMES.get(name, (name,))
        found = [(step, numbers[key]) for step, numbers in self.metrics for key in names if key in numbers]
        return [(step, value) for step, value in found if math.isfinite(value)]

    def mean(self, name: str) -> float:
        """Mean of `series`; NaN when it was not logged."""
        values = self.series(name)
        return float(values.mean()) if len(values) else math.nan

    def place(self, rollout: int) -> str:
        """Where a rollout is found: step, prompt and sample."""
        group, sample = divmod(int(rollout), self.group_size)
        return f"step {self.steps[group]}, {self.prompts[group]}, sample {sample}"

    def group_place(self, group: int) -> str:
        return f"step {self.steps[group]}, {self.prompts[group]}"

    @cached_property
    def windows(self) -> tuple[Observed, ...]:
        """Parts of whole steps with at least `WINDOW_GROUPS` groups (without rollouts: of `WINDOW_STEPS` steps)."""
        cuts = self._cuts
        return tuple(self.join(index, index) for index in range(len(cuts) - 1)) if len(cuts) > 2 else (self,)

    @cached_property
    def _cuts(self) -> list[int]:
        """Boundaries of the windows: places among the groups, or among the training metrics where there are no groups."""
        steps = self.steps if self.group_count else np.array([step for step, _ in self.metrics if step > 0], dtype=np.int64)
        size = WINDOW_GROUPS if self.group_count else WINDOW_STEPS
        starts = [0, *(np.flatnonzero(np.diff(steps)) + 1).tolist()]
        cuts = [0]
        for start in starts[1:]:
            if start - cuts[-1] >= size:
                cuts.append(start)
        if len(steps) - cuts[-1] < size and len(cuts) > 1:
            cuts.pop()
        return [*cuts, len(steps)]

    def join(self, first: int, last: int) -> Observed:
        """Windows `first` to `last` (both included) as one."""
        cuts = self._cuts
        if first == 0 and last == len(cuts) - 2:
            return self
        if not self.group_count:
            steps = [step for step, _ in self.metrics if step > 0]
            return self._between(0, 0, steps[cuts[first]], steps[cuts[last + 1] - 1])
        end = cuts[last + 1]
        latest = int(self.steps[end]) - 1 if end < self.group_count else self.step_range[1]
        return self._between(cuts[first], end, int(self.steps[cuts[first]]), latest)

    def _between(self, start: int, end: int, first_step: int, last_step: int) -> Observed:
        rollouts = slice(start * self.group_size, end * self.group_size)
        by_rollout = ("values", "totals", "advantages", "present", "lengths", "truncated", "empty", "duplicate", "repeated", "verifier")
        part = {name: getattr(self, name)[rollouts] for name in by_rollout}
        return dataclasses.replace(
            self, **part, steps=self.steps[start:end], prompts=self.prompts[start:end], trained=self.trained[start:end],
            metrics=tuple(item for item in self.metrics if first_step <= item[0] <= last_step),
            failures=tuple(item for item in self.failures if first_step <= item.step <= last_step),
            nonfinite=tuple(item for item in self.nonfinite if first_step <= item.step <= last_step),
        )  # fmt: skip


def outcome_bounds(rewards: Sequence[RewardInfo], outcome: Floats | None) -> tuple[float, float] | None:
    """The scale of the outcome: as declared, else as seen when it has few levels (a rule's verdict); None for a continuous score."""
    if outcome is None:
        return None
    judges = [reward for reward in rewards if reward.role == "outcome" and reward.weight]
    if all(reward.range is not None for reward in judges):
        ends = [sorted(reward.weight * end for end in reward.range or ()) for reward in judges]
        return sum(end[0] for end in ends), sum(end[1] for end in ends)
    seen = np.unique(outcome[~np.isnan(outcome)].round(6))
    return (float(seen[0]), float(seen[-1])) if 0 < len(seen) <= MOST_LEVELS else None


MOST_LEVELS = 8
"""Distinct values up to which an outcome without a declared range is read as a verdict."""
