"""`postgrad rewards ablate`: a run without one of its rewards: on its rollouts, in its gradient, in short runs of its recipe."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postgrad.cli.doctor import parse_weight
from postgrad.errors import RecipeError

if TYPE_CHECKING:
    from postgrad.train.ablation import Trained
    from postgrad.train.ablation.gradients import RunPulls


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line asks for. rewards: those to leave out; empty = each in turn. seeds, steps: of short runs."""

    rewards: Sequence[str]
    outcome: Sequence[str]
    weights: Sequence[str]
    gradient: bool
    at: str | None
    batch: int | None
    trained: bool
    seeds: int
    steps: int


def run_ablate(path: Path, asked: Asked, *, json_output: bool) -> None:
    """Print what was asked for. Without a model (no --gradient, no --trained) torch is not imported."""
    from postgrad.rewards.ablation import ablate, lines, to_json
    from postgrad.rewards.doctor import observe
    from postgrad.rewards.doctor.run_files import is_run

    if (asked.gradient or asked.trained) and not is_run(path):
        what = f"{'--gradient' if asked.gradient else '--trained'} needs a run directory of postgrad, with its recipe and model"
        raise RecipeError(what, where=str(path), hint="without it, ablation looks at anyone's rollouts")
    free = ablate(observe(path, outcome=asked.outcome, weights=dict(parse_weight(text) for text in asked.weights)), asked.rewards)
    record: dict[str, Any] = {"free": to_json(free)}
    _print(lines(free), json_output)
    if asked.gradient:
        record["gradient"] = _gradient(path, asked, json_output)
    if asked.trained:
        record["trained"] = _trained(path, asked, json_output)
    if json_output:
        print(json.dumps(record, ensure_ascii=False, indent=1, allow_nan=False))


def _print(lines: Iterator[str], json_output: bool) -> None:
    if not json_output:
        print("\n".join(lines), flush=True)


def _gradient(path: Path, asked: Asked, json_output: bool) -> dict[str, Any]:
    from postgrad.cli.console import stderr
    from postgrad.train.ablation.gradients import of_run, to_json

    if asked.at not in (None, "start", "final"):
        raise RecipeError(f"a run has no {asked.at!r}", where="--at", hint="start or final")
    at: Any = asked.at
    found = of_run(path, at=at, step=asked.batch, note=lambda text: stderr.print(f"note: {text}", markup=False))
    _print(_gradient_lines(found, asked.rewards), json_output)
    return to_json(found)


def _trained(path: Path, asked: Asked, json_output: bool) -> dict[str, Any]:
    from postgrad.cli.console import reporter
    from postgrad.train.ablation import ablate_by_training
    from postgrad.train.ablation.compare import to_json

    result = ablate_by_training(path, reporter(), dropped=asked.rewards, seeds=asked.seeds, steps=asked.steps)
    _print(_trained_lines(result), json_output)
    return to_json(result)


def _gradient_lines(found: RunPulls, wanted: Sequence[str]) -> Iterator[str]:
    from postgrad.rewards.check.report import table

    pulls = found.pulls
    weights = f"{found.trained_weights:,} {'adapter ' if found.adapter else ''}weights"
    yield ""
    yield f"gradients of the policy loss at {found.at}, on {found.rollouts} rollouts of step {found.step}; {weights}"
    yield f"its log-probs differ from the sampler's by {found.off_policy:.3g} nats per token on average; the ratio is taken to be 1"
    yield ""
    cells = [["gradient under", "norm", "share of norms", "part of the whole", *(f"cos {name}" for name in pulls.names), "cos all"]]
    for place, name in enumerate(pulls.names):
        if name in wanted or not wanted:
            sizes = [f"{pulls.norms[place]:.3g}", _percent(pulls.norm_shares[place]), _percent(pulls.parts[place])]
            cells.append([name, *sizes, *map(_cosine, pulls.cosines[place])])
    cells.append(["all", f"{pulls.total_norm:.3g}", "", "100 %", *map(_cosine, pulls.cosines[-1])])
    yield from table(cells)


def _trained_lines(result: Trained) -> Iterator[str]:
    from postgrad.rewards.check.report import table
    from postgrad.train.ablation.compare import sentence

    plan = result.plan
    for item in result.left_out:
        yield ""
        yield f"without {item.reward}: {plan.steps} steps, seeds {', '.join(map(str, plan.seeds))}; held-out prompts"
        cells = [["", "with all", "without", "difference", "95 % interval"]]
        for change in item.changes:
            gap = change.difference
            interval = f"[{gap.low:+.3f}, {gap.high:+.3f}]" + (" *" if change.visible else "  ")
            cells.append([change.behaviour, f"{change.with_all:.3f}", f"{change.without:.3f}", f"{gap.mean:+.3f}", interval])
        yield from table(cells)
        yield f"{item.reward}: {sentence(plan, item)}"
    yield ""
    yield f"each interval misses the truth once in twenty times; runs and result.json are in {plan.folder}"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.0f} %"


def _cosine(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"
