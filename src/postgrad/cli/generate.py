"""`postgrad generate` and `postgrad chat`: the same agent loop that training uses, with tools if asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from postgrad.cli.console import from_option, stderr, stdout
from postgrad.errors import RecipeError
from postgrad.protocols import Sampler, SamplingParams
from postgrad.rollout import RolloutConfig, collect
from postgrad.rollout.record import group_to_json
from postgrad.rollout.tools import Toolbox, load_tools
from postgrad.train.setup import Policy, load_frozen_policy, read_prompts
from postgrad.types import Group, Message, Prompt, Rollout


@dataclass(frozen=True)
class Writer:
    """A loaded model with its tools."""

    policy: Policy
    sampler: Sampler
    toolbox: Toolbox
    params: SamplingParams
    max_tokens: int

    def write(self, prompts: Sequence[Prompt], *, samples: int = 1, seed: int = 0) -> list[Group]:
        config = RolloutConfig(group_size=samples, max_tokens=self.max_tokens)
        return collect(
            list(enumerate(prompts)), sampler=self.sampler, chat=self.policy.chat, toolbox=self.toolbox, config=config,
            params=self.params, seed=seed, step=0,
        )  # fmt: skip


def load_writer(model: str, *, tools: Sequence[str], params: SamplingParams, max_tokens: int) -> Writer:
    with from_option("--tools"):
        toolbox = load_tools(tools, Path.cwd())
    policy = load_frozen_policy(model)
    return Writer(policy, policy.sampler(), toolbox, replace(params, stop_ids=policy.chat.stop_ids), max_tokens)


def run_generate(
    model: str, texts: Sequence[str], *, data: Path | None, tools: Sequence[str], system: str | None, samples: int, params: SamplingParams,
    max_tokens: int, seed: int, json_output: bool,
) -> None:  # fmt: skip
    if (data is None) == (not texts):
        raise RecipeError(
            "give prompts or --data, one of the two", where="command line", hint='postgrad generate smollm2-135m "What is 2 + 2?"'
        )
    writer = load_writer(model, tools=tools, params=params, max_tokens=max_tokens)
    opening = (Message("system", system),) if system else ()
    if data is not None:
        prompts = read_prompts(data, writer.policy, writer.toolbox, system=system)
    else:
        prompts = [Prompt(f"prompt {index + 1}", (*opening, Message("user", text))) for index, text in enumerate(texts)]
    with writer.toolbox:
        groups = writer.write(prompts, samples=samples, seed=seed)
    for group in groups:
        for rollout in group.rollouts:
            if json_output:
                print(json.dumps(group_to_json(Group(group.prompt, (rollout,))), ensure_ascii=False))
            else:
                show(rollout)


def show(rollout: Rollout) -> None:
    """The turns as a reader would want them: text, calls, results."""
    for message in rollout.messages:
        if message.reasoning:
            stdout.print(f"(thinks) {message.reasoning}", style="dim", markup=False)
        if message.role == "tool":
            stdout.print(f"  → {message.content}", style="dim", markup=False)
            continue
        if message.content:
            stdout.print(message.content, markup=False)
        for call in message.tool_calls:
            stdout.print(f"  calls {call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})", style="dim", markup=False)
    if rollout.stop.truncated:
        stderr.print(f"(stopped: {rollout.stop})", style="dim", markup=False)


def run_chat(model: str, *, tools: Sequence[str], system: str | None, temperature: float, max_tokens: int) -> None:
    writer = load_writer(model, tools=tools, params=SamplingParams(temperature=temperature), max_tokens=max_tokens)
    stderr.print("type a message; an empty line or Ctrl-D ends", style="dim", markup=False)
    history: tuple[Message, ...] = (Message("system", system),) if system else ()
    turn = 0
    with writer.toolbox:
        while text := _ask():
            history = (*history, Message("user", text))
            (group,) = writer.write([Prompt(f"turn {turn}", history)], seed=turn)
            (rollout,) = group.rollouts
            show(rollout)
            history = (*history, *rollout.messages)
            turn += 1


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""
