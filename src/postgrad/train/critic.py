"""How good the critic is, and finding P1: said once, when it does not help."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from postgrad.rewards.doctor.policy import SETTLED

WINDOW = 10
"""Iterations whose mean explained variance the finding looks at."""
USELESS = 0.05
"""A critic that explains less of the returns than this is no better a baseline than their mean."""


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var(returns − values) / Var(returns): 1 is a perfect critic, 0 one that knows only the mean, below 0 one that is worse than that.

    0 where the returns do not vary.

    >>> import torch
    >>> round(explained_variance(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0])), 4)
    0.8571
    """
    spread = returns.var(correction=0).item()
    return 1 - (returns - values).var(correction=0).item() / spread if spread > 0 else 0.0


class CriticWatch:
    """P1: over `WINDOW` iterations in which returns varied, the critic explained (nearly) nothing of them."""

    def __init__(self, warmup_steps: int, note: Callable[[str], None]) -> None:
        self._warmup, self._note = warmup_steps, note
        self._seen: deque[float] = deque(maxlen=WINDOW)
        self._said = False
        self._widest = 0.0

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        spread = metrics["val/returns_std"]
        self._widest = max(self._widest, spread)
        if step <= self._warmup or spread <= SETTLED * self._widest:
            return
        self._seen.append(metrics["val/explained_variance"])
        explained = sum(self._seen) / WINDOW
        if len(self._seen) == WINDOW and explained < USELESS and not self._said:
            self._said = True
            self._note(
                f"step {step}: the critic explained {100 * explained:.0f} % of the variance of the returns over {WINDOW} iterations: the "
                "advantages are little better than the returns themselves; raise critic.learning_rate or critic.warmup_steps, or start it "
                "from a reward model (critic.model)"
            )

    def state(self) -> dict[str, Any]:
        return {"seen": list(self._seen), "said": self._said, "widest": self._widest}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._seen = deque(state["seen"], maxlen=WINDOW)
        self._said = bool(state["said"])
        self._widest = float(state["widest"])
