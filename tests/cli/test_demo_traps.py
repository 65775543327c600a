"""The story of a trap: what it says of diagnoses that are known, and the whole command on a tiny model."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from postgrad.cli import demo_traps
from postgrad.cli.chapter import prepared
from postgrad.cli.demo_traps import QUICK, TRAPS, followed, show, story_of
from postgrad.demo.traps import weekdays
from postgrad.rewards.doctor import examine
from postgrad.testing import tiny_model, tiny_tokenizer
from postgrad.testing.simulate import simulate
from postgrad.train.loop import SilentReporter
from postgrad.train.run import run


@pytest.mark.parametrize(
    ("name", "fault", "remedy"),
    [
        ("hacking", "proxy_gaming", "R18: rewards: a reward that the trick does not earn – "),
        ("sparsity", "sparse", "R9: rewards: one more, for steps on the way – "),
        ("collapse", "cold", "R1: rollout.temperature: 1.0 – "),
        ("conflict", "conflict", "R5: rewards: "),
    ],
)
def test_the_doctor_names_each_trap_and_its_remedy(name, fault, remedy):
    """On simulated runs with that fault: the check that the chapter waits for, and the fix that its `after` follows."""
    trap = TRAPS[name]
    diagnosis = examine(simulate(fault, seed=0))
    assert trap.check in {finding.id for finding in diagnosis.findings if finding.severity != "info"}
    assert followed(trap, diagnosis)[0].startswith(remedy)


def test_what_the_doctor_did_not_say_is_not_put_into_its_mouth():
    assert followed(TRAPS["collapse"], examine(simulate("healthy", seed=0))) == ()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The quick chapter `collapse` on a tiny model."""
    folder = tmp_path_factory.mktemp("chapter")
    tiny_model("llama", vocab_size=268).save_pretrained(folder / "tiny")
    tiny_tokenizer().save_pretrained(folder / "tiny")
    small = [f"stages.warm_start.model={folder / 'tiny'}", "stages.warm_start.max_steps=1", "stages.warm_start.data.max_length=256"]
    for stage in demo_traps.STAGES:
        small += [f"stages.{stage}.{key}" for key in ("rollout.max_tokens=4", "data.max_length=256", "dtype=float32")]
    loaded = prepared(folder, "traps/collapse.yaml", lambda base: weekdays.write(base, 0, heldout=24), seed=0, overrides=[*QUICK, *small])
    run(loaded, SilentReporter())
    return loaded


def test_the_story_is_read_off_the_runs(finished):
    story = story_of(TRAPS["collapse"], finished)
    assert story.changed == ("batch.prompts: 16 → 8", "rollout.group_size: 4 → 8", "rollout.temperature: 0.2 → 1.0")
    assert [reading.check for reading in story.before.readings] == ["R1", "R13"]
    assert story.before.readings[0].verdict in ("skipped", "passed", "note")  # two steps are no two windows: no alarm
    assert set(story.heldout) == set(TRAPS["collapse"].measures)
    for intervals in story.heldout.values():
        assert len(intervals) == 3
        assert all(i.low - 1e-9 <= i.mean <= i.high + 1e-9 and i.count == 24 for i in intervals)
    assert all(0 < tokens <= 4 for tokens in story.tokens)
    assert story.before.sample[0].endswith("?")


def test_the_story_is_shown_with_its_numbers(finished, capsys):
    story = story_of(TRAPS["collapse"], finished)
    named = dataclasses.replace(story.before, named="R1 collapse: 83 % of the groups …")
    show(TRAPS["collapse"], dataclasses.replace(story, before=named, remedies=("R1: rollout.temperature: 1.0 – alike",)))
    shown = capsys.readouterr().out
    for part in ("the trap: GRPO collapse", "R1 collapse: 83 %", "it says what to change: R1: rollout.temperature: 1.0", "0.2 → 1.0"):
        assert part in shown
    assert "n = 24" in shown
    assert "right day %" in shown
    show(TRAPS["collapse"], dataclasses.replace(story, before=dataclasses.replace(story.before, named="")))
    assert "does not name it here" in capsys.readouterr().out


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.real_model
def test_the_command_runs_and_resumes(tmp_path):
    def demo() -> dict[str, object]:
        arguments = ["demo", "hacking", "--quick", "--json", "--run-dir", str(tmp_path / "run")]
        done = subprocess.run([sys.executable, "-m", "postgrad", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        told: dict[str, object] = json.loads(done.stdout)
        return told

    first = demo()
    assert Path(str(first["folder"])) == tmp_path / "run"
    again = demo()  # every stage is finished: nothing is trained again
    assert again | {"seconds": 0} == first | {"seconds": 0}
