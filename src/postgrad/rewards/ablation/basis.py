"""How a run's advantages were made, and which of its rollouts are compared with one another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast, get_args

import numpy as np

from postgrad.errors import DataError, RecipeError
from postgrad.rewards.doctor.observed import Observed
from postgrad.rewards.doctor.recompute import scheme_of
from postgrad.rewards.filter import FilterMode
from postgrad.rewards.ledger import Floats, Normalize, Scale, Scheme


def filter_of(observed: Observed) -> FilterMode:
    mode = observed.settings.get("loss.filter", "none")
    return cast(FilterMode, mode) if mode in get_args(FilterMode) else "none"


def comparable(observed: Observed) -> tuple[Observed, Scheme, list[str]]:
    """The rollouts in groups that are compared with one another, and how their advantages are made.

    Raises `RecipeError` where a function of the user's made them: which reward it listens to is its own matter.
    """
    if observed.settings.get("loss.advantages") is not None:
        what = "a function of yours made the advantages (loss.advantages); what they are without a reward only it can say"
        raise RecipeError(what, where=observed.source, hint="leave the reward out in the function, and compare two runs")
    if observed.method == "ppo":
        remark = "PPO's baseline is the critic, which is not in the rollouts: those of a step are compared with their mean"
        return _by_step(observed), Scheme("group"), [remark]
    if observed.group_size < 2:
        raise DataError("has one rollout per prompt, so nothing is compared", where=observed.source, hint="rollout.group_size: 8")
    if (found := scheme_of(observed)) is not None:
        return observed, found, []
    stated, credit = _stated(observed.settings), observed.settings.get("loss.credit", "rollout")
    if credit != "rollout":
        return observed, stated, [f"the run credits each {credit} by itself; here the rollouts are compared as wholes"]
    shown = f"scale {stated.scale}, {stated.normalize}"
    return observed, stated, [f"the file's advantages do not tell how they were made; computed with {shown}"]


def _stated(settings: Mapping[str, Any]) -> Scheme:
    """What `loss.scale` and `loss.normalize` say; the group's standard deviation where they say nothing."""
    scale, normalize = settings.get("loss.scale"), settings.get("loss.normalize")
    return Scheme(
        cast(Scale, scale) if scale in get_args(Scale) else "group",
        cast(Normalize, normalize) if normalize in get_args(Normalize) else "sum_then_normalize",
        float(settings.get("loss.positive_weight", 1.0)),
    )


def _by_step(observed: Observed) -> Observed:
    """One group per step, filled up with rollouts that do not count."""
    steps, counts = np.unique(observed.steps, return_counts=True)
    size = int(counts.max()) * observed.group_size
    places = np.full((len(steps), size), -1)
    for row, step in enumerate(steps):
        found = np.flatnonzero(np.repeat(observed.steps == step, observed.group_size))
        places[row, : len(found)] = found
    there = (places >= 0).reshape(-1)

    def moved(column: Floats) -> Floats:
        taken = np.asarray(column, dtype=np.float64)[places.reshape(-1)]
        taken[~there] = np.nan
        result: Floats = taken
        return result

    names = ("values", "totals", "advantages", "lengths", "truncated", "empty", "duplicate", "repeated", "verifier")
    columns: dict[str, Any] = {name: moved(getattr(observed, name)) for name in names}
    return dataclasses.replace(
        observed, **columns, present=observed.present[places.reshape(-1)] & there, group_size=size, steps=steps,
        prompts=tuple(f"step {step}" for step in steps), trained=np.ones(len(steps), dtype=bool),
    )  # fmt: skip
