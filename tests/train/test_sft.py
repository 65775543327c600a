"""SFT: the loss by hand, and that a step computes the head once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from postgrad.models import heads
from postgrad.models.engine import LocalEngine
from postgrad.testing import tiny_model
from postgrad.train.recipe import SFTRecipe
from postgrad.train.sft import SFT, sft_loss
from postgrad.types import TrainRow


def test_the_loss_is_the_mean_over_the_trained_tokens_of_the_whole_batch() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -5.0], [-4.0, -7.0, -7.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    loss, sums = sft_loss(4.0)(logprobs, SimpleNamespace(mask=mask))
    loss.backward()
    assert (loss.item(), sums) == (pytest.approx(7 / 4), {})
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-0.25, -0.25, 0.0], [-0.25, 0.0, 0.0]]


def test_a_step_makes_no_logit_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [TrainRow((1, 2, 3, 4), (False, True, True, True)), TrainRow((5, 6, 7), (False, False, True))]
    recipe = SFTRecipe.model_validate(
        {"method": "sft", "model": "given", "run_dir": "unused", "max_steps": 1, "data": {"train": "given.jsonl"}, "batch": {"rows": 2}}
    )

    def second_pass(*_: object) -> None:
        raise AssertionError("two passes over the head")

    method = SFT(recipe, None, LocalEngine(tiny_model()), rows, [])  # type: ignore[arg-type]
    monkeypatch.setattr(heads._TwoPasses, "apply", second_pass)  # only now: the engine compares the model's head with it
    assert method.step(1)["loss"] > 0
