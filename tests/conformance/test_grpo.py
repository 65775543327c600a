"""`GRPO.step` against `GRPOTrainer.train`: the same rollouts, rewards and weights give the same loss, gradients and metrics.

Each case runs two optimizer steps on one rollout batch: the first on policy, the second after every weight has moved, so that
ratios leave the clip range on both sides. TRL's micro-batches are padded blocks of rollouts, postgrad's are packed by tokens.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from postgrad.testing.tiny import Architecture, tiny_model

from . import same, trl_side

pytestmark = [pytest.mark.conformance, *trl_side.QUIET]

LENGTH = 37
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo", "epsilon": 0.2}, {"preset": "grpo"}),
    "bnpo": ({"loss_type": "bnpo", "epsilon": 0.2}, {"preset": "bnpo"}),
    "dr_grpo": ({"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": LENGTH}, {"preset": "dr_grpo"}),
    "dapo": ({"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}, {"preset": "dapo"}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"preset": "gspo"},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, {"preset": "cispo", "clip_high": 0.2}),  # TRL's is the bound itself
    "two-sided": (
        {"loss_type": "dapo", "epsilon": 0.1, "delta": 1.3},
        {"preset": "bnpo", "clip_low": 0.1, "clip_high": 0.1, "max_ratio": 1.3},
    ),
}
K3 = ({"beta": 0.3}, {"kl_coef": 0.3})
TOKEN_CLIP = ("grpo", "bnpo", "dr_grpo", "dapo")


def _both(
    folder: Path,
    theirs: dict[str, Any],
    ours: dict[str, Any],
    *,
    architecture: Architecture = "llama",
    temperature: float = 1.0,
    reference: bool = False,
    **options: Any,
) -> tuple[list[same.Step], list[same.Step]]:
    """Two steps of ours and of theirs."""
    policy = tiny_model(architecture)
    batch = same.batch_of_rollouts(policy, temperature=temperature, **options)
    frozen = tiny_model(architecture) if reference else None
    if frozen is not None:
        same.drift(0.05, seed=9)(frozen)
    shared: dict[str, Any] = {"steps": 2, "temperature": temperature, "move": same.drift(0.02), "reference": frozen}
    trl_steps = trl_side.grpo_steps(copy.deepcopy(policy), batch, folder, **shared, **theirs)
    return same.grpo_steps(copy.deepcopy(policy), batch, ours, length=LENGTH, **shared), trl_steps


def _assert_agree(ours: list[same.Step], theirs: list[same.Step]) -> None:
    for our_step, trl_step in zip(ours, theirs, strict=True):
        same.assert_same_step(our_step, trl_step)
    assert same.largest_difference(theirs[0].gradients, theirs[1].gradients) > 0.1, "the second step should not repeat the first"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_type_on_and_off_policy_with_tool_tokens(name: str, temperature: float, tmp_path: Path) -> None:
    ours, theirs = _both(tmp_path, *LOSSES[name], temperature=temperature)
    _assert_agree(ours, theirs)
    if name in TOKEN_CLIP:
        assert min(ours[1].metrics["clip_ratio/low_mean"], ours[1].metrics["clip_ratio/high_mean"]) > 0.05, "the clip should act"


@pytest.mark.parametrize("name", LOSSES)
def test_another_architecture(name: str, tmp_path: Path) -> None:
    _assert_agree(*_both(tmp_path, *LOSSES[name], architecture="qwen3"))


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_absolute_positions_where_all_prompts_have_one_length(name: str, tmp_path: Path) -> None:
    _assert_agree(*_both(tmp_path, *LOSSES[name], architecture="gpt2", prompt_tokens=8))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", LOSSES)
def test_kl_in_the_loss(name: str, temperature: float, tmp_path: Path) -> None:
    theirs, ours = LOSSES[name]
    our_steps, trl_steps = _both(tmp_path, theirs | K3[0], ours | K3[1], temperature=temperature, reference=True)
    _assert_agree(our_steps, trl_steps)
    assert trl_steps[0].metrics["kl"] > 0.1, "the KL term should weigh something"


def test_kl_trains_the_rollouts_whose_advantage_is_zero(tmp_path: Path) -> None:
    level = [[1.0, 0.0, 0.5, 2.0], [0.5] * 4, [1.0, 1.0, 0.0, 0.0]]
    theirs, ours = LOSSES["grpo"]
    _assert_agree(*_both(tmp_path, theirs | K3[0], ours | K3[1], reference=True, rewards=level))


def test_a_group_without_signal_still_counts_in_the_denominators(tmp_path: Path) -> None:
    level = [[1.0, 0.0, 0.5, 2.0], [0.5] * 4, [1.0, 1.0, 0.0, 0.0]]
    for name in ("grpo", "dapo", "dr_grpo"):
        _assert_agree(*_both(tmp_path / name, *LOSSES[name], rewards=level))


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_gradient_accumulation_and_token_budgets_change_nothing(name: str, accumulate: int, tmp_path: Path) -> None:
    theirs, ours = LOSSES[name]
    policy = tiny_model()
    batch = same.batch_of_rollouts(policy)
    options: dict[str, Any] = {"steps": 2, "move": same.drift(0.02)}
    trl_steps = trl_side.grpo_steps(copy.deepcopy(policy), batch, tmp_path, accumulate=accumulate, **options, **theirs)
    for budget in (1, 35, 120):
        our_steps = same.grpo_steps(copy.deepcopy(policy), batch, ours, length=LENGTH, tokens_per_micro_batch=budget, **options)
        _assert_agree(our_steps, trl_steps)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
def test_minibatches_are_optimizer_steps_over_whole_groups(name: str, tmp_path: Path) -> None:
    theirs, ours = LOSSES[name]
    policy = tiny_model()
    batch = same.batch_of_rollouts(policy)
    count = len(batch.groups)
    steps = same.grpo_steps(copy.deepcopy(policy), batch, ours, steps=count, minibatches=count, length=LENGTH, tokens_per_micro_batch=30)
    for number, (group, step) in enumerate(zip(batch.groups, steps, strict=True)):
        part = same.Batch((group,), batch.rewards[number * batch.group_size : (number + 1) * batch.group_size])
        (trl_step,) = trl_side.grpo_steps(copy.deepcopy(policy), part, tmp_path, **theirs)
        same.assert_same_step(step, trl_step)


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_a_model_that_cannot_be_packed(name: str, tmp_path: Path) -> None:
    """Attention over a window of the last tokens: postgrad falls back to padded batches."""
    theirs, ours = LOSSES[name]
    policy = tiny_model("qwen2", use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    batch = same.batch_of_rollouts(policy)
    shared: dict[str, Any] = {"steps": 2, "move": same.drift(0.02)}
    trl_steps = trl_side.grpo_steps(copy.deepcopy(policy), batch, tmp_path, **shared, **theirs)
    _assert_agree(same.grpo_steps(copy.deepcopy(policy), batch, ours, packed=False, **shared), trl_steps)


@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo"])
def test_old_logprobs_measured_by_the_policy(name: str, tmp_path: Path) -> None:
    theirs, ours = LOSSES[name]
    _assert_agree(*_both(tmp_path, theirs, ours | {"old_logprobs": "policy"}))


@pytest.mark.parametrize("name", ["dapo", "cispo"])
def test_truncated_rollouts_can_be_masked(name: str, tmp_path: Path) -> None:
    theirs, ours = LOSSES[name]
    cut = frozenset({1, 4, 6})
    masked = _both(tmp_path / "a", theirs | {"mask_truncated_completions": True}, ours | {"mask_truncated": True}, truncated=cut)
    _assert_agree(*masked)
    whole = _both(tmp_path / "b", theirs, ours, truncated=cut)
    _assert_agree(*whole)
    assert same.largest_difference(masked[0][0].gradients, whole[0][0].gradients) > 0.1


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_recipe_decides_how_advantages_are_scaled(scale: str, tmp_path: Path) -> None:
    theirs, ours = LOSSES["grpo"]
    _assert_agree(*_both(tmp_path, theirs | {"scale_rewards": scale}, ours | {"scale": scale}))


@pytest.mark.parametrize("normalize", ["sum_then_normalize", "normalize_then_sum"])
def test_two_rewards(normalize: str, tmp_path: Path) -> None:
    theirs, ours = LOSSES["dapo"]
    second = [[0.2, 0.9, 0.1, 0.0], [5.0, 0.0, 5.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    rewards = {"rewards": (same.REWARDS, second), "weights": (1.0, 0.5)}
    _assert_agree(*_both(tmp_path, theirs | {"multi_objective_aggregation": normalize}, ours | {"normalize": normalize}, **rewards))


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_an_adapter_and_its_start_as_reference(name: str, tmp_path: Path) -> None:
    """A trained adapter goes on: the reference is the adapter as it was, not the base."""
    theirs, ours = LOSSES[name]
    policy = with_adapter(tiny_model())
    batch = same.batch_of_rollouts(policy)
    shared: dict[str, Any] = {"steps": 2, "move": same.drift(0.05)}
    trl_steps = trl_side.grpo_steps(copy.deepcopy(policy), batch, tmp_path, **shared, **theirs | K3[0])
    our_steps = same.grpo_steps(copy.deepcopy(policy), batch, ours | K3[1], reference=policy, **shared)
    _assert_agree(our_steps, trl_steps)
    assert len(our_steps[0].gradients) == 4 * len(tiny_model().model.layers)


def with_adapter(model: Any) -> Any:
    """LoRA on two projections of every layer, away from its start at 0."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    same.drift(0.1, seed=5)(adapted)
    return adapted


@pytest.mark.parametrize("name", TOKEN_CLIP)
def test_metrics_mean_what_they_mean_in_trl(name: str, tmp_path: Path) -> None:
    theirs, ours = LOSSES[name]
    our_steps, trl_steps = _both(tmp_path, theirs | K3[0], ours | K3[1], reference=True)
    per_step = ("entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
    per_batch = (
        "reward", "rewards/reward_0/mean", "rewards/reward_0/std", "frac_reward_zero_std", "completions/mean_length",
        "completions/min_length", "completions/max_length", "completions/mean_terminated_length", "completions/clipped_ratio",
    )  # fmt: skip
    for number, names in enumerate((per_step + per_batch, per_step)):
        values = {key: our_steps[number].metrics[key] for key in names}
        assert values == pytest.approx({key: trl_steps[number].metrics[key] for key in names}, rel=same.RELATIVE, abs=1e-6)
