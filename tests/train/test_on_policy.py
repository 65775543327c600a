"""The sampler and the trainer are one policy: same log-probs before an update, and after it."""

from __future__ import annotations

import pytest
import torch

from postgrad.models.engine import LocalEngine
from postgrad.models.sampler import LocalSampler
from postgrad.protocols import SampleKey, SamplingParams, TurnRequest
from postgrad.testing import tiny_model, tiny_tokenizer
from postgrad.train.grpo import grpo_loss
from postgrad.train.judged import Denominators
from postgrad.train.presets import loss_settings
from postgrad.train.recipe import GRPOLoss, Rollout
from postgrad.types import TrainRow

PROMPT = (1, 50, 60, 70, 80)


def sampled_row(sampler: LocalSampler, step: int, temperature: float) -> TrainRow:
    request = TurnRequest(SampleKey(0, step, 0, 0), 0, PROMPT, 12)
    (completion,) = sampler.generate([request], SamplingParams(temperature=temperature))
    sampler.forget()
    ids = PROMPT + completion.token_ids
    old = [0.0] * len(PROMPT) + list(completion.logprobs)
    return TrainRow(
        ids,
        (False,) * len(PROMPT) + (True,) * len(completion.token_ids),
        per_token={"old_logprobs": old},
        per_row={"advantages": 1.0, "share": 1.0},
    )


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_sampled_log_probs_are_the_trainers_before_and_after_every_update(dtype, temperature):
    model = tiny_model("llama", vocab_size=268)
    engine = LocalEngine(model)
    sampler = LocalSampler(model, decode=tiny_tokenizer().decode, dtype=dtype)
    tolerance = 1e-4 if dtype is None else 0.15
    settings = loss_settings(GRPOLoss(preset="bnpo"), Rollout())
    for step in range(4):
        row = sampled_row(sampler, step, temperature)
        (trainer,) = engine.logprobs([row], temperature=temperature)
        sampled = row.per_token["old_logprobs"][len(PROMPT) :]
        assert max(abs(a - b) for a, b in zip(trainer, sampled, strict=True)) < tolerance
        engine.forward_backward([row], grpo_loss(settings, Denominators(12.0, 1.0)), temperature=temperature)
        engine.optimizer_step(0.05)  # large: a sampler that kept the old weights would be far off
        (moved,) = engine.logprobs([row], temperature=temperature)
        assert max(abs(a - b) for a, b in zip(moved, trainer, strict=True)) > 3 * tolerance
