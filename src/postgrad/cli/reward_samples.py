"""Good answers for `postgrad rewards`: from the rows of a data file, or from rollouts that a run wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from postgrad.data import RowSource
from postgrad.data.examples import prompt_example, training_example
from postgrad.data.files import Row, read_chunks
from postgrad.data.formats import detect
from postgrad.data.messages import BadRow, read_messages
from postgrad.errors import DataError
from postgrad.rewards.check import Draft, Sample
from postgrad.rollout.record import group_from_json
from postgrad.types import Message, Prompt, Rollout

GOLD_COLUMNS = ("completion", "chosen", "solution", "answer", "output", "response", "target", "gold", "ground_truth", "label")
"""Columns that hold a good answer, the first of a row that has it."""


def samples_of(rows: RowSource, *, gold: str | None, most: int) -> list[Sample]:
    """At most `most` rows, spread over the file, each with its own good answer.

    gold: the column that holds it, as text, a message or messages; None = the turns after the last user message, or the first of
    `GOLD_COLUMNS`. Raises `DataError` when a row has none.
    """
    read = rows.read()
    return [_sample(row, gold) for row in spread(read, most)]


def spread(items: Sequence[Any], most: int) -> list[Any]:
    count = min(len(items), most)
    return [items[number * len(items) // count] for number in range(count)] if count else []


def _sample(row: Row, gold: str | None) -> Sample:
    try:
        prompt, messages = _prompt(row)
        if gold is not None or not messages:
            messages = _gold(row, gold)
    except BadRow as error:
        raise DataError(str(error), where=row.name) from None
    return Sample(prompt, Draft(messages))


def _prompt(row: Row) -> tuple[Prompt, tuple[Message, ...]]:
    """The prompt with its columns, and the turns after the last user message where the row is a conversation."""
    format = detect(row.fields)
    if format is None or format in ("rollouts", "tokens", "text"):
        raise BadRow(f"{format or 'these'} rows hold no prompts for a reward to judge answers to")
    if format == "preference":
        format = "prompt"
    if format in ("messages", "sharegpt"):
        messages = training_example(row, format, "chat").messages
        start = max((index for index, message in enumerate(messages) if message.role == "user"), default=-1) + 1
        columns = {name: value for name, value in row.fields.items() if name not in ("messages", "conversations")}
        return Prompt(row.name, messages[:start], columns), messages[start:]
    example = prompt_example(row, format, "chat")
    if format == "question+calls":
        return Prompt(row.name, example.messages, example.columns), training_example(row, format, "chat").messages[len(example.messages) :]
    return Prompt(row.name, example.messages, example.columns, example.raw_text), ()


def _gold(row: Row, column: str | None) -> tuple[Message, ...]:
    names = GOLD_COLUMNS if column is None else (column,)
    name = next((name for name in names if row.fields.get(name) is not None), None)
    if name is None:
        what = f"there is no column {column!r}" if column else "the row has no good answer"
        hint = f"name its column with --gold; the columns are {', '.join(row.fields)}; or pass rollouts with --rollouts"
        raise DataError(what, where=row.name, hint=hint)
    value = row.fields[name]
    listed = [value] if isinstance(value, Mapping) else value
    if isinstance(listed, list) and listed and all(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in listed):
        return read_messages(listed)
    return (Message("assistant", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)),)


def samples_of_rollouts(path: Path, *, most: int) -> list[Sample]:
    """The best rollout of each prompt by its total, or the first where a file has no scores. path: a file, a run directory, or a folder."""
    files = _rollout_files(path) if path.is_dir() else [path]
    if not files:
        raise DataError("the folder holds no rollouts", where=str(path), hint="name a file of rollouts/, or a run directory")
    best: dict[str, tuple[float, Sample]] = {}
    for file in files:
        for record in _records(file):
            group = group_from_json(record)
            place, total = _best(record.get("scores") or [])
            if group.prompt.row not in best or total > best[group.prompt.row][0]:
                best[group.prompt.row] = total, Sample(group.prompt, _draft(group.rollouts[place]))
    if not best:
        raise DataError("no rollouts", where=str(path), hint="a line of a rollout file has a prompt and its rollouts")
    return spread([sample for _, sample in best.values()], most)


def _rollout_files(folder: Path) -> list[Path]:
    """Those of a run directory lie in its `rollouts/`; another folder is looked through."""
    inside = folder / "rollouts"
    return sorted(file for kind in ("*.jsonl", "*.jsonl.gz") for file in (inside if inside.is_dir() else folder).rglob(kind))


def _records(file: Path) -> Iterator[Mapping[str, Any]]:
    for chunk in read_chunks(file):
        for item in chunk.rows():
            if isinstance(item, Row) and isinstance(item.fields.get("rollouts"), list) and item.fields["rollouts"]:
                yield item.fields


def _best(scores: Sequence[Mapping[str, Any]]) -> tuple[int, float]:
    """(place, total) of the highest total; the first rollout where nothing was scored."""
    totals = [-math.inf if score.get("total") is None else float(score["total"]) for score in scores]
    return (totals.index(max(totals)), max(totals)) if totals else (0, -math.inf)


def _draft(rollout: Rollout) -> Draft:
    errors = tuple((index, result.error) for index, result in enumerate(rollout.tool_results) if result.error)
    return Draft(rollout.messages, rollout.stop, errors)
