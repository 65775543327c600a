"""Turns a validated recipe into the objects that a method works with: policy, engine, sampler, data, tools, rewards.

Everything that can be wrong with files, columns and names is found here, before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from postgrad.chat.format import ChatFormat
from postgrad.data.prepare import prepare_prompts, prepare_sft
from postgrad.data.report import DataReport
from postgrad.data.rows import load_rows
from postgrad.errors import RecipeError
from postgrad.models.engine import LocalEngine, OptimizerConfig
from postgrad.models.loading import LanguageModel, load
from postgrad.models.lora import LoraSettings, reference_of
from postgrad.models.sampler import LocalSampler
from postgrad.models.saving import save
from postgrad.protocols import SamplingParams
from postgrad.rewards.load import LoadedReward, check_columns, load_rewards
from postgrad.rollout.agent import RolloutConfig
from postgrad.rollout.tools import Toolbox, load_tools
from postgrad.train.recipe import Base, GRPORecipe, SFTRecipe
from postgrad.types import Message, Prompt, ToolSpec, TrainRow


@dataclass(frozen=True)
class Policy:
    """The model that is trained, and how conversations become its tokens."""

    model: LanguageModel
    chat: ChatFormat
    notes: str = ""

    def export(self, folder: Path) -> None:
        save(self.model, folder, notes=self.notes)

    def sampler(self, *, max_batch: int = 256, on_progress: Callable[[int, int], None] | None = None) -> LocalSampler:
        """A sampler over the live weights; bf16 decoding where the trainer computes in bf16."""
        return LocalSampler(
            self.model.model, decode=self.chat.decode, dtype=self.model.autocast, max_batch=max_batch, on_progress=on_progress
        )


def load_policy(recipe: Base) -> Policy:
    adapter = recipe.adapter
    lora = None
    if adapter is not None:
        lora = LoraSettings(rank=adapter.rank, alpha=adapter.alpha, dropout=adapter.dropout, targets=adapter.targets)
    model = load(recipe.model, adapter=lora, dtype=recipe.dtype, seed=recipe.seed)
    return Policy(model=model, chat=ChatFormat(model.tokenizer, stop_ids=model.stop_ids), notes=recipe.notes)
