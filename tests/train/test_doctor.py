"""The reward doctor in a run: it writes doctor.json, says what lasts, and never stops a run."""

from __future__ import annotations

import dataclasses
import json

import pytest

from postgrad.rewards.doctor import Monitor, examine, observe
from postgrad.testing.simulate import FAULTS, simulate
from postgrad.train.doctor import RewardWatch, guarded
from postgrad.train.loop import SilentReporter
from postgrad.train.recipe import METHODS
from postgrad.train.recipe_file import load_recipe
from postgrad.train.run import run
from postgrad.train.run_directory import RunDirectory, read_jsonl


class Notes(SilentReporter):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


RECIPE = """\
method: grpo
model: {model}
run_dir: {run_dir}
max_steps: 2
dtype: float32
data: {{train: prompts.jsonl}}
batch: {{prompts: 2}}
rollout: {{group_size: 2, max_tokens: 4, max_turns: 1}}
rewards: [{{use: rewards.py:right}}, {{use: rewards.py:short, weight: 0.1}}]
optimizer: {{learning_rate: 1.0e-3}}
"""


@pytest.fixture
def recipe(make_task, tiny_folder, tmp_path):
    task = make_task(tmp_path)
    (task / "grpo.yaml").write_text(RECIPE.format(model=tiny_folder, run_dir=tmp_path / "out"), encoding="utf-8")
    return load_recipe(task / "grpo.yaml")


def test_a_run_ends_with_a_diagnosis_and_one_line_about_it(recipe, tmp_path):
    reporter = Notes()
    run(recipe, reporter)
    written = json.loads((tmp_path / "out" / "doctor.json").read_text(encoding="utf-8"))
    assert (written["method"], written["groups"], written["group_size"], written["steps"]) == ("grpo", 4, 2, [1, 2])
    assert [note for note in reporter.notes if note.startswith("doctor: ")] == [
        f"doctor: {written['summary']}; postgrad doctor {tmp_path / 'out'} shows them"
    ]
    assert not any("failed" in note for note in reporter.notes)


def test_a_run_records_what_its_rewards_are(recipe, tmp_path):
    """The recipe names no roles and ranges; the functions declare them, and the doctor runs none of the user's code."""
    run(recipe, Notes())
    rewards = observe(tmp_path / "out").rewards
    assert [(r.name, r.weight, r.role, r.range) for r in rewards] == [("right", 1.0, "outcome", (0, 1)), ("short", 0.1, "shaping", (-1, 0))]


def test_a_broken_check_stops_no_run_and_is_seen(recipe, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("a mistake in a statistic")

    monkeypatch.setattr(Monitor, "see", broken)
    monkeypatch.setattr("postgrad.train.doctor.examine", broken)
    reporter = Notes()
    folder = run(recipe, reporter)
    assert folder.is_dir()
    assert not (tmp_path / "out" / "doctor.json").exists()
    events = [event for event in read_jsonl(tmp_path / "out" / "events.jsonl") if event["event"] == "doctor_failed"]
    assert len(events) == 2  # once while it ran, although there were two batches; once at the end
    assert all("a mistake in a statistic" in event["reason"] and "ZeroDivisionError" in event["traceback"] for event in events)
    assert sum("the doctor failed" in note for note in reporter.notes) == 2


def test_an_interruption_is_no_failed_check(tmp_path):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(RunDirectory(tmp_path), Notes(), interrupted)


def test_what_lasts_is_noted_once_with_an_event(recipe, tmp_path):
    """Batches of a simulated run in which every rollout fails, as the rollout file has them."""
    directory, reporter = RunDirectory(tmp_path), Notes()
    observed = simulate("all_fail", seed=0)
    watch = RewardWatch.of(recipe.recipe, observed.rewards, directory, reporter)
    for step in range(1, 25):
        watch(step, [record(observed, group) for group in range((step - 1) * 8, step * 8)], ())
    found = [event for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] == "finding"]
    assert [(event["id"], event["severity"]) for event in found] == [("R1", "critical"), ("R9", "critical")]
    assert found[0]["step"] == 8  # two windows of 32 groups
    assert len(reporter.notes) == 2
    assert reporter.notes[0].startswith("step 8: critical R1 collapse: ")


def record(observed, group):
    """A line of a rollout file with the group's rewards."""
    rollouts = range(group * observed.group_size, (group + 1) * observed.group_size)
    names = [reward.name for reward in observed.rewards]
    return {
        "step": int(observed.steps[group]),
        "dropped": "",
        "prompt": {"row": observed.prompts[group]},
        "rollouts": [{"stop": "end", "segments": segments(n), "tool_results": [], "text": f"answer {n}"} for n in rollouts],
        "scores": [
            {
                "rewards": dict(zip(names, observed.values[n].tolist(), strict=True)),
                "total": observed.totals[n],
                "advantage": observed.advantages[n],
            }
            for n in rollouts
        ],
    }


def segments(rollout):
    return [{"source": "model", "token_ids": list(range(rollout, rollout + 10)), "logprobs": [-1.0] * 10}]


@pytest.mark.parametrize("method", ["grpo", "ppo", "dpo", "reward"])
def test_every_key_that_a_fix_names_is_a_key_of_the_methods_recipe(method):
    """Or `rewards`: a reward to write or to change."""
    keys = set()
    for name in FAULTS:
        observed = simulate(name, seed=1)
        if observed.method not in ("grpo", "ppo") or method in ("grpo", "ppo"):
            changed = dataclasses.replace(observed, method=method) if observed.method in ("grpo", "ppo") else observed
            keys |= {fix.key for finding in examine(changed).findings if changed.method == method for fix in finding.fixes}
    assert keys - {"rewards", *_keys(METHODS[method])} == set()
    remedies = {"loss.filter", "loss.positive_weight", "loss.normalize", "rollout.group_size", "rollout.temperature"}
    assert remedies <= keys or method != "grpo"
    assert len(keys) >= {"grpo": 15, "ppo": 10, "dpo": 2, "reward": 1}[method]


def _keys(model, prefix: str = ""):
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}"
        for inner in _models(info.annotation):
            mark = "[]" if name == "rewards" else ""
            yield from _keys(inner, f"{prefix}{name}{mark}.")


def _models(annotation):
    from typing import get_args

    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
