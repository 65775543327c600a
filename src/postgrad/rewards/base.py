"""What a reward is, as the person who writes one sees it. Imports no torch.

A reward is a function from one rollout to a number, or `None` when it does not apply (it abstains: `None` is not 0).

1. `RolloutView`   what a reward may read of a rollout.
2. `@reward`       declares what a reward looks at and claims. Optional: a plain function works too.
3. `CallForm`      how a function wants to be called, read off its signature:

    def r(rollout, answer)              one `RolloutView`, and dataset columns by name
    def r(completion, answer)           the last assistant message as text, and columns by name
    def r(completions, answer, **kw)    TRL's form: lists, one entry per rollout of a group; a completion is always a list of
                                        messages [{"role": "assistant", "content": "…"}, …], prompts likewise
    def r(rollouts, answer)             with `@reward(group=True)`: the rollouts of one prompt at once; returns one number each
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from postgrad.types import Message, Prompt, Rollout, Source, StopReason, ToolCall, ToolResult

Scope = Literal["structure", "reasoning", "tool_calls", "tool_results", "final", "length"]
RewardRole = Literal["outcome", "shaping"]
Style = Literal["rollout", "completion", "lists", "rollouts"]
Function = TypeVar("Function", bound=Callable[..., Any])

_DECLARATION = "__postgrad_reward__"
_RESERVED: Mapping[Style, frozenset[str]] = {
    "rollout": frozenset({"prompt"}),
    "completion": frozenset({"prompt"}),
    "lists": frozenset({"prompts", "completions", "completion_ids"}),
    "rollouts": frozenset({"prompt"}),
}
_TRL_ONLY = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})


@dataclass(frozen=True, slots=True)
class RolloutView:
    """What a reward reads of one rollout. Each call gets its own copy, so nothing done to it reaches the run.

    text, raw_text:      the completion without and with special tokens, tool results included.
    token_ids:           every id, prompt and tool results included; `sampled_ids` are those that the model wrote.
    messages:            the completion (assistant and tool turns); `prompt_messages` came before it.
    final_answer:        content of the last message if it is the assistant's, else "".
    sampled_tokens:      the length that counts: tokens that the model wrote.
    environment_reward:  what the environments gave for the whole; what they gave for a call is its result's `reward`.
    """

    text: str
    raw_text: str
    token_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    messages: tuple[Message, ...]
    prompt_messages: tuple[Message, ...]
    prompt_text: str
    final_answer: str
    stop: StopReason
    tool_results: tuple[ToolResult, ...]
    sampled_tokens: int
    turns: int
    environment_reward: float | None = None


def view_of(prompt: Prompt, rollout: Rollout) -> RolloutView:
    """The view of one rollout; `prompt_text` is the raw prompt, or the last user message."""
    asked = [message.content for message in prompt.messages if message.role == "user"]
    rows = (*rollout.forks, rollout.segments)
    return RolloutView(
        text=rollout.text,
        raw_text=rollout.raw_text,
        token_ids=rollout.token_ids,
        sampled_ids=tuple(i for row in rows for segment in row if segment.source is Source.MODEL for i in segment.token_ids),
        messages=rollout.messages,
        prompt_messages=prompt.messages,
        prompt_text=prompt.raw_text if prompt.raw_text is not None else (asked[-1] if asked else ""),
        final_answer=rollout.final_answer,
        stop=rollout.stop,
        tool_results=rollout.tool_results,
        sampled_tokens=rollout.sampled_tokens,
        turns=rollout.turns,
        environment_reward=rollout.environment_reward,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What `@reward` states about a function. None = not stated."""

    name: str | None = None
    scope: Scope | None = None
    claim: str | None = None
    range: tuple[float, float] | None = None
    role: RewardRole = "shaping"
    deadline_s: float | None = None
    group: bool = False
    per_turn: bool = False
    check_args: Callable[..., None] | None = None
    runs_code: bool = False

    def __post_init__(self) -> None:
        if self.scope is not None and self.scope not in get_args(Scope):
            raise ValueError(f"scope {self.scope!r} is none of {', '.join(get_args(Scope))}")
        if self.role not in get_args(RewardRole):
            raise ValueError(f"role {self.role!r} is none of {', '.join(get_args(RewardRole))}")
        if self.range is not None and not self.range[0] <= self.range[1]:
            raise ValueError(f"range is (lowest, highest), got {self.range}")
        if self.deadline_s is not None and not (math.isfinite(self.deadline_s) and self.deadline_s > 0):
            raise ValueError(f"deadline_s is a positive number of seconds, got {self.deadline_s}")


def reward(
    *,
    scope: Scope | None = None,
    claim: str | None = None,
    range: tuple[float, float] | None = None,
    role: RewardRole = "shaping",
    deadline_s: float | None = None,
    group: bool = False,
    per_turn: bool = False,
    name: str | None = None,
    check_args: Callable[..., None] | None = None,
    runs_code: bool = False,
) -> Callable[[Function], Function]:
    """Declare what a reward function looks at; the function itself is returned unchanged.

    scope:      the layer of the rollout that it reads. Two rewards on one layer pay twice for one thing.
    claim:      one sentence: what a higher value means.
    range:      (lowest, highest) value it can return, before its weight.
    role:       `outcome` = the task itself; `shaping` = help on the way there.
    deadline_s: seconds that one call may take.
    group:      True = called with all rollouts of a prompt at once, because their values depend on one another.
    per_turn:   True = returns a list, one number (or None) for each turn that the model wrote. The rollout's value is their sum, which is
                what `range` bounds; PPO pays each at the end of its turn.
    check_args: called with the recipe's `args`; raises `ValueError` when they make no sense.
    runs_code:  True = it runs code that the model wrote, in `postgrad.sandbox`; refused while loading where there is no sandbox.

    >>> @reward(scope="final", claim="the answer is polite", range=(0, 1))
    ... def polite(completion: str) -> float:
    ...     return float("please" in completion)
    >>> polite("yes, please"), declaration_of(polite).scope
    (1.0, 'final')
    """
    declared = Declaration(
        name=name, scope=scope, claim=claim, range=range, role=role, deadline_s=deadline_s, group=group, per_turn=per_turn,
        check_args=check_args, runs_code=runs_code,
    )  # fmt: skip

    def mark(function: Function) -> Function:
        setattr(function, _DECLARATION, declared)
        return function

    return mark


def declaration_of(function: Callable[..., Any]) -> Declaration | None:
    """What `@reward` declared on `function`; None for a plain function."""
    declared = getattr(function, _DECLARATION, None)
    return declared if isinstance(declared, Declaration) else None


@dataclass(frozen=True, slots=True)
class CallForm:
    """How to call a reward function, read off its signature.

    required, optional: dataset columns it asks for by name, without and with a default. `every_column`: it takes `**kwargs`.
    per_turn: it returns a list, one number for each turn of the model.
    """

    style: Style
    asynchronous: bool
    reserved: tuple[str, ...]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    every_column: bool
    per_turn: bool = False

    @property
    def takes_lists(self) -> bool:
        return self.style in ("lists", "rollouts")


def call_form(function: Callable[..., Any], args: Mapping[str, Any] | None = None) -> CallForm:
    """Read the form off the signature. `args` are keyword arguments that the recipe binds, so they are no columns.

    Raises `ValueError` with a sentence about the signature when it fits no form.
    """
    bound = dict(args or {})
    parameters = list(inspect.signature(function).parameters.values())
    declared = declaration_of(function)
    style = _style(parameters, declared=declared)
    per_turn = declared is not None and declared.per_turn
    if per_turn and style in ("lists", "rollouts"):
        raise ValueError("is declared with per_turn=True, so it takes one rollout: its first parameter is `rollout` or `completion`")
    keywords = parameters if style == "lists" else parameters[1:]
    named = [p for p in keywords if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    every_column = any(p.kind is p.VAR_KEYWORD for p in keywords)
    if unknown := sorted(set(bound) - {p.name for p in named}):
        raise ValueError(f"takes no argument {unknown[0]!r}; its parameters are {', '.join(p.name for p in parameters)}")
    free = [p for p in named if p.name not in bound]
    reserved = tuple(p.name for p in free if p.name in _RESERVED[style])
    columns = [p for p in free if p.name not in _RESERVED[style] and p.name not in _TRL_ONLY]
    if refused := [p.name for p in free if p.name in _TRL_ONLY and p.default is p.empty]:
        raise ValueError(f"asks for {refused[0]!r}, which only TRL's trainer has; give it a default or leave it out")
    return CallForm(
        style=style,
        asynchronous=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)),  # noqa: B004
        reserved=reserved,
        required=tuple(p.name for p in columns if p.default is p.empty),
        optional=tuple(p.name for p in columns if p.default is not p.empty),
        every_column=every_column,
        per_turn=per_turn,
    )


def _style(parameters: Sequence[inspect.Parameter], *, declared: Declaration | None) -> Style:
    names = [p.name for p in parameters]
    group = declared is not None and declared.group
    if "completions" in names or "completion_ids" in names:
        return "lists"
    first = parameters[0] if parameters else None
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        raise ValueError("takes no rollout: its first parameter is `rollout`, `completion` or `completions`")
    if first.name == "rollouts":
        if not group:
            raise ValueError("takes `rollouts`, so declare it with @reward(group=True)")
        return "rollouts"
    if group:
        raise ValueError("is declared with group=True, so its first parameter is `rollouts` or `completions`")
    if first.name == "rollout" or first.annotation in (RolloutView, "RolloutView"):
        return "rollout"
    if first.name == "completion":
        return "completion"
    raise ValueError(f"has the first parameter {first.name!r}; name it `rollout`, `completion` or `completions`")


def message_json(message: Message) -> dict[str, Any]:
    """A message in the form that TRL and OpenAI-style code expect."""
    data: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        data["reasoning_content"] = message.reasoning
    if message.tool_calls:
        data["tool_calls"] = [_call_json(call) for call in message.tool_calls]
    if message.role == "tool":
        data |= {"name": message.name, "tool_call_id": message.tool_call_id}
    return data


def _call_json(call: ToolCall) -> dict[str, Any]:
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}


def bind(
    form: CallForm, rows: Sequence[tuple[RolloutView, Mapping[str, Any]]], args: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword) arguments for one call. `rows` are (view, columns); one row unless the form takes lists."""
    columns = [row[1] for row in rows]
    wanted = (*form.required, *form.optional)
    if form.every_column:
        hidden = {*_RESERVED[form.style], *args}
        wanted = tuple(dict.fromkeys((*wanted, *(name for name in columns[0] if name not in hidden))))
    names = [name for name in wanted if name in columns[0]]
    views = [row[0] for row in rows]
    if form.style == "lists":
        lists = {name: [row[name] for row in columns] for name in names}
        if form.every_column:
            reserved: tuple[str, ...] = tuple(sorted(_RESERVED["lists"]))
        else:
            reserved = form.reserved
        return (), {**lists, **{name: _list_argument(name, views) for name in reserved}, **args}
    keywords = {**{name: columns[0][name] for name in names}, **args}
    if "prompt" in form.reserved:
        keywords["prompt"] = views[0].prompt_text
    if form.style == "rollouts":
        return (views,), keywords
    return (views[0] if form.style == "rollout" else views[0].final_answer,), keywords


def _list_argument(name: str, views: Sequence[RolloutView]) -> list[Any]:
    if name == "completions":
        return [[message_json(message) for message in view.messages] for view in views]
    if name == "completion_ids":
        return [list(view.sampled_ids) for view in views]
    return [[message_json(message) for message in view.prompt_messages] or view.prompt_text for view in views]
