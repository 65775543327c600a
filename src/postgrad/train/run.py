"""Runs a recipe, or the stages of a pipeline in order. What the command line and a Python user call.

from pathlib import Path
from postgrad.train.recipe_file import load_recipe
from postgrad.train.run import run

run(load_recipe(Path("recipe.yaml")))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from postgrad.data import Work
from postgrad.errors import CheckpointError
from postgrad.models.sampler import LocalSampler
from postgrad.rewards.load import LoadedReward
from postgrad.rewards.score import Scorer
from postgrad.rollout.tools import Toolbox, load_tools
from postgrad.train import setup
from postgrad.train.evaluate import Evaluation, Evaluator
from postgrad.train.grpo import GRPO, GRPOParts
from postgrad.train.loop import Method, Reporter, SilentReporter, fit
from postgrad.train.notes import grpo_notes
from postgrad.train.presets import loss_settings
from postgrad.train.recipe import GRPORecipe, Pipeline, Recipe, SFTRecipe
from postgrad.train.recipe_file import LoadedRecipe, parse_recipe
from postgrad.train.recorder import Recorder
from postgrad.train.run_directory import RunDirectory, open_pipeline, open_run
from postgrad.train.sft import SFT
from postgrad.types import Prompt


def run(loaded: LoadedRecipe, reporter: Reporter | None = None, *, overwrite: bool = False) -> Path:
    """Train; returns the folder of the finished model (of the last stage). Continues a run that was stopped.

    Raises the errors of `postgrad.errors`; `Interrupted` after a clean save.
    """
    watcher = reporter or SilentReporter()
    if isinstance(loaded.recipe, Pipeline):
        return _run_pipeline(loaded.recipe, loaded, watcher, overwrite=overwrite)
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
    text = (path / "recipe.yaml").read_text(encoding="utf-8") if (path / "recipe.yaml").exists() else ""
    return LoadedRecipe(recipe=moved_to(parse_recipe(record["recipe"]), path), base=Path(record["base"]), text=text)


def moved_to(recipe: Recipe | Pipeline, path: Path) -> Recipe | Pipeline:
    """The recipe with its run_dir, and those of its stages inside it, at `path`: a run directory may be moved."""
    if not isinstance(recipe, Pipeline):
        return recipe.model_copy(update={"run_dir": str(path)})
    stages = {
        name: stage.model_copy(update={"run_dir": _rebased(stage.run_dir, recipe.run_dir, path)}) for name, stage in recipe.stages.items()
    }
    return recipe.model_copy(update={"run_dir": str(path), "stages": stages})


def _rebased(run_dir: str, old: str, new: Path) -> str:
    inside = Path(run_dir)
    return str(new / inside.relative_to(old)) if inside.is_relative_to(old) else run_dir


def _run_pipeline(pipeline: Pipeline, loaded: LoadedRecipe, reporter: Reporter, *, overwrite: bool) -> Path:
    """Run each stage that is not finished; `model: stage:NAME` is the model that stage NAME wrote."""
    model = Path(pipeline.run_dir)
    with open_pipeline(pipeline, loaded.base, source_text=loaded.text, overwrite=overwrite):
        for name, recipe in pipeline.stages.items():
            stage = stage_recipe(pipeline, recipe)
            model = _run_one(stage, loaded, reporter, name=name, overwrite=False)
    return model


def stage_recipe(pipeline: Pipeline, recipe: Recipe) -> Recipe:
    """The recipe with `stage:NAME` replaced by the folder of that stage's model."""
    if not recipe.model.startswith("stage:"):
        return recipe
    source = pipeline.stages[recipe.model.removeprefix("stage:")]
    return recipe.model_copy(update={"model": str(Path(source.run_dir) / "model")})


def _run_one(recipe: Recipe, loaded: LoadedRecipe, reporter: Reporter, *, name: str, overwrite: bool) -> Path:
    with open_run(recipe, loaded.base, source_text=loaded.text, overwrite=overwrite) as directory:
        if directory.finished:
            reporter.note(f"{name}: already finished, nothing to do")
            return directory.model
        directory.check_inputs(setup.input_hashes(recipe, loaded.base))
        with build(recipe, loaded.base, directory, reporter) as built:
            return fit(built.method, directory, recipe, reporter, name=name, notes=built.notes)


@dataclass(frozen=True)
class Built:
    """A method that is ready to step, and what the user should know before it does."""

    method: Method
    notes: Sequence[str]


@contextmanager
def build(recipe: Recipe, base: Path, directory: RunDirectory, reporter: Reporter) -> Iterator[Built]:
    """Load everything the recipe names. Worker processes of the rewards end with the block."""
    if isinstance(recipe, SFTRecipe):
        yield build_sft(recipe, base, reporter)
        return
    with ExitStack() as stack:
        yield build_grpo(recipe, base, directory, reporter, stack)


def build_sft(recipe: SFTRecipe, base: Path, reporter: Reporter) -> Built:
    policy = setup.load_policy(recipe)
    data = setup.load_sft(recipe, policy, base, work=reading(reporter))
    engine = setup.make_engine(recipe, policy, with_reference=False)
    return Built(SFT(recipe, policy, engine, data.train, data.heldout[: recipe.evaluation.rows]), data.notes)


def reading(reporter: Reporter) -> Work:
    return Work(progress=lambda share, rows: reporter.working(f"reading, {100 * share:.0f} %", rows))


def sampler_progress(reporter: Reporter) -> Callable[[int, int], None]:
    return lambda tokens, live: reporter.working(f"sampling, {live} rollouts going on", tokens)


def make_evaluator(
    recipe: GRPORecipe,
    policy: setup.Policy,
    sampler: LocalSampler,
    toolbox: Toolbox,
    scorer: Scorer,
    rewards: Sequence[LoadedReward],
    prompts: Sequence[Prompt],
) -> Evaluator:
    setup.check_reward_columns(rewards, prompts)
    return Evaluator(
        sampler=sampler,
        chat=policy.chat,
        toolbox=toolbox,
        rollout=setup.rollout_config(recipe.rollout, sampler, samples=recipe.evaluation.samples),
        params=setup.sampling_params(recipe.rollout, policy.chat, temperature=recipe.evaluation.temperature),
        scorer=scorer,
        prompts=prompts,
        seed=recipe.seed,
    )


def build_grpo(recipe: GRPORecipe, base: Path, directory: RunDirectory, reporter: Reporter, stack: ExitStack) -> Built:
    toolbox = load_tools(recipe.tools, base)
    rewards = setup.load_recipe_rewards(recipe, base)
    policy = setup.load_policy(recipe)
    data = setup.load_prompts(recipe, policy, base, toolbox=toolbox, work=reading(reporter))
    setup.check_reward_columns(rewards, data.train)
    scorer = stack.enter_context(Scorer(rewards))
    sampler = policy.sampler(max_batch=recipe.sampler.max_batch, progress=sampler_progress(reporter))
    evaluator = None
    if data.heldout:
        prompts = data.heldout[: recipe.evaluation.rows]
        evaluator = make_evaluator(recipe, policy, sampler, toolbox, scorer, rewards, prompts)
    parts = GRPOParts(
        policy=policy,
        engine=setup.make_engine(recipe, policy, with_reference=recipe.loss.kl_coef > 0),
        sampler=sampler,
        params=setup.sampling_params(recipe.rollout, policy.chat),
        toolbox=toolbox,
        rollout=setup.rollout_config(recipe.rollout, sampler),
        scorer=scorer,
        prompts=data.train,
        evaluator=evaluator,
        record=Recorder(directory, reporter, rewards, loss_settings(recipe.loss, recipe.rollout).scale),
    )
    return Built(GRPO(recipe, parts), [*data.notes, *grpo_notes(recipe, rewards, policy)])


def evaluate(
    recipe: GRPORecipe, base: Path, *, model: str, data: str | None = None, rows: int | None = None, reporter: Reporter | None = None
) -> Evaluation:
    """Score `model` with the recipe's tools, rewards, limits and evaluation settings. Trains nothing.

    `data` is a file of prompts; left out = the prompts that the recipe holds out.
    """
    watcher = reporter or SilentReporter()
    toolbox = load_tools(recipe.tools, base)
    rewards = setup.load_recipe_rewards(recipe, base)
    policy = setup.load_frozen_policy(model, recipe)
    prompts = setup.load_heldout(recipe, policy, base, file=data, toolbox=toolbox)[: rows or recipe.evaluation.rows]
    sampler = policy.sampler(max_batch=recipe.sampler.max_batch, progress=sampler_progress(watcher))
    with Scorer(rewards) as scorer:
        return make_evaluator(recipe, policy, sampler, toolbox, scorer, rewards, prompts).run(0)
