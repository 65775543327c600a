"""How a dry run tells what became of a rollout."""

from __future__ import annotations

import numpy as np
import pytest

from postgrad.chat import ChatFormat
from postgrad.cli.dry_run import _one_group
from postgrad.rewards.score import RewardFailure, Scores
from postgrad.testing import tiny_tokenizer
from postgrad.types import Group, Message, Prompt, Rollout, Segment, Source, StopReason


def test_what_nobody_scored_failed_or_abstained_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    stops = (StopReason.END, StopReason.END, StopReason.INFRASTRUCTURE)
    segments = (Segment(Source.PROMPT, (20, 30)), Segment(Source.MODEL, (40,), (-0.1,)))
    rollouts = tuple(
        Rollout(segments, (Message("assistant", "a"),), stop, sample=place, text="a", raw_text="a") for place, stop in enumerate(stops)
    )
    values = np.array([[1.0, np.nan], [0.5, np.nan], [np.nan, np.nan]])
    failures = tuple(RewardFailure("second", "d:1", sample, "exception", "KeyError: 'x'", "", place="r.py:3") for sample in (0, 0))
    scores = Scores(("first", "second"), (1.0, 1.0), ("outcome", "shaping"), values, 3, failures)
    _one_group(ChatFormat(tiny_tokenizer()), Group(Prompt("d:1", ()), rollouts), scores)
    told = capsys.readouterr().out.splitlines()
    assert [line.split("; ")[1] for line in told if line.startswith("rollout ")] == [
        "first 1, second failed", "first 0.5, second abstained", "not scored",
    ]  # fmt: skip
    assert [line for line in told if line.startswith("warning: ")] == ["warning: reward second failed at d:1: KeyError: 'x' (r.py:3)"]
