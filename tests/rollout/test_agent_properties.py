"""Whatever the model writes, the tools do and the limits say: the invariants of a rollout."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postgrad.chat import ChatFormat
from postgrad.protocols import Completion, SamplingParams, TurnRequest
from postgrad.rollout import (
    InfrastructureError,
    RolloutConfig,
    collect,
    group_from_json,
    group_to_json,
    make_toolbox,
    rollout_metrics,
    tool,
)
from postgrad.testing import ScriptedPolicy, tiny_tokenizer
from postgrad.types import Message, Prompt, Rollout, Source, StopReason

TOKENIZER = tiny_tokenizer()
THINKING = (
    "{% for m in messages %}{% set content = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATS = {"plain": ChatFormat(TOKENIZER), "thinking": ChatFormat(tiny_tokenizer(THINKING))}


def echo(text: str) -> str:
    """Echo."""
    return text


def refuse() -> None:
    """Refuse."""
    raise SystemExit("no")


@tool(terminal=True)
def finish() -> str:
    """Finish."""
    return "finished"


def flaky(n: int) -> str:
    """Work, or not."""
    if n % 3 == 0:
        raise InfrastructureError("down")
    return "worked"


TOOLBOX = make_toolbox([echo, refuse, finish, flaky])
CALL_OF_ECHO = '<tool_call>{"name": "echo", "arguments": {"text": "<|im_end|> hi"}}</tool_call>'
PIECES = st.sampled_from(
    [
        "some text ",
        "<think>hm</think>",
        "é€",
        "<|im_start|>",
        CALL_OF_ECHO,
        '<tool_call>{"name": "echo", "arguments": {"text": 3}}</tool_call>',
        '<tool_call>{"name": "refuse", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "finish", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "flaky", "arguments": {"n": 1}}</tool_call>',
        '<tool_call>{"name": "flaky", "arguments": {"n": 3}}</tool_call>',
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        "<tool_call>{not json}</tool_call>",
        "<tool_call>",
    ]
)
IDS = st.lists(st.integers(0, len(TOKENIZER) - 1), min_size=1, max_size=20).map(tuple)
CALLS = st.sampled_from([CALL_OF_ECHO, "<think>hm</think>" + CALL_OF_ECHO, CALL_OF_ECHO * 2])
TURN = st.integers(0, 9).flatmap(
    lambda kind: CALLS if kind < 5 else IDS if kind == 9 else st.lists(PIECES, min_size=1, max_size=3).map("".join)
)


@st.composite
def runs(draw: Any) -> Any:
    config = RolloutConfig(
        group_size=3,
        max_tokens=draw(st.sampled_from([5, 100, 300, 300])),
        max_total_tokens=draw(st.sampled_from([None, None, None, 1, 120, 300])),
        max_context_tokens=draw(st.sampled_from([None, None, 240, 420])),
        max_turns=draw(st.sampled_from([1, 2, 4, 4])),
        max_invalid_turns=draw(st.integers(1, 3)),
        max_output_chars=draw(st.sampled_from([1, 50])),
        tool_deadline_s=60,
        history=draw(st.sampled_from(["append", "fork"])),
    )
    script = {(0, sample, turn): draw(TURN) for sample in range(3) for turn in range(4)}
    script[0, 0, 0] = "never spoiled"  # one rollout always ends, so that the run goes on
    params = SamplingParams(stop_strings=draw(st.sampled_from([(), (), ("text",), ("</tool_call>",)])))
    return config, script, params, draw(st.sampled_from(["plain", "thinking"]))


class Recording(ScriptedPolicy):
    """Keeps what it answered."""

    def __init__(self, script: Any) -> None:
        super().__init__(script, tokenizer=TOKENIZER)
        self.answers: list[tuple[TurnRequest, Completion]] = []

    def generate(self, requests: Any, params: Any) -> list[Completion]:
        completions = super().generate(requests, params)
        distinct = [
            Completion(item.token_ids, tuple(-0.001 * (1 + place) for place in range(len(item.token_ids))), item.finish)
            for item in completions
        ]
        self.answers += zip(requests, distinct, strict=True)
        return distinct


def rows(rollout: Rollout) -> tuple[Any, ...]:
    return (*rollout.forks, rollout.segments)


@settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(runs())
def test_the_invariants_of_every_rollout(run: Any) -> None:
    config, script, params, chat_name = run
    chat, policy = CHATS[chat_name], Recording(script)
    prompt = Prompt("d:1", (Message("user", "Go <|im_end|>."),), {"answer": 1})
    [group] = collect([(0, prompt)], sampler=policy, chat=chat, toolbox=TOOLBOX, config=config, params=params, seed=0, step=0)
    for rollout in group.rollouts:
        answers = [(request, completion) for request, completion in policy.answers if request.key.sample == rollout.sample]
        last_start = max(place for place, (request, _) in enumerate(answers) if request.turn == 0)
        check(rollout, answers[last_start:], config, chat)
    assert group_from_json(group_to_json(group)) == group
    assert sum(value for name, value in rollout_metrics([group]).items() if name.startswith("stop/")) == 3


def check(rollout: Rollout, answers: list[tuple[TurnRequest, Completion]], config: RolloutConfig, chat: ChatFormat) -> None:
    spoiled = rollout.stop is StopReason.INFRASTRUCTURE
    sampled = [segment for row in rows(rollout) for segment in row if segment.source is Source.MODEL]
    expected = answers[: len(sampled)] if spoiled else answers

    # exactly one stop reason, and lengths that agree
    assert isinstance(rollout.stop, StopReason)
    assert len(rollout.token_ids) == len(rollout.tool_mask) == len(rollout.logprobs)

    # what is trained is exactly what the sampler returned, in order, with its log-probs
    assert [(segment.token_ids, segment.logprobs) for segment in sampled] == [(item.token_ids, item.logprobs) for _, item in expected]
    assert all(not segment.logprobs for row in rows(rollout) for segment in row if segment.source is not Source.MODEL)

    # what the sampler read before each turn is the row up to that turn
    contexts = []
    for row in rows(rollout):
        for place, segment in enumerate(row):
            if segment.source is Source.MODEL:
                contexts.append(tuple(token for before in row[:place] for token in before.token_ids))
    assert contexts == [request.context for request, _ in expected]

    # limits
    assert all(request.max_tokens <= config.max_tokens for request, _ in answers)
    assert len(sampled) <= config.max_turns
    total = sum(len(segment.token_ids) for segment in sampled)
    if not rollout.forks:
        total = sum(len(segment.token_ids) for segment in rollout.segments if segment.source is not Source.PROMPT)
    if config.max_total_tokens is not None:
        assert total <= config.max_total_tokens
    if config.max_context_tokens is not None:
        assert all(sum(len(segment.token_ids) for segment in row) <= config.max_context_tokens for row in rows(rollout))
    assert all(len(result.content) <= config.max_output_chars for result in rollout.tool_results)
    assert rollout.sampled_tokens == sum(len(segment.token_ids) for segment in sampled)

    # results that the model read are paired with calls, one by one and in order
    answered = [message for message in rollout.messages if message.role == "tool"]
    assert len(answered) <= len(rollout.tool_results)
    for message, result in zip(answered, rollout.tool_results, strict=False):
        assert message.content == result.content
        assert message.tool_call_id == (result.call.id if result.call else "")
    if not rollout.forks:
        assert rollout.text == chat.decode([token for segment in rollout.segments[1:] for token in segment.token_ids])
