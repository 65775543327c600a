"""Runs a recipe, or the stages of a pipeline in order. What the command line and a Python user call.

from pathlib import Path
from postgrad.train.recipe_file import load_recipe
from postgrad.train.run import run

run(load_recipe(Path("recipe.yaml")))
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from postgrad.errors import CheckpointError
from postgrad.rewards.score import Scorer
from postgrad.rollout.tools import load_tools
from postgrad.train import setup
from postgrad.train.build import build, make_evaluator, sampler_progress
from postgrad.train.doctor import write_diagnosis
from postgrad.train.evaluate import Evaluation
from postgrad.train.loop import Reporter, SilentReporter, fit
from postgrad.train.model_rewards import Judges
from postgrad.train.recipe import Pipeline, Recipe, RLRecipe
from postgrad.train.recipe_file import LoadedRecipe, parse_recipe
from postgrad.train.run_directory import RunDirectory, open_pipeline, open_run
from postgrad.train.stages import moved_to, stage_recipe


def run(loaded: LoadedRecipe, reporter: Reporter | None = None, *, overwrite: bool = False) -> Path:
    """Train; returns the folder of the finished model, or the file of pairs (of the last stage). Continues a run that was stopped.

    Raises the errors of `postgrad.errors`; `Interrupted` after a clean save.
    """
    watcher = reporter or SilentReporter()
    if isinstance(loaded.recipe, Pipeline):
        return _run_pipeline(loaded.recipe, loaded, watcher, overwrite=overwrite)
    with loaded.placing(()):
        return _run_one(loaded.recipe, loaded, watcher, name=loaded.recipe.method, overwrite=overwrite)


def resume(path: Path, reporter: Reporter | None = None) -> Path:
    """Continue the run (or pipeline) that lives in `path`, from its resolved recipe."""
    return run(load_run(path), reporter)


def load_run(path: Path) -> LoadedRecipe:
    """The recipe of a run directory, exactly as it was resolved."""
    file = path / "resolved.json"
    if not file.is_file():
        raise CheckpointError("this is not a run directory (no resolved.json)", where=str(path), hint="pass the run_dir of a recipe")
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(
            f"resolved.json cannot be read: {error}", where=str(path), hint="start the recipe again in another run_dir"
        ) from error
    if not isinstance(record, dict) or not {"recipe", "base"} <= record.keys():
        raise CheckpointError("resolved.json holds no recipe", where=str(path), hint="start the recipe again in another run_dir")
    text = (path / "recipe.yaml").read_text(encoding="utf-8") if (path / "recipe.yaml").exists() else ""
    return LoadedRecipe(recipe=moved_to(parse_recipe(record["recipe"]), path), base=Path(record["base"]), text=text)


def _run_pipeline(pipeline: Pipeline, loaded: LoadedRecipe, reporter: Reporter, *, overwrite: bool) -> Path:
    """Run each stage that is not finished; `stage:NAME` is what stage NAME wrote."""
    result = Path(pipeline.run_dir)
    with open_pipeline(pipeline, loaded.base, source_text=loaded.text, overwrite=overwrite) as above:
        for name, recipe in pipeline.stages.items():
            stage = stage_recipe(pipeline, recipe)
            elsewhere = not Path(stage.run_dir).is_relative_to(pipeline.run_dir)
            with loaded.placing(("stages", name)):
                result = _run_one(stage, loaded, reporter, name=name, overwrite=overwrite and elsewhere, above=(above,))
    return result


def _run_one(
    recipe: Recipe, loaded: LoadedRecipe, reporter: Reporter, *, name: str, overwrite: bool, above: Sequence[RunDirectory] = ()
) -> Path:
    """`above`: the pipeline's own directory, whose old content goes once this stage can start."""
    with open_run(recipe, loaded.base, source_text=loaded.text, overwrite=overwrite) as directory:
        directory.check_inputs("files", setup.input_hashes(recipe, loaded.base))
        if directory.finished:
            reporter.note(f"{name}: already finished, nothing to do")
            return directory.result
        with build(recipe, loaded.base, directory, reporter) as built:
            directory.check_inputs("loaded", built.fingerprints)
            for opened in (directory, *above):
                opened.begin()
            directory.event("started", notes=list(built.notes))
            model = fit(built.method, directory, recipe, reporter, name=name, notes=built.notes)
        write_diagnosis(recipe, directory, reporter)
        return model


def evaluate(
    recipe: RLRecipe, base: Path, *, model: str, data: str | None = None, rows: int | None = None, reporter: Reporter | None = None
) -> Evaluation:
    """Score `model` with the recipe's tools, rewards, limits and evaluation settings. Trains nothing.

    `data` is a file of prompts; left out = the prompts that the recipe holds out.
    """
    watcher = reporter or SilentReporter()
    with load_tools(recipe.tools, base, allow_unsafe_exec=recipe.allow_unsafe_exec) as toolbox:
        named = setup.load_recipe_rewards(recipe, base)
        policy = setup.load_frozen_policy(model, recipe)
        prompts = setup.load_heldout(recipe, policy, base, file=data, toolbox=toolbox)[: rows or recipe.evaluation.rows]
        sampler = policy.sampler(max_batch=recipe.sampler.max_batch, progress=sampler_progress(watcher))
        with Scorer(named.functions) as scorer:
            judges = Judges(scorer, named.models(recipe.dtype), toolbox.specs)
            return make_evaluator(recipe, policy, sampler, toolbox, judges, prompts).run(0)
