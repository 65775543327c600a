"""Pairs of a model's own answers: which two, what is counted, killed and resumed, and the classic pipeline on a tiny model."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from postgrad.data import load_rows, prepare_preferences
from postgrad.errors import DataError, RunError
from postgrad.models.role_engine import RoleEngine, RoleReader
from postgrad.train.build import build
from postgrad.train.loop import SilentReporter
from postgrad.train.metrics import find
from postgrad.train.pairing import check_columns, decided, pair_row, split_prompts, told
from postgrad.train.recipe_file import load_recipe
from postgrad.train.run import resume, run
from postgrad.train.run_directory import RunDirectory, read_jsonl
from postgrad.train.stages import stage_recipe
from postgrad.types import Group, Message, Prompt, Rollout, StopReason

NAN = math.nan


def group(*answers: str | StopReason) -> Group:
    """An answer per text; a stop reason stands for an answer that ended so."""
    rollouts = [
        Rollout((), (Message("assistant", answer),), StopReason.END) if not isinstance(answer, StopReason)
        else Rollout((), (Message("assistant", "half"),), answer)
        for answer in answers
    ]  # fmt: skip
    return Group(Prompt("rows:1", (Message("user", "?"),)), tuple(rollouts))


# ---- which two


def test_the_best_and_the_worst_are_the_pair_and_of_equal_ones_the_first():
    decision = decided(group("a", "b", "c", "d", "e"), [0.5, 2.0, -1.0, 2.0, -1.0])
    assert (decision.dropped, decision.chosen, decision.rejected, decision.margin) == ("", 1, 2, 3.0)


@pytest.mark.parametrize("totals", [[1.0, 1.0, 1.0], [1.0, 1.0 + 1e-9, NAN]])
def test_equal_totals_are_a_tie(totals):
    assert decided(group("a", "b", "c"), totals).dropped == "tied"


@pytest.mark.parametrize("stop", [StopReason.TURN_TOKENS, StopReason.TOTAL_TOKENS, StopReason.INFRASTRUCTURE])
def test_an_answer_that_did_not_end_by_itself_is_no_side_even_when_it_scores_best(stop):
    decision = decided(group(stop, "b", "c"), [9.0, 1.0, 0.0])
    assert (decision.chosen, decision.rejected) == (1, 2)
    assert decision.left_out[0] in ("cut", "infrastructure")


def test_what_is_left_out_is_named_and_one_usable_answer_makes_no_pair():
    decision = decided(group(StopReason.TURN_TOKENS, " ", "c", "d"), [1.0, 2.0, NAN, 3.0])
    assert decision.left_out == ("cut", "empty", "unscored", "")
    assert decision.dropped == "too_few"


def test_a_tool_call_at_the_end_is_no_answer():
    ended = Rollout((), (Message("assistant", "looking"), Message("tool", "5")), StopReason.TERMINAL_TOOL)
    whole = Group(Prompt("rows:1", (Message("user", "?"),)), (ended, *group("a", "b").rollouts))
    assert decided(whole, [9.0, 0.0, 1.0]).left_out == ("empty", "", "")


def test_raw_prompts_become_raw_text_pairs():
    record = {
        "prompt": {"raw_text": "Once", "messages": [], "columns": {"id": 3}},
        "rollouts": [{"text": " upon", "messages": []}, {"text": " more", "messages": []}],
        "pair": {"chosen": 1, "rejected": 0, "margin": 0.5},
        "tools": [],
    }
    assert pair_row(record) == {"prompt": "Once", "chosen": " more", "rejected": " upon", "margin": 0.5, "id": 3}


# ---- held out


def rows_of(*prompts: str) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "n": index} for index, prompt in enumerate(prompts)]


def test_all_pairs_of_a_prompt_are_on_one_side():
    rows = rows_of(*"abcdeabcdeabcde")
    train, heldout = split_prompts(rows, 0.4, seed=0)
    assert len({row["prompt"] for row in heldout}) == 2
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    assert sorted(row["n"] for row in train + heldout) == list(range(15))


def test_which_prompts_are_held_out_depends_on_the_prompts_and_the_seed_alone():
    def held(rows, seed):
        return {row["prompt"] for row in split_prompts(rows, 0.3, seed=seed)[1]}

    forth, back = rows_of(*"abcdefghij"), rows_of(*"jihgfedcbaabc")
    assert held(forth, 1) == held(back, 1)
    assert len({frozenset(held(forth, seed)) for seed in range(6)}) > 1


def test_at_least_one_prompt_stays_on_each_side():
    assert [len(side) for side in split_prompts(rows_of(*"ab"), 0.01, seed=0)] == [1, 1]
    assert [len(side) for side in split_prompts(rows_of(*"ab"), 0.99, seed=0)] == [1, 1]
    assert [len(side) for side in split_prompts(rows_of(*"aa"), None, seed=0)] == [2, 0]
    with pytest.raises(RunError, match="only one prompt"):
        split_prompts(rows_of(*"aa"), 0.5, seed=0)


def test_a_column_of_a_pairs_own_name_is_refused():
    with pytest.raises(DataError, match="'margin'"):
        check_columns([Prompt("rows:1", (), {"id": 1}), Prompt("rows:2", (), {"margin": 1.0})])


def test_counts_are_told_in_words_and_nothing_is_told_that_is_not():
    assert told({"made": 3}) == "every prompt gave a pair"
    text = told({"made": 3, "tied": 2, "answers_cut": 5})
    assert text == "prompts without a pair: 2 tied (the totals of their answers are equal); answers left out: 5 cut by a limit"


# ---- whole runs

REWARDS = """\
from postgrad.rewards import reward

@reward(scope="final", claim="the answer is the good one", range=(0, 1))
def good(rollout, key):
    if key == "mute":
        return None
    return float("g" in rollout.final_answer)
"""
RECIPE = """\
run_dir: {run_dir}
seed: 5
stages:
  sft:
    method: sft
    model: {model}
    dtype: float32
    max_steps: 60
    data: {{train: sft.jsonl, max_length: 200}}
    batch: {{rows: 8}}
    optimizer: {{learning_rate: 1e-2, warmup_steps: 4}}
  pairs:
    method: pairs
    model: stage:sft
    dtype: float32
    epochs: 2
    data: {{train: prompts.jsonl}}
    batch: {{prompts: 3}}
    rollout: {{group_size: 3, max_tokens: 6, max_turns: 1}}
    rewards: [{{use: "rewards.py:good"}}]
    heldout: 0.3
    checkpoint: {{every: 2, keep: 9}}
  rm:
    method: reward
    model: stage:sft
    dtype: float32
    max_steps: 20
    data: {{train: stage:pairs, eval: stage:pairs}}
    batch: {{pairs: 4}}
    adapter: {{kind: lora, rank: 4}}
    optimizer: {{learning_rate: 1e-2}}
  ppo:
    method: ppo
    model: stage:sft
    dtype: float32
    max_steps: 2
    data: {{train: prompts.jsonl, eval: prompts.jsonl}}
    batch: {{prompts: 4}}
    rollout: {{max_tokens: 6, max_turns: 1}}
    adapter: {{kind: lora, rank: 4}}
    optimizer: {{learning_rate: 1e-3}}
    rewards: [{{use: stage:rm, name: rm}}, {{use: "rewards.py:good", weight: 0.0}}]
"""
KEYS = ["ab", "cd", "ef", "hi", "kl", "mute", "no"]


def write_task(folder: Path, model: Path) -> Path:
    task = folder / "task"
    task.mkdir()
    answers = [{"prompt": key, "completion": answer} for key in KEYS for answer in ("g", "b")]
    (task / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    (task / "prompts.jsonl").write_text("".join(json.dumps({"prompt": key, "key": key}) + "\n" for key in KEYS))
    (task / "rewards.py").write_text(REWARDS)
    (task / "recipe.yaml").write_text(RECIPE.format(run_dir=folder / "run", model=model))
    return task / "recipe.yaml"


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in read_jsonl(folder / "metrics.jsonl")]


def rollouts(folder: Path) -> dict[str, bytes]:
    return {file.name: gzip.decompress(file.read_bytes()) for file in (folder / "rollouts").iterdir()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_folder) -> Path:
    """A pipeline that was never stopped."""
    folder = tmp_path_factory.mktemp("rlhf")
    run(load_recipe(write_task(folder, tiny_folder)))
    return folder


@pytest.mark.slow
def test_every_group_is_a_pair_or_counted_and_the_files_hold_them(finished):
    folder = finished / "run" / "pairs"
    last = read_jsonl(folder / "metrics.jsonl")[-1]
    records = [json.loads(line) for _, text in sorted(rollouts(folder).items()) for line in text.splitlines()]
    assert len(records) == 2 * len(KEYS)
    assert sum(last[f"pairs/{name}"] for name in ("made", "tied", "too_few", "unreadable")) == len(records)
    assert last["pairs/too_few"] == 2  # the reward abstains on one prompt, which comes twice
    assert last["pairs/tied"] > 0
    rows, held = read_jsonl(folder / "pairs.jsonl"), read_jsonl(folder / "heldout.jsonl")
    assert len(rows) + len(held) == last["pairs/made"] > 4
    assert not {row["key"] for row in rows} & {row["key"] for row in held}
    for row in rows + held:
        assert "g" in row["chosen"][0]["content"]
        assert "g" not in row["rejected"][0]["content"]
        assert (row["margin"], row["prompt"][0]["content"]) == (1.0, row["key"])
    event = next(record for record in read_jsonl(folder / "events.jsonl") if record["event"] == "pairs")
    assert (event["train"], event["heldout"], event["tied"]) == (len(rows), len(held), last["pairs/tied"])


@pytest.mark.slow
def test_every_number_of_the_stage_is_defined(finished):
    for record in read_jsonl(finished / "run" / "pairs" / "metrics.jsonl"):
        assert [name for name in record if name != "step" and find(name) is None] == []


@pytest.mark.slow
def test_the_files_are_read_as_pairs_with_their_margins(finished):
    from postgrad.train.model_rewards import load_scorer

    chat = load_scorer(str(finished / "run" / "rm" / "model"), dtype="float32").chat
    pairs = prepare_preferences(load_rows(finished / "run" / "pairs" / "pairs.jsonl"), chat, max_length=100).pairs
    assert {pair.margin for pair in pairs} == {1.0}


@pytest.mark.slow
@pytest.mark.parametrize("point", ["step:1", "step:3", "save:before_manifest", "run:before_export"])
def test_killed_and_resumed_writes_the_same_bytes(finished, tiny_folder, tmp_path, point):
    recipe = write_task(tmp_path, tiny_folder)
    shutil.copytree(finished / "run" / "sft", tmp_path / "run" / "sft")
    environment = {**os.environ, "POSTGRAD_FAULT": point, "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-m", "postgrad", "train", str(recipe)], env=environment, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "run" / "pairs" / "summary.json").exists()
    resume(tmp_path / "run")
    ours, theirs = tmp_path / "run" / "pairs", finished / "run" / "pairs"
    for name in ("pairs.jsonl", "heldout.jsonl"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    assert metrics(ours) == metrics(theirs)
    assert rollouts(ours) == rollouts(theirs)
    assert metrics(ours.parent / "ppo") == metrics(theirs.parent / "ppo")


@pytest.mark.slow
def test_actor_critic_reference_and_reward_model_share_one_base(finished, tmp_path):
    loaded = load_recipe(finished / "task" / "recipe.yaml")
    recipe = stage_recipe(loaded.recipe, loaded.recipe.stages["ppo"])
    with build(recipe, loaded.base, RunDirectory(tmp_path), SilentReporter()) as built:
        parts = built.method.parts
        model = built.policy.model.model
        (rm,) = parts.sampling.judges.models
        assert isinstance(rm.scorer.reader, RoleReader)
        assert isinstance(parts.critic, RoleEngine)
        assert parts.actor.model is parts.critic.model is parts.actor.reference.model is rm.scorer.reader.model is model
        assert set(model.peft_config) == {"default", "critic", "reward_rm"}
        assert any("one frozen base carries the policy, its reference, the critic, the reward model rm" in note for note in built.notes)


@pytest.mark.slow
def test_a_reward_model_that_needs_a_model_of_its_own_is_named(finished, tiny_folder, tmp_path):
    loaded = load_recipe(finished / "task" / "recipe.yaml", [f"stages.ppo.model={tiny_folder}"])
    recipe = stage_recipe(loaded.recipe, loaded.recipe.stages["ppo"])
    with build(recipe, loaded.base, RunDirectory(tmp_path), SilentReporter()) as built:
        assert any("the reward model rm was not trained with an adapter on this base" in note for note in built.notes)
        assert any("one frozen base carries the policy, its reference, the critic;" in note for note in built.notes)


@pytest.mark.slow
def test_the_reward_model_ranks_held_out_pairs_and_ppo_reads_it(finished):
    last = read_jsonl(finished / "run" / "rm" / "metrics.jsonl")[-1]
    assert last["eval/pairs"] == len(read_jsonl(finished / "run" / "pairs" / "heldout.jsonl"))
    assert last["eval/accuracy"] == 1.0
    steps = read_jsonl(finished / "run" / "ppo" / "metrics.jsonl")[1:]
    for step in steps:
        assert step["objective/scores"] == pytest.approx(step["rewards/rm/mean"])  # what only watches is not trained on
        assert "rewards/good/mean" in step


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rm", "ppo"])
def test_a_moved_pipeline_is_resumed_where_it_lies(finished, tmp_path, stage):
    """Data and reward models of other stages are found at their new place, and are known to be the same."""
    moved = shutil.copytree(finished / "run", tmp_path / "moved")
    (moved / stage / "summary.json").unlink()
    shutil.rmtree(moved / stage / "checkpoints")
    before = metrics(moved / stage)
    resume(moved / stage)
    assert metrics(moved / stage) == before


@pytest.mark.slow
def test_an_annotator_that_cannot_tell_answers_apart_stops_the_run_with_the_counts(finished, tiny_folder, tmp_path):
    recipe = write_task(tmp_path, tiny_folder)
    shutil.copytree(finished / "run" / "sft", tmp_path / "run" / "sft")
    (tmp_path / "task" / "rewards.py").write_text(REWARDS.replace('float("g" in rollout.final_answer)', "1.0"))
    with pytest.raises(RunError, match=r"no pair came of 14 prompts: .* 12 tied .* 2 with fewer"):
        run(load_recipe(recipe))
    assert not (tmp_path / "run" / "pairs" / "pairs.jsonl").exists()


@pytest.mark.slow
def test_pairs_of_rollouts_that_are_gone_are_not_made_up(finished, tiny_folder, tmp_path):
    recipe = write_task(tmp_path, tiny_folder)
    shutil.copytree(finished / "run", tmp_path / "run")
    for stage in ("rm", "ppo"):
        shutil.rmtree(tmp_path / "run" / stage)
    (tmp_path / "run" / "pairs" / "summary.json").unlink()
    (tmp_path / "run" / "pairs" / "rollouts" / "step-000002.jsonl.gz").unlink()
    with pytest.raises(RunError, match="rollouts of step 2 cannot be read"):
        run(load_recipe(recipe))


@pytest.mark.slow
def test_dry_run_shows_answers_with_their_rewards(finished):
    done = subprocess.run(
        [sys.executable, "-m", "postgrad", "train", str(finished / "task" / "recipe.yaml"), "--dry-run"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "pairs: 5 steps" in done.stdout
    assert "rollout 2:" in done.stdout
