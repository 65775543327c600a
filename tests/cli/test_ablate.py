"""`postgrad rewards ablate`: on anyone's rollouts without torch, and on a run with its model."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from postgrad.cli.main import main

NO_TORCH = "import sys; from postgrad.cli.main import app; app(sys.argv[1:], standalone_mode=False); sys.exit('torch' in sys.modules)"


def postgrad(monkeypatch, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command, in this process."""
    monkeypatch.setattr(sys, "argv", ["postgrad", "rewards", "ablate", *arguments])
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue(), err.getvalue()


def write(path: Path) -> Path:
    """64 groups of 4: `copy` says what `correct` says, `style` says something else; advantages as GRPO makes them."""
    rewards = [{"name": "correct", "role": "outcome", "range": [0, 1]}, {"name": "copy"}, {"name": "style", "weight": 0.0}]
    lines = [json.dumps({"run": {"method": "grpo", "rewards": rewards}})]
    for place in range(256):
        right = float(place % 4 == 0)
        values = {"correct": right, "copy": right, "style": float(place % 3)}
        advantage = (2 * right - 0.5) / (1.0 + 1e-4)
        lines.append(json.dumps({"step": 1 + place // 32, "group": f"p{place // 4}", "rewards": values, "advantage": advantage}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_it_says_what_is_redundant_and_ends_in_0(tmp_path, monkeypatch):
    code, out, err = postgrad(monkeypatch, str(write(tmp_path / "run.jsonl")))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{tmp_path / 'run.jsonl'}: 64 groups of 4 rollouts; advantages: scale group, filter none"
    assert "correct: no visible change: not independent (copy says the same: |ρ| = 1.00 within groups)" in lines
    assert "style: no visible change: it has weight 0" in lines
    weighted = postgrad(monkeypatch, str(tmp_path / "run.jsonl"), "--reward", "style", "--weight", "style=1", "--json")
    (item,) = json.loads(weighted[1])["free"]["dropped"]
    assert item["reward"] == "style"
    assert item["verdict"].startswith("visible")
    assert item["flips"] > 0.01


def test_rollouts_need_no_torch_and_no_model(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, "rewards", "ablate", str(write(tmp_path / "run.jsonl"))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no visible change" in done.stdout


def test_trls_completions(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "completions").mkdir()
    rows = [
        {
            "step": 1 + prompt // 8, "prompt": f"question {prompt}", "completion": f"answer {sample}",
            "accuracy_reward": float(sample == prompt % 4), "format_reward": 1.0, "advantage": 1.5 if sample == prompt % 4 else -0.5,
        }
        for prompt in range(64)
        for sample in range(4)
    ]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "completions" / "completions_00005.parquet")
    code, out, _ = postgrad(monkeypatch, str(tmp_path), "--outcome", "accuracy_reward")
    assert code == 0
    assert "format_reward: no visible change: it never differs within a group of this run" in out
    assert "accuracy_reward: visible: 100.0 % of the advantages change their sign" in out


def test_verls_rollouts_have_one_reward(tmp_path, monkeypatch):
    rows = [{"input": f"q{n // 4}", "output": "so", "gts": "4", "score": float(n % 4 == 0), "step": 1} for n in range(256)]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = postgrad(monkeypatch, str(tmp_path))
    assert code == 0
    assert "remark: score is the only reward with a weight: without it there is nothing to learn" in out
    assert "remark: the file's advantages do not tell how they were made" in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run.jsonl", "--reward", "stlye"], 2, "no reward 'stlye' in this run"),
        (["run.jsonl", "--gradient"], 2, "--gradient needs a run directory of postgrad"),
        (["run.jsonl", "--trained"], 2, "--trained needs a run directory of postgrad"),
        (["run.jsonl", "--weight", "style"], 2, "is no NAME=NUMBER"),
        (["nothing"], 3, "does not exist"),
        (["run.jsonl", "--trained", "--seeds", "2"], 2, "--seeds"),
    ],
)
def test_mistakes_are_named(arguments, code, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run.jsonl")
    found, _, err = postgrad(monkeypatch, *arguments)
    assert found == code
    assert message in err
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A recipe of one step on the tiny model."""
    from postgrad.testing import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("task")
    tiny_model("llama", vocab_size=268).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(4)))
    (folder / "rewards.py").write_text(
        "def even(rollout):\n    return sum(token % 2 == 0 for token in rollout.sampled_ids)\n"
        "def low(rollout):\n    return sum(token < 90 for token in rollout.sampled_ids)\n"
    )
    (folder / "recipe.yaml").write_text(
        f"method: grpo\nmodel: {folder / 'model'}\nrun_dir: {folder / 'run'}\nmax_steps: 1\ndtype: float32\n"
        "data: {train: prompts.jsonl, eval: prompts.jsonl}\nbatch: {prompts: 2}\n"
        "rollout: {group_size: 4, max_tokens: 8, max_turns: 1}\n"
        'rewards: [{use: "rewards.py:even"}, {use: "rewards.py:low", role: shaping}]\n'
    )
    return folder


@pytest.mark.slow
def test_all_three_kinds_on_a_run(task, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["postgrad", "train", str(task / "recipe.yaml")])
    main_quietly()
    run = str(task / "run")
    code, out, err = postgrad(monkeypatch, run, "--gradient", "--trained", "--steps", "1", "--reward", "low")
    assert code == 0, err
    lines = out.splitlines()
    assert any(line.startswith("gradients of the policy loss at the checkpoint after step 1, on 8 rollouts of step 1;") for line in lines)
    assert [line.split()[0] for line in lines if line.startswith(("even ", "low ", "all "))] == ["low", "low", "all"]
    assert "without low: 1 steps, seeds 0, 1, 2; held-out prompts" in lines
    assert any(line.startswith("low: ") and "(1 steps, 3 seeds)" in line for line in lines)
    assert "note: run 6 of 6: without low, seed 2" in err
    code, out, _ = postgrad(monkeypatch, run, "--gradient", "--at", "start", "--trained", "--steps", "1", "--reward", "low", "--json")
    record = json.loads(out)
    assert code == 0
    assert set(record) == {"free", "gradient", "trained"}
    assert record["gradient"]["at"] == "the model that the run started from"
    assert record["gradient"]["residual"] < 1e-5
    assert record["trained"]["left_out"][0]["reward"] == "low"
    code, _, err = postgrad(monkeypatch, run, "--gradient", "--at", "middle")
    assert (code, "start or final" in err) == (2, True)


def main_quietly():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        main()
