"""A recipe whose tool or reward runs code: refused without a sandbox before a model loads, or allowed, aloud and on record."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from postgrad.errors import RecipeError
from postgrad.sandbox.isolation import _say_once
from postgrad.train import setup
from postgrad.train.loop import SilentReporter
from postgrad.train.recipe_file import LoadedRecipe, load_recipe
from postgrad.train.run import run
from postgrad.train.run_directory import read_jsonl

RECIPE = """\
method: grpo
model: {model}
run_dir: {run_dir}
max_steps: 1
dtype: float32
data: {{train: prompts.jsonl}}
batch: {{prompts: 1}}
rollout: {{group_size: 2, max_tokens: 8, max_turns: 1}}
tools: [{tools}]
rewards: [{{use: {reward}}}]
{more}
"""


@pytest.fixture
def recipe(tiny_folder, tmp_path):
    (tmp_path / "rewards.py").write_text("def right(completion):\n    return float(len(completion))\n")
    row = {"prompt": "Write add.", "tests": ["assert add(1, 2) == 3"]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")

    def write(tools: str = "", reward: str = "rewards.py:right", more: str = "") -> LoadedRecipe:
        text = RECIPE.format(model=tiny_folder, run_dir=tmp_path / "run", tools=tools, reward=reward, more=more)
        (tmp_path / "recipe.yaml").write_text(text)
        return load_recipe(tmp_path / "recipe.yaml")

    return write


class Notes(SilentReporter):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def started(self, *, notes: Any, **_: Any) -> None:
        self.notes += notes


USES = [{"tools": "python"}, {"tools": "python_session"}, {"reward": "code_exec"}]


@pytest.mark.parametrize("use", USES)
def test_without_a_sandbox_the_run_is_refused_before_a_model_loads_and_leaves_nothing(recipe, use, no_bwrap, monkeypatch, tmp_path):
    monkeypatch.setattr(setup, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(RecipeError, match="there is no sandbox for code that the model writes") as raised:
        run(recipe(**use))
    assert raised.value.exit_code == 2
    assert raised.value.hint is not None
    assert "apt-get install bubblewrap" in raised.value.hint
    assert "allow_unsafe_exec: true" in raised.value.hint
    assert not list((tmp_path / "run").glob("events.jsonl"))


@pytest.mark.parametrize("use", USES)
def test_the_permission_is_said_aloud_and_recorded(recipe, use, no_bwrap, tmp_path, caplog):
    _say_once.cache_clear()
    watcher = Notes()
    with caplog.at_level(logging.WARNING):
        run(recipe(**use, more="allow_unsafe_exec: true"), watcher)
    said = "code that the model writes runs WITHOUT a sandbox, with your rights (bubblewrap (bwrap) is not installed)"
    assert f"allow_unsafe_exec: {said}" in watcher.notes
    assert ("tools" not in use) or said in caplog.text
    assert json.loads((tmp_path / "run" / "resolved.json").read_text())["recipe"]["allow_unsafe_exec"] is True
    started = [event for event in read_jsonl(tmp_path / "run" / "events.jsonl") if event["event"] == "started"]
    assert any(said in note for note in started[0]["notes"])


def test_where_there_is_a_sandbox_the_permission_changes_nothing_and_is_said_to(recipe):
    from postgrad.sandbox import problem

    if (found := problem()) is not None:
        pytest.skip(f"no sandbox on this machine: {found[0]}")
    watcher = Notes()
    run(recipe(tools="python", reward="code_exec", more="allow_unsafe_exec: true"), watcher)
    assert "allow_unsafe_exec changes nothing: there is a sandbox here, and it is used" in watcher.notes
