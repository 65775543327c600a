"""What a rollout may do in all: calls of one tool, calls of one turn, tokens of one result; and what an environment may say."""

from __future__ import annotations

import json
import threading
from typing import Any, ClassVar

import pytest

from postgrad.chat import ChatFormat
from postgrad.errors import RunError
from postgrad.protocols import SamplingParams, TurnRequest
from postgrad.rollout import RolloutConfig, collect, make_toolbox, tool
from postgrad.rollout.episode import start_seed
from postgrad.rollout.journal import FileJournal
from postgrad.testing import ScriptedPolicy, tiny_tokenizer
from postgrad.types import Group, Message, Prompt, Source, StopReason

TOKENIZER = tiny_tokenizer()
CHAT = ChatFormat(TOKENIZER)


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def groups_of(script: Any, *tools: Any, prompts: int = 1, journal: FileJournal | None = None, **limits: Any) -> list[Group]:
    return collect(
        [(index, Prompt(f"d:{index}", (Message("user", "Go."),), {"n": index})) for index in range(prompts)],
        sampler=ScriptedPolicy(script, tokenizer=TOKENIZER),
        chat=CHAT,
        toolbox=make_toolbox(tools),
        config=RolloutConfig(**({"group_size": 1, "max_tokens": 400} | limits)),
        params=SamplingParams(),
        seed=5,
        step=1,
        journal=journal,
    )


def results_of(script: Any, *tools: Any, **limits: Any) -> list[tuple[str, str]]:
    [[rollout]] = [group.rollouts for group in groups_of(script, *tools, **limits)]
    return [(result.content, str(result.error)) for result in rollout.tool_results]


# ---- limits


def test_calls_beyond_a_tools_own_limit_are_refused_and_not_made() -> None:
    made: list[int] = []

    @tool(max_calls=2)
    def look(n: int) -> str:
        """Look."""
        made.append(n)
        return "seen"

    results = results_of([call("look", n=1), call("look", n=2) + call("look", n=3), call("look", n=4), "done"], look)
    assert made == [1, 2]
    refusal = "error: look can be called 2 times in all, and has been; this call was not made"
    assert results == [("seen", ""), ("seen", ""), (refusal, "limit"), (refusal, "limit")]


def test_calls_beyond_the_turns_limit_are_refused_in_their_places() -> None:
    def look(n: int) -> str:
        """Look."""
        return str(n)

    results = results_of(["".join(call("look", n=n) for n in range(3)), "done"], look, max_calls_per_turn=2)
    assert results == [("0", ""), ("1", ""), ("error: one turn can make 2 calls; this call was not made", "limit")]


def test_a_result_is_cut_by_tokens_and_marked_and_what_the_tool_says_goes_before() -> None:
    def long() -> str:
        """Talk."""
        return "word " * 100

    @tool(max_output_tokens=40)
    def longer() -> str:
        """Talk."""
        return "word " * 100

    [[rollout]] = [group.rollouts for group in groups_of([call("long") + call("longer"), "done"], long, longer, max_output_tokens=10)]
    texts = [result.content for result in rollout.tool_results]
    size = len(CHAT.encode("word " * 100))
    assert [text.endswith(f"… [cut: {size} tokens]") for text in texts] == [True, True]
    assert [len(CHAT.encode(text.split("…")[0])) for text in texts] == [10, 40]
    glue = [CHAT.decode_raw(segment.token_ids) for segment in rollout.segments if segment.source is Source.TOOL]
    assert texts[0] in glue[0]  # what was shown is what is stored


# ---- environments


class Maze:
    """Three steps to the end. Every step earns a tenth, arriving earns 1."""

    seeds: ClassVar[list[int]] = []

    def reset(self, n: int, seed: int) -> str:
        self.at = 0
        self.seeds.append(seed)
        return f"You are at {self.at}."

    def go(self) -> str:
        """Take a step."""
        self.at += 1
        return f"at {self.at}"

    @property
    def done(self) -> bool:
        return self.at >= 3

    @property
    def reward(self) -> float:
        return 0.1

    def get_reward(self) -> float:
        return float(self.at >= 3)


def test_an_environment_that_is_done_ends_its_rollout_and_gives_its_reward() -> None:
    groups = groups_of(lambda request: call("go") if request.turn < 9 else "done", Maze, group_size=2)
    for rollout in groups[0].rollouts:
        assert (rollout.stop, rollout.turns, rollout.environment_reward) == (StopReason.ENVIRONMENT, 3, 1.0)
        assert not rollout.stop.truncated
        assert [(result.reward, result.done) for result in rollout.tool_results] == [(0.1, False), (0.1, False), (0.1, True)]
        assert "You are at 0." in CHAT.decode_raw(rollout.segments[0].token_ids)


def test_a_rollout_that_gives_up_gets_what_it_earned_until_then() -> None:
    [group] = groups_of([call("go"), "I give up."], Maze)
    assert (group.rollouts[0].stop, group.rollouts[0].environment_reward) == (StopReason.END, 0.0)


def test_all_samples_of_a_prompt_start_in_one_state_and_prompts_in_others() -> None:
    Maze.seeds.clear()
    groups_of(["done"], Maze, prompts=3, group_size=4)
    assert sorted(Maze.seeds) == sorted([start_seed(5, index) for index in range(3)] * 4)
    assert len(set(Maze.seeds)) == 3


def test_a_reward_that_cannot_be_had_spoils_the_rollout_and_nothing_else() -> None:
    class Broken(Maze):
        def get_reward(self) -> float:
            if self.at == 0:
                raise OSError("the judge is away")
            return 1.0

    def script(request: TurnRequest) -> str:
        return call("go") if request.key.sample == 1 and request.turn == 0 else "done"

    [group] = groups_of(script, Broken, group_size=2)
    first, second = group.rollouts
    assert first.stop is StopReason.INFRASTRUCTURE
    assert "the judge is away" in first.infrastructure_errors[-1]
    assert (second.stop, second.environment_reward) == (StopReason.END, 1.0)


@pytest.mark.slow
def test_a_reward_that_does_not_come_in_time_is_missing_and_not_none() -> None:
    never = threading.Event()

    class Slow(Maze):
        def get_reward(self) -> float:
            never.wait(0 if self.at else 60)
            return 1.0

    def script(request: TurnRequest) -> str:
        return call("go") if request.key.sample == 1 and request.turn == 0 else "done"

    [group] = groups_of(script, Slow, group_size=2, tool_deadline_s=4.0)
    assert group.rollouts[0].stop is StopReason.INFRASTRUCTURE
    assert "get_reward: no result within 4 s" in group.rollouts[0].infrastructure_errors[-1]
    assert group.rollouts[1].environment_reward == 1.0


class Saved(Maze):
    """Its state can be written down; what it does outside cannot be taken back."""

    effects: ClassVar[list[int]] = []

    def go(self) -> str:
        """Take a step."""
        self.effects.append(self.at)
        return super().go()

    def snapshot(self) -> dict[str, int]:
        return {"at": self.at}

    def restore(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def turn_of(line: str) -> int:
    record = json.loads(line)
    return int((record.get("begun") or record["ended"]).split(".")[4])


@pytest.mark.parametrize("kept_turns", [0, 1, 2, 3])
def test_an_environment_with_snapshots_goes_on_from_the_last_and_repeats_nothing(tmp_path, kept_turns) -> None:
    script = [call("go")] * 4
    Saved.effects.clear()
    first = groups_of(script, Saved, journal=FileJournal(tmp_path / "j.jsonl"))
    lines = (tmp_path / "j.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "part.jsonl").write_text("".join(line for line in lines if turn_of(line) < kept_turns))
    Saved.effects.clear()
    again = groups_of(script, Saved, journal=FileJournal(tmp_path / "part.jsonl"))
    assert Saved.effects == list(range(kept_turns, 3))
    assert [result.content for result in again[0].rollouts[0].tool_results] == ["at 1", "at 2", "at 3"]
    assert again[0].rollouts[0].environment_reward == first[0].rollouts[0].environment_reward == 1.0


# ---- environments that fail


class Bare:
    def step(self) -> str:
        """Take a step."""
        return "ok"


def raising(error: BaseException) -> Any:
    def raise_it(*_: Any) -> Any:
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"done": property(raising(SystemExit(1)))}, "Bare.done: SystemExit: 1"),
        ({"done": property(raising(AttributeError("typo")))}, "Bare.done: AttributeError: typo"),
        ({"reward": property(raising(AttributeError("typo")))}, "Bare.reward: AttributeError: typo"),
        ({"reward": 10**400}, "Bare.reward is a finite number or None, not int .OverflowError"),
        ({"get_reward": raising(SystemExit(1))}, "Bare.get_reward: SystemExit: 1"),
        ({"reset": raising(ValueError("no level 9")), "close": raising(AttributeError("never opened"))}, "reset: ValueError: no level 9"),
        ({"reset": lambda self: setattr(self, "done", True)}, "Bare is done as soon as it was reset"),
        ({"reset": lambda self: "word " * 900}, "reset: with what it returned, the prompt has .* tokens, the model takes 700"),
    ],
)  # fmt: skip
def test_what_an_environment_does_wrong_is_told_in_its_own_words_and_spoils_its_rollout(members, message) -> None:
    with pytest.raises(RunError, match=f"failed twice: .*{message}"):
        groups_of([call("step"), "done"], type("Bare", (Bare,), members), max_context_tokens=700)


def test_a_property_that_cannot_say_anything_before_the_first_call_is_asked_after_it() -> None:
    class Later(Bare):
        def step(self) -> str:
            """Take a step."""
            self.taken = True
            return "ok"

        @property
        def done(self) -> bool:
            return self.taken

    [[rollout]] = [group.rollouts for group in groups_of([call("step"), "done"], Later)]
    assert rollout.stop is StopReason.ENVIRONMENT


def test_a_deadline_longer_than_a_system_can_wait_is_waited_for_all_the_same() -> None:
    assert results_of([call("step"), "done"], Bare, tool_deadline_s=1e300) == [("ok", "")]
    with pytest.raises(ValueError, match="tool_deadline_s must be finite"):
        RolloutConfig(group_size=1, max_tokens=1, tool_deadline_s=float("inf"))
