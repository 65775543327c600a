"""What a preference run logs, and what its numbers mean: said once, when it shows.

Finding D1: both log-probs fall while the margin rises; the loss is stuck at ln 2; the preference is saturated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from postgrad import formulas
from postgrad.protocols import BackwardResult
from postgrad.rewards.doctor.observed import WINDOW_STEPS
from postgrad.rewards.doctor.preference import dpo_notes
from postgrad.train.recipe import DPOLoss
from postgrad.train.statistics import wilson
from postgrad.types import TrainRow

WINDOW = WINDOW_STEPS
"""Steps whose means the findings look at."""
PAIR_SUMS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected")


PER_TOKEN = ("simpo", "orpo")
"""Losses that compare answers by their mean log-prob per token."""


def gains(policy: Tensor, reference: Tensor, tokens: Tensor, loss: DPOLoss) -> Tensor:
    """[N] rewards of answers as the loss compares them, from summed log-probs: per token where it divides by the length."""
    whole = formulas.implicit_reward(policy, reference, beta=loss.beta)
    return whole / tokens if not loss.needs_reference and loss.kinds.keys() & set(PER_TOKEN) else whole


def step_metrics(result: BackwardResult, count: int) -> dict[str, float]:
    """Means over the pairs (or answers) of a step."""
    means = {name: result.sums[name] / count for name in PAIR_SUMS if name in result.sums}
    return {"loss": result.loss, "entropy": result.sums["entropy"] / max(result.sums["tokens"], 1.0)} | means


def evaluation_metrics(rows: Sequence[TrainRow], logprobs: Sequence[Sequence[float]], loss: DPOLoss) -> dict[str, float]:
    """Held-out pairs: accuracy (how often the chosen answer gained more on the reference) with its 95 % interval, and means."""
    policy = torch.tensor([sum(values) for values in logprobs], dtype=torch.float64)
    known = [sum(row.per_token["reference_logprobs"]) if loss.needs_reference else 0.0 for row in rows]
    reference = torch.tensor(known, dtype=torch.float64)
    tokens = torch.tensor([row.trained_tokens for row in rows])
    gain = gains(policy, reference, tokens, loss)
    chosen, rejected = gain[0::2], gain[1::2]
    right = wilson(float((chosen > rejected).sum()), len(chosen))
    return {
        "eval/rewards/accuracies": right.mean,
        "eval/rewards/accuracies_low": right.low,
        "eval/rewards/accuracies_high": right.high,
        "eval/rewards/margins": float((chosen - rejected).mean()),
        "eval/logps/accuracies": float((policy[0::2] > policy[1::2]).double().mean()),
        "eval/logps/chosen": float(policy[0::2].mean()),
        "eval/logps/rejected": float(policy[1::2].mean()),
        "eval/pairs": float(len(chosen)),
    }


class Watch:
    """Looks at the last steps and says, once each, what a reader of the log should know."""

    def __init__(self, loss: DPOLoss, note: Callable[[str], None]) -> None:
        self._loss, self._note = loss, note
        self._steps: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self._said: list[str] = []

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        self._steps.append({name: metrics[name] for name in ("loss", *PAIR_SUMS) if name in metrics})
        if len(self._steps) == WINDOW:
            for name, text in self._findings():
                if name not in self._said:
                    self._said.append(name)
                    self._note(f"step {step}: {text}")

    def _findings(self) -> list[tuple[str, str]]:
        """(name, what it is and what to do), over the window."""
        loss = self._loss
        notes = dpo_notes(list(self._steps), sigmoid="sigmoid" in loss.kinds, needs_reference=loss.needs_reference, beta=loss.beta)
        return [(note.name, note.text) for note in notes]

    def state(self) -> dict[str, Any]:
        return {"steps": list(self._steps), "said": self._said}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._steps = deque(state["steps"], maxlen=WINDOW)
        self._said = list(state["said"])
