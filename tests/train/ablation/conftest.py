"""A short GRPO run on the tiny model: two rewards that are copies, and one of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from postgrad.train.recipe_file import load_recipe
from postgrad.train.run import run

REWARDS = """\
from postgrad.rewards import reward

def _share(rollout, wanted):
    return sum(wanted(token) for token in rollout.sampled_ids) / 12

@reward(scope="final", claim="even ids", range=(0, 1), role="outcome")
def even(rollout):
    return _share(rollout, lambda token: token % 2 == 0)

@reward(scope="final", claim="even ids once more", range=(0, 1))
def again(rollout):
    return even(rollout)

@reward(scope="final", claim="low ids", range=(0, 1))
def low(rollout):
    return _share(rollout, lambda token: token < 30)
"""
RECIPE = """\
method: {method}
model: {model}
run_dir: {run_dir}
max_steps: {steps}
dtype: float32
data: {{train: prompts.jsonl, eval: heldout.jsonl}}
batch: {{prompts: 4}}
rollout: {{group_size: 8, max_tokens: 12, max_turns: 1}}
rewards:
  - {{use: "rewards.py:even"}}
  - {{use: "rewards.py:again", weight: 0.5}}
  - {{use: "rewards.py:low", weight: 2.0}}
optimizer: {{learning_rate: 3.0e-2}}
evaluation: {{temperature: 1.0, samples: 2}}
{more}
"""


def write_rows(path: Path, questions: list[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions), encoding="utf-8")


MakeRun = Callable[..., Path]


@pytest.fixture(scope="session")
def make_run(tiny_folder: Path) -> MakeRun:
    """Trains in FOLDER/run; `change` edits the recipe's text."""

    def make(
        folder: Path, *, steps: int = 2, more: str = "", method: str = "grpo", change: Callable[[str], str] = lambda text: text
    ) -> Path:
        write_rows(folder / "prompts.jsonl", [f"{i} and {i + 1}?" for i in range(8)])
        write_rows(folder / "heldout.jsonl", [f"{i} plus {i}?" for i in range(6)])
        (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
        text = RECIPE.format(method=method, model=tiny_folder, run_dir=folder / "run", steps=steps, more=more)
        (folder / "recipe.yaml").write_text(change(text), encoding="utf-8")
        run(load_recipe(folder / "recipe.yaml"))
        return folder / "run"

    return make


@pytest.fixture(scope="session")
def finished_run(make_run: MakeRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    return make_run(tmp_path_factory.mktemp("ablation"), more="loss: {kl_coef: 0.05}")
