"""The loss of GRPO and its presets on hand-made rows, and what becomes of groups, masks and denominators. No model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from postgrad.protocols import BackwardResult
from postgrad.train.grpo import grpo_loss, loss_metrics, spread
from postgrad.train.judged import Denominators, JudgedGroup, Minibatch, rows_of, split_minibatches
from postgrad.train.presets import PRESETS, loss_settings
from postgrad.train.recipe import GRPOLoss, Rollout
from postgrad.types import Group, Message, Prompt, Segment, Source, StopReason, TrainRow
from postgrad.types import Rollout as Sample


@dataclass
class FakeRows:
    mask: Tensor
    per_row: dict[str, Tensor]
    per_token: dict[str, Tensor] = field(default_factory=dict)


MASK = torch.tensor([[True, True, True], [True, False, False]])
ADVANTAGES = torch.tensor([1.0, -1.0])
CURRENT = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, 0.0, 0.0]])


def value_and_gradient(loss: GRPOLoss, *, old: Tensor | None = None, current: Tensor = CURRENT, mask: Tensor = MASK, **per_token: Tensor):
    settings = loss_settings(loss, Rollout(max_tokens=8, max_turns=1))
    if old is not None:
        per_token["old_logprobs"] = old
    leaf = current.clone().requires_grad_()
    value, sums = grpo_loss(settings, Denominators(tokens=4.0, rollouts=2.0), own_old=old is None)(
        leaf, FakeRows(mask, {"advantages": ADVANTAGES, "share": torch.ones(2)}, per_token)
    )
    value.backward()
    return value.item(), leaf.grad, sums


@pytest.mark.parametrize(
    ("preset", "value", "gradient"),
    [
        # On policy −A per token: grpo averages inside each rollout, bnpo and dapo over all 4 tokens, dr_grpo divides by 2 × 8.
        ("grpo", 0.0, [[-1 / 6, -1 / 6, -1 / 6], [0.5, 0.0, 0.0]]),
        ("bnpo", -0.5, [[-0.25, -0.25, -0.25], [0.25, 0.0, 0.0]]),
        ("dapo", -0.5, [[-0.25, -0.25, -0.25], [0.25, 0.0, 0.0]]),
        ("dr_grpo", -2 / 16, [[-1 / 16, -1 / 16, -1 / 16], [1 / 16, 0.0, 0.0]]),
        ("gspo", 0.0, [[-1 / 6, -1 / 6, -1 / 6], [0.5, 0.0, 0.0]]),
        ("cispo", (3.5 - 0.3) / 4, [[-0.25, -0.25, -0.25], [0.25, 0.0, 0.0]]),
        ("rloo", (3.5 - 0.3) / 2, [[-0.5, -0.5, -0.5], [0.5, 0.0, 0.0]]),
    ],
)
def test_each_preset_on_policy_has_the_value_and_gradient_computed_by_hand(preset, value, gradient):
    got, grad, _ = value_and_gradient(GRPOLoss(preset=preset))
    assert got == pytest.approx(value, abs=1e-6)
    torch.testing.assert_close(grad, torch.tensor(gradient), atol=1e-6, rtol=0)


@pytest.mark.parametrize("preset", PRESETS)
def test_with_the_policy_as_its_own_old_the_derivative_is_the_same_everywhere_to_the_bit(preset):
    """What lets the head be computed in one pass; an engine refuses a loss that differs in one bit."""
    loss = GRPOLoss(preset=preset)
    _, here, _ = value_and_gradient(loss)
    _, there, _ = value_and_gradient(loss, current=3 * CURRENT - 0.7)
    assert torch.equal(here, there)
    settings, batch = loss_settings(loss, Rollout(max_tokens=8, max_turns=1)), Denominators(tokens=4.0, rollouts=2.0)
    assert grpo_loss(settings, batch, own_old=True).constant_gradient
    assert not grpo_loss(settings, batch).constant_gradient
    with_kl = loss_settings(GRPOLoss(preset=preset, kl_coef=0.1), Rollout(max_tokens=8, max_turns=1))
    assert not grpo_loss(with_kl, batch, own_old=True).constant_gradient


def test_every_preset_of_the_recipe_is_in_the_table():
    from typing import get_args

    from postgrad.train.recipe import PresetName

    assert set(PRESETS) == set(get_args(PresetName))


def test_clipped_token_has_no_gradient_and_is_counted_on_its_side():
    old = CURRENT.clone()
    old[0, 0] -= 1.0  # ratio e > 1.2 with a positive advantage
    old[1, 0] += 1.0  # ratio 1/e < 0.8 with a negative one
    _, grad, sums = value_and_gradient(GRPOLoss(preset="grpo"), old=old)
    assert grad[0, 0] == 0.0
    assert grad[1, 0] == 0.0
    assert grad[0, 1] != 0.0
    assert (sums["clip_high"].item(), sums["clip_low"].item()) == (1.0, 1.0)


def test_extreme_values_under_the_mask_change_nothing():
    old = CURRENT - 0.1
    plain = value_and_gradient(GRPOLoss(preset="grpo", kl_coef=0.1), old=old, reference_logprobs=CURRENT - 0.2)
    wild, wild_old, wild_reference = CURRENT.clone(), old.clone(), CURRENT - 0.2
    wild[1, 1], wild_old[1, 1], wild_reference[1, 2] = math.nan, -1e30, math.inf
    masked = value_and_gradient(GRPOLoss(preset="grpo", kl_coef=0.1), old=wild_old, current=wild, reference_logprobs=wild_reference)
    assert masked[0] == plain[0]
    torch.testing.assert_close(masked[1], plain[1], atol=0, rtol=0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_is_zero_with_the_policy_as_reference_and_the_logged_kl_is_the_one_used(estimator):
    loss = GRPOLoss(preset="bnpo", kl_coef=0.5, kl_estimator=estimator)
    same, _, sums = value_and_gradient(loss, reference_logprobs=CURRENT.clone())
    assert sums["kl"].item() == 0.0
    other, _, sums = value_and_gradient(loss, reference_logprobs=CURRENT - 0.3)
    assert other - same == pytest.approx(0.5 * sums["kl"].item() / 4, abs=1e-6)


def test_two_sided_clip_bounds_the_loss_of_a_huge_ratio_under_a_negative_advantage():
    old = CURRENT.clone()
    old[1, 0] -= 10.0
    unbounded, _, _ = value_and_gradient(GRPOLoss(preset="bnpo"), old=old)
    bounded, grad, _ = value_and_gradient(GRPOLoss(preset="bnpo", max_ratio=3.0), old=old)
    assert unbounded > 1000
    assert bounded == pytest.approx((-3 + 3.0) / 4, abs=1e-6)
    assert grad[1, 0] == 0.0


# rows ------------------------------------------------------------------------------------------------------------------------------


def sample(*turns: int, stop: StopReason = StopReason.END, prompt: int = 4) -> Sample:
    """A rollout with the given sampled tokens per turn and two tool tokens between turns."""
    segments = [Segment(Source.PROMPT, tuple(range(prompt)))]
    for index, length in enumerate(turns):
        if index:
            segments.append(Segment(Source.TOOL, (90, 91)))
        segments.append(Segment(Source.MODEL, (7,) * length, (-0.5,) * length))
    return Sample(tuple(segments), (Message("assistant", "x"),), stop)


def judged(samples: list[Sample], advantages: list[float], totals: list[float] | None = None, dropped: str = "") -> JudgedGroup:
    group = Group(Prompt("p:1", (Message("user", "q"),)), tuple(samples))
    return JudgedGroup(group, {}, totals or [0.0] * len(samples), advantages, {}, dropped)


def minibatches(groups: list[JudgedGroup], **changes: object) -> list[Minibatch]:
    settings = {"minibatches": 1, "mask_truncated": False, "skip_zero": True} | changes
    return split_minibatches(groups, **settings)  # type: ignore[arg-type]


def test_tool_tokens_are_not_trained_and_sampled_ones_are():
    (row,) = rows_of(0, sample(2, 3), 1.0)
    assert row.trained == (False,) * 4 + (True,) * 2 + (False,) * 2 + (True,) * 3
    assert [value for value, flag in zip(row.per_token["sampler_logprobs"], row.trained, strict=True) if flag] == [-0.5] * 5
    assert (row.group, row.shared_prefix) == (0, 4)


def test_forked_rollout_becomes_one_row_per_fork_without_a_shared_prefix():
    first = (Segment(Source.PROMPT, (1, 2)), Segment(Source.MODEL, (3,), (-0.1,)))
    second = (Segment(Source.PROMPT, (1, 9, 2)), Segment(Source.MODEL, (4,), (-0.2,)))
    rollout = Sample(second, (), StopReason.END, forks=(first,))
    rows = rows_of(0, rollout, 1.0)
    assert [row.token_ids for row in rows] == [(1, 2, 3), (1, 9, 2, 4)]
    assert [row.group for row in rows] == [None, None]
    assert [row.per_row["share"] for row in rows] == [0.5, 0.5]
    (batch,) = minibatches([judged([rollout, sample(2)], [1.0, -1.0])])
    assert batch.denominators == Denominators(tokens=4.0, rollouts=2.0)


def test_prompts_that_differ_within_a_group_are_not_shared():
    (batch,) = minibatches([judged([sample(2, prompt=4), sample(2, prompt=5)], [1.0, -1.0])])
    assert [(row.group, row.shared_prefix) for row in batch.rows] == [(None, 0), (None, 0)]


def test_zero_advantage_rollout_counts_in_the_denominator_and_costs_no_row():
    (batch,) = minibatches([judged([sample(2), sample(3)], [1.0, 0.0])])
    assert len(batch.rows) == 1
    assert batch.denominators == Denominators(tokens=5.0, rollouts=2.0)
    (kept,) = minibatches([judged([sample(2), sample(3)], [1.0, 0.0])], skip_zero=False)
    assert len(kept.rows) == 2


def test_truncated_rollout_leaves_numerator_and_denominator_together():
    group = judged([sample(2), sample(3, stop=StopReason.TURN_TOKENS)], [1.0, -1.0])
    (batch,) = minibatches([group], mask_truncated=True)
    assert len(batch.rows) == 1
    assert batch.denominators == Denominators(tokens=2.0, rollouts=1.0)


def test_rollout_broken_outside_the_model_or_without_a_score_is_in_neither():
    group = judged([sample(2), sample(3, stop=StopReason.INFRASTRUCTURE), sample(1)], [1.0, 1.0, 1.0], [1.0, 1.0, math.nan])
    (batch,) = minibatches([group])
    assert batch.denominators == Denominators(tokens=2.0, rollouts=1.0)


def test_minibatches_hold_whole_groups():
    groups = [judged([sample(1), sample(1)], [1.0, -1.0]) for _ in range(4)]
    batches = minibatches(groups, minibatches=2)
    assert len(batches) == 2
    assert [sorted({row.group for row in batch.rows}) for batch in batches] == [[0, 1], [2, 3]]


def test_batch_with_fewer_groups_than_minibatches_still_has_every_step():
    batches = minibatches([judged([sample(1), sample(1)], [1.0, -1.0])], minibatches=4)
    assert [len(batch.rows) for batch in batches] == [2, 0, 0, 0]


def test_rollout_buffer_survives_json_exactly():
    (batch,) = minibatches([judged([sample(2, 1), sample(3)], [0.1 + 0.2, -1 / 3])])
    import json

    assert Minibatch.from_json(json.loads(json.dumps(batch.to_json()))) == batch


def test_values_of_trained_tokens_are_spread_to_their_places():
    row = TrainRow((1, 2, 3, 4), (False, True, False, True))
    assert spread(row, [-0.1, -0.2]) == [0.0, -0.1, 0.0, -0.2]


def test_step_without_any_gradient_reports_its_zero_loss_and_no_means():
    metrics = loss_metrics(Minibatch((), Denominators(5.0, 2.0)), BackwardResult(0.0, {"tokens": 0.0, "entropy": 0.0}, []))
    assert metrics == {"loss": 0.0, "trained_rollouts": 0.0, "trained_tokens": 0.0}
