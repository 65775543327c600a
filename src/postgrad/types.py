"""The values that flow through postgrad, from rows to training rows. Imports no torch.

1. `Message`, `ToolCall`   a conversation, independent of any chat template.
2. `Segment`               tokens and where they came from. The articles' `tool_mask` is derived from it.
3. `Rollout`               an append-only list of segments: what the model read and wrote, token for token.
4. `Group`                 the G rollouts of one prompt.
5. `TrainRow`              one row of a training batch: ids, which of them are trained, and the numbers the loss needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, as the model asked for it. `arguments` is always a JSON object."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """Text between the call markers that is no call: `error` says why, in words the model can act on."""

    text: str
    error: str


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model is told of it. `parameters` is a JSON Schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The form that chat templates and OpenAI-style APIs expect."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    `train` overrides the recipe's `train_on` for this message (None = let the recipe decide).
    `tool_call_id` pairs a tool message with the `ToolCall` that it answers.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""
    train: bool | None = None


class Source(StrEnum):
    """Where a token came from. Only MODEL tokens were sampled, so only they are trained."""

    PROMPT = "prompt"
    """Read by the model before its first token, or context that a fork starts from."""
    MODEL = "model"
    """Sampled by the policy; carries the log-probs it was sampled with."""
    TOOL = "tool"
    """Tool results and the glue that the chat template puts between turns."""


class StopReason(StrEnum):
    """Why a rollout ended. Exactly one per rollout."""

    END = "end"
    """The model ended its turn with one of its end tokens and asked for no tool."""
    STOP_STRING = "stop_string"
    """The text contains one of the recipe's stop strings."""
    TURN_TOKENS = "turn_tokens"
    """One turn reached `max_tokens`; a tool call inside it is never executed."""
    TOTAL_TOKENS = "total_tokens"
    """The whole rollout reached its token budget (`max_total_tokens`), or all that the model has positions for."""
    TURNS = "turns"
    """The model still called tools at `max_turns`."""
    INVALID_CALLS = "invalid_calls"
    """Too many consecutive turns with only malformed or unknown calls."""
    TERMINAL_TOOL = "terminal_tool"
    """A tool declared terminal, or one that only the row brings, was called successfully."""
    ENVIRONMENT = "environment"
    """The environment said that nothing more can be done."""
    INFRASTRUCTURE = "infrastructure"
    """Something outside the model failed; the rollout is masked out and is never given reward 0."""

    @property
    def truncated(self) -> bool:
        """True when a limit ended the rollout, not the model."""
        return self in _TRUNCATED


_TRUNCATED = frozenset({StopReason.TURN_TOKENS, StopReason.TOTAL_TOKENS, StopReason.TURNS, StopReason.INVALID_CALLS})


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens with one source.

    A MODEL segment carries one finite log-prob (nats, under the temperature-scaled policy) per token; the others carry none.
    Raises `ValueError` on any other shape, so ids and log-probs cannot differ in length anywhere downstream.

    >>> Segment(Source.MODEL, (5, 6), (-0.1, -0.2)).mask
    (True, True)
    """

    source: Source
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        expected = len(self.token_ids) if self.source is Source.MODEL else 0
        if len(self.logprobs) != expected:
            count = len(self.token_ids)
            raise ValueError(f"a {self.source} segment of {count} tokens takes {expected} log-probs, got {len(self.logprobs)}")
        if not all(math.isfinite(value) for value in self.logprobs):
            raise ValueError("a sampled token has a non-finite log-prob")

    @property
    def mask(self) -> tuple[bool, ...]:
        """The articles' tool_mask over this segment: True where the policy sampled the token."""
        return (self.source is Source.MODEL,) * len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came back for one call: the text the model was shown, and whether it was an error.

    `call` is None when the text between the call markers could not be read as a call.
    reward, done: what an environment said after the call: what it earned (None = nothing said), and whether the rollout is over.
    """

    call: ToolCall | None
    content: str
    error: str = ""
    seconds: float = 0.0
    reward: float | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the dataset. `row` is its file:line; `columns` are the other columns, handed to the rewards."""

    row: str
    messages: tuple[Message, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    raw_text: str | None = None
    """Set when the prompt is plain text that no chat template is applied to; `messages` is then empty."""
    tools: tuple[ToolSpec, ...] = ()
    """Tools that this row brings, shown to the model beside those of the run. Nothing runs them: a call that fits one ends the rollout."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """What one sample of one prompt read and wrote, in order, token for token.

    `segments` is append-only: sampled ids are kept as sampled, never decoded and encoded again.
    `forks` holds earlier training rows whose template has since rewritten the history (policy `fork`);
    a fork's tokens that reappear in a later row are PROMPT there, so each sampled token is trained once.
    `messages` is the completion as messages (assistant and tool turns, without the prompt).
    """

    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    stop: StopReason
    sample: int = 0
    tool_results: tuple[ToolResult, ...] = ()
    forks: tuple[tuple[Segment, ...], ...] = ()
    text: str = ""
    """The completion decoded without special tokens, tool results included."""
    raw_text: str = ""
    """The completion decoded with special tokens."""
    rewrites: int = 0
    """Turns after which the chat template, rendering everything again, would have shown the model other tokens than these."""
    infrastructure_errors: tuple[str, ...] = ()
    """One text per attempt that something outside the model spoiled. One attempt is retried; a second ends in INFRASTRUCTURE."""
    environment_reward: float | None = None
    """What `get_reward()` of its environments returned at the end, summed; None when none has it."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def tool_mask(self) -> tuple[bool, ...]:
        """The articles' tool_mask over `token_ids`: True exactly where the policy sampled the token."""
        return tuple(flag for segment in self.segments for flag in segment.mask)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """One log-prob per token; 0.0 where the token was not sampled (select with `tool_mask`)."""
        return tuple(value for segment in self.segments for value in (segment.logprobs or (0.0,) * len(segment.token_ids)))

    @property
    def turn_lengths(self) -> tuple[int, ...]:
        """Tokens the policy wrote in each of its turns, in order."""
        rows = (*self.forks, self.segments)
        return tuple(len(segment.token_ids) for row in rows for segment in row if segment.source is Source.MODEL)

    @property
    def sampled_tokens(self) -> int:
        """Tokens the policy wrote: the length that rewards and metrics count."""
        return sum(self.turn_lengths)

    @property
    def turns(self) -> int:
        return len(self.turn_lengths)

    @property
    def final_answer(self) -> str:
        """Content of the last message if it is the assistant's; empty when the rollout ended inside a tool turn."""
        if self.messages and self.messages[-1].role == "assistant":
            return self.messages[-1].content
        return ""


@dataclass(frozen=True, slots=True)
class Group:
    """The G rollouts of one prompt, in sample order."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One row of a training batch.

    trained:    one flag per token; True = the loss predicts this token from the tokens before it. The first token has no
                tokens before it and can never be trained.
    group, shared_prefix: rows with the same `group` start with the same `shared_prefix` tokens, none of which are trained;
                the engine computes them once.
    per_token:  named numbers, one per token (read only where trained), e.g. old_logprobs.
    per_row:    named numbers, one per row, e.g. advantages.
    """

    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    group: int | None = None
    shared_prefix: int = 0
    per_token: Mapping[str, Sequence[float]] = field(default_factory=dict)
    per_row: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        if len(self.trained) != length:
            raise ValueError(f"{length} token ids but {len(self.trained)} train flags")
        if self.trained and self.trained[0]:
            raise ValueError("the first token of a row has no context and cannot be trained")
        for name, values in self.per_token.items():
            if len(values) != length:
                raise ValueError(f"per_token[{name!r}] has {len(values)} values for {length} tokens")
        if not 0 <= self.shared_prefix <= length or any(self.trained[: self.shared_prefix]):
            raise ValueError("a shared prefix lies inside the row and holds no trained token")

    @property
    def trained_tokens(self) -> int:
        return sum(self.trained)
