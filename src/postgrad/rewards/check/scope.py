"""3. The scope matrix: how far each reward moves when one layer of a good answer is changed, in shares of its range."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from postgrad.rewards.check.finding import Finding, finding
from postgrad.rewards.check.mutate import ERROR, LAYERS
from postgrad.rewards.check.scoring import Scored
from postgrad.rewards.load import LoadedReward

SHARED = 0.05
"""Two rewards that both move by more than this share of their range on one layer pay for the same thing."""
_MOVED = 1e-6


@dataclass(frozen=True)
class Matrix:
    """moved[reward][layer]: mean of the largest |change| per sample, as a share of the reward's range; None where no sample has the layer.
    rows: file:line of samples where it moved."""

    moved: Mapping[str, Mapping[str, float | None]]
    rows: Mapping[tuple[str, str], tuple[str, ...]]


def scope_matrix(scored: Scored, rewards: Sequence[LoadedReward]) -> Matrix:
    moved: dict[str, dict[str, float | None]] = {}
    rows: dict[tuple[str, str], tuple[str, ...]] = {}
    for index, reward in enumerate(rewards):
        width = _width(scored, index, reward)
        moved[reward.name] = {}
        for layer in LAYERS:
            columns = [column for column, case in enumerate(scored.cases) if _layer(case, reward) == layer]
            change = _change(scored, index, columns, width)
            known = ~np.isnan(change)
            moved[reward.name][layer] = float(change[known].mean()) if known.any() else None
            rows[reward.name, layer] = tuple(row for row, size in zip(scored.rows, np.nan_to_num(change), strict=True) if size > _MOVED)
    return Matrix(moved, rows)


def _layer(case: tuple[str, str], reward: LoadedReward) -> str:
    """A call that failed is of the layer that the reward declares, if it is one of the two that share it."""
    return reward.scope if case[1] == ERROR and reward.scope in ("tool_calls", "tool_results") else case[0]


def _change(scored: Scored, index: int, columns: Sequence[int], width: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Per sample the largest |change| over the mutants, NaN where there is none (or the reward abstains on them)."""
    values = scored.values[:, :, index]
    if not columns or np.isnan(values).all():
        return np.full(len(values), np.nan)
    if width == 0.0:
        return np.where(scored.present[:, columns].any(axis=1), 0.0, np.nan)
    sizes = np.abs(values[:, columns] - values[:, :1]) / width
    none = np.isnan(sizes).all(axis=1)
    return np.where(none, np.nan, np.nanmax(np.where(np.isnan(sizes), -1.0, sizes), axis=1))


def _width(scored: Scored, index: int, reward: LoadedReward) -> float:
    if reward.range is not None:
        return reward.range[1] - reward.range[0]
    seen = scored.values[:, :, index]
    seen = seen[~np.isnan(seen)]
    return float(seen.max() - seen.min()) if len(seen) else 0.0


def check_scopes(matrix: Matrix, rewards: Sequence[LoadedReward], *, unstable: Collection[str] = ()) -> Iterator[Finding]:
    """`unstable`: rewards that move by themselves, of which nothing can be said."""
    for reward in rewards:
        for layer in LAYERS if reward.name not in unstable else ():
            size = matrix.moved[reward.name][layer]
            if reward.scope is None or layer == reward.scope or not size or size <= _MOVED:
                continue
            message = f"declares the scope {reward.scope} and moves by {size:.0%} of its range when only {_NAMES[layer]} changes"
            hint = f"read only {_NAMES[reward.scope]}, or declare scope={layer!r}"
            yield finding("scope.outside", "warning", reward.name, message, rows=matrix.rows[reward.name, layer], hint=hint)
    yield from _shared(matrix, [reward for reward in rewards if reward.name not in unstable])
    for layer in LAYERS:
        if any(reward.scope == layer for reward in rewards) and all(matrix.moved[reward.name][layer] is None for reward in rewards):
            names = ", ".join(reward.name for reward in rewards if reward.scope == layer)
            yield finding(
                "scope.untested", "info", "", f"in no good answer can {_NAMES[layer]} be changed, so the scope of {names} was not tested"
            )


def _shared(matrix: Matrix, rewards: Sequence[LoadedReward]) -> Iterator[Finding]:
    """Two rewards that answer to one change: their sentences of the checklist intersect, and one thing is paid twice."""
    acting = [reward for reward in rewards if reward.weight != 0.0]
    for layer in LAYERS:
        names = [reward.name for reward in acting if (matrix.moved[reward.name][layer] or 0.0) > SHARED]
        if len(names) > 1:
            claims = "; ".join(f"{reward.name}: {reward.claim or 'no claim'}" for reward in acting if reward.name in names)
            message = f"{' and '.join(names)} both move when {_NAMES[layer]} changes: it is paid for more than once ({claims})"
            yield finding("scope.shared", "warning", "", message, hint="let each reward look at one layer, or merge them: gate, multiply")


_NAMES: Mapping[str, str] = {
    "structure": "the structure",
    "reasoning": "the reasoning",
    "tool_calls": "the tool calls",
    "tool_results": "the tool results",
    "final": "the final answer",
    "length": "the length",
}
