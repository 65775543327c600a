"""`stage:NAME`: the places of a recipe that may name what an earlier stage of its pipeline wrote.

    model, critic.model     the stage's model
    rewards[].use           its reward model (method: reward)
    data.train, data.eval   its pairs, its held-out pairs (method: pairs)

1. `renamed`           one walk over all of these places; everything else here is made of it.
2. `fault_of`          whether every name is an earlier stage that writes what is wanted.
3. `stage_recipe`      names replaced by the folders of those stages.
4. `moved_to`          a recipe whose run directory lies elsewhere now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from postgrad.train.datasets import holds_pairs
from postgrad.train.recipe import Data, PairsRecipe, Pipeline, PPORecipe, Recipe, SampledRecipe, Source

PREFIX = "stage:"
KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A key of a recipe, and what is named there."""

    key: KeyPath
    wanted: Literal["model", "critic", "reward", "train", "eval"]


def renamed(recipe: Recipe, change: Callable[[Place, str], str]) -> Recipe:
    """The recipe with `change(place, name)` at every place where a name stands."""
    update: dict[str, object] = {"model": change(Place(("model",), "model"), recipe.model), "data": _data(recipe, change)}
    if isinstance(recipe, SampledRecipe):
        uses = [change(Place(("rewards", str(index), "use"), "reward"), reward.use) for index, reward in enumerate(recipe.rewards)]
        update["rewards"] = [reward.model_copy(update={"use": use}) for reward, use in zip(recipe.rewards, uses, strict=True)]
    if isinstance(recipe, PPORecipe) and recipe.critic.model is not None:
        critic = change(Place(("critic", "model"), "critic"), recipe.critic.model)
        update["critic"] = recipe.critic.model_copy(update={"model": critic})
    return recipe.model_copy(update=update)


def _data(recipe: Recipe, change: Callable[[Place, str], str]) -> object:
    def source(item: str | Source, *index: str) -> str | Source:
        place = Place(("data", "train", *index), "train")
        return change(place, item) if isinstance(item, str) else item.model_copy(update={"file": change(place, item.file)})

    data, named = recipe.data, recipe.data.train
    train = source(named) if isinstance(named, str) else [source(item, str(index)) for index, item in enumerate(named)]
    update: dict[str, object] = {"train": train}
    if isinstance(data, Data) and isinstance(data.eval, str):
        update["eval"] = change(Place(("data", "eval"), "eval"), data.eval)
    return data.model_copy(update=update)


# ---- names that are wrong


@dataclass(frozen=True, slots=True)
class Fault:
    place: Place
    what: str
    hint: str


def fault_of(recipe: Recipe, earlier: Mapping[str, Recipe]) -> Fault | None:
    """The first `stage:NAME` of the recipe that is no earlier stage, or one that does not write what is wanted there."""
    faults: list[Fault] = []

    def check(place: Place, name: str) -> str:
        if name.startswith(PREFIX):
            found = _fault(recipe, earlier, place, name.removeprefix(PREFIX))
            faults.extend([Fault(place, f"{'.'.join(place.key)}: {name} {found[0]}", found[1])] if found else [])
        return name

    renamed(recipe, check)
    return faults[0] if faults else None


def _fault(recipe: Recipe, earlier: Mapping[str, Recipe], place: Place, name: str) -> tuple[str, str] | None:
    stage = earlier.get(name)
    if stage is None:
        what = f"names no earlier stage (earlier stages: {', '.join(earlier) or 'none'})"
        return what, "stages run in the order they stand in"
    if place.wanted in ("train", "eval"):
        return _fault_of_data(recipe, stage, place)
    return _fault_of_model(recipe, stage, place)


def _fault_of_data(recipe: Recipe, stage: Recipe, place: Place) -> tuple[str, str] | None:
    if not isinstance(stage, PairsRecipe):
        return f"writes a model and no data (method: {stage.method})", "name a file, or a stage with method: pairs"
    if recipe.method not in ("reward", "dpo"):
        return f"writes pairs of answers, and {recipe.method} does not learn from pairs", "method: reward and method: dpo do"
    if place.wanted == "eval" and stage.heldout is None:
        return "holds no pairs out", "set heldout: 0.2 in that stage"
    return None


def _fault_of_model(recipe: Recipe, stage: Recipe, place: Place) -> tuple[str, str] | None:
    hint = "a policy starts from a language model, a reward may be a stage with method: reward"
    if place.wanted == "reward":
        return None if stage.method == "reward" else ("is no reward model", hint)
    if isinstance(stage, PairsRecipe):
        return "writes pairs and no model", f"name the stage whose model answered: {stage.model}"
    if place.wanted == "model" and stage.method == "reward" and recipe.method != "reward":  # a critic may start from either
        return "is a reward model", hint
    return None


# ---- names that become folders


def stage_recipe(pipeline: Pipeline, recipe: Recipe) -> Recipe:
    """The recipe with every `stage:NAME` replaced: by the folder of that stage's model, or by its run directory where pairs are wanted."""

    def folder(place: Place, name: str) -> str:
        if not name.startswith(PREFIX):
            return name
        run_dir = Path(pipeline.stages[name.removeprefix(PREFIX)].run_dir)
        return str(run_dir if place.wanted in ("train", "eval") else run_dir / "model")

    return renamed(recipe, folder)


def not_there_yet(pipeline: Pipeline, recipe: Recipe) -> str | None:
    """The first `stage:NAME` of the recipe whose stage has not written what is wanted; None when all is there."""
    missing: list[str] = []

    def look(place: Place, name: str) -> str:
        if name.startswith(PREFIX):
            run_dir = Path(pipeline.stages[name.removeprefix(PREFIX)].run_dir)
            there = holds_pairs(run_dir) if place.wanted in ("train", "eval") else (run_dir / "model").exists()
            missing.extend([] if there else [name])
        return name

    renamed(recipe, look)
    return missing[0] if missing else None


def moved_to(recipe: Recipe | Pipeline, path: Path) -> Recipe | Pipeline:
    """The recipe with its run_dir, and those of its stages inside it, at `path`: a run directory may be moved."""
    if not isinstance(recipe, Pipeline):
        return _stage_moved_to(recipe, path)
    stages = {
        name: stage.model_copy(update={"run_dir": _rebased(stage.run_dir, recipe.run_dir, path)}) for name, stage in recipe.stages.items()
    }
    return recipe.model_copy(update={"run_dir": str(path), "stages": stages})


def _stage_moved_to(recipe: Recipe, path: Path) -> Recipe:
    """A run at `path`; what stages that stood beside it wrote stands beside it still. Nothing else is looked for in another place."""
    beside, now = str(Path(recipe.run_dir).parent), path.parent

    def follow(place: Place, name: str) -> str:
        folder = Path(_rebased(name, beside, now))
        found = holds_pairs(folder) if place.wanted in ("train", "eval") else folder.is_dir()
        return str(folder) if found else name

    return renamed(recipe, follow).model_copy(update={"run_dir": str(path)})


def _rebased(run_dir: str, old: str, new: Path) -> str:
    inside = Path(run_dir)
    return str(new / inside.relative_to(old)) if inside.is_relative_to(old) else run_dir
