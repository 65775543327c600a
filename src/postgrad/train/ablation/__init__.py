"""Ablation that needs a model: `rewards.ablation` does what can be done without one.

gradients (which way each reward pulls) · plan, runs, compare (short runs, each without one reward)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from postgrad.train.ablation.compare import Trained, compared, to_json
from postgrad.train.ablation.plan import plan
from postgrad.train.ablation.runs import carry_out
from postgrad.train.files import write_json
from postgrad.train.loop import Reporter

__all__ = ["Trained", "ablate_by_training"]


def ablate_by_training(path: Path, reporter: Reporter, *, dropped: Sequence[str] = (), seeds: int = 3, steps: int = 20) -> Trained:
    """Plan, runs and comparison; the result is also written to RUN/ablation/N-steps/result.json."""
    planned = plan(path, dropped=dropped, seeds=seeds, steps=steps)
    result = Trained(planned, tuple(compared(planned, carry_out(planned, reporter))))
    write_json(planned.folder / "result.json", to_json(result))
    return result
