"""Reads what others write: the doctor's own JSONL (docs/doctor.md), TRL's completions and trainer state, verl's rollout files.

TRL    `log_completions=True` writes completions/completions_00010.parquet with the columns step, prompt, completion, one per reward
       function, `log_extra` columns, advantage; checkpoints hold trainer_state.json with the logged numbers.
verl   `trainer.rollout_data_dir` gets STEP.jsonl with input, output, gts, score, step, and what the reward function returned beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from postgrad.errors import DataError, reason
from postgrad.rewards.doctor.assemble import About, Sample, Sampled, assemble, facts_of_text, finite_metrics
from postgrad.rewards.doctor.lines import Record
from postgrad.rewards.doctor.observed import Failure, Metrics, NonFinite, Observed, RewardInfo
from postgrad.rewards.doctor.run_files import flat, nan, read_metrics, reward_info

Row = tuple[str, Record]
VERIFIERS = ("acc", "accuracy", "correct")
"""Names under which verl's reward functions return a second verdict beside the score."""

# the doctor's own form ------------------------------------------------------------------------------------------------------------------


def observe_jsonl(path: Path, rows: Sequence[Row]) -> Observed:
    """Lines of three kinds: {"run": …}, {"step": …, "metrics": …}, and rollouts {"step": …, "group": …, "rewards": …}."""
    run: Mapping[str, Any] = {}
    rollouts: list[Row] = []
    numbers: list[Record] = []
    failures: list[Failure] = []
    for where, record in rows:
        try:
            if "run" in record:
                run = {**run, **record["run"]}
            elif "metrics" in record:
                numbers.append({**record["metrics"], "step": int(record["step"])})
            else:
                rollouts.append((where, record))
                failures += _failures(where, record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"cannot be read: {error!r}", where=where, hint="see docs/doctor.md for the three kinds of lines") from error
    try:
        rewards = tuple(reward_info(entry) for entry in run.get("rewards", ()))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError(
            f"run.rewards cannot be read: {error!r}", where=str(path), hint="name, weight, role, range; see docs/doctor.md"
        ) from error
    metrics, nonfinite = read_metrics(numbers)
    unit = "tokens" if any("tokens" in record for _, record in rollouts) else "characters"
    about = About(
        source=str(path), method=str(run.get("method", "")), rewards=rewards, metrics=metrics, failures=tuple(failures),
        nonfinite=tuple(nonfinite), settings=flat(run.get("settings", {})), length_unit=unit,
    )  # fmt: skip
    return assemble(_grouped(rollouts, key=lambda record: str(record["group"]), sample=_plain_sample, by_name=True), about)


def _plain_sample(record: Record) -> Sample:
    text = record.get("text")
    length = record.get("tokens", None if text is None else len(text))
    return Sample(
        rewards={str(name): nan(value) for name, value in record["rewards"].items()}, total=nan(record.get("total")),
        advantage=nan(record.get("advantage")), length=nan(length), truncated=nan(record.get("truncated")),
        verifier=nan(record.get("verifier")), text=None if text is None else facts_of_text(text),
    )  # fmt: skip


def _failures(where: str, record: Record) -> Iterator[Failure]:
    for name, kind in (record.get("failures") or {}).items():
        yield Failure(int(record["step"]), name, str(kind), str(record.get("group", where)), int(record.get("sample", -1)))


def _grouped(
    rows: Iterable[Row], *, key: Callable[[Record], str], sample: Callable[[Record], Sample], by_name: bool = False
) -> Iterator[Sampled]:
    """Rows with the same step and key, in the order in which they come. A group is shown by its key, or by its first row's place."""
    groups: dict[tuple[int, str], list[Sample]] = {}
    places: dict[tuple[int, str], str] = {}
    for where, record in rows:
        try:
            place = (int(record["step"]), key(record))
            groups.setdefault(place, []).append(sample(record))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            hint = "a rollout has step, group and rewards; see docs/doctor.md"
            raise DataError(f"is no rollout: {error!r}", where=where, hint=hint) from error
        places.setdefault(place, where)
    for (step, name), samples in groups.items():
        yield Sampled(step, name if by_name else places[step, name], tuple(samples))


# verl -----------------------------------------------------------------------------------------------------------------------------------


def is_verl(record: Record) -> bool:
    return {"input", "output", "score"} <= record.keys()


def observe_verl(path: Path, rows: Sequence[Row]) -> Observed:
    """The score is the outcome; a verdict that was returned beside it (acc) is the second verifier."""
    remarks = ("lengths are in characters; advantages are not in the file",)
    about = About(str(path), rewards=(RewardInfo("score", 1.0, "outcome"),), length_unit="characters", remarks=remarks)
    return assemble(_grouped(rows, key=lambda record: str(record["input"]), sample=_verl_sample), about)


def _verl_sample(record: Record) -> Sample:
    text = str(record["output"])
    second = next((record[name] for name in VERIFIERS if isinstance(record.get(name), bool | int | float)), None)
    return Sample({"score": nan(record["score"])}, length=float(len(text)), verifier=nan(second), text=facts_of_text(text))


# TRL ------------------------------------------------------------------------------------------------------------------------------------


def observe_trl(path: Path, tables: Sequence[Path], states: Sequence[Path]) -> Observed:
    """Completions (may be none) and the newest trainer state (may be missing)."""
    metrics, nonfinite = _trainer_state(states[-1]) if states else ((), [])
    rows = [row for table in tables for row in _parquet(table)]
    names = _reward_columns(rows, metrics)
    rewards = tuple(RewardInfo(name) for name in names)
    remarks = (
        ["lengths are in characters; weights are taken to be 1, and no role is known (--outcome NAME, --weight NAME=NUMBER)"]
        if rows
        else []
    )
    about = About(
        str(path), "grpo" if rows else "", rewards, metrics, (), tuple(nonfinite), length_unit="characters", remarks=tuple(remarks)
    )
    groups = _grouped(
        rows,
        key=lambda record: json.dumps(record["prompt"], ensure_ascii=False, default=str),
        sample=lambda record: _trl_sample(record, names),
    )
    return assemble(groups, about)


def _parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot be read: {reason(error)}", where=str(path), hint="the file is damaged or no parquet") from error
    if missing := {"step", "prompt", "completion"} - set(table.column_names):
        raise DataError(f"has no column {sorted(missing)[0]}", where=str(path), hint="TRL writes it with log_completions=True")
    return [(f"{path.name}:{number}", record) for number, record in enumerate(table.to_pylist(), start=1)]


def _reward_columns(rows: Sequence[Row], metrics: Metrics) -> list[str]:
    """The columns whose mean TRL logged; without its log every numeric column between completion and advantage."""
    if not rows:
        return []
    logged = {name for _, numbers in metrics for name in numbers}
    if told := [name for name in rows[0][1] if f"rewards/{name}/mean" in logged]:
        return told
    names = [name for name in rows[0][1] if name not in ("step", "prompt", "completion", "advantage")]
    return [n for n in names if all(r.get(n) is None or (isinstance(r[n], int | float) and not isinstance(r[n], bool)) for _, r in rows)]


def _trl_sample(record: Record, names: Sequence[str]) -> Sample:
    text = message_text(record["completion"])
    rewards = {name: nan(record.get(name)) for name in names}
    return Sample(rewards, advantage=nan(record.get("advantage")), length=float(len(text)), text=facts_of_text(text))


def message_text(completion: Any) -> str:
    """The text of a completion: a string, or the contents of its messages."""
    if isinstance(completion, str):
        return completion
    parts = [message.get("content") or "" for message in completion or () if isinstance(message, Mapping) and message.get("role") != "tool"]
    return "\n".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts)


def _trainer_state(path: Path) -> tuple[Metrics, list[NonFinite]]:
    """log_history: numbers per step, evaluations with the prefix eval_."""
    try:
        history = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        by_step: dict[int, dict[str, float]] = {}
        nonfinite: list[NonFinite] = []
        for entry in history:
            numbers, bad = finite_metrics(int(entry["step"]), entry)
            by_step.setdefault(int(entry["step"]), {}).update({_own_name(name): value for name, value in numbers.items()})
            nonfinite += bad
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"holds no log_history: {error!r}", where=str(path), hint="pass TRL's output_dir") from error
    return tuple(sorted(by_step.items())), nonfinite


def _own_name(name: str) -> str:
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else name
