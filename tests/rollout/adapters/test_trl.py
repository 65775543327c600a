"""Classes as TRL 1.16.0's GRPOTrainer takes them in `environment_factory`."""

from __future__ import annotations

from typing import Any

import pytest

from postgrad.errors import RecipeError
from postgrad.rollout.adapters import trl_environment
from postgrad.rollout.environments import Ending, end_session
from postgrad.rollout.execute import ToolLimits, execute
from postgrad.rollout.tools import ToolSession, make_toolbox
from postgrad.types import Message, Prompt, ToolCall


class Guess:
    """As TRL documents an environment: `reset(**kwargs)` with the row, public methods with Google docstrings, `get_reward`."""

    def __init__(self, low: int = 1) -> None:
        self.low = low
        self.seen: dict[str, Any] = {}

    def reset(self, **kwargs: Any) -> str | None:
        self.seen = kwargs
        self.secret = kwargs["secret"]
        self.right = False
        return f"Guess a number from {self.low} on."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The number to guess.

        Returns:
            Whether it is right.
        """
        self.right = number == self.secret
        return "right" if self.right else "wrong"

    def get_reward(self) -> float:
        return 1.0 if self.right else 0.0

    def _hidden(self) -> None: ...


def opened(factory: Any) -> tuple[ToolSession, Any]:
    toolbox = make_toolbox([trl_environment(factory)])
    [environment] = toolbox.environments
    session = toolbox.open([environment.reset_arguments(Prompt("d:1", (Message("user", "Play."),), {"secret": 7, "level": "easy"}))])
    return session, session.instances[0]._inner


@pytest.mark.parametrize("factory", [Guess, lambda: Guess(low=3)])
def test_it_is_reset_with_the_row_asked_by_its_methods_and_scored_at_the_end(factory: Any) -> None:
    session, inner = opened(factory)
    assert inner.seen == {"prompt": [{"role": "user", "content": "Play."}], "secret": 7, "level": "easy"}
    assert session.observation == f"Guess a number from {inner.low} on."
    assert list(session.tools) == ["guess"]
    results = [execute([(session, [ToolCall("guess", {"number": n})])], ToolLimits(deadline_s=20))[0][0].content for n in (3, 7)]
    assert results == ["wrong", "right"]
    assert end_session(session) == Ending(reward=1.0)


def test_its_tools_are_described_as_its_own_methods_are() -> None:
    adapted, native = (make_toolbox([kind]).specs for kind in (trl_environment(Guess), Guess))
    assert adapted == native
    assert adapted[0].description == "Guess the number."
    assert adapted[0].parameters["properties"] == {"number": {"type": "integer", "description": "The number to guess."}}


def test_rollouts_do_not_share_an_instance() -> None:
    (first, one), (_, other) = opened(Guess), opened(Guess)
    execute([(first, [ToolCall("guess", {"number": 7})])], ToolLimits(deadline_s=20))
    assert (one.right, other.right) == (True, False)


def test_a_reward_attribute_is_that_of_the_call_and_what_is_no_number_says_nothing() -> None:
    class Scored(Guess):
        reward: Any = None
        done: Any = "not yet"

        def guess(self, number: int) -> str:
            """Guess."""
            self.reward, self.done = {1: (0.25, False), 2: ("high", None), 7: (1, True)}[number]
            return ""

    session, _ = opened(Scored)
    results = [execute([(session, [ToolCall("guess", {"number": n})])], ToolLimits(deadline_s=20))[0][0] for n in (1, 2, 7)]
    assert [(result.reward, result.done, result.error) for result in results] == [(0.25, False, ""), (None, False, ""), (1.0, True, "")]


def test_async_methods_and_a_close_are_handed_on() -> None:
    closed = []

    class Async(Guess):
        async def guess(self, number: int) -> str:
            """Guess."""
            return "heard"

        async def get_reward(self) -> float:
            return 0.5

        def close(self) -> None:
            closed.append(1)

    session, _ = opened(Async)
    assert execute([(session, [ToolCall("guess", {"number": 1})])], ToolLimits(deadline_s=20))[0][0].content == "heard"
    assert end_session(session) == Ending(reward=0.5)
    assert closed == [1]


def test_a_class_without_reset_is_refused_as_trl_refuses_it() -> None:
    class Nothing:
        def act(self) -> str:
            """Act."""
            return ""

    with pytest.raises(RecipeError, match="Nothing has no reset"):
        trl_environment(Nothing)
