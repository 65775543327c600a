"""PPO on a problem whose best policy is known.

The prompt is one of four letters. The best answer is that letter three times and then the end, worth 1: each of the first three places that
holds it is worth 1/3, each letter beyond three costs 0.1. The policy starts from answers of 1 to 6 letters, of which 55 % are the prompt's
and the others random, worth about 0.3. It must learn which letter, how many, and to stop; being cut by the limit of 8 tokens must not pay.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from postgrad.testing import tiny_model, tiny_tokenizer
from postgrad.train.recipe_file import load_recipe
from postgrad.train.run import run
from postgrad.train.run_directory import read_jsonl

OPTIMUM = 1.0
RECIPE = """\
run_dir: {folder}/run
seed: {seed}
stages:
  sft:
    method: sft
    model: {folder}/model
    dtype: float32
    max_steps: 80
    data: {{train: sft.jsonl}}
    batch: {{rows: 32}}
    optimizer: {{learning_rate: 5.0e-3}}
  ppo:
    method: ppo
    model: stage:sft
    dtype: float32
    max_steps: 50
    data: {{train: prompts.jsonl}}
    batch: {{prompts: 4, minibatches: 2, epochs: 4}}
    rollout: {{group_size: 16, max_tokens: 8}}
    optimizer: {{learning_rate: 3.0e-3, schedule: linear}}
    critic: {{learning_rate: 8.0e-3, warmup_steps: 4}}
    rewards: [{{use: "rewards.py:three"}}]
    loss: {{kl_coef: 0.0, missing_end_penalty: 0.1, entropy_coef: 0.03, target_kl: 0.03}}
"""
REWARDS = """\
def three(rollout, letter):
    return sum(found == letter for found in rollout.text[:3]) / 3 - 0.1 * len(rollout.text[3:])
"""


def write_problem(folder: Path, seed: int) -> Path:
    tiny_model("llama", vocab_size=268, seed=seed, scale=0.1).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rng = random.Random(seed)

    def answer(asked: str) -> str:
        text = ""
        while not text or (len(text) < 6 and rng.random() < 0.75):
            text += asked if rng.random() < 0.4 else rng.choice("abcd")
        return text

    def turns(letter: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": letter}, {"role": "assistant", "content": answer(letter)}]

    (folder / "sft.jsonl").write_text("".join(json.dumps({"messages": turns(letter)}) + "\n" for letter in "abcd" for _ in range(320)))
    asked = [{"prompt": [{"role": "user", "content": letter}], "letter": letter} for letter in "abcd"]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, seed=seed))
    return folder / "recipe.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_ppo_finds_the_best_policy(tmp_path: Path, seed: int) -> None:
    """The answers sampled in the last five iterations earn at least 95 % of what the best policy earns."""
    run(load_recipe(write_problem(tmp_path, seed)))
    steps = [record for record in read_jsonl(tmp_path / "run" / "ppo" / "metrics.jsonl") if "reward" in record]
    assert steps[0]["reward"] < 0.4
    assert sum(record["reward"] for record in steps[-5:]) / 5 >= 0.95 * OPTIMUM
