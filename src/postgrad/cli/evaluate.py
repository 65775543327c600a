"""`postgrad eval`: a model on held-out prompts, with intervals."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from postgrad.cli.console import number, stderr, stdout, table
from postgrad.errors import RecipeError
from postgrad.train.recipe import RLRecipe
from postgrad.train.recipe_file import KeyPath, LoadedRecipe, load_recipe


def run_eval(path: Path, *, model: str | None, data: str | None, rows: int | None, json_output: bool) -> None:
    loaded, own = _locate(path)
    part, recipe = _grpo(loaded, path)
    name = model or own or recipe.model
    from postgrad.train.run import evaluate

    file = None if data is None else str(Path.cwd() / data) if (Path.cwd() / data).exists() else data
    with loaded.placing(part):
        result = evaluate(recipe, loaded.base, model=name, data=file, rows=rows)
    source = data or str(recipe.data.eval)
    if json_output:
        record = {
            "model": name,
            "data": source,
            "rewards": {key: asdict(value) for key, value in result.rewards.items()},
            "metrics": result.metrics,
        }
        print(json.dumps(record, indent=1))
        return
    stderr.print(f"{name} on {source}: {len(result.groups)} prompts", markup=False)
    lines = [
        [key, number(round(value.mean, 4)), f"[{value.low:.4f}, {value.high:.4f}]", str(value.count)]
        for key, value in result.rewards.items()
    ]
    stdout.print(table("", ["reward", "mean", "95 % interval", "rollouts"], lines))
    others = {key: value for key, value in result.metrics.items() if not key.startswith("eval/rewards/")}
    stdout.print(table("", ["metric", "value"], [[key.removeprefix("eval/"), number(value)] for key, value in others.items()]))


def _locate(path: Path) -> tuple[LoadedRecipe, str | None]:
    """The recipe, and the run's own model when a run directory was given."""
    if path.is_dir():
        from postgrad.train.run import load_run

        loaded = load_run(path)
        _, last = loaded.parts[-1]
        model = Path(last.run_dir) / "model"
        return loaded, str(model) if model.exists() else None
    return load_recipe(path), None


def _grpo(loaded: LoadedRecipe, path: Path) -> tuple[KeyPath, RLRecipe]:
    part, recipe = loaded.parts[-1]
    if not isinstance(recipe, RLRecipe):
        raise RecipeError(
            "evaluation needs rewards, which only GRPO and PPO recipes have", where=str(path), hint="pass a recipe with method: grpo or ppo"
        )
    return part, recipe
