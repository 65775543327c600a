"""`postgrad rewards`: on a file, on a recipe, on rollouts; what it finds and how it ends."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from postgrad.cli.reward_samples import samples_of, samples_of_rollouts, spread
from postgrad.data import load_rows, rows_from
from postgrad.errors import DataError
from postgrad.rewards.check.samples import say
from postgrad.rollout.record import group_to_json
from postgrad.types import Group, Message, Prompt

REWARDS = """
from postgrad.rewards import reward
from postgrad.rewards.combine import gate
from postgrad.rewards.library import numeric_match

def helper(text):
    return text.lower()

@reward(scope="final", claim="the answer says please", range=(0, 1))
def polite(completion):
    return float("please" in helper(completion))

@reward(scope="final", claim="the answer is in there", range=(0, 1), role="outcome")
def hedge(completion, answer):
    return float(str(answer) in completion)

combined = gate(numeric_match, polite, weight=0.5)
"""


def postgrad(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "postgrad", *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i), "worked": f"{2 * i}, please"} for i in range(10, 40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_reward_that_pays_for_lists_ends_with_exit_code_4_and_names_rows(folder):
    done = postgrad("rewards", "check", "rewards.py:hedge", "--data", "rows.jsonl", cwd=folder)
    assert done.returncode == 4
    assert "critical: lazy.list: a model that lists many answers, the right one among them earns 100%" in done.stdout
    assert "rows: rows.jsonl:1, rows.jsonl:2" in done.stdout
    assert "error: rewards.py:hedge: critical: lazy.list" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_sound_reward_passes_and_json_says_the_same(folder):
    done = postgrad(
        "rewards", "check", "numeric_match", "rewards.py:polite", "--data", "rows.jsonl", "--gold", "worked", "--json", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == "passed"
    assert report["rows"] == 30
    assert [reward["name"] for reward in report["rewards"]] == ["numeric_match", "polite"]
    assert report["scoreboard"][0]["by_reward"] == [1.0, 1.0]


def test_a_file_without_names_means_every_reward_in_it(folder):
    done = postgrad("rewards", "matrix", "rewards.py", "--data", "rows.jsonl", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)) == ["polite", "hedge", "combined"]


def test_arguments_reach_the_rewards_that_take_them(folder):
    done = postgrad("rewards", "matrix", "numeric_match", "soft_overlong", "--arg", "max_tokens=20", "--data", "rows.jsonl", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[2:4]] == ["numeric_match", "soft_overlong"]


@pytest.mark.parametrize("method", ["agent", "grpo", "ppo"])
def test_the_rewards_of_a_new_project_pass_their_own_check(tmp_path, method):
    assert postgrad("init", method, "mine", cwd=tmp_path).returncode == 0
    done = postgrad("rewards", "check", "mine/recipe.yaml", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert not [found for found in report["findings"] if found["severity"] != "info"]
    if method == "agent":
        assert [(line["name"], line["moves"]) for line in report["scale"]] == [
            ("structure", 0.2), ("query", 0.3), ("correctness", 1.0), ("malformed", 0.5),
        ]  # fmt: skip
        assert report["scoreboard"][0]["total"] == pytest.approx(1.5)
        for reward in report["rewards"]:
            moved = report["matrix"][reward["name"]]
            assert {layer for layer, size in moved.items() if size} == {reward["scope"]}


@pytest.mark.slow
@pytest.mark.real_model
def test_a_new_agent_project_can_be_built(tmp_path):
    assert postgrad("init", "agent", "mine", cwd=tmp_path).returncode == 0
    done = postgrad("train", "mine/recipe.yaml", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nothing was written" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["rewards.py:polite"], 2, "no data"),
        (["rewards.py:missing", "--data", "rows.jsonl"], 2, "error: command line: rewards.py:missing: the file has no function missing"),
        (["other.py", "--data", "rows.jsonl"], 2, "cannot read the reward file"),
        (["exact_mach", "--data", "rows.jsonl"], 2, "did you mean exact_match?"),
        (["rewards.py:polite", "--data", "none.jsonl"], 3, "no such file"),
        (["rewards.py:polite", "--data", "rows.jsonl", "--gold", "reply"], 3, "there is no column 'reply'"),
        (["tool_match", "--data", "rows.jsonl"], 3, "asks for the column 'tool_calls'"),
        (["rewards.py:polite", "--data", "rows.jsonl", "--rollouts", "x.jsonl"], 2, "both --data and --rollouts"),
        (["rewards.py:polite", "--data", "rows.jsonl", "--arg", "max"], 2, "is not NAME=VALUE"),
        (["empty.py", "--data", "rows.jsonl"], 2, "defines no reward"),
        (["broken.py", "--data", "rows.jsonl"], 2, "broken.py:1"),
        (["sft.yaml"], 2, "the recipe has no rewards"),
        (["grpo.yaml"], 2, "grpo.yaml:8: rewards[1].use: rewards.py:polit: the file has no function polit"),
        (["grpo.yaml"], 2, "hint: did you mean polite?"),
    ],
)
def test_mistakes_are_named(folder, arguments, code, message):
    (folder / "empty.py").write_text("X = 1\n")
    (folder / "broken.py").write_text("raise RuntimeError('x')\n")
    (folder / "sft.yaml").write_text("method: sft\nmodel: m\nrun_dir: r\nepochs: 1\ndata: {train: rows.jsonl}\n")
    grpo = "method: grpo\nmodel: m\nrun_dir: r\nmax_steps: 1\ndata: {train: rows.jsonl}\n"
    (folder / "grpo.yaml").write_text(grpo + "rewards:\n  - {use: reward_model}\n  - use: rewards.py:polit\n")
    done = postgrad("rewards", "check", *arguments, cwd=folder)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


# ---- good answers


def read(row, **settings):
    return samples_of(rows_from([row]), gold=settings.get("gold"), most=5)[0]


TURN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}


@pytest.mark.parametrize(
    ("row", "final", "columns"),
    [
        ({"prompt": "q", "answer": "42", "left": 1}, "42", {"answer": "42", "left": 1}),
        ({"question": "q", "answer": "42"}, "42", {"answer": "42"}),
        ({"instruction": "q", "output": "42"}, "42", {"output": "42"}),
        ({"prompt": "q", "completion": "good", "answer": "42"}, "good", {"completion": "good", "answer": "42"}),
        ({"prompt": "q", "answer": 42}, "42", {"answer": 42}),
        ({"prompt": "q", "answer": {"a": [1]}}, '{"a": [1]}', {"answer": {"a": [1]}}),
        ({"messages": TURN, "answer": "x"}, "hello", {"answer": "x"}),
        ({"prompt": "q", "chosen": "good", "rejected": "bad"}, "good", {"chosen": "good", "rejected": "bad"}),
    ],
)
def test_a_good_answer_is_found(row, final, columns):
    sample = read(row)
    assert sample.good.final == final
    assert sample.prompt.columns == columns
    assert sample.prompt.messages[-1].role == "user"
    assert sample.row == "rows:1"


def test_turns_with_tools_are_one_good_rollout():
    messages = [
        *TURN,
        {"role": "user", "content": "1 + 2?"},
        CALL,
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3"},
    ]
    for row in ({"messages": messages}, {"prompt": messages[:3], "completion": messages[3:]}):
        sample = read(row)
        assert [message.role for message in sample.good.messages] == ["assistant", "tool", "assistant"]
        assert len(sample.prompt.messages) == 3
        assert sample.good.rollout().tool_results[0].call.name == "f"


def test_a_row_without_a_good_answer_is_an_error_with_its_place():
    with pytest.raises(DataError, match="the row has no good answer") as caught:
        read({"prompt": "q", "level": 3})
    assert caught.value.where == "rows:1"
    assert "--gold" in caught.value.hint
    assert read({"prompt": "q", "level": 3}, gold="level").good.final == "3"


def test_rows_are_spread_over_the_file(tmp_path):
    assert spread(range(10), 5) == [0, 2, 4, 6, 8]
    assert spread(range(3), 5) == [0, 1, 2]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": str(i), "answer": str(i)}) + "\n" for i in range(100)))
    assert [sample.row for sample in samples_of(load_rows(tmp_path / "rows.jsonl"), gold=None, most=2)] == ["rows.jsonl:1", "rows.jsonl:51"]


@pytest.mark.parametrize("packed", [False, True])
def test_the_best_rollout_of_each_prompt_is_the_good_answer(tmp_path, packed):
    groups = [
        Group(Prompt(f"d:{i}", (Message("user", "q"),), {"answer": "b"}), tuple(say(t).rollout(n) for n, t in enumerate("abc")))
        for i in range(3)
    ]
    scores = [{"total": 0.1}, {"total": 0.9}, {"total": None}]
    run = tmp_path / "rollouts"
    run.mkdir()
    lines = [json.dumps({"step": 1, **group_to_json(group), "scores": scores}) for group in groups]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollouts": 3}\n')
    file = run / ("step-1.jsonl.gz" if packed else "step-1.jsonl")
    worse, better = ({**json.loads(lines[0]), "scores": [{"total": total}] * 2 + [{"total": None}]} for total in (0.2, 0.95))
    later = Group(groups[1].prompt, tuple(say(t).rollout(n) for n, t in enumerate("xyz")))
    more = [json.dumps(worse), json.dumps({"step": 2, **group_to_json(later), "scores": better["scores"]})]
    text = "\n".join([*lines, *more]) + "\n"
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    for path in (tmp_path, run, file):
        assert [(s.row, s.good.final) for s in samples_of_rollouts(path, most=9)] == [("d:0", "b"), ("d:1", "x"), ("d:2", "b")]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no rollouts"):
        samples_of_rollouts(tmp_path / "empty", most=3)
