"""Reads a run directory of postgrad: resolved.json, metrics.jsonl, events.jsonl, rollouts/. It executes nothing of the user's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from postgrad.errors import DataError
from postgrad.rewards.doctor.assemble import About, Sample, Sampled, assemble, finite_metrics, text_facts
from postgrad.rewards.doctor.lines import Record, read_lines
from postgrad.rewards.doctor.observed import Failure, Metrics, NonFinite, Observed, RewardInfo

_TRUNCATED = ("turn_tokens", "total_tokens", "turns", "invalid_calls")


def is_run(path: Path) -> bool:
    return (path / "resolved.json").is_file()


def observe_run(path: Path) -> Observed:
    """One run. Raises `DataError` when its files cannot be read, or when it is a pipeline (its stages are runs)."""
    recipe = _recipe(path)
    events = list(_events(path))
    metrics, nonfinite = read_metrics(record for _, record in _optional(path / "metrics.jsonl"))
    about = About(
        source=str(path), method=str(recipe.get("method", "")), rewards=tuple(_rewards(recipe, events)), metrics=metrics,
        failures=tuple(failures_of(events)), nonfinite=tuple(nonfinite), settings=flat(recipe),
    )  # fmt: skip
    return assemble(_groups(path), about)


def _recipe(path: Path) -> Mapping[str, Any]:
    file = path / "resolved.json"
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        recipe: Mapping[str, Any] = record["recipe"]
        stages = recipe.get("stages")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"holds no recipe: {error!r}", where=str(file), hint="pass the run_dir of a recipe") from error
    if isinstance(stages, dict):
        last = path / Path(list(stages.values())[-1]["run_dir"]).name
        raise DataError("is a pipeline; its stages are the runs", where=str(path), hint=f"pass {last}")
    return recipe


def _optional(path: Path) -> Iterator[tuple[str, Record]]:
    return read_lines(path) if path.exists() else iter(())


def _events(path: Path) -> Iterator[Record]:
    return (record for _, record in _optional(path / "events.jsonl"))


def read_metrics(records: Iterable[Record]) -> tuple[Metrics, list[NonFinite]]:
    """(step, numbers) in order of the steps, and the numbers that are none."""
    steps: list[tuple[int, Mapping[str, float]]] = []
    nonfinite: list[NonFinite] = []
    for record in records:
        if isinstance(step := record.get("step"), int):
            numbers, bad = finite_metrics(step, record)
            steps.append((step, numbers))
            nonfinite += bad
    return tuple(sorted(steps, key=lambda item: item[0])), nonfinite


def failures_of(events: Iterable[Mapping[str, Any]]) -> Iterator[Failure]:
    for event in events:
        if event.get("event") == "reward_failure":
            yield Failure(
                int(event.get("step", 0)), str(event["reward"]), str(event.get("kind", "exception")), str(event.get("row", "")),
                int(event.get("sample", -1)), str(event.get("message", "")),
            )  # fmt: skip


def _rewards(recipe: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Iterator[RewardInfo]:
    """As the run recorded them when it started; of a run that did not, what the recipe says."""
    recorded = [event for event in events if event.get("event") == "rewards"]
    if recorded:
        for entry in recorded[-1]["rewards"]:
            yield reward_info(entry)
        return
    for entry in recipe.get("rewards") or ():
        name = entry.get("name") or str(entry["use"]).rpartition(":")[2]
        yield RewardInfo(name, float(entry.get("weight", 1.0)), entry.get("role"))


def reward_info(entry: Mapping[str, Any]) -> RewardInfo:
    ends = entry.get("range")
    role = entry.get("role")
    if role not in (None, "outcome", "shaping"):
        raise ValueError(f"role is outcome or shaping, got {role!r}")
    return RewardInfo(str(entry["name"]), float(entry.get("weight", 1.0)), role, None if ends is None else (float(ends[0]), float(ends[1])))


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested recipe keys with dots."""
    if isinstance(value, Mapping):
        items = ((f"{prefix}.{key}" if prefix else str(key), item) for key, item in value.items())
        return {key: leaf for name, item in items for key, leaf in flat(item, name).items()}
    return {prefix: value}


def _groups(path: Path) -> Iterator[Sampled]:
    for file in sorted((path / "rollouts").glob("step-*.jsonl.gz")):
        for where, record in read_lines(file):
            try:
                yield group_of(record)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                hint = "the rollout file is damaged, or of another version"
                raise DataError(f"is no group of rollouts: {error!r}", where=f"{file.parent / where}", hint=hint) from error


def group_of(record: Mapping[str, Any]) -> Sampled:
    """One line of a rollout file."""
    samples = [_sample(rollout, scores) for rollout, scores in zip(record["rollouts"], record["scores"], strict=True)]
    return Sampled(int(record["step"]), str(record["prompt"]["row"]), tuple(samples), trained=not record.get("dropped"))


def _sample(rollout: Mapping[str, Any], scores: Mapping[str, Any]) -> Sample:
    rows = [*rollout.get("forks", ()), rollout["segments"]]
    ids = [token for row in rows for segment in row if segment["source"] == "model" for token in segment["token_ids"]]
    called = any(result.get("call") for result in rollout.get("tool_results", ()))
    return Sample(
        rewards={name: nan(value) for name, value in scores["rewards"].items()},
        total=nan(scores.get("total")), advantage=nan(scores.get("advantage")), length=float(len(ids)),
        truncated=float(rollout["stop"] in _TRUNCATED), text=text_facts(ids, empty=not rollout["text"].strip() and not called),
        broken=rollout["stop"] == "infrastructure",
    )  # fmt: skip


def nan(value: Any) -> float:
    return math.nan if value is None else float(value)
