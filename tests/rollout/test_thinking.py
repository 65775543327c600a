"""Thinking models: what the model read is what is stored and trained, whatever its template does to earlier thoughts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from tests import templates
from tests.templates import format_of, tokenizer_of

from postgrad.chat import ChatFormat
from postgrad.protocols import SamplingParams
from postgrad.rollout import RolloutConfig, collect, make_toolbox
from postgrad.testing import ScriptedPolicy
from postgrad.types import Message, Prompt, Rollout, Source

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    '```json\n{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
THOUGHTS = ("first I add", "once more", "then I say")


def turns(call: str, *, opened: bool) -> list[str]:
    """Two calls and an answer, each after a thought. `opened`: the first prompt has opened the thought already."""
    texts = [f"<think>\n{thought}\n</think>\n\n{rest}" for thought, rest in zip(THOUGHTS, (call, call, "3"), strict=True)]
    return [texts[0].removeprefix("<think>\n") if opened else texts[0], *texts[1:]]


KINDS: dict[str, tuple[str, str, bool, bool]] = {
    # name: template, how a call is written, the prompt opens the thought, thoughts of a tool loop are dropped
    "keeps all thoughts": (templates.KEEPS_THOUGHTS, CALL, False, False),
    "qwen3": (templates.QWEN3, CALL, False, False),
    "prints the last thought alone": (templates.DROPS_THOUGHTS, CALL, False, True),
    "deepseek-r1": (templates.DEEPSEEK_R1, V3, True, True),
    "deepseek-r1 that keeps thoughts": (templates.DEEPSEEK_R1_KEEPS, V3, True, False),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def rolled(
    kind: str, history: str, *, script: list[str] | None = None, messages: tuple[Message, ...] = ()
) -> tuple[Rollout, Any, ChatFormat]:
    template, call, opened, _ = KINDS[kind]
    chat = format_of(template)
    policy = ScriptedPolicy(script or turns(call, opened=opened), tokenizer=tokenizer_of(template))
    [group] = collect(
        [(0, Prompt("rows.jsonl:1", messages or (Message("user", "1 + 2"),)))],
        sampler=policy,
        chat=chat,
        toolbox=make_toolbox([add]),
        config=RolloutConfig(group_size=1, max_tokens=600, history=history),
        params=SamplingParams(),
        seed=0,
        step=0,
    )
    return group.rollouts[0], policy, chat


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def rows(rollout: Rollout) -> list[Any]:
    return [*rollout.forks, rollout.segments]


def contexts(policy: Any) -> list[tuple[int, ...]]:
    return [request.context for batch in policy.requests for request in batch]


@every_kind
@pytest.mark.parametrize("history", ["append", "fork"])
def test_every_sampled_token_is_trained_once_after_exactly_what_the_model_read(kind: str, history: str) -> None:
    rollout, policy, chat = rolled(kind, history)
    read = iter(contexts(policy))
    sampled = []
    for row in rows(rollout):
        before: tuple[int, ...] = ()
        for segment in row:
            if segment.source is Source.MODEL:
                assert before == next(read)
                sampled.append(chat.decode(segment.token_ids))
            before += segment.token_ids
    assert next(read, None) is None
    _, call, opened, _ = KINDS[kind]
    assert [text.split("</think>")[0] for text in sampled] == [text.split("</think>")[0] for text in turns(call, opened=opened)]
    assert [message.reasoning for message in rollout.messages if message.role == "assistant"] == list(THOUGHTS)
    assert rollout.final_answer == "3"


@every_kind
def test_append_keeps_every_token_and_counts_the_turns_that_the_template_would_show_otherwise(kind: str) -> None:
    rollout, policy, _ = rolled(kind, "append")
    assert rollout.forks == ()
    seen = contexts(policy)
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(seen))
    assert rollout.rewrites == (2 if KINDS[kind][3] else 0)


@every_kind
def test_fork_starts_a_row_with_what_the_template_renders_where_it_drops_thoughts_and_only_there(kind: str) -> None:
    rollout, _, chat = rolled(kind, "fork")
    dropped = KINDS[kind][3]
    assert len(rollout.forks) == (2 if dropped else 0)
    history = [Message("user", "1 + 2")]
    told = list(rollout.messages)
    for row in rows(rollout):
        assert row[0].source is Source.PROMPT
        assert row[0].token_ids == chat.prompt_ids(history, make_toolbox([add]).specs)
        history += [told.pop(0), told.pop(0)] if len(told) > 1 else []
    text = chat.decode(rollout.segments[0].token_ids)
    assert not any(thought in text for thought in THOUGHTS) if dropped else text.count("once more") == 0


def test_qwen3_drops_the_thoughts_of_an_earlier_question_from_the_prompt_already() -> None:
    """A prompt of several questions is what the template renders of it: the model reads no old thought, and none is trained."""
    earlier = (Message("user", "hi"), Message("assistant", "Hello.", reasoning="a greeting"), Message("user", "1 + 2"))
    _, policy, chat = rolled("qwen3", "append", messages=earlier)
    assert "a greeting" not in chat.decode(contexts(policy)[0])
    assert "Hello." in chat.decode(contexts(policy)[0])
    kept, _, chat = rolled("keeps all thoughts", "append", messages=earlier)
    assert "a greeting" in chat.decode(kept.segments[0].token_ids)


def test_a_turn_without_thoughts_is_no_rewriting_although_qwen3_prints_an_empty_thought_for_the_last_turn() -> None:
    rollout, _, _ = rolled("qwen3", "fork", script=[CALL, CALL, "3"])
    assert (rollout.rewrites, rollout.forks) == (0, ())


def test_an_answer_after_a_result_needs_no_thought_where_only_the_first_prompt_opened_one() -> None:
    """DeepSeek's template opens no thought after tool results: the answer there is an answer, not an unfinished thought."""
    rollout, _, _ = rolled("deepseek-r1", "append", script=[f"I add.\n</think>\n\n{V3}", "3"])
    assert rollout.final_answer == "3"
    assert rollout.messages[0].reasoning == "I add."


def test_what_looks_like_a_call_is_text_where_no_tools_are_offered_and_its_thought_stays_a_thought() -> None:
    chat, tokenizer = format_of(templates.QWEN3), tokenizer_of(templates.QWEN3)
    [group] = collect(
        [(0, Prompt("rows.jsonl:1", (Message("user", "1 + 2"),)))],
        sampler=ScriptedPolicy([f"<think>\nhm\n</think>\n\n{CALL}"], tokenizer=tokenizer),
        chat=chat,
        toolbox=make_toolbox([]),
        config=RolloutConfig(group_size=1, max_tokens=600),
        params=SamplingParams(),
        seed=0,
        step=0,
    )
    assert group.rollouts[0].messages == (Message("assistant", CALL, reasoning="hm"),)


def test_a_thought_that_never_ends_is_no_answer_and_calls_nothing() -> None:
    rollout, _, _ = rolled("deepseek-r1", "append", script=[f"I call {V3} and"])
    assert (rollout.final_answer, rollout.tool_results) == ("", ())
    rollout, _, _ = rolled("qwen3", "append", script=[f"<think>\nI call {CALL}"])
    assert (rollout.final_answer, rollout.tool_results) == ("", ())


class TestTraining:
    """The same templates in SFT: what was shown to the model is what is trained."""

    CONVERSATION = (
        Message("user", "hi"),
        Message("assistant", "Hello.", reasoning="a greeting"),
        Message("user", "and you?"),
        Message("assistant", "Well.", reasoning="be polite"),
    )

    def rows(self, template: str) -> tuple[list[str], Any]:
        """Text of each row with the trained part in brackets, and the report."""
        from postgrad.data import prepare_sft, rows_from

        chat = format_of(template)
        messages = [
            {"role": message.role, "content": message.content} | ({"reasoning_content": message.reasoning} if message.reasoning else {})
            for message in self.CONVERSATION
        ]
        data = prepare_sft(rows_from([{"messages": messages}]), chat, max_length=2000)
        texts = []
        for row in data.rows:
            trained = [token for token, flag in zip(row.token_ids, row.trained, strict=True) if flag]
            texts.append(f"{chat.decode(row.token_ids)}|{chat.decode(trained)}")
        return texts, data.report

    def test_a_template_that_keeps_thoughts_gives_one_row_with_all_of_them(self) -> None:
        (text,), _ = self.rows(templates.KEEPS_THOUGHTS)
        assert text.endswith("|<think>\na greeting\n</think>\n\nHello.<think>\nbe polite\n</think>\n\nWell.")

    def test_a_template_that_drops_them_gives_a_row_for_each_answer_with_what_the_model_would_have_read(self) -> None:
        (first, second), report = self.rows(templates.QWEN3)
        assert first.endswith("|<think>\na greeting\n</think>\n\nHello.")
        assert second.endswith("|<think>\nbe polite\n</think>\n\nWell.")
        assert "a greeting" not in second
        assert "Hello." in second
        assert report.tally.marks["rewrites_history"].count == 1

    def test_a_template_that_prints_no_thought_at_all_is_refused(self) -> None:
        from postgrad.errors import DataError

        with pytest.raises(DataError, match="prints no `reasoning`, so it would be lost"):
            self.rows(templates.DEEPSEEK_R1)

    def test_a_thought_that_belongs_into_the_content_is_put_there(self) -> None:
        (text,), _ = self.rows(templates.DEEPSEEK_R1_KEEPS)
        assert text.endswith("|a greeting\n</think>\n\nHello.be polite\n</think>\n\nWell.")
