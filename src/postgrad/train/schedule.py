"""The learning rate of each step."""

from __future__ import annotations

import math

from postgrad.train.recipe import Optimizer


def learning_rate(step: int, total: int, optimizer: Optimizer) -> float:
    """Learning rate of optimizer step `step` (1-based) of `total`: linear warm-up, then constant, linear or cosine decay to 0.

    >>> [learning_rate(step, 10, Optimizer(learning_rate=1.0, warmup_steps=2)) for step in (1, 2, 10)]
    [0.5, 1.0, 1.0]
    """
    peak, warmup = optimizer.learning_rate, optimizer.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup - 1) / max(1, total - warmup)
    if optimizer.schedule == "linear":
        return peak * (1.0 - done)
    if optimizer.schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * done))
    return peak
