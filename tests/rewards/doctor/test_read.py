"""Whatever wrote a run: the same numbers come out, and what cannot be read is named."""

from __future__ import annotations

import gzip
import json
import math

import numpy as np
import pytest

from postgrad.errors import DataError, RecipeError
from postgrad.rewards.doctor import examine, observe
from postgrad.rewards.doctor.lines import Tail, read_lines
from postgrad.rewards.doctor.render import as_json, as_text
from postgrad.testing.simulate import HEALTHY, simulate


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def as_lines(observed):
    """A simulated run in the form of docs/doctor.md."""
    yield {
        "run": {
            "method": observed.method,
            "rewards": [{"name": r.name, "weight": r.weight, "role": r.role, "range": r.range} for r in observed.rewards],
            "settings": observed.settings,
        }
    }
    for step, numbers in observed.metrics:
        yield {"step": step, "metrics": numbers}
    for rollout, values in enumerate(observed.values):
        group, sample = divmod(rollout, observed.group_size)
        rewards = {r.name: None if math.isnan(v) else v for r, v in zip(observed.rewards, values, strict=True)}
        failures = {f.reward: f.kind for f in observed.failures if (f.row, f.sample) == (observed.prompts[group], sample)}
        yield {
            "step": int(observed.steps[group]), "group": observed.prompts[group], "sample": sample, "rewards": rewards,
            "advantage": observed.advantages[rollout], "tokens": observed.lengths[rollout], "truncated": observed.truncated[rollout],
            "failures": failures,
        }  # fmt: skip


@pytest.mark.parametrize("name", ["healthy", "phantom", "failing_grader", "abstaining", "kl_runaway", "proxy_gaming"])
def test_a_run_written_as_lines_gets_the_same_diagnosis(name, tmp_path):
    """But for the texts, which the simulation has none of."""
    simulated = simulate(name, seed=2)
    read = observe(write(tmp_path / "run.jsonl", as_lines(simulated)))
    assert np.array_equal(read.values, simulated.values, equal_nan=True)
    assert np.allclose(read.totals, simulated.totals, equal_nan=True)
    assert read.bounds == simulated.bounds
    assert {(f.id, f.severity) for f in examine(read).findings} == {(f.id, f.severity) for f in examine(simulated).findings}


def test_the_smallest_lines_are_enough_for_what_they_hold(tmp_path):
    """No declaration: weight 1, no role; no texts, no advantages. What is missing is skipped, with what would bring it."""
    rows = [
        {"step": 1 + place // 64, "group": f"p{place // 4}", "rewards": {"a": place % 2, "b": place % 3}, "text": "x" * (place % 7)}
        for place in range(512)
    ]
    diagnosis = examine(observe(write(tmp_path / "x.jsonl", rows)))
    skipped = {item.id: item.key for item in diagnosis.skipped}
    assert skipped["R7"] == "rewards[].role (or --outcome NAME)"
    assert skipped["R4"] == "advantage"
    assert diagnosis.observed.length_unit == "characters"
    named = examine(observe(tmp_path / "x.jsonl", outcome=["a"], weights={"b": 0.1}))
    assert "R7" not in {item.id for item in named.skipped}
    assert [r.weight for r in named.observed.rewards] == [1.0, 0.1]
    assert named.observed.totals[5] == pytest.approx(1 + 0.1 * 2)


def test_a_reward_that_the_run_does_not_have_cannot_be_named(tmp_path):
    write(tmp_path / "x.jsonl", [{"step": 1, "group": "p", "rewards": {"a": 1}}])
    with pytest.raises(RecipeError, match="no reward 'c' in this run"):
        observe(tmp_path / "x.jsonl", outcome=["c"])


def test_groups_of_another_size_are_filled_up_or_split_and_said(tmp_path):
    rows = [{"step": 1, "group": name, "rewards": {"a": 1}} for name in "ppppqqqqrrss" + "t" * 8]
    observed = observe(write(tmp_path / "x.jsonl", rows))
    assert (observed.group_size, observed.group_count) == (4, 6)
    assert int(observed.present.sum()) == 20
    assert "3 groups have another size than 4" in observed.remarks[0]


def test_infinite_numbers_are_findings_and_leave_the_statistics(tmp_path):
    rows = [{"step": 1, "group": f"p{p}", "rewards": {"a": float("inf") if (p, s) == (3, 1) else s}} for p in range(64) for s in range(4)]
    rows.append({"step": 1, "metrics": {"kl": "nan", "loss": 0.5}})
    diagnosis = examine(observe(write(tmp_path / "x.jsonl", rows)))
    (found,) = [finding for finding in diagnosis.findings if finding.id == "R19"]
    assert found.severity == "critical"
    assert found.rows == ("step 1: kl is nan", "step 1: a of p3, sample 1 is inf")
    assert np.isfinite(diagnosis.observed.totals[~np.isnan(diagnosis.observed.totals)]).all()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is no JSON"),
        ("[1]", "is a JSON list"),
        ('{"step": 1}', "is no rollout"),
        ('{"step": "x", "group": "p", "rewards": {}}', "is no rollout"),
        ('{"step": 1, "group": "p", "rewards": [1]}', "is no rollout"),
        ('{"step": 1, "group": "p", "rewards": {"a": "high"}}', "is no rollout"),
        ('{"step": 1, "group": "p", "rewards": {"a": 1}, "text": 7}', "is no rollout"),
        ('{"step": 1, "metrics": 3}', "cannot be read"),
        ('{"metrics": {}}', "cannot be read"),
        ('{"run": 3}', "cannot be read"),
        ('{"run": {"rewards": [{"weight": 1}]}}', "run.rewards cannot be read"),
        ('{"run": {"rewards": [{"name": "a", "role": "judge"}]}}', "run.rewards cannot be read"),
        ('{"step": 1, "group": "p", "rewards": {"a": 1}, "failures": [1]}', "cannot be read"),
    ],
)
def test_a_line_that_is_none_is_named(line, words, tmp_path):
    (tmp_path / "x.jsonl").write_text(line + "\n{}\n" if line == "{" else line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=words) as caught:
        observe(tmp_path / "x.jsonl")
    assert caught.value.where is not None
    assert "x.jsonl" in caught.value.where
    assert caught.value.hint


@pytest.mark.parametrize("kind", ["missing", "empty file", "empty folder", "binary", "parquet", "state"])
def test_a_place_without_a_run_says_what_could_be_there(kind, tmp_path):
    path = tmp_path / {"parquet": "x.parquet", "state": "trainer_state.json"}.get(kind, "x.jsonl")
    if kind == "empty folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes({"empty file": b"", "binary": b"\xff\xfe\x00", "parquet": b"PAR1", "state": b"{}"}[kind])
    with pytest.raises(DataError) as caught:
        observe(path)
    assert caught.value.hint


def test_a_last_line_that_a_crash_cut_is_left_out(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a": 2', encoding="utf-8")
    assert [record for _, record in read_lines(tmp_path / "x.jsonl")] == [{"a": 1}]


def test_the_tail_of_a_growing_file_is_read_once(tmp_path):
    path = tmp_path / "m.jsonl"
    tail = Tail(path)
    assert tail.new() == []
    path.write_text('{"step": 1}\n{"st', encoding="utf-8")
    assert tail.new() == [{"step": 1}]
    path.write_text('{"step": 1}\n{"step": 2}\n', encoding="utf-8")
    assert tail.new() == [{"step": 2}]
    assert tail.new() == []
    path.write_text('{"step": 1}\n', encoding="utf-8")  # a resumed run forgot the later steps
    assert tail.new() == [{"step": 1}]


# others' files ------------------------------------------------------------------------------------------------------------------------


def trl_rows(step, *, conversational=True):
    for prompt in range(8):
        for sample in range(4):
            text = f"answer {sample} to {prompt} at {step} in more than eight words of text"
            yield {
                "step": step,
                "prompt": [{"role": "user", "content": f"question {prompt}"}] if conversational else f"question {prompt}",
                "completion": [{"role": "assistant", "content": text}] if conversational else text,
                "accuracy_reward": float(sample == prompt % 4),
                "format_reward": None if sample == 3 else 1.0,
                "source": "web",
                "advantage": 1.5 if sample == prompt % 4 else -0.5,
            }


@pytest.mark.parametrize("conversational", [True, False])
def test_trls_completions_and_its_log(conversational, tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "completions").mkdir()
    for step in range(5, 65, 5):
        table = pyarrow.Table.from_pylist(list(trl_rows(step, conversational=conversational)))
        pyarrow.parquet.write_table(table, tmp_path / "completions" / f"completions_{step:05d}.parquet")
    for step, kl in ((10, 0.1), (60, 0.7)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        history = [{"step": s, "kl": kl, "reward": 0.3, "eval_reward": 0.2, "epoch": 0.1} for s in range(5, step + 5, 5)]
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    observed = observe(tmp_path, outcome=["accuracy_reward"])
    assert [r.name for r in observed.rewards] == ["accuracy_reward", "format_reward"]
    assert (observed.group_size, observed.group_count, observed.steps[-1]) == (4, 96, 60)
    assert observed.mean("kl") == pytest.approx(0.7)  # the newest state
    assert len(observed.points("eval/reward")) == 12
    found = {finding.id: finding for finding in examine(observed).findings}
    assert found["R11"].evidence["value"] == 0.25
    assert found["R15"].severity == "warn"
    assert observe(tmp_path / "completions").group_count == 96
    assert observe(tmp_path / "completions" / "completions_00005.parquet").group_count == 8


def test_verls_rollout_files_in_the_order_of_their_steps(tmp_path):
    """Rows of one prompt need not stand together: verl balances its batch over workers."""
    for step in (2, 10, 1):
        rows = [
            {"input": f"user\nquestion {n % 16}", "output": "so " * n, "gts": "4", "score": float(n < 16), "step": step, "acc": n < 8}
            for n in range(64)
        ]
        write(tmp_path / f"{step}.jsonl", rows)
    observed = observe(tmp_path)
    assert (observed.group_size, observed.group_count) == (4, 48)
    assert sorted(set(observed.steps.tolist())) == [1, 2, 10]
    assert observed.values[:4, 0].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert observed.verifier[:4].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert observed.prompts[0] == "1.jsonl:1"  # a prompt of several lines is named by its place
    assert [r.role for r in observed.rewards] == ["outcome"]


# run directories ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path):
    recipe = {"method": "grpo", "loss": {"kl_coef": 0.04, "filter": "none"}, "rewards": [{"use": "rewards.py:right", "weight": 2.0}]}
    (tmp_path / "resolved.json").write_text(json.dumps({"base": ".", "recipe": recipe}))
    return tmp_path


def rollout_line(step, dropped=""):
    def rollout(sample, stop="end"):
        segments = [
            {"source": "prompt", "token_ids": [1, 2], "logprobs": []},
            {"source": "model", "token_ids": [3] * 10, "logprobs": [0.0] * 10},
        ]
        return {"sample": sample, "stop": stop, "segments": segments, "forks": [segments], "tool_results": [], "text": "three"}

    scores = [
        {"rewards": {"right": 1.0}, "total": 2.0, "advantage": 0.5},
        {"rewards": {"right": None}, "total": None, "advantage": 0.0},
    ]
    return {
        "step": step, "dropped": dropped, "prompt": {"row": "train.jsonl:7"}, "scores": scores,
        "rollouts": [rollout(0, "turn_tokens"), rollout(1, "infrastructure")],
    }  # fmt: skip


def write_rollouts(folder, step, lines):
    (folder / "rollouts").mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "rollouts" / f"step-{step:06d}.jsonl.gz").write_bytes(gzip.compress(text.encode()))


def test_a_rollout_file_becomes_arrays(run_folder):
    write_rollouts(run_folder, 1, [rollout_line(1), rollout_line(1, dropped="all_equal")])
    write(run_folder / "metrics.jsonl", [{"step": 0}, {"step": 1, "kl": 0.2, "grad_norm": "inf"}])
    failure = {"time": 0, "event": "reward_failure", "step": 1, "reward": "right", "kind": "crash", "row": "train.jsonl:7", "sample": 1}
    write(run_folder / "events.jsonl", [failure, {"time": 0, "event": "checkpoint", "step": 1}])
    observed = observe(run_folder)
    assert observed.lengths.tolist() == [20.0] * 4  # sampled tokens, those of the fork included; the prompt's do not count
    assert observed.truncated.tolist() == [1, 0, 1, 0]
    assert observed.present.tolist() == [True, False, True, False]
    assert observed.trained.tolist() == [True, False]
    assert observed.repeated[0] == pytest.approx(1 - 1 / 18)
    assert (observed.rewards[0].name, observed.rewards[0].weight, observed.rewards[0].role) == ("right", 2.0, "outcome")
    assert observed.settings["loss.kl_coef"] == 0.04
    assert [(f.reward, f.kind, f.row, f.sample) for f in observed.failures] == [("right", "crash", "train.jsonl:7", 1)]
    assert [(n.step, n.name) for n in observed.nonfinite] == [(1, "grad_norm")]


def test_what_the_run_recorded_of_its_rewards_comes_before_the_recipe(run_folder):
    recorded = {"name": "right", "weight": 2.0, "role": "outcome", "range": [0, 1]}
    write(run_folder / "events.jsonl", [{"time": 0, "event": "rewards", "step": 1, "rewards": [recorded]}])
    (reward,) = observe(run_folder).rewards
    assert (reward.role, reward.range) == ("outcome", (0.0, 1.0))


@pytest.mark.parametrize("method", ["grpo", "ppo", "dpo", "reward", "sft"])
def test_a_run_without_a_step_is_skipped_through(method, run_folder):
    record = json.loads((run_folder / "resolved.json").read_text())
    record["recipe"]["method"] = method
    (run_folder / "resolved.json").write_text(json.dumps(record))
    diagnosis = examine(observe(run_folder))
    assert diagnosis.findings == ()
    assert all(item.reason for item in diagnosis.skipped)
    assert json.dumps(as_json(diagnosis), allow_nan=False)
    assert "skipped" in as_text(diagnosis)


def test_a_pipeline_is_no_run(tmp_path):
    stages = {"sft": {"run_dir": "elsewhere/sft"}, "grpo": {"run_dir": "elsewhere/grpo"}}
    (tmp_path / "resolved.json").write_text(json.dumps({"base": ".", "recipe": {"stages": stages}}))
    with pytest.raises(DataError, match="its stages are the runs") as caught:
        observe(tmp_path)
    assert caught.value.hint == f"pass {tmp_path / 'grpo'}"


@pytest.mark.parametrize("damage", ["gzip", "json", "shape"])
def test_a_damaged_rollout_file_is_named(damage, run_folder):
    write_rollouts(run_folder, 1, [{"step": 1}] if damage == "shape" else [rollout_line(1)])
    file = run_folder / "rollouts" / "step-000001.jsonl.gz"
    if damage == "gzip":
        file.write_bytes(file.read_bytes()[:-20])
    if damage == "json":
        file.write_bytes(gzip.compress(b"{]\n"))
    with pytest.raises(DataError) as caught:
        observe(run_folder)
    assert "step-000001.jsonl.gz" in str(caught.value.where)


@pytest.mark.parametrize("name", HEALTHY)
def test_every_diagnosis_is_json_and_text(name):
    diagnosis = examine(simulate(name, seed=0))
    assert json.loads(json.dumps(as_json(diagnosis), allow_nan=False))["findings"] == as_json(diagnosis)["findings"]
    assert as_text(diagnosis).startswith(f"simulated {name}: ")
