"""The result as text that needs no colour, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from postgrad.rewards.ablation.free import Ablation, Dropped
from postgrad.rewards.check.report import table
from postgrad.rewards.doctor.render import clean

NO_CHANGE = "no visible change"
SLIGHT = 0.99
"""Cosine above which what changes is small, whatever it does to the order."""


def lines(ablation: Ablation) -> Iterator[str]:
    """The ablation as text that needs no colour."""
    observed, scheme = ablation.observed, ablation.scheme
    made = scheme.normalize if scheme.normalize == "normalize_then_sum" else f"scale {scheme.scale}"
    rollouts = f"{observed.group_count} groups of {observed.group_size} rollouts"
    yield f"{observed.source}: {rollouts}; advantages: {made}, filter {ablation.filter}"
    yield from (f"remark: {remark}" for remark in ablation.remarks)
    yield ""
    cells = [["without", "role", "weight", "sign flips", "tau", "cosine", "other best", "equal groups", "inverted pairs"]]
    cells += [
        [
            item.reward, item.role or "–", f"{item.weight:g}", _percent(item.flips), _number(item.tau), _number(item.cosine),
            _percent(item.other_best), _both(item.equal), _both(item.inverted),
        ]
        for item in ablation.dropped
    ]  # fmt: skip
    yield from table(cells)
    yield ""
    yield from (f"{item.reward}: {verdict(item)}" for item in ablation.dropped)


def verdict(item: Dropped) -> str:
    if not item.visible:
        return f"{NO_CHANGE}: {item.because}"
    seen = f"{_percent(item.flips)} of the advantages change their sign, tau {_number(item.tau)}, cosine {_number(item.cosine)}"
    return f"{'visible, but slight' if item.cosine > SLIGHT else 'visible'}: {seen}"


def to_json(ablation: Ablation) -> dict[str, Any]:
    """Numbers that cannot be said are null."""
    return {
        "run": ablation.observed.source,
        "groups": ablation.observed.group_count,
        "group_size": ablation.observed.group_size,
        "scale": ablation.scheme.scale,
        "normalize": ablation.scheme.normalize,
        "filter": ablation.filter,
        "remarks": list(ablation.remarks),
        "dropped": [clean({**asdict(item), "verdict": verdict(item)}) for item in ablation.dropped],
    }


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.1f} %"


def _both(pair: tuple[float, float]) -> str:
    return "–" if any(map(math.isnan, pair)) else f"{100 * pair[0]:.1f} → {100 * pair[1]:.1f} %"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"
