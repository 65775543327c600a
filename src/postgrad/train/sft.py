"""Supervised fine-tuning: cross-entropy on the tokens that the policy should learn to write.

    rows ─ data ─▶ TrainRows ─ ① draw a batch ─▶ ② masked cross-entropy ─▶ ③ update

The loss of a step is the mean over the trained tokens of the whole batch, however it is split into micro-batches (trl#2175).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from postgrad.errors import DataError
from postgrad.formulas import token_mean
from postgrad.protocols import BackwardResult, Engine, Loss, Rows
from postgrad.train.loop import Timer
from postgrad.train.order import Batches, CountedBatches, FilledBatches
from postgrad.train.recipe import SFTRecipe
from postgrad.train.schedule import learning_rate
from postgrad.train.setup import Policy
from postgrad.types import TrainRow

DEFAULT_ROWS = 8


def sft_loss(trained_tokens: float) -> Loss:
    """−(1 / N) Σ log π(token), N = trained tokens of the whole batch."""

    def loss(logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        return token_mean(-logprobs, rows.mask, denominator=trained_tokens), {}

    return Loss(loss, constant_gradient=True)


def batches_of(recipe: SFTRecipe, train: Sequence[TrainRow]) -> Batches:
    """Which rows each step takes: a number of them, or as many as fit into a number of tokens."""
    seed, shuffle, steps, epochs = recipe.seed, recipe.data.shuffle, recipe.max_steps, recipe.epochs
    if recipe.batch.tokens is None:
        return CountedBatches(len(train), recipe.batch.rows or DEFAULT_ROWS, seed, shuffle, steps, epochs)
    return FilledBatches([len(row.token_ids) for row in train], recipe.batch.tokens, seed, shuffle, steps, epochs)


def batch_notes(batches: Batches) -> list[str]:
    if not isinstance(batches, FilledBatches):
        return []
    return [f"steps of at most {batches.tokens} tokens hold {100 * batches.fullness():.1f} % of that in whole rows; no row is split"]


class SFT:
    """One SFT run over prepared rows; see `loop.Method`."""

    headline: tuple[str, ...] = ("loss", "entropy", "grad_norm", "trained_tokens")

    def __init__(self, recipe: SFTRecipe, policy: Policy, engine: Engine, train: Sequence[TrainRow], heldout: Sequence[TrainRow]) -> None:
        if not any(row.trained_tokens for row in train):
            raise DataError("no row has a trained token", key="data.train", hint="see `postgrad data show` for what is trained and why")
        self.recipe, self.policy, self.engine = recipe, policy, engine
        self.train, self.heldout = train, heldout
        self.timer = Timer()
        self.batches = batches_of(recipe, train)
        self.total_steps = self.batches.steps

    def step(self, step: int) -> dict[str, float]:
        batch = [self.train[index] for index in self.batches.batch(step)]  # ①
        with self.timer.part("train"):
            result = self._backward(batch)  # ②
            update = self.engine.optimizer_step(learning_rate(step, self.total_steps, self.recipe.optimizer))  # ③
        tokens = result.sums["tokens"]
        return {
            "loss": result.loss,
            "entropy": result.sums["entropy"] / tokens,
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rate,
            "epoch": self.batches.epoch(step),
            "trained_tokens": tokens,
            "num_tokens": float(sum(len(row.token_ids) for row in batch)),
        } | self.timer.take()

    def _backward(self, batch: Sequence[TrainRow]) -> BackwardResult:
        trained = self.engine.global_sum(float(sum(row.trained_tokens for row in batch)))
        return self.engine.forward_backward(batch, sft_loss(trained))

    def evaluate(self, step: int) -> dict[str, float]:
        """Mean loss over the trained tokens of the evaluation rows: a batch without any cannot turn it into NaN (trl#1053)."""
        if not self.heldout:
            return {}
        with self.timer.part("evaluate"):
            logprobs = self.engine.logprobs(self.heldout)
        tokens = sum(len(row) for row in logprobs)
        return {"eval/loss": -sum(sum(row) for row in logprobs) / tokens, "eval/trained_tokens": float(tokens)}

    def state(self) -> dict[str, Any]:
        """Nothing: which rows a step takes follows from its number."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        pass

    def export(self, folder: Path) -> None:
        self.policy.export(folder, {"Method": f"SFT, {self.total_steps} steps", "Notes": self.recipe.notes})
