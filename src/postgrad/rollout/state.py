"""One rollout as a value, and the rules that say how it goes on. Nothing here samples, executes or renders.

1. `RolloutConfig`   the limits, as a recipe names them.
2. `State`           a frozen value: everything one rollout has read and written so far.
3. `after_turn`      what happens after the model has written a turn: `Done(stop)` or `CallTools(calls)`.
4. `after_results`   what happens after its calls were answered: a `StopReason`, or None to go on.

Every `StopReason` but TOTAL_TOKENS inside a tool result (`agent.append`) and INFRASTRUCTURE (`agent.spoiled`) is given here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from postgrad.protocols import Completion, Finish
from postgrad.types import MalformedCall, Message, Prompt, Rollout, Segment, Source, StopReason, ToolCall, ToolResult

Call = ToolCall | MalformedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """The limits of a rollout.

    group_size:         samples per prompt (G).
    max_tokens:         tokens the model may write in one turn.
    max_total_tokens:   tokens of the whole rollout after its prompt, tool results and glue included; None = only the turns' limits.
    max_context_tokens: tokens of a row in all, prompt included: what the model has positions for; None = not known.
    max_turns:          turns the model may write. The calls of the last one are not executed, unless it calls a terminal tool.
    max_invalid_turns:  consecutive turns with only malformed or unknown calls that end the rollout.
    tool_deadline_s:    seconds one call may take (`@tool(deadline_s=...)` overrides it); also for the reset and close of environments.
    max_output_tokens:  tokens of one tool result (`@tool(max_output_tokens=...)` overrides it); None = only the characters' limit.
    max_output_chars:   characters of one tool result, whatever its tokens.
    max_calls_per_turn: tool calls of one turn that are made; the others are refused. None = all.
    history:            when the chat template would now render earlier turns otherwise: `append` keeps the tokens as they are,
                        `fork` starts a second training row from what the template renders.
    tool_workers:       calls that run at the same time.
    """

    group_size: int
    max_tokens: int
    max_total_tokens: int | None = None
    max_context_tokens: int | None = None
    max_turns: int = 8
    max_invalid_turns: int = 3
    tool_deadline_s: float = 5.0
    max_output_tokens: int | None = None
    max_output_chars: int = 4000
    max_calls_per_turn: int | None = None
    history: Literal["append", "fork"] = "append"
    tool_workers: int = 64

    def __post_init__(self) -> None:
        for name in ("group_size", "max_tokens", "max_turns", "max_invalid_turns", "tool_deadline_s", "max_output_chars", "tool_workers"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not math.isfinite(self.tool_deadline_s):
            raise ValueError(f"tool_deadline_s must be finite, got {self.tool_deadline_s}")
        for name in ("max_total_tokens", "max_context_tokens", "max_output_tokens", "max_calls_per_turn"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One rollout so far. `history` is the conversation that the model has read, prompt included; `messages` the part after the prompt.

    `completion` holds the ids of all turns and results in order, also those that a fork has moved out of `segments`.
    `ready` is False until the rollout's environments are open.
    """

    index: int
    sample: int
    prompt: Prompt
    history: tuple[Message, ...]
    segments: tuple[Segment, ...]
    ready: bool
    forks: tuple[tuple[Segment, ...], ...] = ()
    completion: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()
    tool_results: tuple[ToolResult, ...] = ()
    turns: int = 0
    invalid_turns: int = 0
    rewrites: int = 0
    restarts: int = 0
    environment_reward: float | None = None
    infrastructure_errors: tuple[str, ...] = ()
    stop: StopReason | None = None

    @property
    def context(self) -> tuple[int, ...]:
        """What the model reads next: every token of the current row."""
        return tuple(token for segment in self.segments for token in segment.token_ids)


@dataclass(frozen=True, slots=True)
class Turn:
    """One sampled turn, and what the chat format reads in it."""

    completion: Completion
    message: Message
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Done:
    stop: StopReason


@dataclass(frozen=True, slots=True)
class CallTools:
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits, and the names of the tools (all of them, and those whose success ends a rollout)."""

    config: RolloutConfig
    tools: frozenset[str] = frozenset()
    terminal: frozenset[str] = frozenset()


_UNLIMITED = sys.maxsize


def _budget(state: State, config: RolloutConfig) -> int:
    """Tokens left of the rollout's own budget."""
    return _UNLIMITED if config.max_total_tokens is None else config.max_total_tokens - len(state.completion)


def room(state: State, config: RolloutConfig) -> int:
    """Tokens that the current row can still take: what is left of the budget and of the model's positions."""
    positions = _UNLIMITED if config.max_context_tokens is None else config.max_context_tokens - len(state.context)
    return min(_budget(state, config), positions)


def after_turn(state: State, turn: Turn, rules: Rules) -> Done | CallTools:
    """Decide from a sampled turn, in this order. `state` is the rollout before the turn."""
    config = rules.config
    if turn.completion.finish is Finish.LENGTH:  # cut: a call in it may look whole and still not be what the model meant to write
        full = len(turn.completion.token_ids) >= config.max_tokens
        return Done(StopReason.TURN_TOKENS if full else StopReason.TOTAL_TOKENS)
    if not turn.calls:
        return Done(StopReason.STOP_STRING if turn.completion.finish is Finish.STOP_STRING else StopReason.END)
    if not _names(turn.calls) & rules.tools and state.invalid_turns + 1 >= config.max_invalid_turns:
        return Done(StopReason.INVALID_CALLS)
    if state.turns + 1 >= config.max_turns and not _names(turn.calls) & rules.terminal:
        return Done(StopReason.TURNS)
    return CallTools(turn.calls)


def after_results(state: State, results: Sequence[ToolResult], rules: Rules) -> StopReason | None:
    """Decide from the results of the turn's calls. `state` is the rollout with the turn; None means that the model reads them."""
    if any(result.call is not None and result.call.name in rules.terminal and not result.error for result in results):
        return StopReason.TERMINAL_TOOL
    if any(result.done for result in results):
        return StopReason.ENVIRONMENT
    if state.turns >= rules.config.max_turns:
        return StopReason.TURNS
    return None


def write_turn(state: State, turn: Turn, rules: Rules) -> State:
    """The state with the turn appended, exactly as sampled."""
    segment = Segment(Source.MODEL, turn.completion.token_ids, turn.completion.logprobs)
    return replace(
        state,
        segments=(*state.segments, segment),
        completion=state.completion + segment.token_ids,
        history=(*state.history, turn.message),
        messages=(*state.messages, turn.message),
        turns=state.turns + 1,
        invalid_turns=0 if not turn.calls or _names(turn.calls) & rules.tools else state.invalid_turns + 1,
    )


def numbered(message: Message, calls: Sequence[Call], *, start: int) -> tuple[Message, tuple[Call, ...]]:
    """The calls with ids that are unique in their rollout (`call_0`, `call_1`, ... from `start`), in the message as well."""
    renamed = tuple(replace(call, id=f"call_{start + place}") if isinstance(call, ToolCall) else call for place, call in enumerate(calls))
    return replace(message, tool_calls=tuple(call for call in renamed if isinstance(call, ToolCall))), renamed


def finished(state: State, *, text: str, raw_text: str) -> Rollout:
    """The rollout that a state has become."""
    if state.stop is None:
        raise ValueError("this rollout has not ended")
    return Rollout(
        segments=state.segments,
        messages=state.messages,
        stop=state.stop,
        sample=state.sample,
        tool_results=state.tool_results,
        forks=state.forks,
        text=text,
        raw_text=raw_text,
        rewrites=state.rewrites,
        environment_reward=state.environment_reward,
        infrastructure_errors=state.infrastructure_errors,
    )


def _names(calls: Iterable[Call]) -> frozenset[str]:
    return frozenset(call.name for call in calls if isinstance(call, ToolCall))
