"""Whole runs on a tiny model: SFT → GRPO with a tool, killed anywhere, resumed bit for bit."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from postgrad.train.metrics import find
from postgrad.train.recipe_file import load_recipe
from postgrad.train.run import run
from postgrad.train.run_directory import read_jsonl

pytestmark = pytest.mark.slow


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Everything but the clock."""
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in read_jsonl(folder / "metrics.jsonl")]


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def command(*arguments: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "POSTGRAD_FAULT": fault, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "postgrad", *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, make_task) -> Path:
    """The run folder of a pipeline that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    task = make_task(folder)
    run(load_recipe(task / "recipe.yaml"))
    return folder / "run"


def test_warm_start_teaches_the_call_and_grpo_trains_on_it(finished):
    steps = metrics(finished / "grpo")
    assert max(record.get("tools/call_frequency", 0) for record in steps) > 0.3
    assert any(record.get("grad_norm", 0) > 0 for record in steps)


def test_every_logged_number_is_defined(finished):
    for stage in ("sft", "grpo"):
        for record in read_jsonl(finished / stage / "metrics.jsonl"):
            undefined = [name for name in record if name != "step" and find(name) is None]
            assert undefined == []


def test_rollout_file_tells_the_whole_story(finished):
    file = sorted((finished / "grpo" / "rollouts").iterdir())[0]
    record = json.loads(gzip.decompress(file.read_bytes()).splitlines()[0])
    assert record["prompt"]["messages"]
    assert len(record["rollouts"]) == len(record["scores"]) == 4
    for rollout, score in zip(record["rollouts"], record["scores"], strict=True):
        assert rollout["stop"]
        assert {segment["source"] for segment in rollout["segments"]} >= {"prompt", "model"}
        assert set(score["rewards"]) == {"right", "short", "called"}
        assert sum(score["advantage_by_reward"].values()) == pytest.approx(score["advantage"], abs=1e-6)


@pytest.mark.parametrize("step", range(1, 6))
def test_grpo_killed_after_any_step_resumes_bit_for_bit(finished, make_task, tmp_path, step):
    task = make_task(tmp_path)
    shutil.copytree(finished / "sft", tmp_path / "run" / "sft")
    done = command("train", str(task / "recipe.yaml"), fault=f"step:{step}")
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = command("resume", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "run" / "grpo") == metrics(finished / "grpo")
    assert weights(tmp_path / "run" / "grpo") == weights(finished / "grpo")
