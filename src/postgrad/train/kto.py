"""KTO: learn from single answers labelled desirable or undesirable (arXiv 2402.01306).

    answers ─ data ─▶ ① draw a batch ─▶ ② reference log-probs, and the KL from answers of other prompts ─▶ ③ loss ─▶ ④ update

② The KL is the mean of log π(y')/π_ref(y') over the batch's prompts, each with an answer to another prompt; no gradient goes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postgrad import formulas
from postgrad.data import LabelledAnswer
from postgrad.errors import DataError, RecipeError
from postgrad.protocols import Engine, LossFunction, Rows
from postgrad.train.loop import Timer
from postgrad.train.order import CountedBatches
from postgrad.train.pairs import answer_row
from postgrad.train.recipe import DPOLoss, DPORecipe
from postgrad.train.schedule import learning_rate
from postgrad.train.setup import Policy
from postgrad.train.statistics import wilson
from postgrad.types import TrainRow


def answer_rows(answers: Sequence[LabelledAnswer], reference: Sequence[Sequence[float]] | None = None) -> list[TrainRow]:
    return [
        answer_row(item.prompt_ids, item.answer, index, group=None, reference=None if reference is None else reference[index])
        for index, item in enumerate(answers)
    ]


def mismatched(answers: Sequence[LabelledAnswer], others: Iterable[LabelledAnswer] = ()) -> list[LabelledAnswer]:
    """Each prompt with the next answer of the batch (after the last comes the first) that belongs to another prompt.

    A pair's two answers belong to one prompt, so the next row is not always one. Without another prompt in the batch: of `others`.
    """
    pairs = []
    for index, item in enumerate(answers):
        candidates = chain(answers[index + 1 :], answers[:index], others)
        other = next(candidate for candidate in candidates if candidate.prompt_ids != item.prompt_ids)
        pairs.append(LabelledAnswer(item.name, item.prompt_ids, other.answer, item.label))
    return pairs


def kto_loss(labels: Sequence[bool], kl: float, loss: DPOLoss, *, answers: float) -> LossFunction:
    """The mean over the batch's answers of `formulas.kto_loss`."""
    desirable = torch.tensor(labels)

    def function(logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        policy = torch.where(rows.mask, logprobs, 0.0).sum(1)
        reference = torch.where(rows.mask, rows.per_token["reference_logprobs"], 0.0).sum(1)
        good = desirable.to(policy.device)[rows.per_row["index"].long()]
        each = formulas.kto_loss(
            policy, reference, good, torch.tensor(kl, device=policy.device), beta=loss.beta, desirable_weight=loss.desirable_weight,
            undesirable_weight=loss.undesirable_weight,
        )  # fmt: skip
        with torch.no_grad():
            gain = formulas.implicit_reward(policy, reference, beta=loss.beta)
            sums = {
                "chosen": gain[good].sum(),
                "rejected": gain[~good].sum(),
                "logps_chosen": policy[good].sum(),
                "logps_rejected": policy[~good].sum(),
            }
        return each.sum() / answers, sums

    return function


class KTO:
    """One run over labelled answers; see `loop.Method`."""

    headline: tuple[str, ...] = ("loss", "rewards/margins", "rewards/chosen", "rewards/rejected", "kl", "grad_norm")

    def __init__(
        self,
        recipe: DPORecipe,
        policy: Policy,
        engine: Engine,
        train: Sequence[LabelledAnswer],
        heldout: Sequence[LabelledAnswer],
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        if recipe.batch.pairs < 2:
            raise RecipeError("kto needs at least 2 answers in a batch: the KL comes from other prompts' answers", key="batch.pairs")
        first = train[0].prompt_ids
        if all(item.prompt_ids == first for item in train):
            raise DataError("all answers belong to one prompt: kto compares with answers to other prompts", key="data.train")
        self.recipe, self.policy, self.engine = recipe, policy, engine
        self.train, self.heldout = train, heldout
        self.timer = Timer()
        self.batches = CountedBatches(len(train), recipe.batch.pairs, recipe.seed, recipe.data.shuffle, recipe.max_steps, recipe.epochs)
        self.total_steps = self.batches.steps
        self._balance(note)

    def _balance(self, note: Callable[[str], None]) -> None:
        """The paper asks for weights whose product with the counts is about equal on both sides."""
        good = sum(item.label for item in self.train)
        bad = len(self.train) - good
        loss = self.recipe.loss
        if not good or not bad:
            note(f"all {len(self.train)} answers are {'desirable' if good else 'undesirable'}: the model only learns in one direction")
        elif not 0.75 <= (ratio := loss.desirable_weight * good / (loss.undesirable_weight * bad)) <= 4 / 3:
            key, weight = ("undesirable", loss.undesirable_weight * ratio) if ratio > 1 else ("desirable", loss.desirable_weight / ratio)
            note(
                f"{good} desirable and {bad} undesirable answers weigh {ratio:.2f} to 1; the paper asks for 1 to 1 up to 4 to 3: "
                f"e.g. loss.{key}_weight: {weight:.2f}"
            )

    def step(self, step: int) -> dict[str, float]:
        answers = [self.train[index] for index in self.batches.batch(step)]  # ①
        with self.timer.part("reference"):
            rows = self._rows(answers)  # ②
            kl = self._kl(answers)
        with self.timer.part("train"):
            count = self.engine.global_sum(float(len(answers)))
            loss = kto_loss([item.label for item in answers], kl, self.recipe.loss, answers=count)
            result = self.engine.forward_backward(rows, loss)  # ③
            update = self.engine.optimizer_step(learning_rate(step, self.total_steps, self.recipe.optimizer))  # ④
        good = sum(item.label for item in answers)
        bad = len(answers) - good
        means = {"loss": result.loss, "entropy": result.sums["entropy"] / result.sums["tokens"], "kl": max(kl, 0.0)}
        if good:
            means |= {"rewards/chosen": result.sums["chosen"] / good, "logps/chosen": result.sums["logps_chosen"] / good}
        if bad:
            means |= {"rewards/rejected": result.sums["rejected"] / bad, "logps/rejected": result.sums["logps_rejected"] / bad}
        if good and bad:
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return (
            means
            | {
                "grad_norm": update.grad_norm,
                "learning_rate": update.learning_rate,
                "epoch": self.batches.epoch(step),
                "num_tokens": float(sum(len(row.token_ids) for row in rows)),
            }
            | self.timer.take()
        )

    def _rows(self, answers: Sequence[LabelledAnswer]) -> list[TrainRow]:
        return answer_rows(answers, self.engine.logprobs(answer_rows(answers), model="reference"))

    def _kl(self, answers: Sequence[LabelledAnswer]) -> float:
        rows = answer_rows(mismatched(answers, self.train))
        sums = [sum(map(sum, self.engine.logprobs(rows, model=model))) for model in ("policy", "reference")]
        return (sums[0] - sums[1]) / len(rows)

    def evaluate(self, step: int) -> dict[str, float]:
        """How often a held-out answer gained on the reference when it is desirable, and lost when it is not."""
        if not self.heldout:
            return {}
        with self.timer.part("evaluate"):
            rows = answer_rows(self.heldout)
            policy, reference = (self.engine.logprobs(rows, model=model) for model in ("policy", "reference"))
        gains = [sum(a) - sum(b) for a, b in zip(policy, reference, strict=True)]
        right = wilson(sum((gain > 0) == item.label for gain, item in zip(gains, self.heldout, strict=True)), len(gains))
        return {
            "eval/rewards/accuracies": right.mean,
            "eval/rewards/accuracies_low": right.low,
            "eval/rewards/accuracies_high": right.high,
            "eval/answers": float(len(gains)),
        }

    def state(self) -> dict[str, Any]:
        """Nothing: which answers a step takes follows from its number."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        pass

    def export(self, folder: Path) -> None:
        self.policy.export(folder, {"Method": f"KTO, {self.total_steps} steps", "Notes": self.recipe.notes})
