"""Environments: a class whose methods are tools and whose instance belongs to one rollout."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from postgrad.chat import ChatFormat
from postgrad.errors import DataError, RunError
from postgrad.protocols import SamplingParams, TurnRequest
from postgrad.rollout import InfrastructureError, RolloutConfig, collect, make_toolbox, tool
from postgrad.testing import ScriptedPolicy, tiny_tokenizer
from postgrad.types import Group, Message, Prompt, Source, StopReason

TOKENIZER = tiny_tokenizer()
CHAT = ChatFormat(TOKENIZER)


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def groups_of(script: Any, tools: Sequence[Any], *, prompts: int = 1, samples: int = 1, columns: Any = None, **limits: Any) -> list[Group]:
    rows = [(index, Prompt(f"d:{index}", (Message("user", "Play."),), columns or {"start": 10 * index})) for index in range(prompts)]
    config = RolloutConfig(**({"group_size": samples, "max_tokens": 300, "tool_deadline_s": 20} | limits))
    policy = script if hasattr(script, "generate") else ScriptedPolicy(script, tokenizer=TOKENIZER)
    return collect(rows, sampler=policy, chat=CHAT, toolbox=make_toolbox(tools), config=config, params=SamplingParams(), seed=0, step=0)


class Recorder:
    """Counts what happens to the environments of one test."""

    def __init__(self) -> None:
        self.made = 0
        self.closed = 0
        self.lock = threading.Lock()

    def environment(self) -> type:
        recorder = self

        class Counter:
            def __init__(self) -> None:
                self.total = 0
                with recorder.lock:
                    recorder.made += 1

            def reset(self, start: int) -> str:
                self.total = start
                return f"The counter stands at {start}."

            def increase(self, by: int = 1) -> int:
                """Increase the counter."""
                self.total += by
                return self.total

            @tool(terminal=True)
            def stop(self) -> str:
                """Stop."""
                return "stopped"

            def close(self) -> None:
                with recorder.lock:
                    recorder.closed += 1

        return Counter


def test_each_rollout_has_an_environment_of_its_own() -> None:
    recorder = Recorder()
    groups = groups_of([call("increase"), call("increase", '{"by": 2}'), "done"], [recorder.environment()], prompts=2, samples=3)
    assert [[[result.content for result in rollout.tool_results] for rollout in group.rollouts] for group in groups] == [
        [["1", "3"]] * 3,
        [["11", "13"]] * 3,
    ]
    assert (recorder.made, recorder.closed) == (6, 6)


def test_the_observation_of_a_reset_is_read_before_the_first_turn_and_not_trained() -> None:
    [group] = groups_of(["done"], [Recorder().environment()], columns={"start": 5})
    [rollout] = group.rollouts
    first = rollout.segments[0]
    assert first.source is Source.PROMPT
    assert "<|im_start|>user\nPlay.\n\nThe counter stands at 5.<|im_end|>\n<|im_start|>assistant\n" in CHAT.decode_raw(first.token_ids)
    assert "counter" not in rollout.text
    assert group.prompt.messages == (Message("user", "Play."),)


def test_the_observation_stays_in_the_context_of_later_turns() -> None:
    [group] = groups_of([call("increase"), "done"], [Recorder().environment()])
    assert CHAT.decode_raw(group.rollouts[0].token_ids).count("The counter stands at 0.") == 1


@pytest.mark.parametrize(
    ("script", "stop"),
    [
        (["done"], StopReason.END),
        ([call("stop")], StopReason.TERMINAL_TOOL),
        (lambda request: call("increase"), StopReason.TURNS),
        (lambda request: "<tool_call>x</tool_call>", StopReason.INVALID_CALLS),
        (lambda request: "x" * 400, StopReason.TURN_TOKENS),
    ],
)
def test_an_environment_is_closed_however_its_rollout_ends(script: Any, stop: StopReason) -> None:
    recorder = Recorder()
    [group] = groups_of(script, [recorder.environment()])
    assert group.rollouts[0].stop is stop
    assert (recorder.made, recorder.closed) == (1, 1)


def test_environments_are_closed_when_the_run_is_interrupted_or_hits_a_bug() -> None:
    class Breaks(ScriptedPolicy):
        def generate(self, requests: Any, params: Any) -> Any:
            if len(self.requests) == 1:
                raise KeyboardInterrupt
            return super().generate(requests, params)

    recorder = Recorder()
    with pytest.raises(KeyboardInterrupt):
        groups_of(Breaks([call("increase")] * 2, tokenizer=TOKENIZER), [recorder.environment()], samples=4)
    assert (recorder.made, recorder.closed) == (4, 4)


def test_an_environment_is_closed_as_soon_as_its_own_rollout_has_ended() -> None:
    recorder = Recorder()
    closed_at_turn: dict[int, int] = {}

    def script(request: TurnRequest) -> str:
        closed_at_turn[request.turn] = recorder.closed
        return "done" if request.key.sample == 0 or request.turn == 2 else call("increase")

    groups_of(script, [recorder.environment()], samples=2)
    assert closed_at_turn == {0: 0, 1: 1, 2: 1}


def test_any_number_of_rollouts_gets_environments() -> None:
    for prompts, samples in ((1, 1), (3, 1), (1, 5)):
        recorder = Recorder()
        groups_of(["done"], [recorder.environment()], prompts=prompts, samples=samples, tool_workers=2)
        assert recorder.made == recorder.closed == prompts * samples


def test_a_reset_that_fails_once_is_tried_again_with_a_new_environment() -> None:
    failures = iter([OSError("port in use")])
    closed = []

    class Game:
        def reset(self) -> None:
            for error in failures:
                raise error

        def move(self) -> str:
            """Move."""
            return "ok"

        def close(self) -> None:
            closed.append(1)

    [group] = groups_of([call("move"), "done"], [Game])
    [rollout] = group.rollouts
    assert rollout.stop is StopReason.END
    assert rollout.infrastructure_errors == ("reset: OSError: port in use",)
    assert len(closed) == 2  # also the one whose reset failed


def test_a_reset_that_fails_twice_is_infrastructure_and_the_others_go_on() -> None:
    class Game:
        def reset(self, start: int) -> None:
            if start == 0:
                raise RuntimeError("no such level")

        def move(self) -> str:
            """Move."""
            return "ok"

    first, second = groups_of([call("move"), "done"], [Game], prompts=2)
    assert first.rollouts[0].stop is StopReason.INFRASTRUCTURE
    assert first.rollouts[0].sampled_tokens == 0
    assert second.rollouts[0].stop is StopReason.END


def test_a_reset_that_hangs_is_infrastructure_and_its_late_environment_is_closed() -> None:
    closed = threading.Event()

    class Game:
        def reset(self, start: int) -> None:
            if start == 0:
                time.sleep(3.5)

        def move(self) -> str:
            """Move."""
            return "ok"

        def close(self) -> None:
            closed.set()

    first, second = groups_of(["done"], [Game], prompts=2, tool_deadline_s=2)
    assert first.rollouts[0].stop is StopReason.INFRASTRUCTURE
    assert first.rollouts[0].infrastructure_errors[0] == "reset: no result within 2 s"
    assert second.rollouts[0].stop is StopReason.END
    closed.clear()
    assert closed.wait(10)


def test_an_environment_that_crashes_in_the_middle_starts_its_rollout_again() -> None:
    crashes = iter([InfrastructureError("simulator died")])
    made: list[Any] = []
    closed: list[Any] = []

    class Game:
        def __init__(self) -> None:
            made.append(self)
            self.moves = 0

        def move(self) -> int:
            """Move."""
            self.moves += 1
            if self.moves == 2:
                for error in crashes:
                    raise error
            return self.moves

        def close(self) -> None:
            closed.append(self)

    [group] = groups_of([call("move"), call("move"), "done"], [Game])
    [rollout] = group.rollouts
    assert rollout.stop is StopReason.END
    assert [result.content for result in rollout.tool_results] == ["1", "2"]
    assert len(rollout.infrastructure_errors) == 1
    assert len(made) == 2
    assert closed == made  # the crashed one too, before the new one is made


def test_an_ordinary_exception_of_an_environment_is_told_to_the_model() -> None:
    class Game:
        def move(self, to: str) -> str:
            """Move."""
            raise ValueError(f"{to} is taken")

    [group] = groups_of([call("move", '{"to": "a1"}'), "done"], [Game])
    assert group.rollouts[0].tool_results[0].content == "error: move: ValueError: a1 is taken"


def test_a_reset_that_returns_no_text_is_refused() -> None:
    class Game:
        def reset(self) -> int:
            return 3

        def move(self) -> str:
            """Move."""
            return ""

    with pytest.raises(RunError, match=r"Game\.reset returns the first observation as text, or None; it returned int"):
        groups_of(["done"], [Game])


def test_a_missing_column_is_a_data_error_before_anything_runs() -> None:
    recorder = Recorder()
    with pytest.raises(DataError, match=r"d:0: Counter\.reset asks for column 'start'"):
        groups_of(["done"], [recorder.environment()], columns={"other": 1})
    assert recorder.made == 0


def test_async_environments_work() -> None:
    class Game:
        async def reset(self) -> str:
            return "Ready."

        async def move(self) -> str:
            """Move."""
            return "moved"

        async def close(self) -> None: ...

    [group] = groups_of([call("move"), "done"], [Game])
    assert group.rollouts[0].tool_results[0].content == "moved"
    assert "Ready." in CHAT.decode_raw(group.rollouts[0].segments[0].token_ids)


def test_a_failing_close_is_logged_and_the_rollout_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    class Game:
        def move(self) -> str:
            """Move."""
            return ""

        def close(self) -> None:
            raise OSError("already gone")

    with caplog.at_level(logging.WARNING):
        [group] = groups_of(["done"], [Game])
    assert group.rollouts[0].stop is StopReason.END
    assert "an environment did not close: OSError: already gone" in caplog.text


def test_functions_and_several_environments_live_side_by_side() -> None:
    def double(x: int) -> int:
        """Double."""
        return 2 * x

    class Other:
        def reset(self) -> str:
            return "Other ready."

        def peek(self) -> str:
            """Peek."""
            return "seen"

    turn = call("double", '{"x": 4}') + call("peek") + call("increase")
    [group] = groups_of([turn, "done"], [double, Recorder().environment(), Other])
    assert [result.content for result in group.rollouts[0].tool_results] == ["8", "seen", "1"]
    assert "The counter stands at 0.\nOther ready." in CHAT.decode_raw(group.rollouts[0].segments[0].token_ids)
