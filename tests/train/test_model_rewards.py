"""Reward models as rewards: their own tokenizer, the same numbers as alone, in a pipeline that trains one and then learns from it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from postgrad.data import prepare_preferences, rows_from
from postgrad.errors import ModelError, RecipeError
from postgrad.models.saving import save
from postgrad.models.scalar import load_scalar
from postgrad.rewards.score import Scorer
from postgrad.train.model_rewards import Judges, check_model_reward, load_model_reward, load_scorer, names_model
from postgrad.train.recipe import Reward
from postgrad.train.recipe_file import load_recipe
from postgrad.train.run import run
from postgrad.train.run_directory import read_jsonl
from postgrad.types import Group, Message, Prompt, Rollout, StopReason

PAIRS = [{"prompt": f"{a} and {b}?", "chosen": str(a + b), "rejected": "x" * b} for a in (1, 2, 3) for b in (1, 2, 4)]


@pytest.fixture(scope="module")
def model_folder(tiny_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "model"
    return save(load_scalar(tiny_folder, dtype="float32", seed=3), folder)


def group(*answers: str, stop: StopReason = StopReason.END) -> Group:
    prompt = Prompt("rows:1", (Message("user", "1 and 2?"),))
    return Group(prompt, tuple(Rollout((), (Message("assistant", answer),), stop, sample=n) for n, answer in enumerate(answers)))


def test_a_rollout_scores_as_the_same_conversation_of_a_file(model_folder):
    scorer = load_scorer(str(model_folder), dtype="float32")
    (pair,) = prepare_preferences(rows_from([{"prompt": "1 and 2?", "chosen": "3", "rejected": "no"}]), scorer.chat, max_length=99).pairs
    alone = scorer.scores([pair.prompt_ids + pair.chosen.token_ids]) + scorer.scores([pair.prompt_ids + pair.rejected.token_ids])
    reward = load_model_reward(Reward(use="x"), model_folder, dtype="float32")
    assert reward.values([group("3", "no")], ()) == pytest.approx(alone, abs=1e-6)


def test_judges_put_model_columns_after_functions_and_leave_out_spoiled_rollouts(model_folder):
    reward = load_model_reward(Reward(use="x", name="rm", weight=0.5), model_folder, dtype="float32")
    with Scorer([]) as functions:
        judges = Judges(functions, [reward])
        scores = judges.score([group("3", "four")])
        spoiled = judges.score([group("3", stop=StopReason.INFRASTRUCTURE)])
    assert scores.names == ("rm",)
    assert scores.totals.tolist() == pytest.approx([0.5 * value for value in scores.values[:, 0]])
    assert math.isnan(spoiled.values[0, 0])
    assert [item.name for item in judges.rewards] == ["rm"]


def test_a_language_model_is_no_reward_model(tiny_folder, model_folder):
    with pytest.raises(ModelError, match="no scalar head"):
        load_scorer(str(tiny_folder))
    assert names_model(Reward(use=model_folder.name), model_folder.parent) == model_folder
    assert names_model(Reward(use="numeric_match"), model_folder.parent) is None


@pytest.mark.parametrize("key", [{"args": {"a": 1}}, {"deadline_s": 1.0}, {"on_error": "stop"}, {"on_nonfinite": "abstain"}])
def test_keys_of_functions_are_refused_for_a_model(model_folder, key):
    with pytest.raises(RecipeError, match="acts on reward functions"):
        check_model_reward(Reward(use="x", **key))


RECIPE = """\
run_dir: {run_dir}
stages:
  rm:
    method: reward
    model: {model}
    dtype: float32
    max_steps: 25
    data: {{train: pairs.jsonl}}
    batch: {{pairs: 4}}
    optimizer: {{learning_rate: 5e-3}}
  grpo:
    method: grpo
    model: {model}
    dtype: float32
    max_steps: 2
    data: {{train: prompts.jsonl}}
    batch: {{prompts: 2}}
    rollout: {{group_size: 4, max_tokens: 6, max_turns: 1}}
    rewards: [{{use: "stage:rm", name: rm}}]
"""


def write_task(folder: Path, model: Path) -> Path:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in PAIRS))
    (folder / "recipe.yaml").write_text(RECIPE.format(run_dir=folder / "run", model=model))
    return folder / "recipe.yaml"


@pytest.mark.slow
def test_a_pipeline_trains_a_reward_model_and_learns_from_it(tiny_folder, tmp_path):
    run(load_recipe(write_task(tmp_path, tiny_folder)))
    steps = read_jsonl(tmp_path / "run" / "grpo" / "metrics.jsonl")
    assert [step["step"] for step in steps if step.get("rewards/rm/std", 0) > 0] == [1, 2]
    assert all(step["rewards/rm/abstained"] == 0 for step in steps if "reward" in step)


def test_a_stage_that_is_no_reward_model_is_refused_as_a_reward(tiny_folder, tmp_path):
    file = write_task(tmp_path, tiny_folder)
    file.write_text(file.read_text().replace("method: reward", "method: dpo"))
    with pytest.raises(RecipeError, match="is no reward model"):
        load_recipe(file)
    file = write_task(tmp_path, tiny_folder)
    file.write_text(file.read_text().replace("stage:rm", "stage:nothing"))
    with pytest.raises(RecipeError, match="names no earlier stage"):
        load_recipe(file)
