"""What other rewards would have said of the rollouts of a run: nothing is sampled, nothing is trained.

    rollouts/step-*.jsonl.gz ─▶ groups ─ score, judge ─▶ new values and advantages, beside those of the run

Rewards are those of the run's recipe with the overrides given, from their files as they are now.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from postgrad.errors import DataError, RecipeError
from postgrad.rewards.ablation.free import other_best
from postgrad.rewards.doctor.numbers import pooled_kendall
from postgrad.rewards.doctor.recompute import sign_flips
from postgrad.rewards.ledger import Floats
from postgrad.rewards.score import RewardFailure, Scorer
from postgrad.rollout import group_from_json
from postgrad.rollout.load import load_attribute
from postgrad.rollout.tools import load_tools
from postgrad.train import setup
from postgrad.train.judged import JudgedGroup
from postgrad.train.judging import judge, score
from postgrad.train.model_rewards import Judges
from postgrad.train.presets import loss_settings
from postgrad.train.recipe import GRPOLoss, GRPORecipe, Pipeline, SampledRecipe
from postgrad.train.recipe_file import parse_recipe
from postgrad.train.run import load_run
from postgrad.train.run_directory import RunDirectory

Numbers = dict[str, float]
"""Of one rollout: `total`, `advantage`, and its rewards by name; NaN = abstained."""


@dataclass(frozen=True)
class Values:
    """One reward on all rollouts. Means leave out abstentions; NaN = the run had no such reward, or has none now.

    changed: share of the rollouts that it now gives another value.
    """

    name: str
    before: float
    after: float
    changed: float


@dataclass(frozen=True)
class Replay:
    """rewards: by name, the run's and today's. flips, tau, other_best: what became of the advantages (see rewards.ablation); NaN for
    methods whose advantages come from elsewhere."""

    steps: tuple[int, ...]
    rollouts: int
    rewards: tuple[Values, ...]
    total: Values
    flips: float
    tau: float
    other_best: float
    failures: tuple[RewardFailure, ...]


def replay(path: Path, *, overrides: Sequence[str] = (), out: TextIO | None = None) -> Replay:
    """Score the rollouts of the run at `path` again. out: gets the new values in the form that docs/doctor.md describes.

    Raises `RecipeError` for a run without rollouts and rewards, and whatever is wrong with the rewards.
    """
    loaded = load_run(path)
    if isinstance(loaded.recipe, Pipeline):
        stages = ", ".join(str(path / name) for name in loaded.recipe.stages)
        raise RecipeError("this is a pipeline", where=str(path), hint=f"name a stage: {stages}")
    recipe = parse_recipe(loaded.recipe.model_dump(mode="json"), overrides)
    if isinstance(recipe, Pipeline) or not isinstance(recipe, SampledRecipe):
        raise RecipeError(f"a run of {loaded.recipe.method} has no rollouts", where=str(path), hint="replay a run of grpo, ppo or pairs")
    steps = sorted(int(file.name.split(".")[0].removeprefix("step-")) for file in (path / "rollouts").glob("step-*.jsonl.gz"))
    if not steps:
        raise DataError("there are no rollouts in this run", where=str(path / "rollouts"), hint="let it take a step first")
    named = setup.load_recipe_rewards(recipe, loaded.base)
    hook = load_attribute(recipe.loss.advantages, loaded.base) if isinstance(recipe, GRPORecipe) and recipe.loss.advantages else None
    old: list[Numbers] = []
    new: list[Numbers] = []
    failures: list[RewardFailure] = []
    tools = load_tools(recipe.tools, loaded.base, allow_unsafe_exec=recipe.allow_unsafe_exec, to_run=False)
    with tools as toolbox, Scorer(named.functions) as scorer:
        judges = Judges(scorer, named.models(recipe.dtype), toolbox.specs)
        for step in steps:
            records = RunDirectory(path).read_rollouts(step)
            loss = recipe.loss if isinstance(recipe, GRPORecipe) else GRPOLoss()
            scored = score([group_from_json(record) for record in records], judges, loss)
            scale = loss_settings(recipe.loss, recipe.rollout).scale if isinstance(recipe, GRPORecipe) else "none"
            judged = judge(scored, loss, scale=scale, hook=hook)
            old += [_numbers(entry) for record in records for entry in record["scores"]]
            lines = list(_lines(step, judged))
            new += map(_numbers, lines)
            failures += scored.scores.failures
            if out is not None:
                out.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    names = list(dict.fromkeys(name for numbers in (old[0], new[0]) for name in numbers if name not in ("total", "advantage")))
    moved = (math.nan, math.nan, math.nan)
    if isinstance(recipe, GRPORecipe):
        before, after, size = _column(old, "advantage"), _column(new, "advantage"), recipe.rollout.group_size
        moved = (sign_flips(before, after), pooled_kendall(before, after, size), other_best(before, after, size))
    rewards = tuple(_values(name, old, new) for name in names)
    return Replay(tuple(steps), len(old), rewards, _values("total", old, new), *moved, tuple(failures))


def _lines(step: int, judged: Sequence[JudgedGroup]) -> Iterator[dict[str, Any]]:
    """One line per rollout, in the form that docs/doctor.md describes."""
    for group in judged:
        for place, (rollout, entry) in enumerate(zip(group.group.rollouts, group.record(step)["scores"], strict=True)):
            yield {
                "step": step, "group": group.group.prompt.row, "sample": place, "rewards": entry["rewards"], "total": entry["total"],
                "advantage": entry["advantage"], "text": rollout.text, "tokens": rollout.sampled_tokens,
                "truncated": rollout.stop.truncated,
            }  # fmt: skip


def _numbers(entry: Mapping[str, Any]) -> Numbers:
    given = {"total": entry["total"], "advantage": entry.get("advantage"), **entry["rewards"]}
    return {name: math.nan if value is None else float(value) for name, value in given.items()}


def _column(rollouts: Sequence[Numbers], name: str) -> Floats:
    return np.array([numbers.get(name, math.nan) for numbers in rollouts])


def _values(name: str, old: Sequence[Numbers], new: Sequence[Numbers]) -> Values:
    before, after = _column(old, name), _column(new, name)
    same = np.isclose(before, after, rtol=1e-9, atol=1e-12, equal_nan=True)
    return Values(name, _mean(before), _mean(after), float((~same).mean()))


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan
