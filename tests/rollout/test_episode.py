"""What an environment says beside the results of its tools: seed, done, reward, final reward, snapshot."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postgrad.errors import DataError, RecipeError
from postgrad.protocols import InfrastructureError
from postgrad.rollout.environments import Ending, Environment, end_session
from postgrad.rollout.episode import Standing, final_reward, put_back, standing, start_seed, take_snapshot
from postgrad.rollout.execute import Calls, ToolLimits, execute
from postgrad.rollout.journal import CallPlace, FileJournal
from postgrad.rollout.pool import run_lanes
from postgrad.rollout.record import rollout_from_json, rollout_to_json
from postgrad.rollout.results import ErrorKind
from postgrad.rollout.tools import make_toolbox
from postgrad.types import Message, Prompt, Rollout, StopReason, ToolCall, ToolResult

PROMPT = Prompt("d:3", (Message("system", "Be brief."), Message("user", "Play.")), {"start": 5, "level": "easy"})


class Game:
    """Pays each move, and is over after three."""

    def __init__(self) -> None:
        self.moves = 0
        self.reward: float | None = None
        self.done = False
        self.closed = False

    def reset(self, start: int, seed: int) -> str:
        self.start, self.seed = start, seed
        return f"{start} {seed}"

    def move(self, by: int) -> str:
        """Move.

        Args:
            by: how far
        """
        self.moves += 1
        self.done = self.moves == 3
        if by < 0:
            self.reward = -1.0
            raise ValueError("backwards")
        self.reward = by / 2
        return "moved"

    def look(self) -> int:
        """Look."""
        self.reward = None
        return self.moves

    def get_reward(self) -> float:
        return float(self.moves)

    def snapshot(self) -> dict[str, Any]:
        return {"moves": self.moves, "start": self.start}

    def restore(self, state: dict[str, Any]) -> None:
        self.moves, self.start = state["moves"], state["start"]

    def close(self) -> None:
        self.closed = True


def play(*calls: ToolCall) -> tuple[Game, list[ToolResult]]:
    session = make_toolbox([Game]).open([{"start": 0, "seed": 0}])
    results = [execute([(session, [item])], ToolLimits(deadline_s=20))[0][0] for item in calls]
    [game] = session.instances
    return game, results


# ---- seed


@pytest.mark.parametrize(
    ("reset", "given"),
    [
        (lambda self, start, seed: None, {"start": 5, "seed": 7}),
        (lambda self, seed=1: None, {"seed": 7}),
        (lambda self, row: None, {"row": {"start": 5, "level": "easy"}}),
        (
            lambda self, prompt: None,
            {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Play."}]},
        ),
        (lambda self, **columns: None, {"start": 5, "level": "easy"}),
        (lambda self, seed, **columns: None, {"start": 5, "level": "easy", "seed": 7}),
        (lambda self: None, {}),
    ],
)
def test_reset_gets_what_it_asks_for(reset: Any, given: dict[str, Any]) -> None:
    assert Environment(type("Env", (), {"reset": reset}), "Env").reset_arguments(PROMPT, seed=7) == given


def test_a_column_comes_before_what_postgrad_gives_under_its_name() -> None:
    environment = Environment(type("Env", (), {"reset": lambda self, seed: None}), "Env")
    assert environment.reset_arguments(Prompt("d:1", (), {"seed": 3}), seed=7) == {"seed": 3}


def test_a_column_that_is_missing_is_still_a_data_error() -> None:
    with pytest.raises(DataError, match="asks for column 'depth'"):
        Environment(type("Env", (), {"reset": lambda self, depth, seed: None}), "Env").reset_arguments(PROMPT, seed=7)


def test_seeds_are_those_of_the_run_and_the_prompt_and_fit_every_generator() -> None:
    seeds = [start_seed(run, index) for run in range(20) for index in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert seeds[:2] == [310654021, 3962971157]  # a resumed or repeated run must begin in the same states
    np.random.default_rng(max(seeds))
    np.random.seed(max(seeds))


# ---- done and reward


def test_what_an_environment_says_after_a_call_is_kept_with_the_result() -> None:
    moves = [ToolCall("move", {"by": 1}), ToolCall("look", {}), ToolCall("move", {"by": -1}), ToolCall("move", {"by": 4})]
    _, results = play(*moves)
    assert [(result.reward, result.done) for result in results] == [(0.5, False), (None, False), (-1.0, False), (2.0, True)]
    assert results[2].error is ErrorKind.RAISED  # an illegal move may cost something too


def test_tools_without_an_environment_say_nothing() -> None:
    def double(x: int) -> int:
        """Double."""
        return 2 * x

    [[result]] = execute([(make_toolbox([double]).open([]), [ToolCall("double", {"x": 1})])], ToolLimits())
    assert (result.reward, result.done) == (None, False)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, Standing()),
        ({"done": True, "reward": 1}, Standing(True, 1.0)),
        ({"done": np.bool_(True), "reward": np.float32(0.5)}, Standing(True, 0.5)),
        ({"reward": True}, Standing(False, 1.0)),
        ({"done": lambda self: True, "reward": lambda self: 1}, Standing()),  # tools of these names
        ({"done": property(lambda self: True)}, Standing(True)),
    ],
)
def test_done_and_reward_are_read_as_they_are(said: dict[str, Any], expected: Standing) -> None:
    assert standing(type("Env", (), said)()) == expected


@pytest.mark.parametrize(
    "said", [{"done": "yes"}, {"done": None}, {"reward": "1"}, {"reward": float("nan")}, {"reward": float("inf")}, {"reward": [1]},
             {"reward": property(lambda self: 1 / 0)}],
)  # fmt: skip
def test_what_makes_no_sense_is_a_failure_of_the_environment(said: dict[str, Any]) -> None:
    def act(self: Any) -> str:
        """Act."""
        return "acted"

    toolbox = make_toolbox([type("Env", (), {**said, "act": act})])
    [[result]] = execute([(toolbox.open([{}]), [ToolCall("act", {})])], ToolLimits(deadline_s=20))
    assert result.error is ErrorKind.INFRASTRUCTURE


def test_an_environment_is_asked_before_its_next_call_may_change_it() -> None:
    _, [first, second] = play(ToolCall("move", {"by": 2}), ToolCall("move", {"by": 4}))
    session = make_toolbox([Game]).open([{"start": 0, "seed": 0}])
    [together] = execute([(session, [ToolCall("move", {"by": 2}), ToolCall("move", {"by": 4})])], ToolLimits(deadline_s=20))
    assert [result.reward for result in together] == [first.reward, second.reward] == [1.0, 2.0]


def test_reward_and_done_survive_the_rollout_file_and_the_journal(tmp_path: Path) -> None:
    call, place = ToolCall("move", {"by": 1}, "call_0"), CallPlace(0, 0, 0, 0, 0, 0)
    result = ToolResult(call, "moved", "", 0.25, reward=-0.0625, done=True)
    rollout = Rollout((), (), StopReason.TERMINAL_TOOL, tool_results=(result,), environment_reward=0.1)
    assert rollout_from_json(rollout_to_json(rollout)) == rollout
    with FileJournal(tmp_path / "j.jsonl") as journal:
        journal.begun(place, call)
        journal.ended(place, result, {"moves": 1})
    found = FileJournal(tmp_path / "j.jsonl").find(place, call)
    assert found is not None
    assert (found.result, found.snapshot) == (result, {"moves": 1})


def test_a_call_of_the_journal_has_the_standing_that_was_recorded(tmp_path: Path) -> None:
    """Its environment is called again, to be where the old one was; what counts is what was recorded."""
    call, place = ToolCall("move", {"by": 1}, "call_0"), CallPlace(0, 0, 0, 0, 0, 0)
    with FileJournal(tmp_path / "j.jsonl") as journal:
        journal.begun(place, call)
        journal.ended(place, ToolResult(call, "moved", "", 0.25, reward=9.0, done=True))
    session = make_toolbox([Game]).open([{"start": 0, "seed": 0}])
    calls = Calls(session, [call], ToolLimits(deadline_s=20), place, FileJournal(tmp_path / "j.jsonl"))
    [result] = calls.results(run_lanes(calls.lanes, workers=1))
    assert (result.reward, result.done, session.instances[0].moves) == (9.0, True, 1)


# ---- the end


def test_the_last_word_is_asked_before_the_environment_is_closed() -> None:
    class Closing(Game):
        def get_reward(self) -> float:
            assert not self.closed
            return 2.5

    session = make_toolbox([Closing]).open([{"start": 0, "seed": 0}])
    assert end_session(session) == Ending(reward=2.5)
    assert session.instances[0].closed


def test_final_rewards_are_summed_and_may_be_async_or_missing() -> None:
    class Judge:
        async def get_reward(self) -> float:
            return 0.5

        def ask(self) -> str:
            """Ask."""
            return ""

    class Silent:
        def listen(self) -> str:
            """Listen."""
            return ""

    assert end_session(make_toolbox([Judge, Game, Silent]).open([{}, {"start": 0, "seed": 0}, {}])) == Ending(reward=0.5)
    assert end_session(make_toolbox([Silent]).open([{}])) == Ending()
    assert final_reward(Silent()) is None


def test_a_final_reward_that_fails_is_a_failure_and_the_environment_is_closed_all_the_same() -> None:
    class Broken(Game):
        def get_reward(self) -> float:
            raise ConnectionError("judge is away")

    session = make_toolbox([Broken]).open([{"start": 0, "seed": 0}])
    assert end_session(session) == Ending(failure="InfrastructureError: Broken.get_reward: ConnectionError: judge is away")
    assert session.instances[0].closed


def test_a_close_that_fails_spoils_no_reward() -> None:
    class Stuck(Game):
        def close(self) -> None:
            raise OSError("already gone")

    assert end_session(make_toolbox([Stuck]).open([{"start": 0, "seed": 0}])) == Ending(0.0, problem="OSError: already gone")


def test_the_words_of_the_protocol_are_no_tools() -> None:
    assert [spec.name for spec in make_toolbox([Game]).specs] == ["look", "move"]


# ---- snapshots


def test_a_new_instance_goes_on_where_the_snapshot_was_taken() -> None:
    game, _ = play(ToolCall("move", {"by": 1}), ToolCall("move", {"by": 1}))
    state = take_snapshot(game)
    assert state == {"moves": 2, "start": 0}
    [again] = make_toolbox([Game]).open([{"start": 0, "seed": 0}]).instances
    put_back(again, state)
    assert again.look() == 2


def test_an_environment_without_snapshots_says_so() -> None:
    class Plain:
        def act(self) -> str:
            """Act."""
            return ""

    assert take_snapshot(Plain()) is None


@pytest.mark.parametrize("state", [None, (1, 2), {1: 2}, {1, 2}, float("nan"), threading.Lock(), {"a": np.float32(1)}, [(1,)]])
def test_a_snapshot_that_would_not_come_back_as_it_was_is_refused(state: Any) -> None:
    class Env(Game):
        def snapshot(self) -> Any:
            return state

    with pytest.raises(InfrastructureError, match=r"Env\.snapshot"):
        take_snapshot(Env())


def test_a_restore_that_fails_is_a_failure_of_the_environment() -> None:
    with pytest.raises(InfrastructureError, match=r"Game\.restore: KeyError: 'moves'"):
        put_back(Game(), {})


def test_snapshot_without_restore_is_refused_when_the_tools_are_loaded() -> None:
    class Half:
        def act(self) -> str:
            """Act."""
            return ""

        def snapshot(self) -> int:
            return 1

    with pytest.raises(RecipeError, match="one of snapshot and restore"):
        make_toolbox([Half])
