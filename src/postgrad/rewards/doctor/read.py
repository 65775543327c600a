"""Finds out what a path holds, and reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from postgrad.errors import DataError, RecipeError
from postgrad.rewards.doctor.foreign import is_verl, observe_jsonl, observe_trl, observe_verl
from postgrad.rewards.doctor.lines import read_lines
from postgrad.rewards.doctor.observed import Observed, outcome_bounds
from postgrad.rewards.doctor.recompute import scheme_of
from postgrad.rewards.doctor.run_files import is_run, observe_run
from postgrad.rewards.ledger import weighted_total
from postgrad.suggest import did_you_mean

UNEXPLAINED = (
    "the advantages do not follow from these rewards and weights, so fixes that need them are not recomputed: other weights, a column that "
    "is no reward (--weight NAME=0), rewards of single turns, or abstentions that were counted as 0"
)
ACCEPTED = "a run directory, a .jsonl as docs/doctor.md describes it, TRL's output_dir (completions/*.parquet), or verl's rollout_data_dir"


def observe(path: Path, *, outcome: Collection[str] = (), weights: Mapping[str, float] | None = None) -> Observed:
    """Read a run. outcome, weights: what the files do not say of the rewards, by name.

    Raises `DataError` when nothing that can be read is there, `RecipeError` for a name that is no reward of the run.
    """
    observed = declare(_observe(path), outcome=outcome, weights=weights or {})
    if observed.method in ("ppo", "dpo", "reward", "sft") or not np.abs(np.nan_to_num(observed.advantages)).any() or scheme_of(observed):
        return observed
    return dataclasses.replace(observed, remarks=(*observed.remarks, UNEXPLAINED))


def _observe(path: Path) -> Observed:
    if not path.exists():
        raise DataError("does not exist", where=str(path), hint=f"pass {ACCEPTED}")
    if path.is_dir():
        return _observe_folder(path)
    if path.suffix == ".parquet":
        return observe_trl(path, [path], [])
    if path.name == "trainer_state.json":
        return observe_trl(path, [], [path])
    return _observe_lines(path, [path])


def _observe_folder(path: Path) -> Observed:
    if is_run(path):
        return observe_run(path)
    tables = sorted(path.glob("completions_*.parquet")) or sorted((path / "completions").glob("*.parquet"))
    states = sorted(path.glob("trainer_state.json")) + sorted(path.glob("checkpoint-*/trainer_state.json"), key=_number)
    if tables or states:
        return observe_trl(path, tables, states)
    files = sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")], key=_number)
    if not files:
        raise DataError("holds nothing that can be examined", where=str(path), hint=f"pass {ACCEPTED}")
    return _observe_lines(path, files)


def _number(path: Path) -> tuple[int, str]:
    """Files named after steps in the order of the steps."""
    name = path.parent.name if path.name == "trainer_state.json" else path.name
    digits = "".join(c for c in name.split(".")[0].rpartition("-")[2] if c.isdigit())
    return (int(digits) if digits else -1, name)


def _observe_lines(path: Path, files: list[Path]) -> Observed:
    rows = [row for file in files for row in read_lines(file)]
    if not rows:
        raise DataError("is empty", where=str(path), hint=f"pass {ACCEPTED}")
    return observe_verl(path, rows) if is_verl(rows[0][1]) else observe_jsonl(path, rows)


def declare(observed: Observed, *, outcome: Collection[str], weights: Mapping[str, float]) -> Observed:
    """The same run with other weights and roles of the rewards."""
    if not outcome and not weights:
        return observed
    names = [reward.name for reward in observed.rewards]
    if unknown := [name for name in (*outcome, *weights) if name not in names]:
        hint = did_you_mean(unknown[0], names, f"it has: {', '.join(names) or 'none'}")
        raise RecipeError(f"no reward {unknown[0]!r} in this run", where="--outcome, --weight", hint=hint)
    rewards = tuple(
        dataclasses.replace(r, weight=weights.get(r.name, r.weight), role="outcome" if r.name in outcome else r.role or "shaping")
        for r in observed.rewards
    )
    changed = dataclasses.replace(observed, rewards=rewards)
    if weights:
        changed = dataclasses.replace(changed, totals=weighted_total(observed.values, changed.weights, observed.group_size))
    return dataclasses.replace(changed, bounds=outcome_bounds(rewards, changed.outcome))
