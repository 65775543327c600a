"""Reward modelling: a scalar head on a language model learns to score the chosen answer of a pair above the rejected one.

    pairs ─ data ─▶ ① draw a batch ─▶ ② scores of both sides ─▶ ③ −log σ(r_chosen − r_rejected) ─▶ ④ update

A score is read at the last token of prompt and answer, found by its place, never by its id: the padding id of many models is also the end
of every answer. Both sides of a pair share the computation of their prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postgrad import formulas
from postgrad.data import Pair
from postgrad.protocols import Engine, Loss, Rows
from postgrad.rewards.doctor.preference import FEWEST_PAIRS, reward_model_notes
from postgrad.train.loop import Timer
from postgrad.train.order import CountedBatches
from postgrad.train.pairs import scored_row, sides_of
from postgrad.train.recipe import RewardRecipe
from postgrad.train.schedule import learning_rate
from postgrad.train.setup import Policy
from postgrad.train.statistics import spearman, wilson
from postgrad.types import TrainRow


def score_rows(pairs: Sequence[Pair]) -> list[TrainRow]:
    """Two rows per pair, chosen first, each read at its last token."""
    rows = []
    for number, pair in enumerate(pairs):
        for side, answer in enumerate((pair.chosen, pair.rejected)):
            ids = pair.prompt_ids + answer.token_ids
            rows.append(scored_row(ids, 2 * number + side, group=number, shared=len(pair.prompt_ids)))
    return rows


def reward_loss(margins: Sequence[float | None], *, center_coef: float, pairs: float) -> Loss:
    """Mean over the batch's pairs of `formulas.bradley_terry_loss`. A pair without a margin has margin 0."""
    all_margins = torch.tensor([0.0 if margin is None else margin for margin in margins])

    def loss(values: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        sides = sides_of(rows)
        scores = values[:, 0]
        chosen, rejected = scores[sides.chosen], scores[sides.rejected]
        margin = all_margins.to(scores.device)[sides.pair]
        each = formulas.bradley_terry_loss(chosen, rejected, margin=margin, center_coef=center_coef)
        with torch.no_grad():
            sums = {
                "accuracy": (chosen > rejected).float().sum(),
                "margin": (chosen - rejected).sum(),
                "mean_reward": (chosen + rejected).sum() / 2,
                "square_reward": (chosen**2 + rejected**2).sum() / 2,
            }
        return each.sum() / pairs, sums

    return Loss(loss, whole_groups=True)


class RewardModelling:
    """One run over preference pairs; see `loop.Method`."""

    headline: tuple[str, ...] = ("loss", "accuracy", "margin", "mean_reward", "grad_norm")

    def __init__(
        self,
        recipe: RewardRecipe,
        policy: Policy,
        engine: Engine,
        train: Sequence[Pair],
        heldout: Sequence[Pair],
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.recipe, self.policy, self.engine = recipe, policy, engine
        self.train, self.heldout, self.note = train, heldout, note
        self.timer = Timer()
        self.batches = CountedBatches(len(train), recipe.batch.pairs, recipe.seed, recipe.data.shuffle, recipe.max_steps, recipe.epochs)
        self.total_steps = self.batches.steps

    def step(self, step: int) -> dict[str, float]:
        pairs = [self.train[index] for index in self.batches.batch(step)]  # ①
        count = self.engine.global_sum(float(len(pairs)))
        loss = reward_loss([pair.margin for pair in pairs], center_coef=self.recipe.loss.center_coef, pairs=count)
        rows = score_rows(pairs)
        with self.timer.part("train"):
            result = self.engine.forward_backward(rows, loss)  # ② ③
            update = self.engine.optimizer_step(learning_rate(step, self.total_steps, self.recipe.optimizer))  # ④
        means = {name: result.sums[name] / count for name in ("accuracy", "margin", "mean_reward", "square_reward")}
        variance = max(0.0, means.pop("square_reward") - means["mean_reward"] ** 2)
        return {
            "loss": result.loss,
            **means,
            "reward_std": math.sqrt(variance),
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rate,
            "epoch": self.batches.epoch(step),
            "num_tokens": float(sum(len(row.token_ids) - 1 for row in rows)),
        } | self.timer.take()

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out accuracy with its interval, margin, how scores follow length, and whether σ(margin) is an honest probability."""
        if not self.heldout:
            return {}
        with self.timer.part("evaluate"):
            values = [row[0] for row in self.engine.values(score_rows(self.heldout))]
        metrics = heldout_metrics(self.heldout, values, center_coef=self.recipe.loss.center_coef)
        self._judge(step, metrics)
        return metrics

    def _judge(self, step: int, metrics: Mapping[str, float]) -> None:
        """Finding M1, at the end."""
        if step == self.total_steps:
            for text in reward_model_findings(metrics):
                self.note(text)

    def state(self) -> dict[str, Any]:
        """Nothing: which pairs a step takes follows from its number."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        pass

    def export(self, folder: Path) -> None:
        self.policy.export(folder, {"Method": f"reward model, {self.total_steps} steps", "Notes": self.recipe.notes})


def heldout_metrics(pairs: Sequence[Pair], values: Sequence[float], *, center_coef: float) -> dict[str, float]:
    """`values`: scores of both sides, chosen first, pair by pair."""
    chosen, rejected = list(values[0::2]), list(values[1::2])
    margins = [a - b for a, b in zip(chosen, rejected, strict=True)]
    right = wilson(sum(margin > 0 for margin in margins), len(margins))
    lengths = [float(len(answer.token_ids)) for pair in pairs for answer in (pair.chosen, pair.rejected)]
    mean = sum(values) / len(values)
    asked = torch.tensor([pair.margin or 0.0 for pair in pairs])
    losses = formulas.bradley_terry_loss(torch.tensor(chosen), torch.tensor(rejected), margin=asked, center_coef=center_coef)
    return {
        "eval/accuracy": right.mean,
        "eval/accuracy_low": right.low,
        "eval/accuracy_high": right.high,
        "eval/loss": float(losses.mean()),
        "eval/margin": sum(margins) / len(margins),
        "eval/mean_reward": mean,
        "eval/reward_std": math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)),
        "eval/length_correlation": spearman(lengths, list(values)),
        "eval/calibration_error": calibration_error(margins),
        "eval/pairs": float(len(margins)),
    }


def calibration_error(margins: Sequence[float], bins: int = 10) -> float:
    """How far σ(|margin|), the model's confidence in the side it prefers, is from how often that side is the chosen one.

    The expected calibration error (Guo et al. 2017): weighted mean over equal bins of confidence. 0 is honest.
    """
    grouped: dict[int, list[tuple[float, bool]]] = {}
    for margin in margins:
        confidence = 1 / (1 + math.exp(-min(abs(margin), 50.0)))
        grouped.setdefault(min(bins - 1, int((confidence - 0.5) * 2 * bins)), []).append((confidence, margin > 0))
    gaps = (abs(sum(confidence for confidence, _ in group) - sum(right for _, right in group)) for group in grouped.values())
    return sum(gaps) / len(margins)


def reward_model_findings(metrics: Mapping[str, float]) -> list[str]:
    """M1: what the held-out pairs say about the finished model; nothing about fewer than `FEWEST_PAIRS` of them."""
    if metrics["eval/pairs"] < FEWEST_PAIRS:
        return [f"{metrics['eval/pairs']:.0f} held-out pairs are too few to judge the reward model by; hold out at least {FEWEST_PAIRS}"]
    return [note.text for note in reward_model_notes(metrics)]
