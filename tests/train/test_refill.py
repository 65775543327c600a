"""Dynamic sampling: dropped groups are replaced while refills are left, and later batches keep their size. No model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from postgrad.train import grpo
from postgrad.train.grpo import GRPO
from postgrad.train.recipe import GRPORecipe


def method(monkeypatch: pytest.MonkeyPatch, kept: list[int], drawn: list[range], *, refill: int, **length: Any) -> GRPO:
    """A GRPO run over 5 prompts whose draws keep `kept` groups, one entry after another; `drawn` collects the positions."""
    recipe = GRPORecipe.model_validate(
        {
            "method": "grpo", "model": "m", "run_dir": "r", "data": {"train": "p.jsonl"}, "rewards": [{"use": "x"}],
            "batch": {"prompts": 3}, "rollout": {"refill": refill}, "loss": {"filter": "zero_std"}, **length,
        }
    )  # fmt: skip
    run = GRPO(recipe, SimpleNamespace(engine=None, sampling=SimpleNamespace(prompts=[0] * 5, judges=SimpleNamespace(rewards=[]))))  # type: ignore[arg-type]
    monkeypatch.setattr(run, "_generate", lambda step, positions: drawn.append(positions))
    monkeypatch.setattr(grpo, "score", lambda groups, scorer, loss: SimpleNamespace(kept=kept.pop(0)))
    monkeypatch.setattr(grpo, "joined", lambda draws: list(draws))
    return run


def test_only_what_is_missing_is_drawn_again_and_later_batches_stay_whole(monkeypatch):
    drawn: list[range] = []
    run = method(monkeypatch, [1, 2, 3], drawn, refill=2, max_steps=2)
    run._draw(1)
    run._draw(2)
    assert drawn == [range(3), range(3, 5), range(5, 8)]


def test_batch_that_stays_short_after_every_refill_is_used_as_it_is(monkeypatch):
    drawn: list[range] = []
    run = method(monkeypatch, [0, 0, 3], drawn, refill=1, max_steps=2)
    assert len(run._draw(1)) == 2
    assert len(run._draw(2)) == 1
    assert [len(positions) for positions in drawn] == [3, 3, 3]


def test_last_batch_of_an_epoch_is_smaller_with_and_without_refills(monkeypatch):
    drawn: list[range] = []
    run = method(monkeypatch, [3, 2], drawn, refill=0, epochs=1)
    assert run.total_steps == 2
    run._draw(1)
    run._draw(2)
    assert drawn == [range(3), range(3, 5)]
