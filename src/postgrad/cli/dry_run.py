"""`postgrad train --dry-run`: resolve, load, build one batch, show what is trained, stop. Writes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory

from postgrad.chat import ChatFormat
from postgrad.cli.console import number, reporter, stderr, stdout
from postgrad.cli.data_view import marked, visible
from postgrad.rewards.score import Scores
from postgrad.train.build import build
from postgrad.train.dpo import DPO
from postgrad.train.grpo import GRPO
from postgrad.train.kto import KTO
from postgrad.train.pairing import Pairing
from postgrad.train.recipe import DPORecipe, Pipeline, Recipe, SampledRecipe
from postgrad.train.recipe_file import LoadedRecipe
from postgrad.train.reward_model import RewardModelling
from postgrad.train.run_directory import RunDirectory
from postgrad.train.sft import SFT
from postgrad.train.stages import not_there_yet, stage_recipe
from postgrad.types import Group, StopReason


def run_dry(loaded: LoadedRecipe) -> None:
    for part, recipe in loaded.parts:
        with loaded.placing(part):
            if isinstance(loaded.recipe, Pipeline):
                _stage(loaded.recipe, part[-1], recipe, loaded.base)
            else:
                _one(recipe, loaded.base)


def _stage(pipeline: Pipeline, name: str, recipe: Recipe, base: Path) -> None:
    stdout.print(f"stage {name}", style="bold", markup=False)
    if missing := not_there_yet(pipeline, recipe):
        stdout.print(f"  {missing} has not run yet, so this stage cannot be built now", markup=False)
    else:
        _one(stage_recipe(pipeline, recipe), base)


def _one(recipe: Recipe, base: Path) -> None:
    if isinstance(recipe, DPORecipe) and recipe.loss.reference == "precomputed":  # which would take as long as an epoch
        recipe = recipe.model_copy(update={"loss": recipe.loss.model_copy(update={"reference": "live"})})
    with TemporaryDirectory() as scratch, build(recipe, base, RunDirectory(Path(scratch)), reporter()) as built:
        for note in built.notes:
            stdout.print(f"note: {note}", markup=False)
        method = built.method
        stdout.print(f"{recipe.method}: {method.total_steps} step{'' if method.total_steps == 1 else 's'}", markup=False)
        if isinstance(method, SFT):
            row = method.train[0]
            stdout.print("first row; what stands in ⟦ ⟧ is trained:", markup=False)
            stdout.print(marked(method.policy.chat, row.token_ids, row.trained), markup=False)
        elif isinstance(method, DPO | RewardModelling):
            pair = method.train[0]
            stdout.print(f"first pair ({pair.name}); what stands in ⟦ ⟧ is scored:", markup=False)
            stdout.print(visible(method.policy.chat.decode_raw(pair.prompt_ids)), markup=False)
            for label, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
                stdout.print(f"{label}: {marked(method.policy.chat, answer.token_ids, answer.scored)}", markup=False)
        elif isinstance(method, KTO):
            item = method.train[0]
            stdout.print(
                f"first answer ({item.name}), {'desirable' if item.label else 'undesirable'}; what stands in ⟦ ⟧ is scored:", markup=False
            )
            stdout.print(visible(method.policy.chat.decode_raw(item.prompt_ids)), markup=False)
            stdout.print(marked(method.policy.chat, item.answer.token_ids, item.answer.scored), markup=False)
        elif isinstance(method, GRPO):
            _sampling(recipe)
            scored = method.score_one(step=1)
            _one_group(method.parts.sampling.policy.chat, scored.groups[0], scored.scores)
        elif isinstance(method, Pairing):
            _sampling(recipe)
            _one_group(method.parts.sampling.policy.chat, *method.sample_one(step=1))
        stdout.print("nothing was written; without --dry-run it trains", markup=False)


def _sampling(recipe: Recipe) -> None:
    assert isinstance(recipe, SampledRecipe)
    size = recipe.rollout.group_size
    stderr.print(f"sampling {size} answer{'' if size == 1 else 's'} to the first prompt", markup=False)


def _one_group(chat: ChatFormat, group: Group, scores: Scores) -> None:
    """The first prompt's group: sampled, scored, not trained."""
    stdout.print("first prompt, as the model reads it:", markup=False)
    prompt = group.rollouts[0].segments[0].token_ids
    stdout.print(visible(chat.decode_raw(prompt)), markup=False)
    for index, rollout in enumerate(group.rollouts):
        failed = {failure.reward for failure in scores.failures if failure.sample == index}
        values = zip(scores.names, scores.values[index], strict=True)
        rewards = ", ".join(f"{name} {_value(value, failed=name in failed)}" for name, value in values)
        rewards = "not scored" if rollout.stop is StopReason.INFRASTRUCTURE else rewards
        stdout.print(f"rollout {index}: {rollout.stop}, {rollout.sampled_tokens} tokens sampled; {rewards}", style="bold", markup=False)
        stdout.print(visible(rollout.text), markup=False)
    first = {(failure.reward, failure.kind): failure for failure in reversed(scores.failures)}
    for failure in reversed(first.values()):
        stdout.print(f"warning: {failure}", markup=False)


def _value(value: float, *, failed: bool) -> str:
    if math.isnan(value):
        return "failed" if failed else "abstained"
    return number(value)
