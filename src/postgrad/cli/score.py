"""`postgrad score`: a reward model on rows of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from postgrad.cli.console import number, stderr
from postgrad.errors import DataError


def run_score(model: str, file: str, *, columns: dict[str, str | list[str]], json_output: bool) -> None:
    from postgrad.data import load_rows
    from postgrad.models.locate import locate
    from postgrad.train.model_rewards import load_scorer

    rows = load_rows(file, columns=columns)
    folder = Path(model) / "model"
    scorer = load_scorer(str(folder) if folder.is_dir() else str(locate(model).folder))
    records = list(_paired(scorer, rows) if rows.format == "preference" else _single(scorer, rows))
    for record in records:
        print(json.dumps(record, ensure_ascii=False) if json_output else _line(record))
    if rows.format == "preference":
        _summary(records)


def _paired(scorer: Any, rows: Any) -> Iterator[dict[str, Any]]:
    from postgrad.data import prepare_preferences

    data = prepare_preferences(rows, scorer.chat, max_length=2**31)
    ids = [pair.prompt_ids + answer.token_ids for pair in data.pairs for answer in (pair.chosen, pair.rejected)]
    scores = scorer.scores(ids)
    for pair, chosen, rejected in zip(data.pairs, scores[0::2], scores[1::2], strict=True):
        yield {"row": pair.name, "chosen": chosen, "rejected": rejected, "margin": chosen - rejected}


def _single(scorer: Any, rows: Any) -> Iterator[dict[str, Any]]:
    from postgrad.data.examples import effective_text_prompts, training_example
    from postgrad.data.formats import ACCEPTED
    from postgrad.data.messages import BadRow

    if rows.format not in set(ACCEPTED["sft"]) - {"tokens", "text"}:
        hint = "give messages, a prompt with a completion, or preference pairs"
        raise DataError(f"{rows.format} rows hold no answer to score", where=rows.name, hint=hint)
    named, ids = [], []
    for row in rows.read():
        try:
            example = training_example(row, rows.format, effective_text_prompts("chat", scorer.chat))
        except BadRow as error:
            raise DataError(str(error), where=row.name, hint="every row needs a prompt and an answer") from None
        named.append(row.name)
        ids.append(scorer.raw_ids(*example.raw) if example.raw is not None else scorer.ids(example.messages, example.tools))
    for name, score in zip(named, scorer.scores(ids), strict=True):
        yield {"row": name, "score": score}


def _line(record: dict[str, Any]) -> str:
    return "  ".join([record["row"], *(f"{name} {number(value)}" for name, value in record.items() if name != "row")])


def _summary(records: list[dict[str, Any]]) -> None:
    from postgrad.train.statistics import wilson

    right = wilson(sum(record["margin"] > 0 for record in records), len(records))
    shown = f"{100 * right.mean:.1f} % [{100 * right.low:.1f}, {100 * right.high:.1f}]"
    stderr.print(f"the chosen answer scores higher in {shown} of {right.count} pairs", markup=False)
