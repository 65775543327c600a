"""What a user should know before a run starts: the questions that every tracker repeats, answered once, where they apply."""

from __future__ import annotations

from collections.abc import Sequence

from postgrad.rewards.advice import Declared, design_notes
from postgrad.train.presets import PRESETS, loss_settings
from postgrad.train.recipe import GRPORecipe
from postgrad.train.setup import Policy


def grpo_notes(recipe: GRPORecipe, rewards: Sequence[Declared], policy: Policy) -> list[str]:
    settings = loss_settings(recipe.loss, recipe.rollout)
    notes = [
        "the loss reads about 0, or below, and that is right: on the sampled policy the ratio is 1 and advantages are centred, so the loss "
        "is 0 while its gradient is not; watch the reward, and grad_norm"
    ]
    one_update = recipe.batch.minibatches * recipe.batch.epochs == 1
    if one_update and settings.old_logprobs == "policy" and PRESETS[recipe.loss.preset].surrogate == "clipped":
        notes.append("with one update per batch the ratio is exactly 1: the clip range has no effect")
    if policy.model.autocast is not None and settings.old_logprobs == "sampler":
        notes.append(f"sampling in {policy.model.autocast}: the ratio corrects its rounding (sampling/logprob_difference shows how much)")
    return notes + [note.message for note in design_notes(rewards, scale=settings.scale)]
