"""`schedule` in a run: the optimizer step reaches the rewards that ask for it, in training and on held-out prompts."""

from __future__ import annotations

import json

import pytest

from postgrad.train.recipe_file import load_recipe
from postgrad.train.run import run
from postgrad.train.run_directory import RunDirectory

REWARDS = """\
from postgrad.rewards import reward
from postgrad.rewards.combine import schedule

@reward(scope="length", claim="an even number of tokens", range=(0, 1))
def even(rollout):
    return float(len(rollout.sampled_ids) % 2 == 0)

def one(rollout):
    return 1.0

fading = schedule(even, {1: 1.0, 3: 0.5})
falling = schedule(one, {0: 3.0, 3: 0.0})
"""
RECIPE = """\
method: {method}
model: {model}
run_dir: {run_dir}
max_steps: 3
dtype: float32
data: {{train: prompts.jsonl, eval: prompts.jsonl}}
batch: {{prompts: 2}}
rollout: {{group_size: 2, max_tokens: 6, max_turns: 1}}
evaluation: {{every: 1}}
rewards: [{{use: "rewards.py:even"}}, {{use: "rewards.py:fading", weight: 0.5}}, {{use: "rewards.py:falling"}}]
"""


def train(folder, model, method, **columns):
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i}?", **columns}) + "\n" for i in range(4)))
    (folder / "recipe.yaml").write_text(RECIPE.format(model=model, run_dir=folder / "run", method=method))
    run(load_recipe(folder / "recipe.yaml"))
    return RunDirectory(folder / "run")


@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_a_schedule_follows_the_step(tiny_folder, tmp_path, method):
    directory = train(tmp_path, tiny_folder, method)
    for step, factor in ((1, 1.0), (2, 0.75), (3, 0.5)):
        scores = [score["rewards"] for record in directory.read_rollouts(step) for score in record["scores"]]
        assert [score["fading"] for score in scores] == [factor * score["even"] for score in scores]
        assert {score["falling"] for score in scores} == {3.0 - step}
    held_out = {record["step"]: record["eval/rewards/falling/mean"] for record in directory.metrics()}
    assert held_out == {0: 3.0, 1: 2.0, 2: 1.0, 3: 0.0}


def test_a_column_of_that_name_in_the_data_comes_first(tiny_folder, tmp_path):
    directory = train(tmp_path, tiny_folder, "grpo", step=2)
    scores = [score["rewards"] for step in (1, 2, 3) for record in directory.read_rollouts(step) for score in record["scores"]]
    assert {score["falling"] for score in scores} == {1.0}
