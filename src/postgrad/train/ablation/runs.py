"""Carries out the runs of a plan: train, look at the held-out prompts, keep the numbers, delete the weights.

Each run directory then holds `measured.json`: what the model did on each held-out prompt. A run that has one is not made again.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import yaml

from postgrad.errors import Interrupted, RecipeError
from postgrad.train import setup
from postgrad.train.ablation.plan import ALL, Plan
from postgrad.train.evaluate import Evaluation
from postgrad.train.files import write_json
from postgrad.train.loop import Reporter, graceful_signals
from postgrad.train.recipe import RLRecipe
from postgrad.train.recipe_file import LoadedRecipe
from postgrad.train.run import evaluate, run
from postgrad.train.run_directory import RunDirectory
from postgrad.types import Rollout, StopReason

MEASURED = "measured.json"

Numbers = Mapping[str, Sequence[float]]
"""By name of a behaviour: one number per held-out prompt, NaN where it does not apply."""


def carry_out(plan: Plan, reporter: Reporter) -> dict[tuple[str, int], Numbers]:
    """The numbers of every run, by (arm, seed); those that are there already are not made again.

    Raises the errors of `run`; after an interruption the same call goes on where it stopped.
    """
    wanted = [(arm, seed) for seed in plan.seeds for arm in plan.arms]
    numbers: dict[tuple[str, int], Numbers] = {}
    for place, (arm, seed) in enumerate(wanted, start=1):
        reporter.note(f"run {place} of {len(wanted)}: {'all rewards' if arm == ALL else f'without {arm}'}, seed {seed}")
        try:
            numbers[arm, seed] = _measured(plan, arm, seed, reporter)
        except Interrupted as stopped:
            hint = f"the same command goes on from here: {place - 1} of {len(wanted)} runs are finished"
            raise Interrupted(stopped.what, signal=stopped.exit_code - 128, hint=hint) from stopped
    return numbers


def _measured(plan: Plan, arm: str, seed: int, reporter: Reporter) -> Numbers:
    directory = RunDirectory(plan.directory(arm, seed))
    inputs = setup.input_hashes(plan.full(seed), plan.base)
    recipe = plan.trained(arm, seed)
    run(LoadedRecipe(recipe=recipe, base=plan.base, text=_text(plan, recipe)), reporter)
    file = directory.path / MEASURED
    with graceful_signals() as stop:
        if not file.exists():
            result = evaluate(plan.full(seed), plan.base, model=str(directory.model), reporter=reporter)
            values = {name: [_null(value) for value in column] for name, column in behaviour(result).items()}
            write_json(file, {"inputs": inputs, "values": values})
    if stop.signal is not None:
        raise Interrupted("stopped after a run was measured; everything is saved", signal=stop.signal)
    for weights in (directory.checkpoints, directory.model):
        shutil.rmtree(weights, ignore_errors=True)
    record = json.loads(file.read_text(encoding="utf-8"))
    if record["inputs"] != inputs:
        what = "the held-out data has changed since this run was measured"
        raise RecipeError(what, where=str(directory.path), hint=f"restore it, or delete {plan.folder} to start again")
    return {name: [math.nan if value is None else value for value in column] for name, column in record["values"].items()}


def _text(plan: Plan, recipe: RLRecipe) -> str:
    keys = recipe.model_dump(mode="json", exclude_defaults=True)
    return f"# One run of an ablation: postgrad rewards ablate {plan.path} --trained\n" + yaml.safe_dump(keys, sort_keys=False)


def _null(value: float) -> float | None:
    return None if math.isnan(value) else value


def behaviour(result: Evaluation) -> Numbers:
    """What held-out rollouts do: each reward, tokens, whether a limit cut them, and their calls. Means over the rollouts of a prompt."""
    scores, size = result.scores, result.scores.group_size
    rollouts = [rollout for group in result.groups for rollout in group.rollouts]
    columns = {f"reward {name}": scores.values[:, column].tolist() for column, name in enumerate(scores.names)}
    columns |= {name: [look(rollout) for rollout in rollouts] for name, look in LOOKS.items()}
    return {name: [mean(column[start : start + size]) for start in range(0, len(column), size)] for name, column in columns.items()}


LOOKS: Mapping[str, Callable[[Rollout], float]] = {
    "tokens": lambda rollout: _sound(rollout, rollout.sampled_tokens),
    "cut by a limit": lambda rollout: _sound(rollout, rollout.stop.truncated),
    "calls": lambda rollout: _sound(rollout, len(rollout.tool_results)),
    "failed calls": lambda rollout: _sound(rollout, sum(bool(result.error) for result in rollout.tool_results)),
}


def _sound(rollout: Rollout, value: float) -> float:
    return math.nan if rollout.stop is StopReason.INFRASTRUCTURE else float(value)


def mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan
