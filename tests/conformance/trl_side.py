"""TRL's side: its real trainers and its real training loop, on given rollouts or rows.

1. Rollouts reach `GRPOTrainer` through its own `rollout_func` (with `env_mask` for tool tokens), rewards through reward functions.
   `RLOOTrainer` has no such hook, so there the method that samples is replaced.
2. `train()` runs as for any user: dataloader, advantages, micro-batches, gradient accumulation. The optimizer's rate is 0;
   each step's loss and gradients are recorded just before it, and `move` then changes the weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from postgrad.testing.tiny import tiny_tokenizer

from .same import Batch, Source, Step, gradients_of

pytest.importorskip("trl", minversion="1.16.0", reason="TRL is not installed (pip install postgrad[conformance])")

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

QUIET = (
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
)
"""What TRL and the loop below it warn of in every run of these tests."""

_COMMON: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1,
    "optim": "sgd", "learning_rate": 0.0, "max_grad_norm": 0.0, "gradient_checkpointing": False,
}  # fmt: skip


class _Recorder(TrainerCallback):
    """Records each optimizer step just before it happens, then moves the weights."""

    def __init__(self, move: Callable[[nn.Module], None]) -> None:
        self.move = move
        self.losses: list[float] = []
        self.steps: list[tuple[float, dict[str, Any]]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        self.steps.append((sum(self.losses), gradients_of(model)))
        self.losses.clear()

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: nn.Module, **kwargs: Any) -> None:
        self.move(model)


def _recorded(trainer: Any, move: Callable[[nn.Module], None]) -> list[Step]:
    """Train, and say what each optimizer step was: the sum of the micro-batches' losses (as the loop adds them up), the gradients,
    and what was logged."""
    recorder = _Recorder(move)
    trainer.add_callback(recorder)
    one_micro_batch = trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        loss = one_micro_batch(*args, **kwargs)
        recorder.losses.append(loss.item())
        return loss

    trainer.training_step = training_step
    trainer.train()
    logs = trainer.state.log_history
    return [Step(loss, gradients, logs[number]) for number, (loss, gradients) in enumerate(recorder.steps)]


# reinforcement learning -------------------------------------------------------------------------------------------------------------


def grpo_steps(
    model: nn.Module,
    batch: Batch,
    folder: Path,
    *,
    steps: int = 1,
    reference: nn.Module | None = None,
    accumulate: int = 1,
    move: Callable[[nn.Module], None] = lambda model: None,
    **config: Any,
) -> list[Step]:
    """The first `steps` optimizer steps of `GRPOTrainer` on one generation batch. `config` overrides `GRPOConfig`."""
    if reference is not None:  # TRL loads it from where the policy came from
        reference.save_pretrained(folder / "reference")  # type: ignore[operator]
        model.config._name_or_path = str(folder / "reference")
    trainer = grpo_trainer(model, batch, folder, steps=steps, accumulate=accumulate, **config)
    return _recorded(trainer, move)


def grpo_trainer(model: nn.Module, batch: Batch, folder: Path, *, steps: int = 1, accumulate: int = 1, **config: Any) -> GRPOTrainer:
    options = {
        "loss_type": "grpo",
        "max_completion_length": 64,
        "num_iterations": steps,
        "reward_weights": list(batch.weights),
        "use_bias_correction_kl": False,
        "shuffle_dataset": False,
    }
    return GRPOTrainer(
        model,
        reward_funcs=_reward_functions(batch),
        args=GRPOConfig(str(folder), **_COMMON | _batching(batch, steps=steps, accumulate=accumulate) | options | config),
        train_dataset=_prompts(batch),
        processing_class=tiny_tokenizer(),
        rollout_func=_given_rollouts(batch),
    )


def advantages(trainer: Any) -> list[float]:
    """The advantages that a trainer computed for its last batch, in order."""
    return [float(value) for value in trainer._logs["advantages"]]


class _GivenRollouts(RLOOTrainer):
    batch: Batch

    def _generate(self, prompts: list[str]) -> Any:
        rows = _given_rollouts(self.batch)(prompts, self)
        return rows["prompt_ids"], rows["completion_ids"], [""] * len(prompts)


def rloo_steps(
    model: nn.Module,
    batch: Batch,
    folder: Path,
    *,
    steps: int = 1,
    accumulate: int = 1,
    move: Callable[[nn.Module], None] = lambda model: None,
    **config: Any,
) -> tuple[list[Step], list[float]]:
    """Steps of `RLOOTrainer`, and its advantages."""
    options = {
        "beta": 0.0,
        "max_completion_length": 64,
        "num_iterations": steps,
        "reward_weights": list(batch.weights),
        "shuffle_dataset": False,
    }
    trainer = _GivenRollouts(
        model,
        reward_funcs=_reward_functions(batch),
        args=RLOOConfig(str(folder), **_COMMON | _batching(batch, steps=steps, accumulate=accumulate) | options | config),
        train_dataset=_prompts(batch),
        processing_class=tiny_tokenizer(),
    )
    trainer.batch = batch
    return _recorded(trainer, move), advantages(trainer)


def _batching(batch: Batch, *, steps: int, accumulate: int) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": len(batch.rollouts) // accumulate,
        "gradient_accumulation_steps": accumulate,
        "num_generations": batch.group_size,
        "max_steps": steps,
    }


def _prompts(batch: Batch) -> Dataset:
    return Dataset.from_dict({"prompt": [group.prompt.row for group in batch.groups]})


def _keys(prompts: Sequence[str]) -> list[tuple[str, int]]:
    """The k-th time a prompt comes, its k-th rollout."""
    seen: dict[str, int] = defaultdict(int)
    keys = []
    for prompt in prompts:
        keys.append((prompt, seen[prompt]))
        seen[prompt] += 1
    return keys


def _places(batch: Batch) -> list[tuple[str, int]]:
    return [(group.prompt.row, rollout.sample) for group in batch.groups for rollout in group.rollouts]


def _given_rollouts(batch: Batch) -> Callable[[list[str], Any], dict[str, Any]]:
    """A `rollout_func`."""
    rollouts = dict(zip(_places(batch), batch.rollouts, strict=True))

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
        chosen = [rollouts[key].segments for key in _keys(prompts)]
        return {
            "prompt_ids": [list(prompt.token_ids) for prompt, *_ in chosen],
            "completion_ids": [[token for turn in turns for token in turn.token_ids] for _, *turns in chosen],
            "logprobs": None,
            "env_mask": [[int(turn.source is Source.MODEL) for turn in turns for _ in turn.token_ids] for _, *turns in chosen],
        }

    return rollout_func


def _reward_functions(batch: Batch) -> list[Callable[..., list[float | None]]]:
    def function(number: int) -> Callable[..., list[float | None]]:
        values = dict(zip(_places(batch), batch.rewards[:, number].tolist(), strict=True))

        def reward(prompts: list[str], **kwargs: Any) -> list[float | None]:
            return [None if math.isnan(values[key]) else values[key] for key in _keys(prompts)]

        reward.__name__ = f"reward_{number}"
        return reward

    return [function(number) for number in range(len(batch.weights))]


# supervised fine-tuning -------------------------------------------------------------------------------------------------------------


def sft_trainer(
    model: nn.Module, rows: Sequence[dict[str, Any]], folder: Path, *, rows_per_micro_batch: int, tokenizer: Any = None, **config: Any
) -> SFTTrainer:
    """`SFTTrainer` whose first optimizer step sees all rows."""
    batching = {
        "per_device_train_batch_size": rows_per_micro_batch,
        "gradient_accumulation_steps": len(rows) // rows_per_micro_batch,
        "max_steps": 1,
    }
    assert len(rows) % rows_per_micro_batch == 0
    return SFTTrainer(
        model,
        args=SFTConfig(str(folder), **_COMMON | batching | config),
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=tokenizer or tiny_tokenizer(),
    )


def sft_step(trainer: SFTTrainer) -> Step:
    return _recorded(trainer, lambda model: None)[0]
