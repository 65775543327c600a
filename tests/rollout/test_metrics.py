"""Metrics of rollouts, by hand."""

from __future__ import annotations

import pytest

from postgrad.rollout import rollout_metrics
from postgrad.types import Group, Prompt, Rollout, Segment, Source, StopReason, ToolCall, ToolResult

PROMPT = Prompt("d:1", ())


def rollout(
    length: int, stop: StopReason, *, tool_tokens: int = 0, results: tuple[ToolResult, ...] = (), errors: tuple[str, ...] = ()
) -> Rollout:
    segments = [Segment(Source.PROMPT, (1, 2)), Segment(Source.MODEL, (5,) * length, (-1.0,) * length)]
    if tool_tokens:
        segments += [Segment(Source.TOOL, (6,) * tool_tokens), Segment(Source.MODEL, (7,), (-1.0,))]
    return Rollout(tuple(segments), (), stop, tool_results=results, infrastructure_errors=errors)


def test_lengths_count_sampled_tokens_and_leave_out_what_the_infrastructure_spoiled() -> None:
    group = Group(
        PROMPT,
        (
            rollout(4, StopReason.END),
            rollout(9, StopReason.TURN_TOKENS),
            rollout(1, StopReason.END, tool_tokens=100),
            rollout(500, StopReason.INFRASTRUCTURE, errors=("a", "b")),
        ),
    )
    metrics = rollout_metrics([group])
    assert metrics["completions/mean_length"] == pytest.approx((4 + 9 + 2) / 3)
    assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (2.0, 9.0)
    assert metrics["completions/mean_terminated_length"] == 3.0
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 / 3)
    assert metrics["completions/mean_turns"] == pytest.approx(4 / 3)
    assert metrics["stop/end"] == 2.0
    assert metrics["stop/turn_tokens"] == 1.0
    assert metrics["stop/infrastructure"] == 1.0
    assert metrics["rollouts/retried"] == 1.0


def test_tool_frequencies() -> None:
    call = ToolCall("f", {})
    good, bad, malformed = ToolResult(call, "1"), ToolResult(call, "error: x", "raised"), ToolResult(None, "error: y", "malformed")
    group = Group(PROMPT, (rollout(1, StopReason.END, results=(good, bad, malformed)), rollout(1, StopReason.END)))
    metrics = rollout_metrics([group])
    assert metrics["tools/call_frequency"] == 1.5
    assert metrics["tools/failure_frequency"] == pytest.approx(2 / 3)
    assert (metrics["tools/errors/raised"], metrics["tools/errors/malformed"], metrics["tools/errors/deadline"]) == (1.0, 1.0, 0.0)


def test_a_number_that_nothing_supports_is_left_out() -> None:
    metrics = rollout_metrics([Group(PROMPT, (rollout(3, StopReason.INFRASTRUCTURE),))])
    assert not any(name.startswith("completions/") for name in metrics)
    assert "tools/failure_frequency" not in rollout_metrics([Group(PROMPT, (rollout(3, StopReason.END),))])
    assert rollout_metrics([])["stop/end"] == 0.0


def test_every_stop_reason_has_a_count() -> None:
    metrics = rollout_metrics([Group(PROMPT, tuple(rollout(1, stop) for stop in StopReason))])
    assert {name for name in metrics if name.startswith("stop/")} == {f"stop/{stop.value}" for stop in StopReason}
    assert all(metrics[f"stop/{stop.value}"] == 1.0 for stop in StopReason)
