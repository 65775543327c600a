"""A reward that fails in a run: the run goes on, the failure is seen, and it is never a 0."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys

import pytest

from postgrad.errors import RunError
from postgrad.train.loop import SilentReporter
from postgrad.train.recipe_file import load_recipe
from postgrad.train.run import run
from postgrad.train.run_directory import RunDirectory, read_jsonl

REWARDS = """\
import asyncio

def right(completion, answer):
    return float(answer in completion)

def picky(rollout):
    if len(rollout.sampled_ids) % 2:
        raise ValueError("an odd number of tokens")
    return 0.25

async def slow(rollout):
    print("scoring", flush=True)
    await asyncio.sleep(0.4)
    return len(rollout.sampled_ids)
"""
RECIPE = """\
method: grpo
model: {model}
run_dir: {run_dir}
max_steps: {steps}
dtype: float32
data: {{train: prompts.jsonl}}
batch: {{prompts: 3}}
rollout: {{group_size: 4, max_tokens: 8, max_turns: 1}}
rewards: {rewards}
"""


@pytest.fixture
def recipe(tiny_folder, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i} and {i}?", "answer": str(2 * i)}) + "\n" for i in range(6)))

    def write(rewards, steps=1):
        text = RECIPE.format(model=tiny_folder, run_dir=tmp_path / "run", steps=steps, rewards=rewards)
        (tmp_path / "recipe.yaml").write_text(text)
        return load_recipe(tmp_path / "recipe.yaml")

    return write


class Notes(SilentReporter):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_an_exception_abstains_and_is_told_in_full(recipe, tmp_path):
    reporter = Notes()
    run(recipe('[{use: "rewards.py:right"}, {use: "rewards.py:picky", weight: 0.5}]'), reporter)
    directory = RunDirectory(tmp_path / "run")
    rollouts = [
        (len(rollout["segments"][-1]["token_ids"]), score["rewards"]["picky"])
        for record in directory.read_rollouts(1)
        for rollout, score in zip(record["rollouts"], record["scores"], strict=True)
    ]
    odd = sum(length % 2 for length, _ in rollouts)
    assert 0 < odd < len(rollouts)  # else this test shows nothing
    assert all(value == (None if length % 2 else 0.25) for length, value in rollouts)
    failures = [event for event in read_jsonl(tmp_path / "run" / "events.jsonl") if event["event"] == "reward_failure"]
    assert len(failures) == odd
    for failure in failures:
        assert (failure["step"], failure["reward"], failure["kind"]) == (1, "picky", "exception")
        assert failure["row"].startswith("prompts.jsonl:")
        assert failure["prompt_head"].endswith("?")
        assert 'raise ValueError("an odd number of tokens")' in failure["traceback"]
    metrics = directory.metrics()[-1]
    assert (metrics["rewards/picky/failed"], metrics["rewards/picky/mean"]) == (odd, 0.25)
    (told,) = [note for note in reporter.notes if "reward picky failed at prompts.jsonl:" in note]
    assert told.endswith("ValueError: an odd number of tokens (rewards.py:8)")
    assert math.isfinite(metrics["loss"])


def test_an_exception_stops_the_run_where_the_recipe_says_so(recipe):
    with pytest.raises(RunError, match=r"step 1: reward picky: ValueError: an odd number of tokens") as caught:
        run(recipe('[{use: "rewards.py:right"}, {use: "rewards.py:picky", on_error: stop}]'))
    assert "the last good checkpoint is none" in caught.value.hint


def test_a_dry_run_shows_what_failed_and_what_abstained(recipe, tmp_path):
    (tmp_path / "more.py").write_text("def silent(completion):\n    return None\n\ndef broken(completion):\n    return completion[999]\n")
    recipe('[{use: "rewards.py:right"}, {use: "more.py:broken", weight: 0.5}, {use: "more.py:silent"}]')
    shown = subprocess.run(
        [sys.executable, "-m", "postgrad", "train", str(tmp_path / "recipe.yaml"), "--dry-run"], capture_output=True, text=True, check=True
    ).stdout
    assert shown.count("right 0, broken failed, silent abstained") == 4
    assert "nan" not in shown
    (told,) = [line for line in shown.splitlines() if line.startswith("warning: ")]
    assert told.startswith("warning: reward broken failed at prompts.jsonl:")
    assert told.endswith("IndexError: string index out of range (more.py:5)")


@pytest.mark.slow
def test_a_signal_while_an_async_reward_waits_ends_cleanly_without_orphans(recipe, tmp_path):
    recipe('[{use: "rewards.py:slow"}]', steps=50)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "postgrad", "train", str(tmp_path / "recipe.yaml")]
    child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    with child:
        next(line for line in child.stderr if line.startswith("scoring"))
        workers = _children(child.pid)
        child.send_signal(signal.SIGTERM)
        rest = child.stderr.read()
    assert child.returncode == 143, rest
    assert "everything is saved" in rest
    assert "Traceback" not in rest
    assert "Task was destroyed" not in rest
    assert workers
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}")]


def _children(parent: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=False)
    return [int(pid) for pid in listed.stdout.split()]
