"""Where postgrad differs from TRL 1.16 on purpose: both numbers, side by side, and how one follows from the other.

If TRL changes one of these, the test fails and the difference can be struck from the documentation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from postgrad import formulas
from postgrad.models.engine import LocalEngine
from postgrad.protocols import Rows
from postgrad.rewards.ledger import weighted_total
from postgrad.testing.tiny import tiny_model
from postgrad.train.judged import Denominators
from postgrad.types import TrainRow

from . import same, trl_side

pytestmark = [pytest.mark.conformance, *trl_side.QUIET]

Move = Callable[[nn.Module], None]
NONE = float("nan")
GROUP = len(same.REWARDS[0])
ROLLOUTS = sum(len(shapes) for _, shapes in same.TURNS)


MOVE = same.drift(0.02)


def _both(
    folder: Path, theirs: dict[str, Any], ours: dict[str, Any], *, steps: int = 1, accumulate: int = 1, move: Move = MOVE, **options: Any
) -> tuple[same.Batch, list[same.Step], list[same.Step]]:
    """(batch, our steps, TRL's steps) on the tiny llama."""
    policy = tiny_model()
    batch = same.batch_of_rollouts(policy, **options)
    shared: dict[str, Any] = {"steps": steps, "move": move}
    trl_steps = trl_side.grpo_steps(copy.deepcopy(policy), batch, folder, accumulate=accumulate, **shared, **theirs)
    return batch, same.grpo_steps(copy.deepcopy(policy), batch, ours, **shared), trl_steps


# rewards ------------------------------------------------------------------------------------------------------------------------------


def test_an_abstaining_reward_is_no_zero(tmp_path: Path) -> None:
    """A format reward scores all four; a correctness reward abstains on the last. TRL adds 0 for it, which makes it the worst of its
    siblings; here it counts with its group's mean, so abstaining neither favours nor punishes (trl#5902)."""
    rewards = (((1.0,) * 4,) * 3, ((1.0, 0.9, 0.5, NONE),) * 3)
    batch = same.batch_of_rollouts(tiny_model(), rewards=rewards, weights=(1.0, 1.0))
    trainer = trl_side.grpo_trainer(tiny_model(), batch, tmp_path)
    trainer.train()
    theirs = trl_side.advantages(trainer)[:GROUP]
    total = torch.from_numpy(weighted_total(batch.rewards, batch.weights, GROUP))
    ours = formulas.group_advantages(total, GROUP).tolist()[:GROUP]
    assert theirs == pytest.approx([0.8797, 0.6598, -0.2199, -1.3195], abs=1e-3)
    assert ours == pytest.approx([0.9255, 0.4628, -1.3883, 0.0], abs=1e-3)


@pytest.mark.parametrize(("loss", "preset"), [("grpo", "grpo"), ("dapo", "bnpo")])
def test_a_rollout_that_no_reward_scored_is_in_no_denominator(loss: str, preset: str, tmp_path: Path) -> None:
    """It has advantage 0 in TRL too, but dilutes the others there."""
    rewards = ((1.0, NONE, 0.5, 2.0), (0.0, NONE, NONE, 0.3), (-1.0, 0.25, 0.0, 1.5))
    batch, (ours,), (theirs,) = _both(tmp_path, {"loss_type": loss}, {"preset": preset}, rewards=rewards)
    trained = [sum(rollout.tool_mask) for rollout in batch.rollouts]
    counted = [tokens for tokens, total in zip(trained, batch.rewards[:, 0], strict=True) if total == total]
    factor = sum(trained) / sum(counted) if loss == "dapo" else ROLLOUTS / len(counted)
    assert factor > 1.1
    same.assert_same_step(ours, theirs, factor=factor)


def test_reward_std_is_the_spread_within_groups(tmp_path: Path) -> None:
    """The advantage's denominator, averaged; TRL 1.16 logs the spread of all rewards of the batch under this name."""
    _, (ours,), (theirs,) = _both(tmp_path, {}, {})
    rewards = torch.tensor(same.REWARDS)
    assert ours.metrics["reward_std"] == pytest.approx(rewards.std(1).mean().item(), rel=1e-5)
    assert theirs.metrics["reward_std"] == pytest.approx(rewards.std().item(), rel=1e-5)


# the loss -----------------------------------------------------------------------------------------------------------------------------


def test_cispo_with_trls_default_epsilon_ignores_the_ratio(tmp_path: Path) -> None:
    """TRL reads `epsilon_high` as the bound itself and falls back to ε = 0.2: every ratio above 0.2 becomes 0.2, so on policy the gradient
    is a fifth, and off policy the ratio no longer matters. The preset here weighs by up to 5."""
    move = same.drift(0.01)  # ratios from 0.4 to 1.6
    _, ours, theirs = _both(tmp_path, {"loss_type": "cispo"}, {"preset": "cispo"}, steps=2, move=move)
    same.assert_same_step(ours[0], theirs[0], factor=5.0)
    assert same.largest_difference(ours[1].gradients, _scaled(theirs[1].gradients, 5.0)) > 0.1

    def reinforce(current: Tensor, rows: Rows) -> Tensor:
        return formulas.reinforce_surrogate(current, rows.per_row["advantages"], rows.mask)

    same.assert_same_gradients(_gradients(reinforce, move=move), theirs[1].gradients, factor=5.0)


def test_bnpo_divides_by_the_whole_batchs_tokens(tmp_path: Path) -> None:
    """TRL's `bnpo` divides each micro-batch by its own tokens, so a token's weight depends on its neighbours; without accumulation the two
    agree (see test_grpo), and here nothing changes with the micro-batches."""
    _, (ours,), (whole,) = _both(tmp_path / "1", {"loss_type": "bnpo"}, {"preset": "bnpo"})
    same.assert_same_step(ours, whole)
    _, (again,), (accumulated,) = _both(tmp_path / "3", {"loss_type": "bnpo"}, {"preset": "bnpo"}, accumulate=3)
    same.assert_same_step(again, ours)
    assert same.largest_difference(accumulated.gradients, ours.gradients) > 0.02


def test_dapo_divides_each_optimizer_step_by_its_own_tokens(tmp_path: Path) -> None:
    """Several optimizer steps on one rollout batch: TRL divides each by the batch's mean number of tokens, so its steps add up to the
    gradient of the whole batch and weigh as many tokens as they happen to hold. Here every step is a mean over its own tokens."""
    policy = tiny_model()
    batch = same.batch_of_rollouts(policy)
    count = len(batch.groups)
    split = {"per_device_train_batch_size": batch.group_size, "steps_per_generation": count, "num_iterations": 1}
    theirs = trl_side.grpo_steps(copy.deepcopy(policy), batch, tmp_path, steps=count, loss_type="dapo", **split)
    (whole,) = same.grpo_steps(copy.deepcopy(policy), batch, {"preset": "bnpo"})
    ours = same.grpo_steps(copy.deepcopy(policy), batch, {"preset": "bnpo"}, steps=count, minibatches=count, tokens_per_micro_batch=30)
    same.assert_same_gradients(_scaled(whole.gradients, count), _total(theirs))
    assert same.largest_difference(_total(ours), _total(theirs)) > 0.1


def test_masked_rollouts_are_not_in_the_mean_over_sequences(tmp_path: Path) -> None:
    """`mask_truncated` takes rollouts out of numerator and denominator. TRL's `grpo` loss still divides by all of them."""
    cut = frozenset({1, 4, 6})
    theirs = {"loss_type": "grpo", "mask_truncated_completions": True}
    _, (ours,), (masked,) = _both(tmp_path, theirs, {"preset": "grpo", "mask_truncated": True}, truncated=cut)
    same.assert_same_step(ours, masked, factor=ROLLOUTS / (ROLLOUTS - len(cut)))


def test_trl_multiplies_k3_by_the_ratio_by_default(tmp_path: Path) -> None:
    """`use_bias_correction_kl`. The articles' k3 is the default here; the other has its own name in the formulas. On policy the two have
    one value but not one gradient."""
    policy, reference = tiny_model(), tiny_model()
    same.drift(0.05, seed=9)(reference)
    batch = same.batch_of_rollouts(policy)
    shared: dict[str, Any] = {"reference": reference, "steps": 2, "move": MOVE}
    ours = same.grpo_steps(copy.deepcopy(policy), batch, {"preset": "bnpo", "kl_coef": 0.3}, **shared)
    default = {"loss_type": "bnpo", "beta": 0.3, "use_bias_correction_kl": True}
    theirs = trl_side.grpo_steps(copy.deepcopy(policy), batch, tmp_path, **shared, **default)
    assert ours[0].loss == pytest.approx(theirs[0].loss, rel=same.RELATIVE)
    assert ours[1].loss != pytest.approx(theirs[1].loss, rel=0.01)
    for our_step, trl_step in zip(ours, theirs, strict=True):
        assert same.largest_difference(our_step.gradients, trl_step.gradients) > 0.1

    def weighted(current: Tensor, rows: Rows) -> Tensor:
        ratio = formulas.token_ratio(formulas.log_ratio(current, rows.per_token["sampler_logprobs"], rows.mask))
        kl = formulas.kl_k3_importance_weighted(current, rows.per_token["reference_logprobs"], ratio, rows.mask)
        return formulas.clipped_surrogate(ratio, rows.per_row["advantages"]) + 0.3 * kl

    for move, trl_step in zip((None, MOVE), theirs, strict=True):
        same.assert_same_gradients(_gradients(weighted, move=move, reference=reference), trl_step.gradients)


def test_left_padding_moves_absolute_positions_in_trl(tmp_path: Path) -> None:
    """TRL pads prompts on the left and passes no positions, so a model with learned positions reads a short prompt at other places than
    it was sampled at. Rows are never padded on the left here: the log-probs are the textbook's."""
    policy = tiny_model("gpt2")
    batch = same.batch_of_rollouts(policy)
    theirs = trl_side.grpo_steps(copy.deepcopy(policy), batch, tmp_path)
    ours = same.grpo_steps(copy.deepcopy(policy), batch, {})
    assert same.largest_difference(theirs[0].gradients, ours[0].gradients) > 0.1
    assert ours[0].metrics["sampling/logprob_difference"] < 1e-4


# RLOO ---------------------------------------------------------------------------------------------------------------------------------


def _rloo(folder: Path, accumulate: int) -> tuple[list[same.Step], list[same.Step]]:
    policy = tiny_model()
    batch = same.batch_of_rollouts(policy, tools=False)  # TRL's RLOO knows no tool mask
    shared: dict[str, Any] = {"steps": 2, "move": MOVE}
    theirs, _ = trl_side.rloo_steps(copy.deepcopy(policy), batch, folder, accumulate=accumulate, **shared)
    return same.grpo_steps(copy.deepcopy(policy), batch, {"preset": "rloo"}, tokens_per_micro_batch=30, **shared), theirs


@pytest.mark.parametrize("accumulate", [1, 3])
def test_rloo_on_policy_has_one_gradient_and_two_losses(accumulate: int, tmp_path: Path) -> None:
    """TRL: −mean_i r_i·A_i with the ratio of whole sequences, r = 1 on policy. Here: −mean_i A_i·Σ_t log π, the paper's. Both have the
    gradient −mean_i A_i·∇log π(sequence); TRL's value is −mean A = 0."""
    ours, theirs = _rloo(tmp_path, accumulate)
    same.assert_same_gradients(ours[0].gradients, theirs[0].gradients)
    assert theirs[0].loss == pytest.approx(0.0, abs=1e-5)
    assert abs(ours[0].loss) > 0.1


def test_rloo_off_policy_is_plain_reinforce_where_trl_clips_sequence_ratios(tmp_path: Path) -> None:
    ours, theirs = _rloo(tmp_path, 1)
    assert same.largest_difference(theirs[1].gradients, ours[1].gradients) > 0.1


# helpers ------------------------------------------------------------------------------------------------------------------------------


def _total(steps: list[same.Step]) -> dict[str, Tensor]:
    return {name: sum((step.gradients[name] for step in steps), start=torch.zeros(())) for name in steps[0].gradients}


def _scaled(gradients: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: factor * gradient for name, gradient in gradients.items()}


def _gradients(
    per_token: Callable[[Tensor, Rows], Tensor],
    *,
    move: Move | None = None,
    reference: nn.Module | None = None,
) -> dict[str, Tensor]:
    """Gradients of the mean over tokens of a loss of one's own, through the engine, for the rollouts of `batch_of_rollouts`."""
    policy = tiny_model()
    rows, batch = _rows(policy, reference)
    if move is not None:
        move(policy)

    def loss(current: Tensor, given: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        return formulas.token_mean(per_token(current, given), given.mask, denominator=batch.tokens), {}

    LocalEngine(policy, tokens_per_micro_batch=60).forward_backward(rows, loss)
    return same.gradients_of(policy)


def _rows(policy: nn.Module, reference: nn.Module | None) -> tuple[list[TrainRow], Denominators]:
    batch = same.batch_of_rollouts(policy)
    advantages = formulas.group_advantages(torch.from_numpy(batch.rewards[:, 0]), GROUP).tolist()
    rows = []
    for rollout, advantage in zip(batch.rollouts, advantages, strict=True):
        per_token = {"sampler_logprobs": rollout.logprobs}
        if reference is not None:
            per_token["reference_logprobs"] = tuple(same.plain_logprobs(reference, rollout.token_ids, 1.0))
        rows.append(TrainRow(rollout.token_ids, rollout.tool_mask, per_token=per_token, per_row={"advantages": advantage, "share": 1.0}))
    return rows, Denominators(float(sum(row.trained_tokens for row in rows)), float(len(rows)))
