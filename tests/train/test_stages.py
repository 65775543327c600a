"""`stage:NAME`: what may be named where, what each name becomes, and that a moved pipeline still finds its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from postgrad.errors import RecipeError
from postgrad.train.datasets import data_file, data_files
from postgrad.train.recipe import Data, Pipeline
from postgrad.train.recipe_file import load_recipe
from postgrad.train.stages import moved_to, not_there_yet, stage_recipe

RECIPE = """\
run_dir: {run_dir}
stages:
  sft:
    method: sft
    model: m
    max_steps: 1
    data: {{train: sft.jsonl}}
  pairs:
    method: pairs
    model: stage:sft
    epochs: 1
    data: {{train: prompts.jsonl}}
    rewards: [{{use: "rewards.py:good"}}]
    heldout: 0.5
  rm:
    method: reward
    model: stage:sft
    max_steps: 1
    data: {{train: stage:pairs, eval: stage:pairs}}
  dpo:
    method: dpo
    model: stage:sft
    max_steps: 1
    data: {{train: [{{file: stage:pairs, weight: 2.0}}, more.jsonl], eval: 0.1}}
  ppo:
    method: ppo
    model: stage:sft
    max_steps: 1
    data: {{train: prompts.jsonl}}
    rewards: [{{use: "rewards.py:good", weight: 0.0}}, {{use: stage:rm, name: rm}}]
    critic: {{model: stage:rm}}
"""
STEPS = "max_steps: 1\n    data: {train: "


def pipeline(folder: Path, *changes: tuple[str, str]) -> Pipeline:
    text = RECIPE.format(run_dir=folder / "run")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "recipe.yaml").write_text(text)
    loaded = load_recipe(folder / "recipe.yaml").recipe
    assert isinstance(loaded, Pipeline)
    return loaded


def pairs_run(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True)
    for name in ("resolved.json", *files):
        (folder / name).write_text("{}\n")
    return folder


def test_each_name_becomes_what_is_wanted_at_its_place(tmp_path):
    found = pipeline(tmp_path)
    stages = {name: stage_recipe(found, recipe) for name, recipe in found.stages.items()}
    run = tmp_path / "run"
    assert stages["pairs"].model == stages["rm"].model == str(run / "sft" / "model")
    assert (stages["rm"].data.train, stages["rm"].data.eval) == (str(run / "pairs"), str(run / "pairs"))
    weighted, plain = stages["dpo"].data.train
    assert (weighted.file, weighted.weight, plain) == (str(run / "pairs"), 2.0, "more.jsonl")
    assert [reward.use for reward in stages["ppo"].rewards] == ["rewards.py:good", str(run / "rm" / "model")]
    assert stages["ppo"].critic.model == str(run / "rm" / "model")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("train: stage:pairs, eval: stage:pairs", "train: stage:par"), r"data.train: stage:par names no earlier stage \(.* sft, pairs\)"),
        (("train: stage:pairs, eval: stage:pairs", "train: stage:ppo"), "data.train: stage:ppo names no earlier stage"),
        (("train: stage:pairs, eval: stage:pairs", "train: stage:rm"), "data.train: stage:rm names no earlier stage"),
        (("train: stage:pairs, eval: stage:pairs", "train: stage:sft"), r"stage:sft writes a model and no data \(method: sft\)"),
        (("train: stage:pairs, eval: stage:pairs", "train: stage:pairs, eval: stage:sft"), "data.eval: stage:sft writes a model"),
        (("    heldout: 0.5\n", ""), "data.eval: stage:pairs holds no pairs out"),
        ((STEPS + "prompts.jsonl}", STEPS + "stage:pairs}"), "ppo does not learn from pairs"),
        (("model: stage:sft\n    " + STEPS + "stage", "model: stage:pairs\n    " + STEPS + "stage"), "stage:pairs writes pairs"),
        (("critic: {model: stage:rm}", "critic: {model: stage:pairs}"), "critic.model: stage:pairs writes pairs and no model"),
        (("use: stage:rm", "use: stage:pairs"), "rewards.1.use: stage:pairs is no reward model"),
        (("file: stage:pairs", "file: stage:x"), "data.train.0: stage:x names no earlier stage"),
    ],
)  # fmt: skip
def test_a_name_that_cannot_be_meant_is_refused_with_its_line(tmp_path, change, message):
    with pytest.raises(RecipeError, match=message) as caught:
        pipeline(tmp_path, change)
    assert "recipe.yaml:" in caught.value.where
    assert caught.value.hint


def test_a_stage_that_waits_for_another_says_for_which(tmp_path):
    found = pipeline(tmp_path)
    (tmp_path / "run" / "sft" / "model").mkdir(parents=True)
    assert not_there_yet(found, found.stages["pairs"]) is None
    assert not_there_yet(found, found.stages["rm"]) == "stage:pairs"
    pairs_run(tmp_path / "run" / "pairs", "pairs.jsonl")
    assert not_there_yet(found, found.stages["rm"]) is None
    assert not_there_yet(found, found.stages["ppo"]) == "stage:rm"


def test_a_run_directory_as_data_is_its_pairs_or_its_held_out_pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "recipes"
    base.mkdir()
    run = pairs_run(tmp_path / "runs" / "one", "pairs.jsonl", "heldout.jsonl")
    assert Path(data_file("runs/one", base)).resolve() == run / "pairs.jsonl"
    assert Path(data_file("runs/one", base, wanted="eval")).resolve() == run / "heldout.jsonl"
    files = data_files(Data(train="runs/one", eval="runs/one"), base)
    assert {name: path.resolve() for name, path in files.items()} == {
        "one/pairs.jsonl": run / "pairs.jsonl",
        "one/heldout.jsonl": run / "heldout.jsonl",
    }


def test_held_out_pairs_of_a_run_that_held_none_out_are_refused(tmp_path):
    pairs_run(tmp_path / "one", "pairs.jsonl")
    with pytest.raises(RecipeError, match="holds no pairs out"):
        data_file("one", tmp_path, wanted="eval")


def test_a_plain_file_and_a_hub_id_are_as_they_were(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "pairs.jsonl").write_text("{}\n")  # no run wrote this folder
    assert data_file("rows.jsonl", tmp_path) == str(tmp_path / "rows.jsonl")
    assert data_file("owner/name", tmp_path) == "owner/name"
    assert data_file("folder", tmp_path) == str(tmp_path / "folder")
    assert list(data_files(Data(train="rows.jsonl", eval=0.5), tmp_path)) == ["rows.jsonl"]


def test_a_moved_stage_follows_what_moved_with_it_and_nothing_else(tmp_path, monkeypatch):
    """`m` is a built-in model or a hub id: no folder of that name stands beside the moved run."""
    monkeypatch.chdir(tmp_path)
    found = pipeline(tmp_path, (f"run_dir: {tmp_path}/run", "run_dir: run"))
    stage = stage_recipe(found, found.stages["ppo"])
    there = tmp_path / "elsewhere"
    (there / "sft" / "model").mkdir(parents=True)
    (there / "rm" / "model").mkdir(parents=True)
    moved = moved_to(stage, there / "ppo")
    assert moved.model == str(there / "sft" / "model")
    assert moved.rewards[1].use == moved.critic.model == str(there / "rm" / "model")
    assert moved.rewards[0].use == "rewards.py:good"
    assert moved.data.train == "prompts.jsonl"
    pairs_run(there / "pairs", "pairs.jsonl")
    assert moved_to(stage_recipe(found, found.stages["rm"]), there / "rm").data.train == str(there / "pairs")
    single = found.stages["sft"].model_copy(update={"run_dir": "x"})
    assert moved_to(single, tmp_path / "moved" / "x").model == "m"
