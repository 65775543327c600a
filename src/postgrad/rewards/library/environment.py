"""What the environments of a rollout gave: for the whole of it, or turn by turn."""

from __future__ import annotations

from typing import Any, Literal, get_args

from postgrad.rewards.base import RolloutView, reward

Calls = Literal["sum", "last"]


def _check_calls(calls: str = "sum", **_: Any) -> None:
    if calls not in get_args(Calls):
        raise ValueError(f"needs calls sum or last, got {calls!r}")


@reward(scope="tool_results", claim="the environment gave more", role="outcome", check_args=_check_calls)
def environment(rollout: RolloutView, *, calls: Calls = "sum") -> float:
    """What `get_reward()` of the environments returned; where none has it, the sum of what its calls earned, or what the last of them
    earned (calls: last, for an environment that says how much it has given so far). A rollout that never asked it earned 0.
    """
    if rollout.environment_reward is not None:
        return rollout.environment_reward
    earned = [result.reward for result in rollout.tool_results if result.reward is not None]
    if not earned:
        return 0.0
    return sum(earned) if calls == "sum" else earned[-1]


@reward(scope="tool_results", claim="the environment gave more", role="outcome", per_turn=True)
def environment_turns(rollout: RolloutView) -> list[float | None]:
    """What the calls of each turn earned, paid at its end; what `get_reward()` returned comes with the last turn. A turn in which the
    environment said nothing abstains."""
    earned = {result.call.id: result.reward for result in rollout.tool_results if result.call is not None and result.reward is not None}
    turns = [message for message in rollout.messages if message.role == "assistant"]
    given = [[earned[call.id] for call in turn.tool_calls if call.id in earned] for turn in turns]
    if given and rollout.environment_reward is not None:
        given[-1].append(rollout.environment_reward)
    return [sum(parts) if parts else None for parts in given]
