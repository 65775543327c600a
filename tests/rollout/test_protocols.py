"""The agent loop in every way of writing calls: they run, what is no call is told to the model, and the rollout goes on."""

from __future__ import annotations

from typing import Any

import pytest
from tests.templates import CALLING, format_of, tokenizer_of

from postgrad.chat.codecs import STYLES
from postgrad.protocols import SamplingParams
from postgrad.rollout import ErrorKind, RolloutConfig, collect, make_toolbox
from postgrad.testing import CHATML, ScriptedPolicy
from postgrad.types import Message, Prompt, Rollout, Source, StopReason, ToolCall

WAYS = {f"template {name}": (template, {}) for name, template in CALLING.items()} | {
    f"text {name}": (CHATML, {} if name == "hermes" else {"tool_protocol": name}) for name in STYLES
}
MALFORMED = {
    "hermes": '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
    "llama3": '{"name": "add", "parameters": null}',
    "pythonic": "[add(1, 2)]",
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": [1, 2]}]',
    "mistral_v11": "[TOOL_CALLS]add[ARGS]3",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>null<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "xml": "<tool_call>\n<function=add>\n1, 2\n</function>\n</tool_call>",
}


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def call(a: Any, b: Any, name: str = "add") -> ToolCall:
    return ToolCall(name, {"a": a, "b": b})


def rolled(way: str, *turns: Any, history: str = "append") -> tuple[Rollout, Any]:
    """A rollout of these turns: a text, or (text, calls)."""
    template, options = WAYS[way]
    chat, tokenizer = format_of(template, **options), tokenizer_of(template)
    write = STYLES[chat.call_style].write
    script = [tokenizer.encode(turn if isinstance(turn, str) else write(*turn), add_special_tokens=False) for turn in turns]
    [group] = collect(
        [(0, Prompt("rows.jsonl:1", (Message("user", "1 + 2"),)))],
        sampler=ScriptedPolicy(script, tokenizer=tokenizer),
        chat=chat,
        toolbox=make_toolbox([add]),
        config=RolloutConfig(group_size=1, max_tokens=2000, history=history),
        params=SamplingParams(),
        seed=0,
        step=0,
    )
    return group.rollouts[0], chat


@pytest.mark.parametrize("history", ["append", "fork"])
@pytest.mark.parametrize("way", WAYS)
def test_calls_run_and_what_is_no_call_is_told(way: str, history: str) -> None:
    style = way.split()[1]
    rollout, chat = rolled(
        way, ("", [call(1, 2), call(3, 4)]), MALFORMED[style], ("Once more.", [call(5, 6), call(1, 2, "sub")]), ("", [call("x", 2)]), "3",
        history=history,
    )  # fmt: skip
    errors = ["", "", ErrorKind.MALFORMED, "", ErrorKind.UNKNOWN_TOOL, ErrorKind.ARGUMENTS]
    assert [result.error for result in rollout.tool_results] == errors
    assert [result.content for result in rollout.tool_results if not result.error] == ["3", "7", "11"]
    assert rollout.tool_results[4].content == "error: no tool is called 'sub'; the tools are: add"
    assert "argument 'a' is \"x\"" in rollout.tool_results[5].content
    assert (rollout.stop, rollout.final_answer) == (StopReason.END, "3")
    assert rollout.messages[3].content == ("Once more." if len(rollout.messages[3].tool_calls) else "")
    read = chat.decode_raw(
        [i for row in (*rollout.forks, rollout.segments) for s in row if s.source is not Source.MODEL for i in s.token_ids]
    )
    for result in rollout.tool_results:
        assert result.content in read.replace("\\u2019", "'").replace('\\"', '"')


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_the_token_limit_cut_is_not_run(way: str) -> None:
    template, options = WAYS[way]
    chat, tokenizer = format_of(template, **options), tokenizer_of(template)
    text = STYLES[chat.call_style].write("", [call(1, 2)])
    ids = tokenizer.encode(text, add_special_tokens=False)
    [group] = collect(
        [(0, Prompt("rows.jsonl:1", (Message("user", "1 + 2"),)))],
        sampler=ScriptedPolicy([ids], tokenizer=tokenizer),
        chat=chat,
        toolbox=make_toolbox([add]),
        config=RolloutConfig(group_size=1, max_tokens=len(ids)),
        params=SamplingParams(),
        seed=0,
        step=0,
    )
    assert (group.rollouts[0].stop, group.rollouts[0].tool_results) == (StopReason.TURN_TOKENS, ())
