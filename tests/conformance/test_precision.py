"""The real model: fp32 gradients are those of the plain computation, and bf16 gradients are no further from them than TRL's."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from postgrad.models.engine import LocalEngine
from postgrad.models.loading import LanguageModel, load
from postgrad.protocols import Rows
from postgrad.types import TrainRow

from . import trl_side

pytestmark = [pytest.mark.conformance, pytest.mark.real_model, *trl_side.QUIET]

PROMPT, LENGTHS = 24, (9, 30, 17, 22)
BATCHES = 6
README = Path(__file__).parent.parent.parent / "README.md"


@pytest.fixture(scope="module")
def language_model() -> LanguageModel:
    loaded = load("smollm2-135m", dtype="float32")
    loaded.model.requires_grad_(True)
    return loaded


@pytest.fixture(scope="module")
def model(language_model: LanguageModel) -> torch.nn.Module:
    return language_model.model


@pytest.fixture(scope="module")
def batches(language_model: LanguageModel) -> list[list[TrainRow]]:
    """Groups of four rollouts behind one prompt: text, because on random tokens a few positions make up the whole gradient."""
    ids = language_model.tokenizer(README.read_text(encoding="utf-8"))["input_ids"]
    rng = random.Random(0)
    made = []
    for number in range(BATCHES):
        prompt = ids[number * 100 : number * 100 + PROMPT]
        rows = []
        for length in LENGTHS:
            start = number * 100 + PROMPT + length % 7
            trained = (False,) * PROMPT + (True,) * length
            own = ids[start : start + length]
            rows.append(TrainRow((*prompt, *own), trained, group=0, shared_prefix=PROMPT, per_row={"advantage": rng.gauss(0, 1)}))
        made.append(rows)
    return made


def gradient(model: torch.nn.Module, backward: Callable[[], object]) -> Tensor:
    model.zero_grad(set_to_none=True)
    backward()
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def ours(model: torch.nn.Module, rows: Sequence[TrainRow], dtype: torch.dtype | None) -> Tensor:
    def loss(logprobs: Tensor, batch: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        return -(logprobs * batch.per_row["advantage"][:, None] * batch.mask).sum() / sum(LENGTHS), {}

    engine = LocalEngine(model, autocast=dtype)
    return gradient(model, lambda: engine.forward_backward(rows, loss))


def theirs(model: torch.nn.Module, rows: Sequence[TrainRow], dtype: torch.dtype | None) -> Tensor:
    """Padded rows through the model, and TRL's log-probs; its trainer turns what the model returns under autocast into fp32."""
    from trl.trainer.utils import selective_log_softmax

    width = max(len(row.token_ids) for row in rows)
    ids = torch.tensor([[*row.token_ids, *[0] * (width - len(row.token_ids))] for row in rows])
    seen = torch.tensor([[1] * len(row.token_ids) + [0] * (width - len(row.token_ids)) for row in rows])
    mask = torch.tensor([[*row.trained, *[False] * (width - len(row.trained))] for row in rows])[:, 1:]
    advantage = torch.tensor([row.per_row["advantage"] for row in rows])[:, None]

    def backward() -> None:
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, :-1].float()
            logprobs = selective_log_softmax(logits, ids[:, 1:])
        (-(logprobs * advantage * mask).sum() / sum(LENGTHS)).backward()

    return gradient(model, backward)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def test_fp32_gradients_of_the_real_model_are_those_of_the_plain_computation(model: torch.nn.Module, batches: list[list[TrainRow]]) -> None:
    assert error(ours(model, batches[0], None), theirs(model, batches[0], None)) < 1e-5


def test_bf16_gradients_are_no_further_from_fp32_than_those_of_trl(model: torch.nn.Module, batches: list[list[TrainRow]]) -> None:
    """Means over batches: the error of a single one varies by half. A tenth of room for what is left of that."""
    mine, other = 0.0, 0.0
    for rows in batches:
        exact = theirs(model, rows, None)
        mine += error(ours(model, rows, torch.bfloat16), exact) / BATCHES
        other += error(theirs(model, rows, torch.bfloat16), exact) / BATCHES
    print(f"relative error of the bf16 gradient: {mine:.4f}, TRL's {other:.4f}")
    assert mine <= 1.1 * other
