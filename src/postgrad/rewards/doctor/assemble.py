"""From groups, as any source has them, to `Observed`.

1. `Sample`, `Sampled`   one rollout and one group: what a reader knows of them, small enough to keep.
2. `text_facts`          what is kept of a text.
3. `assemble`            the arrays; groups of another size are split or filled up, and counted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from postgrad.rewards.base import RewardRole
from postgrad.rewards.doctor.observed import Failure, Metrics, NonFinite, Observed, RewardInfo, outcome_bounds
from postgrad.rewards.ledger import Floats, outcome_total, weighted_total

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]")
FEWEST_WORDS = 8
"""Texts with fewer words are neither copies nor loops: many tasks have one short right answer."""


@dataclass(frozen=True, slots=True)
class TextFacts:
    """repeated: share of 3-grams that occurred before (NaN: too short); digest: equal for equal texts ("" = too short to be a copy)."""

    repeated: float
    digest: str
    empty: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout. NaN = not scored, or not known. broken: something outside the model spoiled it."""

    rewards: Mapping[str, float]
    total: float = math.nan
    advantage: float = math.nan
    length: float = math.nan
    truncated: float = math.nan
    verifier: float = math.nan
    text: TextFacts | None = None
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Sampled:
    """The rollouts of one prompt at one step."""

    step: int
    prompt: str
    samples: tuple[Sample, ...]
    trained: bool = True


@dataclass(frozen=True)
class About:
    """What is known of a run beside its rollouts."""

    source: str
    method: str = ""
    rewards: tuple[RewardInfo, ...] = ()
    metrics: Metrics = ()
    failures: tuple[Failure, ...] = ()
    nonfinite: tuple[NonFinite, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    length_unit: str = "tokens"
    remarks: tuple[str, ...] = ()


def words(text: str) -> list[str]:
    """Words, signs, and single characters of scripts that write no spaces."""
    return _WORD.findall(text)


def text_facts(units: Sequence[Hashable], *, empty: bool) -> TextFacts:
    """Facts of a rollout from its words, or from the ids of its sampled tokens."""
    if len(units) < FEWEST_WORDS:
        return TextFacts(math.nan, "", empty)
    grams = list(zip(units, units[1:], units[2:], strict=False))
    digest = hashlib.blake2b(repr(units).encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
    return TextFacts(1.0 - len(set(grams)) / len(grams), digest, empty)


def facts_of_text(text: str) -> TextFacts:
    return text_facts(words(text), empty=not text.strip())


def assemble(groups: Iterable[Sampled], about: About) -> Observed:
    """The arrays of a run. Rewards that the run did not declare are taken as they come, with weight 1 and no known role."""
    given = sorted(groups, key=lambda group: group.step)
    names = dict.fromkeys([*(r.name for r in about.rewards), *(name for g in given for s in g.samples for name in s.rewards)])
    declared = {reward.name: reward for reward in about.rewards}
    rewards = with_outcome([declared.get(name, RewardInfo(name)) for name in names])
    size = _size(given)
    pieces = [piece for group in given for piece in _pieces(group, size)]
    samples = [sample for piece in pieces for sample in piece.samples]
    values = np.array([[s.rewards.get(r.name, math.nan) for r in rewards] for s in samples], dtype=np.float64).reshape(
        len(samples), len(rewards)
    )
    infinite = _infinite(pieces)
    values[np.isinf(values)] = np.nan
    weights = np.array([reward.weight for reward in rewards])
    totals = _column(samples, "total")
    if len(samples) and len(rewards) and np.isnan(totals).all():
        totals = weighted_total(values, weights, size)
    roles: list[RewardRole] = [reward.role or "shaping" for reward in rewards]
    outcome = outcome_total(values, weights, roles, size) if len(rewards) and len(samples) else None
    return Observed(
        source=about.source, method=about.method, rewards=rewards, group_size=size,
        steps=np.array([piece.step for piece in pieces], dtype=np.int64),
        prompts=tuple(piece.prompt for piece in pieces),
        trained=np.array([piece.trained for piece in pieces], dtype=bool),
        values=values, totals=totals, advantages=_column(samples, "advantage"),
        present=np.array([not sample.broken for sample in samples], dtype=bool),
        lengths=_column(samples, "length"), truncated=_column(samples, "truncated"), verifier=_column(samples, "verifier"),
        empty=np.array([math.nan if s.text is None else float(s.text.empty) for s in samples], dtype=np.float64),
        repeated=np.array([math.nan if s.text is None else s.text.repeated for s in samples], dtype=np.float64),
        duplicate=np.array([flag for piece in pieces for flag in _duplicates(piece)], dtype=np.float64),
        bounds=outcome_bounds(rewards, outcome), metrics=about.metrics, failures=about.failures, nonfinite=(*about.nonfinite, *infinite),
        settings=about.settings, length_unit=about.length_unit, remarks=(*about.remarks, *_remarks(given, size)),
    )  # fmt: skip


def with_outcome(rewards: Sequence[RewardInfo]) -> tuple[RewardInfo, ...]:
    """The only reward with a weight is the task, whatever role it has."""
    acting = [reward for reward in rewards if reward.weight]
    if len(acting) != 1:
        return tuple(rewards)
    return tuple(dataclasses.replace(reward, role="outcome") if reward is acting[0] else reward for reward in rewards)


_ABSENT = Sample({}, broken=True)


def _size(groups: Sequence[Sampled]) -> int:
    """The most common group size; the larger of equals."""
    counts = Counter(len(group.samples) for group in groups)
    return max(counts, key=lambda size: (counts[size], size)) if counts else 1


def _pieces(group: Sampled, size: int) -> list[Sampled]:
    """A larger group (a prompt that stood in the batch twice) as several, a smaller one filled up."""
    parts = [group.samples[start : start + size] for start in range(0, len(group.samples), size)]
    return [Sampled(group.step, group.prompt, (*part, *(_ABSENT,) * (size - len(part))), group.trained) for part in parts]


def _remarks(groups: Sequence[Sampled], size: int) -> list[str]:
    odd = sum(len(group.samples) != size for group in groups)
    return [f"{odd} groups have another size than {size}: they were split, or filled up with rollouts that do not count"] if odd else []


def _column(samples: Sequence[Sample], name: str) -> Floats:
    column = np.array([getattr(sample, name) for sample in samples], dtype=np.float64)
    column[np.isinf(column)] = np.nan  # reported by `_infinite`
    return column


def _infinite(groups: Sequence[Sampled]) -> list[NonFinite]:
    """Infinite rewards, totals and advantages, with their places; the statistics go without them."""
    return [
        NonFinite(group.step, f"{name} of {group.prompt}, sample {place}", str(value))
        for group in groups
        for place, sample in enumerate(group.samples)
        for name, value in (*sample.rewards.items(), ("total", sample.total), ("advantage", sample.advantage))
        if math.isinf(value)
    ]


def _duplicates(group: Sampled) -> list[float]:
    """1 where an earlier rollout of the group is the same; NaN where the text is not known or too short to tell."""
    seen: set[str] = set()
    flags = []
    for sample in group.samples:
        digest = sample.text.digest if sample.text is not None else ""
        flags.append(float(digest in seen) if digest else math.nan)
        seen.add(digest)
    return flags


def finite_metrics(step: int, record: Mapping[str, Any]) -> tuple[dict[str, float], list[NonFinite]]:
    """A line of numbers, and those of them that are none (written as `nan`, `inf`, or as text of that kind)."""
    numbers: dict[str, float] = {}
    bad: list[NonFinite] = []
    for name, value in record.items():
        number = _number(value)
        if number is None or name in ("step", "epoch"):
            continue
        if math.isfinite(number):
            numbers[name] = number
        else:
            bad.append(NonFinite(step, name, str(value)))
    return numbers, bad


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str) and value.strip().lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return float(value)
    return None
