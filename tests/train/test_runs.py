"""Whole runs on a tiny model: SFT → GRPO with a tool, killed anywhere, resumed bit for bit."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from postgrad.train.metrics import find
from postgrad.train.recipe_file import load_recipe
from postgrad.train.replay import replay
from postgrad.train.run import resume, run
from postgrad.train.run_directory import read_jsonl
from postgrad.train.setup import input_hashes

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


def test_replay_scores_the_rollouts_as_the_run_did_and_as_changed_rewards_do(finished, tmp_path):
    """Unchanged rewards change nothing; a changed file and a changed weight show, and the doctor reads what is written."""
    folder = tmp_path / "copy"
    shutil.copytree(finished.parent, folder)
    run_dir = folder / "run" / "grpo"
    resolved = json.loads((run_dir / "resolved.json").read_text())
    (run_dir / "resolved.json").write_text(json.dumps({**resolved, "base": str(folder / "task")}))
    same = replay(run_dir)
    assert (same.flips, same.tau, same.other_best, same.failures) == (0.0, pytest.approx(1.0), 0.0, ())
    assert [(values.name, values.changed) for values in (*same.rewards, same.total)] == [
        ("right", 0.0), ("short", 0.0), ("called", 0.0), ("total", 0.0),
    ]  # fmt: skip
    rewards = folder / "task" / "rewards.py"
    rewards.write_text(rewards.read_text().replace("return -rollout.sampled_tokens / 100", "return -1.0"))
    done = command("replay", str(run_dir), "rewards.0.weight=-2", "--out", str(tmp_path / "new.jsonl"), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {values["name"]: values["after"] for values in found["rewards"]}["short"] == -1.0
    assert found["flips"] > 0.2
    assert len((tmp_path / "new.jsonl").read_text().splitlines()) == found["rollouts"] == same.rollouts
    assert command("doctor", str(tmp_path / "new.jsonl"), "--outcome", "right").returncode in (0, 4)
    refused = command("replay", str(folder / "run"))
    assert (refused.returncode, "name a stage" in refused.stderr) == (2, True)
    assert command("replay", str(folder / "run"), "--out", str(tmp_path / "left.jsonl")).returncode == 2
    nowhere = command("replay", str(run_dir), "--out", str(tmp_path / "missing" / "new.jsonl"))
    assert (nowhere.returncode, "cannot be written" in nowhere.stderr) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "new.jsonl"], "nothing is left half-written"


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


EFFECTS = """
import json, os
from pathlib import Path
from postgrad.rollout import call_key, tool

HERE = Path(__file__).parent / "effects"

@tool(idempotent=True)
def add(a: int, b: int) -> int:
    "Add two numbers."
    HERE.mkdir(exist_ok=True)
    with open(HERE / "log", "a") as log:
        log.write(call_key() + chr(10))
    done = HERE / call_key()
    if not done.exists():
        done.with_suffix(".new").write_text(json.dumps(a + b))
        os.replace(done.with_suffix(".new"), done)
    return json.loads(done.read_text())
"""


def with_effects(make_task, folder: Path) -> Path:
    """The task with a tool that leaves a file per call, and checkpoints so rare that steps are done again."""
    task = make_task(folder)
    (task / "tools.py").write_text(EFFECTS)
    recipe = (task / "recipe.yaml").read_text()
    (task / "recipe.yaml").write_text(recipe.replace("every: 1, keep: 9", "every: 3, keep: 9"))
    return task


def effects(task: Path) -> set[str]:
    return {path.name for path in (task / "effects").iterdir()} - {"log"}


@pytest.fixture(scope="module")
def whole_with_effects(tmp_path_factory: pytest.TempPathFactory, make_task, finished) -> Path:
    folder = tmp_path_factory.mktemp("effects")
    task = with_effects(make_task, folder)
    run(load_recipe(task / "recipe.yaml"))
    return folder


@pytest.mark.parametrize("share", [0.1, 0.4, 0.6, 0.9])
def test_killed_between_tool_calls_a_run_resumes_bit_for_bit_and_repeats_no_effect(whole_with_effects, make_task, tmp_path, share):
    task = with_effects(make_task, tmp_path)
    shutil.copytree(whole_with_effects / "run" / "sft", tmp_path / "run" / "sft")
    expected = effects(whole_with_effects / "task")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "postgrad", "train", str(task / "recipe.yaml")], env=environment)
    while process.poll() is None and (not (task / "effects").exists() or len(effects(task)) < share * len(expected)):
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    done = command("resume", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert effects(task) == expected
    made = (task / "effects" / "log").read_text().split()
    assert len(made) - len(set(made)) <= 8  # only calls that were under way when the process died are made once more
    assert metrics(tmp_path / "run" / "grpo") == metrics(whole_with_effects / "run" / "grpo")
    assert weights(tmp_path / "run" / "grpo") == weights(whole_with_effects / "run" / "grpo")
    assert not (tmp_path / "run" / "grpo" / "journal").exists()


@pytest.mark.parametrize("step", [7, 15, 40])
def test_sft_killed_after_a_step_resumes_bit_for_bit(finished, make_task, tmp_path, step):
    task = make_task(tmp_path)
    assert command("train", str(task / "recipe.yaml"), fault=f"step:{step}").returncode == -signal.SIGKILL
    done = command("resume", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "run" / "sft") == metrics(finished / "sft")
    assert weights(tmp_path / "run" / "sft") == weights(finished / "sft")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_finishes_the_step_saves_and_exits_with_its_code(finished, make_task, tmp_path, number):
    task = make_task(tmp_path)
    shutil.copytree(finished / "sft", tmp_path / "run" / "sft")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-m", "postgrad", "train", str(task / "recipe.yaml")], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert child.stderr is not None
    with child:
        for line in child.stderr:
            if line.startswith("step 1/"):
                child.send_signal(number)
                break
        rest = child.stderr.read()
    assert child.returncode == 128 + number, rest
    assert "everything is saved" in rest
    assert "postgrad resume" in rest
    assert "Traceback" not in rest
    resume(tmp_path / "run")
    assert metrics(tmp_path / "run" / "grpo") == metrics(finished / "grpo")


def test_finished_pipeline_is_not_run_again(finished):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file() and path.name != ".lock"}
    resume(finished)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_resuming_with_changed_data_is_refused(finished, make_task, tmp_path):
    task = make_task(tmp_path)
    shutil.copytree(finished / "sft", tmp_path / "run" / "sft")
    assert command("train", str(task / "recipe.yaml"), fault="step:2").returncode == -signal.SIGKILL
    (task / "prompts.jsonl").write_text((task / "prompts.jsonl").read_text().replace("1 and 2", "9 and 2"))
    done = command("resume", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "changed since this run started: prompts.jsonl" in done.stderr


def test_half_written_newest_checkpoint_is_skipped_with_a_note(finished, make_task, tmp_path):
    task = make_task(tmp_path)
    shutil.copytree(finished / "sft", tmp_path / "run" / "sft")
    assert command("train", str(task / "recipe.yaml"), fault="step:4").returncode == -signal.SIGKILL
    newest = sorted((tmp_path / "run" / "grpo" / "checkpoints").glob("step-*"))[-1]
    (newest / "MANIFEST.json").unlink()
    done = command("resume", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert f"{newest.name}: no MANIFEST.json" in done.stderr
    assert weights(tmp_path / "run" / "grpo") == weights(finished / "grpo")


def test_dry_run_shows_what_is_trained_and_writes_nothing(finished, make_task, tmp_path):
    task = make_task(tmp_path)
    done = command("train", str(task / "recipe.yaml"), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "⟦" in done.stdout
    assert "has not run yet" in done.stdout
    assert not (tmp_path / "run").exists()
    shutil.copytree(finished / "sft", tmp_path / "run" / "sft")
    done = command("train", str(task / "recipe.yaml"), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "rollout 3:" in done.stdout
    assert not (tmp_path / "run" / "grpo").exists()


def test_finished_model_opens_in_transformers_with_the_same_tokens(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from postgrad.models.loading import load

    folder = finished / "grpo" / "model"
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ours = load(str(finished / "grpo"))
    ids = ours.tokenizer("1 and 2?", return_tensors="pt").input_ids
    assert tokenizer("1 and 2?").input_ids == ids[0].tolist()
    assert (theirs(ids).logits - ours.model(ids).logits).abs().max() < 1e-6


def test_eval_of_a_finished_run_reports_intervals(finished):
    done = command("eval", str(finished), "--json")
    assert done.returncode == 0, done.stderr
    right = json.loads(done.stdout)["rewards"]["right"]
    assert right["low"] <= right["mean"] <= right["high"]
    assert right["count"] == 6


def test_reward_that_asks_for_a_missing_column_stops_before_training(make_task, tmp_path, finished):
    task = make_task(tmp_path)
    shutil.copytree(finished / "sft", tmp_path / "run" / "sft")
    rows = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()]
    (task / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"], "gold": row["answer"]}) + "\n" for row in rows))
    done = command("train", str(task / "recipe.yaml"))
    assert done.returncode == 3
    assert "column 'answer'" in done.stderr
    assert "gold" in done.stderr


def test_tool_result_longer_than_the_model_can_read_ends_its_rollout_not_the_run(make_task, tmp_path, finished):
    task = make_task(tmp_path)
    shutil.copytree(finished / "sft", tmp_path / "run" / "sft")
    (task / "tools.py").write_text('def add(a: int, b: int) -> str:\n    """Add two numbers."""\n    return "9" * 4000\n')
    recipe = load_recipe(task / "recipe.yaml")
    inputs = tmp_path / "run" / "sft" / "inputs.json"
    inputs.write_text(json.dumps(input_hashes(recipe.recipe.stages["sft"], recipe.base)))
    run(recipe)
    steps = read_jsonl(tmp_path / "run" / "grpo" / "metrics.jsonl")
    assert max(record.get("tools/call_frequency", 0) for record in steps) > 0
    lines = gzip.decompress((tmp_path / "run" / "grpo" / "rollouts" / "step-000001.jsonl.gz").read_bytes()).splitlines()
    assert "total_tokens" in {rollout["stop"] for line in lines for rollout in json.loads(line)["rollouts"]}


def test_the_seed_keys_dropout_and_a_killed_run_draws_the_same_noise(make_task, tiny_folder, tmp_path):
    recipe = """\
method: sft
model: {model}
run_dir: {run_dir}
dtype: float32
max_steps: 4
data: {{train: sft.jsonl, max_length: 600}}
tools: [tools.py:add]
batch: {{rows: 3}}
adapter: {{kind: lora, rank: 4, dropout: 0.2}}
checkpoint: {{every: 2}}
"""
    task = make_task(tmp_path)
    for name in ("one", "two"):
        (task / f"{name}.yaml").write_text(recipe.format(model=tiny_folder, run_dir=tmp_path / name))
    run(load_recipe(task / "one.yaml"))
    assert command("train", str(task / "two.yaml"), fault="step:3").returncode == -signal.SIGKILL
    resume(tmp_path / "two")
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two")
    assert weights(tmp_path / "one") == weights(tmp_path / "two")
