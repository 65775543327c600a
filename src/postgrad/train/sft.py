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
from postgrad.protocols import BackwardResult, Engine, LossFunction, Rows
from postgrad.train.loop import Timer
from postgrad.train.order import positions_in_run, row_at
from postgrad.train.recipe import SFTRecipe
from postgrad.train.schedule import learning_rate
from postgrad.train.setup import Policy
from postgrad.types import TrainRow


def sft_loss(trained_tokens: float) -> LossFunction:
    """−(1 / N) Σ log π(token), N = trained tokens of the whole batch."""

    def loss(logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        return token_mean(-logprobs, rows.mask, denominator=trained_tokens), {}

    return loss


class SFT:
    """One SFT run over prepared rows; see `loop.Method`."""

    headline: tuple[str, ...] = ("loss", "entropy", "grad_norm", "trained_tokens")

    def __init__(self, recipe: SFTRecipe, policy: Policy, engine: Engine, train: Sequence[TrainRow], heldout: Sequence[TrainRow]) -> None:
        if not any(row.trained_tokens for row in train):
            raise DataError("no row has a trained token", where="data.train", hint="see `postgrad data show` for what is trained and why")
        self.recipe, self.policy, self.engine = recipe, policy, engine
        self.train, self.heldout = train, heldout
        self.timer = Timer()
        self.total_steps, self.total_rows = positions_in_run(
            size=len(train), epochs=recipe.epochs, per_step=recipe.batch.rows, max_steps=recipe.max_steps
        )
        self.drawn = 0

    def step(self, step: int) -> dict[str, float]:
        batch = self._draw()  # ①
        with self.timer.part("train"):
            result = self._backward(batch)  # ②
            update = self.engine.optimizer_step(learning_rate(step, self.total_steps, self.recipe.optimizer))  # ③
        tokens = result.sums["tokens"]
        return {
            "loss": result.loss,
            "entropy": result.sums["entropy"] / tokens,
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rate,
            "epoch": self.drawn / len(self.train),
            "trained_tokens": tokens,
            "num_tokens": float(sum(len(row.token_ids) for row in batch)),
        } | self.timer.take()

    def _draw(self) -> list[TrainRow]:
        count = min(self.recipe.batch.rows, self.total_rows - self.drawn)
        positions = range(self.drawn, self.drawn + count)
        self.drawn += count
        size, seed, shuffle = len(self.train), self.recipe.seed, self.recipe.data.shuffle
        return [self.train[row_at(position, size=size, seed=seed, shuffle=shuffle)] for position in positions]

    def _backward(self, batch: Sequence[TrainRow]) -> BackwardResult:
        trained = self.engine.global_sum(float(sum(row.trained_tokens for row in batch)))
        return self.engine.forward_backward(batch, sft_loss(trained))

    def evaluation_due(self, step: int) -> bool:
        every = self.recipe.evaluation.every
        return bool(self.heldout) and (step == self.total_steps or (every is not None and step % every == 0))

    def evaluate(self, step: int) -> dict[str, float]:
        """Mean loss over the trained tokens of the evaluation rows: a batch without any cannot turn it into NaN (trl#1053)."""
        if not self.heldout:
            return {}
        with self.timer.part("evaluate"):
            logprobs = self.engine.logprobs(self.heldout)
        tokens = sum(len(row) for row in logprobs)
        return {"eval/loss": -sum(sum(row) for row in logprobs) / tokens, "eval/trained_tokens": float(tokens)}

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.drawn = int(state["drawn"])

    def export(self, folder: Path) -> None:
        self.policy.export(folder, {"Method": f"SFT, {self.total_steps} steps", "Notes": self.recipe.notes})
