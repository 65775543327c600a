"""How far a policy is from another model, measured on what the policy sampled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from postgrad.models.loading import load
from postgrad.models.saving import save
from postgrad.train.evaluate import Evaluation, kl_to
from postgrad.train.recipe import PPORecipe
from postgrad.train.run import evaluate
from postgrad.types import Group, StopReason


@pytest.fixture(scope="module")
def judged(tiny_folder, tmp_path_factory) -> tuple[PPORecipe, Evaluation]:
    folder = tmp_path_factory.mktemp("kl")
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "say {word}"}}\n' for word in "abcd"))
    (folder / "rewards.py").write_text("def length(completion):\n    return float(len(completion))\n")
    recipe = PPORecipe.model_validate(
        {
            "method": "ppo", "model": str(tiny_folder), "run_dir": str(folder / "run"), "max_steps": 1, "dtype": "float32",
            "data": {"train": "prompts.jsonl", "eval": "prompts.jsonl"}, "rewards": [{"use": "rewards.py:length"}],
            "rollout": {"max_tokens": 6, "max_turns": 1}, "evaluation": {"temperature": 1.0, "samples": 2},
        }
    )  # fmt: skip
    return recipe, evaluate(recipe, folder, model=recipe.model)


@pytest.mark.slow
def test_a_policy_is_at_no_distance_from_itself(judged):
    recipe, result = judged
    distance = kl_to(recipe.model, result, recipe)
    assert distance.count == 8
    assert abs(distance.mean) < 1e-4


@pytest.mark.slow
def test_the_distance_is_the_sum_of_log_ratios_over_sampled_tokens(judged, tmp_path):
    recipe, result = judged
    other = load(recipe.model, dtype="float32")
    with torch.no_grad():
        for weight in other.model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    folder = save(other, tmp_path / "other")
    by_hand = []
    for rollout in (rollout for group in result.groups for rollout in group.rollouts):
        prompt, sampled = rollout.segments[0].token_ids, rollout.segments[1]
        ids = torch.tensor([[*prompt, *sampled.token_ids]])
        with torch.no_grad():
            logprobs = other.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        known = logprobs[range(len(sampled.token_ids)), list(sampled.token_ids)].sum().item()
        by_hand.append(sum(sampled.logprobs) - known)
    distance = kl_to(str(folder), result, recipe)
    assert distance.mean == pytest.approx(sum(by_hand) / 8, rel=1e-4)
    assert distance.mean > 0.05


@pytest.mark.slow
def test_a_rollout_that_the_infrastructure_spoiled_is_left_out(judged):
    recipe, result = judged
    first = result.groups[0]
    spoiled = Group(first.prompt, (replace(first.rollouts[0], stop=StopReason.INFRASTRUCTURE), first.rollouts[1]))
    assert kl_to(recipe.model, replace(result, groups=(spoiled, *result.groups[1:])), recipe).count == 7
