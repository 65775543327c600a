"""A real OpenEnv server in a process of its own, and the real client."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postgrad.errors import RecipeError
from postgrad.rollout.adapters import openenv_environment
from postgrad.rollout.execute import ToolLimits, execute
from postgrad.rollout.results import ErrorKind
from postgrad.rollout.tools import ToolSession, make_toolbox
from postgrad.types import Prompt, ToolCall

pytest.importorskip("openenv.core.generic_client")

SERVER = '''
import random, sys
from typing import Literal, Optional
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

class Move(Action):
    """Move in the game."""
    by: int = Field(description="how far", le=100)
    mode: Literal["walk", "run"] = "walk"
    note: Optional[str] = None
    pace: int = Field(default=2, multiple_of=2)

class Seen(Observation):
    text: str = ""

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, level="easy", **kwargs):
        self.place = random.Random(seed).randint(0, 9)
        return Seen(text=f"At {self.place}, {level}.")

    def step(self, action, **kwargs):
        if action.note == "crash":
            raise RuntimeError("the simulator died")
        self.place += action.by * (2 if action.mode == "run" else 1)
        return Seen(text=f"At {self.place}.", reward=action.by / 2, done=self.place > 50)

    @property
    def state(self):
        return State()

uvicorn.run(create_fastapi_app(Game, Move, Seen, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="warning")
'''


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("server") / "server.py"
    file.write_text(SERVER)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(file), str(port)], stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 60
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < end, "the server did not start"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
        process.kill()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=1):
            return True
    except OSError:
        return False


def opened(kind: type, *, seed: int = 0, **columns: Any) -> ToolSession:
    toolbox = make_toolbox([kind])
    [environment] = toolbox.environments
    return toolbox.open([environment.reset_arguments(Prompt("d:1", (), columns), seed=seed)])


def step(session: ToolSession, **arguments: Any) -> Any:
    return execute([(session, [ToolCall("step", arguments)])], ToolLimits(deadline_s=20))[0][0]


def test_the_tool_has_the_fields_of_the_servers_action(url: str) -> None:
    [spec] = make_toolbox([openenv_environment(url)]).specs
    assert (spec.name, spec.description) == ("step", "Move in the game.")
    assert spec.parameters["required"] == ["by"]
    assert spec.parameters["properties"]["by"] == {"type": "integer", "description": "how far", "maximum": 100}
    assert spec.parameters["properties"]["mode"] == {"type": "string", "enum": ["walk", "run"], "default": "walk"}


def test_a_rollout_steps_is_paid_and_ends(url: str) -> None:
    session = opened(openenv_environment(url, show="text", columns=["level"]), seed=3, level="hard")
    try:
        start = int(session.observation.split(",")[0].removeprefix("At "))
        assert session.observation == f"At {start}, hard."
        first, last = step(session, by=3), step(session, by=40, mode="run")
        assert (first.content, first.reward, first.done) == (f"At {start + 3}.", 1.5, False)
        assert (last.content, last.reward, last.done) == (f"At {start + 83}.", 20.0, True)
    finally:
        session.close()


def test_sessions_are_separate_and_start_where_their_seed_says(url: str) -> None:
    sessions = [opened(openenv_environment(url), seed=seed) for seed in (1, 1, 2)]
    try:
        assert sessions[0].observation == sessions[1].observation != sessions[2].observation
        assert sessions[0].observation.startswith('{"text": "At ')
        step(sessions[0], by=10)
        assert step(sessions[1], by=0).content != step(sessions[0], by=0).content
    finally:
        for session in sessions:
            session.close()


def test_what_the_model_does_wrong_is_told_to_it_and_a_crash_is_not_its_fault(url: str) -> None:
    session = opened(openenv_environment(url))
    try:
        assert step(session, by="far").error is ErrorKind.ARGUMENTS
        too_far = step(session, by=1000)
        assert too_far.error is ErrorKind.ARGUMENTS
        assert "less than or equal to 100" in too_far.content
        assert step(session, by=1, pace=3).error is ErrorKind.RAISED  # only the server knows that it must be even
        assert step(session, by=1, note="crash").error is ErrorKind.INFRASTRUCTURE
    finally:
        session.close()


def test_no_server_is_refused_before_anything_runs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(RecipeError, match=f"no OpenEnv server answers at http://127.0.0.1:{port}"):
        openenv_environment(f"http://127.0.0.1:{port}")


def test_a_recipe_names_it_like_a_class_of_its_own(url: str, tmp_path: Path) -> None:
    from postgrad.rollout.tools import load_tools

    (tmp_path / "worlds.py").write_text(f"from postgrad.rollout.adapters import openenv_environment\nGame = openenv_environment({url!r})\n")
    assert [spec.name for spec in load_tools(["worlds.py:Game"], tmp_path).specs] == ["step"]
