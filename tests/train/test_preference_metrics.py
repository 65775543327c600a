"""What a preference run logs, by hand; and that each finding speaks when it should, once, and never otherwise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from postgrad.protocols import BackwardResult
from postgrad.rewards.doctor.preference import LN2
from postgrad.train.preference_metrics import WINDOW, Watch, evaluation_metrics, gains, step_metrics
from postgrad.train.recipe import DPOLoss
from postgrad.types import TrainRow


def row(scored: int, reference: list[float] | None = None) -> TrainRow:
    per_token = {} if reference is None else {"reference_logprobs": [0.0, *reference]}
    return TrainRow(tuple(range(scored + 1)), (False,) + (True,) * scored, per_token=per_token)


# numbers ---------------------------------------------------------------------------------------------------------------------------


def test_a_steps_metrics_are_means_over_its_pairs_and_tokens():
    sums = {"rewards/margins": 3.0, "rewards/accuracies": 1.0, "logps/chosen": -8.0, "entropy": 10.0, "tokens": 4.0, "computed_tokens": 9.0}
    metrics = step_metrics(BackwardResult(loss=0.5, sums=sums, logprobs=[]), 2)
    assert metrics == {"loss": 0.5, "entropy": 2.5, "rewards/margins": 1.5, "rewards/accuracies": 0.5, "logps/chosen": -4.0}


def test_held_out_accuracy_margin_and_interval_by_hand():
    """Pair 1: gains 1 and −1. Pair 2: gains −2 and 0. Pair 3: both 0, which is not right."""
    rows = [row(2, [-1, -1]), row(1, [-2]), row(1, [-1]), row(2, [-2, -1]), row(1, [-1]), row(1, [-1])]
    policy = [[-0.5, -0.5], [-3], [-3], [-2, -1], [-1], [-1]]
    metrics = evaluation_metrics(rows, policy, DPOLoss(beta=0.5))
    assert metrics["eval/rewards/accuracies"] == pytest.approx(1 / 3)
    assert metrics["eval/rewards/margins"] == pytest.approx(0.5 * (2 - 2 + 0) / 3)
    assert metrics["eval/logps/chosen"] == pytest.approx(-5 / 3)
    assert metrics["eval/logps/rejected"] == pytest.approx(-7 / 3)
    assert metrics["eval/pairs"] == 3
    low, high = metrics["eval/rewards/accuracies_low"], metrics["eval/rewards/accuracies_high"]
    assert (low, high) == pytest.approx((0.0615, 0.7923), abs=1e-3)  # Wilson, 1 of 3


def test_losses_that_compare_per_token_are_judged_per_token():
    """A long answer that is likelier per token has the lower sum: simpo and orpo call it the better one, cpo the worse one."""
    rows, policy = [row(4), row(1)], [[-1.0] * 4, [-2.0]]
    for kind, right in (("simpo", 1.0), ("orpo", 1.0), ("cpo", 0.0)):
        assert evaluation_metrics(rows, policy, DPOLoss(kind=kind))["eval/rewards/accuracies"] == right


def test_against_a_reference_rewards_are_of_whole_answers():
    policy, reference, tokens = torch.tensor([-3.0]), torch.tensor([-1.0]), torch.tensor([4.0])
    assert gains(policy, reference, tokens, DPOLoss(kind="ipo", beta=0.5)).item() == -1.0
    assert gains(policy, reference, tokens, DPOLoss(kind={"sigmoid": 1.0, "simpo": 1.0}, beta=0.5)).item() == -1.0
    assert gains(policy, reference - reference, tokens, DPOLoss(kind={"simpo": 1.0, "sft": 1.0}, beta=2.0)).item() == -1.5


# findings --------------------------------------------------------------------------------------------------------------------------


def watched(metrics: dict[str, float], *, steps: int = WINDOW, settings: DPOLoss | None = None) -> list[str]:
    """What is said over `steps` equal steps."""
    notes: list[str] = []
    watch = Watch(settings or DPOLoss(), notes.append)
    for step in range(1, steps + 1):
        watch.see(step, HEALTHY | metrics)
    return notes


HEALTHY = {
    "loss": 0.5,
    "rewards/chosen": 0.1,
    "rewards/rejected": -0.3,
    "rewards/margins": 0.4,
    "rewards/accuracies": 0.9,
    "logps/chosen": -20.0,
    "logps/rejected": -30.0,
    "grad_norm": 1.0,
}
STUCK = {"loss": LN2 + 5e-4, "rewards/margins": 1e-4, "rewards/chosen": 0.0}
FALLING = {"rewards/chosen": -0.2, "rewards/rejected": -0.6}
LEARNED = {"loss": 0.01, "rewards/accuracies": 1.0}


def test_a_healthy_run_is_told_nothing():
    assert watched({}, steps=60) == []


@pytest.mark.parametrize(
    ("metrics", "words"),
    [(STUCK, "nothing is learned"), (FALLING, "2.0 nats less likely"), (LEARNED, "the preference is learned")],
)
def test_a_finding_is_said_once_and_only_after_a_whole_window(metrics, words):
    """ETO#14, trl#800, trl#1236."""
    assert watched(metrics, steps=WINDOW - 1) == []
    (note,) = watched(metrics)
    assert words in note
    assert note.startswith(f"step {WINDOW}:")
    assert watched(metrics, steps=3 * WINDOW) == [note]


@pytest.mark.parametrize(
    "metrics",
    [
        {"loss": LN2 + 2e-3, "rewards/margins": 1e-4},
        {"loss": LN2 - 2e-3},
        {"rewards/chosen": -0.2, "rewards/margins": -0.1},  # the margin does not grow: nothing is traded
        {"rewards/chosen": 0.0},
        {"rewards/accuracies": 1.0, "loss": 0.06},
        {"rewards/accuracies": 0.98, "loss": 0.01},
    ],
)
def test_a_finding_is_not_said_on_the_other_side_of_its_border(metrics):
    assert watched(metrics) == []


def test_stuck_means_every_step_of_the_window():
    notes: list[str] = []
    watch = Watch(DPOLoss(), notes.append)
    for step in range(1, 2 * WINDOW):
        watch.see(step, HEALTHY | {"loss": LN2 if step != WINDOW else 0.5})
    assert notes == []
    watch.see(2 * WINDOW, HEALTHY | {"loss": LN2})
    assert len(notes) == 1


def test_ln_2_is_the_start_of_the_sigmoid_loss_only():
    assert watched(STUCK, settings=DPOLoss(kind="hinge")) == []
    assert watched(STUCK, settings=DPOLoss(kind="simpo")) == []


def test_without_a_reference_there_is_nothing_the_chosen_answer_could_fall_from():
    """Its log-prob itself is the reward there, which is always below 0."""
    assert watched(FALLING, settings=DPOLoss(kind="simpo")) == []


def test_the_nats_do_not_depend_on_beta():
    (note,) = watched({"rewards/chosen": -0.4, "rewards/rejected": -1.0}, settings=DPOLoss(beta=0.2))
    assert "2.0 nats" in note


def test_a_resumed_run_says_what_an_unbroken_one_says():
    def run(cut: int | None) -> list[str]:
        notes: list[str] = []
        watch = Watch(DPOLoss(), notes.append)
        for step in range(1, 3 * WINDOW):
            watch.see(step, HEALTHY | {"rewards/chosen": -0.01 * step, "loss": 0.001, "rewards/accuracies": 1.0})
            if step == cut:
                state: Any = watch.state()
                watch = Watch(DPOLoss(), notes.append)
                watch.load_state(state)
        return notes

    whole = run(None)
    assert len(whole) == 2
    assert all(run(cut) == whole for cut in (3, WINDOW - 1, WINDOW, WINDOW + 5))


def test_a_watchs_state_is_json_that_shares_nothing_with_it():
    import json

    watch = Watch(DPOLoss(), lambda note: None)
    watch.see(1, HEALTHY)
    state = watch.state()
    before = json.dumps(state)
    watch.see(2, HEALTHY)
    assert json.dumps(state) == before
    assert not math.isnan(json.loads(before)["steps"][0]["loss"])
