"""The reference's log-probs, computed once: the right numbers, for the right model and rows, and no second time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from postgrad.chat import ChatFormat
from postgrad.data import Pair
from postgrad.data.preferences import Answer
from postgrad.errors import RunError
from postgrad.models.engine import LocalEngine
from postgrad.models.loading import from_memory
from postgrad.models.lora import Lora
from postgrad.models.reference import reference_of
from postgrad.testing import tiny_model, tiny_tokenizer
from postgrad.train import reference_logprobs
from postgrad.train.pairs import pair_rows
from postgrad.train.reference_logprobs import precomputed
from postgrad.train.setup import Policy


def answer(*ids: int) -> Answer:
    return Answer(ids, (True,) * len(ids))


PAIRS = [
    Pair("rows:1", (1, 50, 60), answer(70, 71, 2), answer(80, 2)),
    Pair("rows:2", (1, 51), answer(72), answer(81, 82, 83, 84, 85, 86, 2)),
    Pair("rows:3", (1, 52, 53, 54, 55), Answer((73, 9, 74, 2), (True, False, True, True)), answer(87)),
]


def policy_of(model: Any = None, **options: Any) -> Policy:
    tokenizer = tiny_tokenizer()
    return Policy(from_memory(tiny_model() if model is None else model, tokenizer, **options), ChatFormat(tokenizer))


class Counted(LocalEngine):
    calls = 0

    def logprobs(self, *args: Any, **kwargs: Any) -> list[list[float]]:
        self.calls += 1
        return super().logprobs(*args, **kwargs)


def compute(pairs: list[Pair], folder: Path, policy: Policy | None = None) -> tuple[Any, int]:
    """(log-probs, calls of the model)."""
    policy = policy or policy_of()
    engine = Counted(policy.model.model)
    return precomputed(pairs, policy, engine, folder=folder), engine.calls


def test_the_numbers_are_those_of_the_live_reference(tmp_path):
    policy = policy_of()
    live = LocalEngine(policy.model.model, reference=reference_of(policy.model)).logprobs(pair_rows(PAIRS), model="reference")
    kept, _ = compute(PAIRS, tmp_path, policy)
    sides = [side for pair in kept for side in pair]
    assert [len(side) for side in sides] == [3, 2, 1, 7, 3, 1]
    assert [value for side in sides for value in side] == pytest.approx([value for side in live for value in side], abs=1e-5)


def test_pairs_that_do_not_fit_one_call_stay_in_order(tmp_path, monkeypatch):
    whole, _ = compute(PAIRS, tmp_path / "1")
    monkeypatch.setattr(reference_logprobs, "_PAIRS_AT_ONCE", 2)
    parts, calls = compute(PAIRS, tmp_path / "2")
    assert calls == 2
    for pair, other in zip(parts, whole, strict=True):
        for side, same in zip(pair, other, strict=True):
            assert side == pytest.approx(same, abs=1e-5)


def test_the_same_model_and_rows_are_computed_once(tmp_path):
    first, calls = compute(PAIRS, tmp_path)
    again, more = compute(PAIRS, tmp_path)
    assert (calls, more) == (1, 0)
    assert again == first


def _other_ids(at: int) -> list[Pair]:
    changed = {
        0: replace(PAIRS[0], prompt_ids=(1, 50, 61)),
        1: replace(PAIRS[0], chosen=answer(70, 72, 2)),
        2: replace(PAIRS[0], rejected=answer(81, 2)),
        3: replace(PAIRS[0], chosen=Answer((70, 71, 2), (True, True, False))),
        4: replace(PAIRS[0], prompt_ids=(1, 50), chosen=answer(60, 70, 71, 2), rejected=answer(60, 80, 2)),
    }[at]
    return [changed, *PAIRS[1:]]


@pytest.mark.parametrize("at", range(5))
def test_other_tokens_are_computed_anew(at, tmp_path):
    first, _ = compute(PAIRS, tmp_path)
    other, calls = compute(_other_ids(at), tmp_path)
    assert calls == 1
    assert other != first


def test_the_order_and_number_of_rows_matter(tmp_path):
    compute(PAIRS, tmp_path)
    assert compute(PAIRS[::-1], tmp_path)[1] == 1
    assert compute(PAIRS[:2], tmp_path)[1] == 1


def test_another_model_is_computed_anew(tmp_path):
    first, _ = compute(PAIRS, tmp_path)
    other, calls = compute(PAIRS, tmp_path, policy_of(tiny_model(seed=1)))
    assert calls == 1
    assert other != first


def test_equal_weights_under_another_config_are_another_model(tmp_path):
    """The base of the rotary positions is no weight, and changes every number."""
    first, _ = compute(PAIRS, tmp_path)
    rope = {"rope_type": "default", "rope_theta": 100.0}
    other, calls = compute(PAIRS, tmp_path, policy_of(tiny_model(rope_parameters=rope)))
    assert calls == 1
    assert other != first


def test_equal_adapter_weights_at_another_scale_are_another_model(tmp_path):
    def adapted(alpha: float) -> Policy:
        policy = policy_of(adapter=Lora(rank=4, alpha=alpha))
        with torch.no_grad():
            for name, weight in policy.model.model.named_parameters():
                if "lora_B" in name:
                    weight.fill_(0.01)
        return policy

    first, _ = compute(PAIRS, tmp_path, adapted(4))
    other, calls = compute(PAIRS, tmp_path, adapted(8))
    assert calls == 1
    assert other != first


def test_dropout_is_off(tmp_path):
    """trl#5542."""
    quiet, _ = compute(PAIRS, tmp_path / "1", policy_of(tiny_model("gpt2")))
    model = tiny_model("gpt2", dropout=0.5).train()
    noisy, _ = compute(PAIRS, tmp_path / "2", policy_of(model))
    assert noisy == quiet


def test_a_computation_that_fails_leaves_nothing_behind(tmp_path):
    policy = policy_of()
    engine = LocalEngine(policy.model.model)
    with torch.no_grad():
        policy.model.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RunError, match="not finite"):
        precomputed(PAIRS, policy, engine, folder=tmp_path)
    assert list(tmp_path.rglob("*.npy")) == []


def test_progress_is_told(tmp_path):
    policy, told = policy_of(), []
    precomputed(PAIRS, policy, LocalEngine(policy.model.model), folder=tmp_path, progress=lambda what, count: told.append((what, count)))
    assert told == [("reference log-probs", 0)]
