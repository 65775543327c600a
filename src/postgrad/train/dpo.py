"""Direct preference optimisation and its relatives: learn from pairs of answers to one prompt, or from labelled answers.

    pairs ─ data ─▶ ① draw a batch ─▶ ② reference log-probs ─▶ ③ loss of the pairs ─▶ ④ update

②  The reference is the policy as it was at the start: a frozen copy, or the adapter switched off; or its log-probs, computed once.
③  `formulas.dpo_loss`: −log σ(β·[log(π_θ(chosen)/π_ref(chosen)) − log(π_θ(rejected)/π_ref(rejected))]), and its relatives (`losses_of`);
   several of them are added with weights (MPO, arXiv 2411.10442).

Where this deviates from a literal reading of the article: the sigmoid loss is never negative. It starts at ln 2 = 0.693 and falls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postgrad import formulas
from postgrad.data import Pair
from postgrad.protocols import BackwardResult, Engine, Loss, Rows
from postgrad.train.loop import Timer
from postgrad.train.order import CountedBatches
from postgrad.train.pairs import pair_rows, sides_of, token_counts
from postgrad.train.preference_metrics import Watch, evaluation_metrics, gains, step_metrics
from postgrad.train.recipe import DPOLoss, DPORecipe
from postgrad.train.schedule import learning_rate
from postgrad.train.setup import Policy
from postgrad.types import TrainRow

# ③ the loss ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PairNumbers:
    """What a loss sees of P pairs: log-probs summed over the answers' tokens, and token counts, all [P]. Reference-free: reference = 0."""

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_nll: Tensor
    """−Σ log π of the chosen answer, plain (not length-desensitised)."""


def losses_of(pairs: PairNumbers, loss: DPOLoss, kind: str) -> Tensor:
    """[P]: the loss named `kind` of each pair. `sft` (the chosen answers' mean negative log-likelihood) is added beside them."""
    counts = (pairs.chosen_tokens, pairs.rejected_tokens)
    if kind == "simpo":
        return formulas.simpo_loss(pairs.chosen, pairs.rejected, *counts, beta=loss.beta, gamma=loss.gamma)
    if kind == "cpo":
        return formulas.cpo_loss(pairs.chosen, pairs.rejected, beta=loss.beta)
    if kind == "orpo":
        return formulas.orpo_loss(pairs.chosen, pairs.rejected, *counts)
    averaged = {"chosen_tokens": pairs.chosen_tokens, "rejected_tokens": pairs.rejected_tokens} if kind in ("ipo", "sigmoid_norm") else {}
    return formulas.dpo_loss(
        pairs.chosen, pairs.rejected, pairs.reference_chosen, pairs.reference_rejected, beta=loss.beta, loss=kind,
        label_smoothing=loss.label_smoothing, divergence=loss.divergence, **averaged,
    )  # fmt: skip


def pair_loss(loss: DPOLoss, *, pairs: float, chosen_tokens: float) -> Loss:
    """The mean over the batch's pairs of the weighted losses, plus `sft` as the mean over its chosen tokens."""

    def function(logprobs: Tensor, rows: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        numbers = pair_numbers(logprobs, rows, loss)
        total = logprobs.new_zeros(())
        for kind, weight in loss.kinds.items():
            if kind == "sft":
                total = total + weight * numbers.chosen_nll.sum() / chosen_tokens
            else:
                total = total + weight * losses_of(numbers, loss, kind).sum() / pairs
        return total, pair_sums(numbers, loss)

    return Loss(function, whole_groups=True, whole_batch=any(kind in formulas.WHOLE_BATCH_DPO_LOSSES for kind in loss.kinds))


def pair_numbers(logprobs: Tensor, rows: Rows, loss: DPOLoss) -> PairNumbers:
    """From per-token log-probs [R, L] to per-pair sums [P]."""
    sides = sides_of(rows)
    counts = token_counts(rows.mask)
    shared = torch.zeros_like(counts)
    shared[sides.chosen] = shared[sides.rejected] = torch.minimum(counts[sides.chosen], counts[sides.rejected])

    def summed(values: Tensor) -> Tensor:
        if loss.length_alpha == 1.0:
            return torch.where(rows.mask, values, 0.0).sum(1)
        return formulas.length_desensitized_sum(values, rows.mask, shared, alpha=loss.length_alpha)

    policy = summed(logprobs)
    reference = summed(rows.per_token["reference_logprobs"]) if loss.needs_reference else torch.zeros_like(policy)
    nll = -torch.where(rows.mask, logprobs, 0.0).sum(1)
    return PairNumbers(
        policy[sides.chosen], policy[sides.rejected], reference[sides.chosen], reference[sides.rejected], counts[sides.chosen],
        counts[sides.rejected], nll[sides.chosen],
    )  # fmt: skip


def pair_sums(pairs: PairNumbers, loss: DPOLoss) -> dict[str, Tensor]:
    """Sums over the pairs of what the metrics are means of."""
    with torch.no_grad():
        chosen = gains(pairs.chosen, pairs.reference_chosen, pairs.chosen_tokens, loss)
        rejected = gains(pairs.rejected, pairs.reference_rejected, pairs.rejected_tokens, loss)
        return {
            "rewards/chosen": chosen.sum(),
            "rewards/rejected": rejected.sum(),
            "rewards/margins": (chosen - rejected).sum(),
            "rewards/accuracies": (chosen > rejected).float().sum(),
            "logps/chosen": pairs.chosen.sum(),
            "logps/rejected": pairs.rejected.sum(),
        }


# one run ---------------------------------------------------------------------------------------------------------------------------


class DPO:
    """One run over preference pairs; see `loop.Method`. `reference[i]`: the reference's log-probs of pair i, if they were precomputed."""

    headline: tuple[str, ...] = ("loss", "rewards/accuracies", "rewards/margins", "logps/chosen", "grad_norm")

    def __init__(
        self,
        recipe: DPORecipe,
        policy: Policy,
        engine: Engine,
        train: Sequence[Pair],
        heldout: Sequence[Pair],
        *,
        reference: Sequence[Sequence[Sequence[float]]] | None = None,
        heldout_reference: Sequence[Sequence[Sequence[float]]] | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.recipe, self.policy, self.engine = recipe, policy, engine
        self.train, self.heldout = train, heldout
        self.reference, self.heldout_reference = reference, heldout_reference
        self.timer = Timer()
        self.watch = Watch(recipe.loss, note)
        self.batches = CountedBatches(len(train), recipe.batch.pairs, recipe.seed, recipe.data.shuffle, recipe.max_steps, recipe.epochs)
        self.total_steps = self.batches.steps

    def step(self, step: int) -> dict[str, float]:
        chosen = self.batches.batch(step)  # ①
        pairs = [self.train[index] for index in chosen]
        with self.timer.part("reference"):
            rows = self._rows(pairs, None if self.reference is None else [self.reference[index] for index in chosen])  # ②
        with self.timer.part("train"):
            result = self._backward(pairs, rows)  # ③
            update = self.engine.optimizer_step(learning_rate(step, self.total_steps, self.recipe.optimizer))  # ④
        metrics = step_metrics(result, len(pairs)) | {
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rate,
            "epoch": self.batches.epoch(step),
            "num_tokens": float(sum(len(row.token_ids) for row in rows)),
        }
        self.watch.see(step, metrics)
        return metrics | self.timer.take()

    def _rows(self, pairs: Sequence[Pair], known: Sequence[Sequence[Sequence[float]]] | None) -> list[TrainRow]:
        if not self.recipe.loss.needs_reference:
            return pair_rows(pairs)
        if known is None:
            return pair_rows(pairs, self.engine.logprobs(pair_rows(pairs), model="reference"))
        return pair_rows(pairs, [side for pair in known for side in pair])

    def _backward(self, pairs: Sequence[Pair], rows: Sequence[TrainRow]) -> BackwardResult:
        count = self.engine.global_sum(float(len(pairs)))
        tokens = self.engine.global_sum(float(sum(sum(pair.chosen.scored) for pair in pairs)))
        return self.engine.forward_backward(rows, pair_loss(self.recipe.loss, pairs=count, chosen_tokens=tokens))

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out accuracy with its interval, and the means that training logs."""
        if not self.heldout:
            return {}
        with self.timer.part("evaluate"):
            rows = self._rows(self.heldout, self.heldout_reference)
            return evaluation_metrics(rows, self.engine.logprobs(rows), self.recipe.loss)

    def state(self) -> dict[str, Any]:
        return {"watch": self.watch.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.watch.load_state(state["watch"])

    def export(self, folder: Path) -> None:
        kinds = " + ".join(f"{weight:g} {kind}" if weight != 1.0 else kind for kind, weight in self.recipe.loss.kinds.items())
        self.policy.export(folder, {"Method": f"DPO ({kinds}), {self.total_steps} steps", "Notes": self.recipe.notes})
