"""A tiny model on disk and a tiny task, so that whole runs take seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postgrad.testing import tiny_model, tiny_tokenizer

TOOLS = '''\
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
'''
REWARDS = """\
from postgrad.rewards import reward

@reward(scope="final", claim="the answer is right", range=(0, 1), role="outcome")
def right(rollout, answer):
    return float(answer in rollout.final_answer)

@reward(scope="length", claim="short", range=(-1, 0))
def short(rollout):
    return -rollout.sampled_tokens / 100

@reward(scope="tool_calls", claim="calls", range=(0, 1))
def called(rollout):
    return float(any(not result.error for result in rollout.tool_results))
"""


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_model("llama", vocab_size=268).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def conversation(a: int, b: int) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    return {
        "messages": [
            {"role": "user", "content": f"{a} and {b}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": str(a + b)},
            {"role": "assistant", "content": str(a + b)},
        ]
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="session")
def make_task(tiny_folder: Path) -> Callable[[Path], Path]:
    """Writes data, a tool, rewards and a two-stage recipe (SFT, then GRPO with the tool) into FOLDER/task; the run goes to FOLDER/run."""

    def make(folder: Path) -> Path:
        task = folder / "task"
        task.mkdir()
        pairs = [(1, 2), (2, 3), (3, 1), (4, 4), (5, 2), (6, 3)]
        write_rows(task / "sft.jsonl", [conversation(a, b) for a, b in pairs])
        write_rows(task / "prompts.jsonl", [{"prompt": f"{a} and {b}?", "answer": str(a + b)} for a, b in pairs])
        (task / "tools.py").write_text(TOOLS)
        (task / "rewards.py").write_text(REWARDS)
        (task / "recipe.yaml").write_text(RECIPE.format(model=tiny_folder, run_dir=folder / "run"))
        return task

    return make


RECIPE = """\
run_dir: {run_dir}
seed: 3
stages:
  sft:
    method: sft
    model: {model}
    dtype: float32
    max_steps: 40
    data: {{train: sft.jsonl, eval: sft.jsonl, max_length: 600}}
    tools: [tools.py:add]
    batch: {{rows: 6}}
    optimizer: {{learning_rate: 1e-2, warmup_steps: 4}}
    checkpoint: {{every: 15}}
  grpo:
    method: grpo
    model: stage:sft
    dtype: float32
    max_steps: 5
    data: {{train: prompts.jsonl, eval: prompts.jsonl, max_length: 600}}
    tools: [tools.py:add]
    batch: {{prompts: 2, minibatches: 2, epochs: 2, tokens_per_micro_batch: 1000}}
    rollout: {{group_size: 4, temperature: 1.0, max_tokens: 70, max_turns: 2}}
    optimizer: {{learning_rate: 1e-3}}
    rewards: [{{use: "rewards.py:right"}}, {{use: "rewards.py:short", weight: 0.5}}, {{use: "rewards.py:called", weight: 0.2}}]
    loss: {{preset: grpo, kl_coef: 0.05}}
    evaluation: {{every: 2}}
    checkpoint: {{every: 1, keep: 9}}
"""
