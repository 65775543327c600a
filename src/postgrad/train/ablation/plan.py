"""Which runs an ablation by training consists of: their rewards, seeds, steps and folders.

    RUN/ablation/20-steps/all/seed-0/            run directories
    RUN/ablation/20-steps/without-style/seed-0/
    RUN/ablation/20-steps/result.json

Runs of one seed share the order of the prompts and the noise of sampling. A reward that is left out has weight 0: it trains nothing and is
still scored, so that one can see what becomes of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.errors import RecipeError
from postgrad.rewards.base import RewardRole
from postgrad.train import setup
from postgrad.train.model_rewards import names_model
from postgrad.train.recipe import GRPORecipe, RLRecipe
from postgrad.train.run import load_run

HELD_OUT = 0.2
"""Share of the prompts that is held out where the run holds none out."""
ALL = "all"


@dataclass(frozen=True)
class Entry:
    """place: where the reward stands in the recipe. range: as it declares it, None where it does not."""

    place: int
    role: RewardRole
    range: tuple[float, float] | None


@dataclass(frozen=True)
class Plan:
    """rewards: those with a weight, by name. dropped: those to leave out."""

    path: Path
    recipe: RLRecipe
    base: Path
    rewards: Mapping[str, Entry]
    dropped: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int

    @property
    def folder(self) -> Path:
        return self.path / "ablation" / f"{self.steps}-steps"

    @property
    def arms(self) -> tuple[str, ...]:
        return (ALL, *self.dropped)

    def directory(self, arm: str, seed: int) -> Path:
        name = ALL if arm == ALL else f"without-{re.sub(r'[^A-Za-z0-9_.-]', '_', arm)}"
        return self.folder / name / f"seed-{seed}"

    def full(self, seed: int) -> RLRecipe:
        """The recipe with every reward: what behaviour is measured by."""
        data = self.recipe.data if self.recipe.data.eval is not None else self.recipe.data.model_copy(update={"eval": HELD_OUT})
        evaluation = self.recipe.evaluation.model_copy(update={"every": None})
        update = {"seed": seed, "max_steps": self.steps, "epochs": None, "data": data, "evaluation": evaluation}
        return self.recipe.model_copy(update=update)

    def trained(self, arm: str, seed: int) -> RLRecipe:
        """The recipe of one run. Held-out prompts of a file are looked at once, after the run; a share must be held out of it."""
        recipe = self.full(seed)
        rewards = list(recipe.rewards)
        if arm != ALL:
            place = self.rewards[arm].place
            rewards[place] = rewards[place].model_copy(update={"weight": 0.0})
        data = recipe.data if isinstance(recipe.data.eval, float) else recipe.data.model_copy(update={"eval": None})
        update: dict[str, Any] = {"run_dir": str(self.directory(arm, seed)), "rewards": rewards, "data": data}
        if isinstance(recipe, GRPORecipe) and self._outcome_is_gone(arm) and recipe.loss.filter == "outcome":
            update["loss"] = recipe.loss.model_copy(update={"filter": "zero_std"})
        return recipe.model_copy(update=update)

    def _outcome_is_gone(self, arm: str) -> bool:
        return all(entry.role != "outcome" for name, entry in self.rewards.items() if name != arm)


def plan(path: Path, *, dropped: Sequence[str], seeds: int, steps: int) -> Plan:
    """Raises `RecipeError` for a run whose rewards cannot be left out one by one, or names that are none of them."""
    loaded = load_run(path)
    recipe = loaded.recipe
    if not isinstance(recipe, RLRecipe):
        what = "only runs of GRPO and PPO have rewards to leave out"
        raise RecipeError(what, where=str(path), hint="pass the directory of such a run, not of a pipeline")
    if isinstance(recipe, GRPORecipe) and recipe.loss.advantages is not None:
        what = "a function of yours makes the advantages (loss.advantages), whatever the weights are"
        raise RecipeError(what, where=str(path), hint="leave the reward out in the function, and compare two runs")
    rewards = _acting(recipe, loaded.base)
    if len(rewards) < 2:
        raise RecipeError("the run has one reward with a weight; without it nothing is trained", where=str(path))
    if unknown := [name for name in dropped if name not in rewards]:
        hint = f"rewards with a weight: {', '.join(rewards)}"
        raise RecipeError(f"no reward {unknown[0]!r} with a weight in this run", where="--reward", hint=hint)
    chosen = tuple(dict.fromkeys(dropped)) or tuple(rewards)
    return Plan(path, recipe, loaded.base, rewards, chosen, tuple(recipe.seed + number for number in range(seeds)), steps)


def _acting(recipe: RLRecipe, base: Path) -> dict[str, Entry]:
    """The rewards with a weight, by their names."""
    functions = iter(setup.load_recipe_rewards(recipe, base).functions)
    found: dict[str, Entry] = {}
    for place, reward in enumerate(recipe.rewards):
        if names_model(reward, base) is not None:
            name, entry = reward.name or "reward_model", Entry(place, reward.role or "outcome", None)
        else:
            function = next(functions)
            name, entry = function.name, Entry(place, function.role, function.range)
        if reward.weight:
            found[name] = entry
    return found
