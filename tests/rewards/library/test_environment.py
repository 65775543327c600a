import pytest

from postgrad.errors import RecipeError
from postgrad.rewards.base import view_of
from postgrad.rewards.library import environment, environment_turns
from postgrad.rewards.load import load_rewards
from postgrad.rewards.score import Scorer
from postgrad.types import Group, Message, Prompt, Rollout, Segment, Source, StopReason, ToolCall, ToolResult

PROMPT = Prompt("d:1", (Message("user", "Play."),))


def rolled(*turns, final=None):
    """One turn per list of rewards, each a call of its own (None = the environment said nothing), and an answer."""
    messages, results, segments = [], [], []
    for rewards in turns:
        calls = tuple(ToolCall("move", {}, f"call_{len(results) + place}") for place in range(len(rewards)))
        results += [ToolResult(call, "ok", reward=reward) for call, reward in zip(calls, rewards, strict=True)]
        messages += [Message("assistant", "", calls), *(Message("tool", "ok") for _ in calls)]
        segments += [Segment(Source.MODEL, (1,), (-0.1,)), Segment(Source.TOOL, (2,))]
    messages.append(Message("assistant", "done"))
    segments.append(Segment(Source.MODEL, (3,), (-0.1,)))
    return Rollout(tuple(segments), tuple(messages), StopReason.END, tool_results=tuple(results), environment_reward=final)


@pytest.mark.parametrize(
    ("rollout", "whole", "last", "turns"),
    [
        (rolled(), 0.0, 0.0, [None]),
        (rolled([None]), 0.0, 0.0, [None, None]),
        (rolled([1.0], [0.5]), 1.5, 0.5, [1.0, 0.5, None]),
        (rolled([1.0, -2.0, None], [0.25]), -0.75, 0.25, [-1.0, 0.25, None]),
        (rolled([1.0], final=3.0), 3.0, 3.0, [1.0, 3.0]),
        (rolled(final=0.0), 0.0, 0.0, [0.0]),
    ],
)
def test_by_hand(rollout, whole, last, turns):
    view = view_of(PROMPT, rollout)
    assert environment(view) == whole
    assert environment(view, calls="last") == last
    assert environment_turns(view) == turns


def test_a_malformed_call_belongs_to_no_turn():
    rollout = rolled([1.0])
    spoiled = Rollout(
        rollout.segments, rollout.messages, rollout.stop, tool_results=(ToolResult(None, "error", "malformed"), *rollout.tool_results)
    )
    assert environment_turns(view_of(PROMPT, spoiled)) == [1.0, None]


def test_in_a_run_each_turn_is_paid_at_its_end():
    loaded = load_rewards([{"use": "environment"}, {"use": "environment_turns"}], ".")
    with Scorer(loaded) as scorer:
        scores = scorer.score([Group(PROMPT, (rolled([1.0], [0.5], final=2.0),))])
    assert scores.values.tolist() == [[2.0, 3.5]]
    assert list(scores.turns["environment_turns"][0]) == [1.0, 0.5, 2.0]


def test_arguments_are_checked():
    with pytest.raises(RecipeError, match="needs calls sum or last"):
        load_rewards([{"use": "environment", "args": {"calls": "mean"}}], ".")
