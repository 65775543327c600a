"""What a user should know before a run starts: the questions that every tracker repeats, answered once, where they apply."""

from __future__ import annotations

from collections.abc import Sequence

from postgrad.rewards.advice import Declared, design_notes
from postgrad.sandbox import problem
from postgrad.train.model_rewards import ModelReward
from postgrad.train.presets import PRESETS, loss_settings
from postgrad.train.recipe import GRPORecipe, PPORecipe, SampledRecipe
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
    return notes + [note.message for note in design_notes(rewards, settings.scheme)]


def sandbox_notes(recipe: SampledRecipe) -> list[str]:
    """Whether the permission of `allow_unsafe_exec` is needed here, and so used."""
    if not recipe.allow_unsafe_exec:
        return []
    found = problem()
    if found is None:
        return ["allow_unsafe_exec changes nothing: there is a sandbox here, and it is used"]
    return [f"allow_unsafe_exec: code that the model writes runs WITHOUT a sandbox, with your rights ({found[0]})"]


def role_notes(recipe: PPORecipe, models: Sequence[ModelReward], policy: Policy) -> list[str]:
    """With an adapter: which of PPO's roles share one frozen base, and which need a model of their own."""
    if recipe.adapter is None:
        return []
    shared = ["the policy", *(["its reference"] if recipe.loss.kl_coef else []), *(["the critic"] if recipe.critic.model is None else [])]
    shared += [f"the reward model {model.name}" for model in models if model.on_policys_base]
    weights = sum(weight.numel() for weight in policy.model.model.parameters() if not weight.requires_grad)
    notes = [f"one frozen base carries {', '.join(shared)}; {weights / 1e6:.1f} million weights are held once"]
    alone = [model.name for model in models if not model.on_policys_base]
    return notes + [f"the reward model {name} was not trained with an adapter on this base: it is a model of its own" for name in alone]
