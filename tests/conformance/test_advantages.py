"""Advantages: TRL's own, as its trainer computes them from rewards, against the formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from postgrad import formulas
from postgrad.testing.tiny import tiny_model

from . import same, trl_side

pytestmark = [pytest.mark.conformance, *trl_side.QUIET]

NONE = float("nan")
GROUP = len(same.REWARDS[0])
CASES: dict[str, tuple[tuple[float, ...], ...]] = {
    "all scored": same.REWARDS,
    "far from zero": tuple(tuple(1000.0 + value for value in group) for group in same.REWARDS),
    "some abstain": ((1.0, NONE, 0.5, 2.0), (0.0, NONE, NONE, 0.3), (-1.0, 0.25, NONE, 1.5)),
    "one is left": ((1.0, 0.0, 0.5, 2.0), (NONE, 1.0, NONE, NONE), (-1.0, 0.25, 0.0, 1.5)),
    "none is left": ((1.0, 0.0, 0.5, 2.0), (NONE,) * 4, (-1.0, 0.25, 0.0, 1.5)),
}
TWO = (
    ((1.0, 0.0, 0.0, 1.0), (1.0, 1.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0)),
    ((3.0, 0.5, 0.5, -4.0), (0.0, 1.0, 0.0, 1.0), (0.2, 0.3, 0.9, 0.1)),
)


def _trl(rewards: Any, folder: Path, *, weights: tuple[float, ...] = (1.0,), **config: Any) -> list[float]:
    model = tiny_model()
    batch = same.batch_of_rollouts(model, rewards=rewards, weights=weights)
    trainer = trl_side.grpo_trainer(model, batch, folder, **config)
    trainer.train()
    return trl_side.advantages(trainer)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("case", CASES)
def test_group_advantages(case: str, scale: Any, tmp_path: Path) -> None:
    rewards = torch.tensor(CASES[case], dtype=torch.float64).flatten()
    ours = formulas.group_advantages(rewards, GROUP, scale=scale).tolist()
    assert ours == pytest.approx(_trl(CASES[case], tmp_path, scale_rewards=scale), rel=1e-4, abs=1e-4)


def test_equal_rewards_give_exactly_zero_where_trl_leaves_rounding(tmp_path: Path) -> None:
    level = ((0.1,) * 4, (0.7,) * 4, (1.0, 0.0, 0.0, 1.0))
    ours = formulas.group_advantages(torch.tensor(level).flatten(), GROUP).tolist()
    assert ours[:8] == [0.0] * 8
    assert ours == pytest.approx(_trl(level, tmp_path), rel=1e-4, abs=1e-2)


def test_several_rewards_are_added_by_weight(tmp_path: Path) -> None:
    theirs = _trl(TWO, tmp_path, weights=(1.0, 0.5))
    total = torch.tensor([1.0, 0.5]).double() @ torch.tensor(TWO).double().reshape(2, -1)
    assert formulas.group_advantages(total, GROUP).tolist() == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("abstaining", [(), ((0, 1), (1, 6)), ((0, 3), (1, 3))])
def test_normalize_then_sum(abstaining: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    values = np.array(TWO).reshape(2, -1)
    for place in abstaining:
        values[place] = np.nan
    theirs = _trl(values, tmp_path, weights=(1.0, 0.5), multi_objective_aggregation="normalize_then_sum")
    ours = formulas.normalize_then_sum(torch.from_numpy(values), torch.tensor([1.0, 0.5]), GROUP)
    assert ours.tolist() == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_leave_one_out(case: str, tmp_path: Path) -> None:
    model = tiny_model()
    batch = same.batch_of_rollouts(model, rewards=CASES[case], tools=False)
    _, theirs = trl_side.rloo_steps(model, batch, tmp_path)
    ours = formulas.leave_one_out_advantages(torch.tensor(CASES[case], dtype=torch.float64).flatten(), GROUP)
    assert ours.tolist() == pytest.approx(theirs, rel=1e-4, abs=2e-4)
