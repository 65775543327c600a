"""Held-out behaviour without a reward less behaviour with all of them, paired by seed and prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from postgrad.rewards.doctor.render import clean
from postgrad.train.ablation.plan import ALL, Plan
from postgrad.train.ablation.runs import LOOKS, Numbers, mean
from postgrad.train.statistics import Interval, paired_interval

SMALL = 0.1
"""Share of a behaviour's scale below which a difference is no visible one."""
Verdict = Literal["visible", "no visible change", "cannot tell"]


@dataclass(frozen=True)
class Change:
    """One behaviour.

    difference: without − with, and its 95 % interval.
    scale:      what a difference is small against: a reward's range, the mean length, 1 for shares and counts.
    """

    behaviour: str
    with_all: float
    without: float
    difference: Interval
    scale: float

    @property
    def visible(self) -> bool:
        return self.difference.low > 0.0 or self.difference.high < 0.0

    @property
    def reach(self) -> float:
        """How far from 0 the interval reaches, as a share of the scale; NaN where nothing is known."""
        return max(abs(self.difference.low), abs(self.difference.high)) / self.scale


@dataclass(frozen=True)
class LeftOut:
    """What became of held-out behaviour without one reward. An interval that holds 0 and much else tells nothing."""

    reward: str
    changes: tuple[Change, ...]

    @property
    def visible(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.visible)

    @property
    def unknown(self) -> tuple[Change, ...]:
        """The behaviours that are not known to stay, widest interval first."""
        wide = [change for change in self.changes if not change.visible and not change.reach <= SMALL]
        return tuple(sorted(wide, key=lambda change: -change.reach if change.reach == change.reach else -math.inf))

    @property
    def verdict(self) -> Verdict:
        return "visible" if self.visible else "cannot tell" if self.unknown else "no visible change"


def compared(plan: Plan, numbers: Mapping[tuple[str, int], Numbers]) -> list[LeftOut]:
    """One entry per reward that was left out."""
    return [LeftOut(name, _changes(plan, name, numbers)) for name in plan.dropped]


def _changes(plan: Plan, name: str, numbers: Mapping[tuple[str, int], Numbers]) -> tuple[Change, ...]:
    outcomes = [reward for reward, entry in plan.rewards.items() if entry.role == "outcome"]
    looks = [look for look in LOOKS if plan.recipe.tools or look not in ("calls", "failed calls")]
    shown = [*(f"reward {reward}" for reward in dict.fromkeys((*outcomes, name))), *looks]
    return tuple(_change(plan, name, look, numbers) for look in shown)


def _change(plan: Plan, name: str, look: str, numbers: Mapping[tuple[str, int], Numbers]) -> Change:
    pairs = [(numbers[ALL, seed][look], numbers[name, seed][look]) for seed in plan.seeds]
    differences = [[after - before for before, after in zip(*pair, strict=True)] for pair in pairs]
    with_all, without = (mean([mean(pair[side]) for pair in pairs]) for side in (0, 1))
    return Change(look, with_all, without, paired_interval(differences), _scale(plan, look, pairs))


def _scale(plan: Plan, look: str, pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    values = [value for pair in pairs for side in pair for value in side if not math.isnan(value)]
    if look == "tokens":
        return max(1.0, mean(values))
    if not look.startswith("reward "):
        return 1.0
    ends = plan.rewards[look.removeprefix("reward ")].range or (min(values, default=0.0), max(values, default=1.0))
    return ends[1] - ends[0] or 1.0


@dataclass(frozen=True)
class Trained:
    plan: Plan
    left_out: tuple[LeftOut, ...]


def to_json(result: Trained) -> dict[str, Any]:
    """Numbers that cannot be said are null."""
    record: dict[str, Any] = clean({
        "run": str(result.plan.path), "steps": result.plan.steps, "seeds": list(result.plan.seeds),
        "left_out": [
            {
                "reward": item.reward,
                "verdict": item.verdict,
                "sentence": sentence(result.plan, item),
                "changes": [{**asdict(change), "visible": change.visible} for change in item.changes],
            }
            for item in result.left_out
        ],
    })  # fmt: skip
    return record


def sentence(plan: Plan, item: LeftOut) -> str:
    """The verdict in words."""
    ran = f"{plan.steps} steps, {len(plan.seeds)} seeds"
    if item.verdict == "visible":
        return f"visible ({ran}): " + ", ".join(f"{change.behaviour} {change.difference.mean:+.3g}" for change in item.visible)
    if item.verdict == "cannot tell":
        widest = item.unknown[0]
        gap = widest.difference
        return f"cannot tell ({ran}): {widest.behaviour} {gap.mean:+.3g}, in [{gap.low:+.3g}, {gap.high:+.3g}]; more --seeds or --steps"
    return f"no visible change ({ran}): not independent; every interval stays within {100 * SMALL:.0f} % of its scale"
