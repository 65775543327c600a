"""`postgrad demo preferences`: a reward model and a DPO policy learn one preference; held-out pairs before and after, with intervals."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from postgrad.cli.chapter import folder_of, percent, prepared, watching
from postgrad.cli.console import duration, stderr, stdout, table
from postgrad.demo import preferences
from postgrad.train.recipe import Pipeline
from postgrad.train.run import run
from postgrad.train.run_directory import read_jsonl
from postgrad.train.statistics import Interval, wilson

QUICK = ("stages.reward.max_steps=6", "stages.dpo.max_steps=6", "stages.reward.evaluation.rows=24", "stages.dpo.evaluation.rows=24")


@dataclass(frozen=True)
class Row:
    """What one measure says of the held-out pairs before and after: the share that it ranks right."""

    stage: str
    measure: str
    before: Interval
    after: Interval


def run_preferences(*, quick: bool, seed: int, run_dir: Path | None, overwrite: bool, json_output: bool) -> None:
    started = time.monotonic()
    folder = folder_of("demo-preferences", run_dir, quick=quick, overwrite=overwrite)
    overrides = QUICK if quick else ()
    loaded = prepared(folder, "preferences.yaml", lambda base: preferences.write(base, seed), seed=seed, overrides=overrides)
    stderr.print(f"SmolLM2-135M, courteous and curt answers. Everything is written to {folder}", markup=False)
    with watching() as watcher:
        run(loaded, watcher)
    assert isinstance(loaded.recipe, Pipeline)
    rows = _rows({name: Path(stage.run_dir) for name, stage in loaded.recipe.stages.items()})
    if json_output:
        print(json.dumps({"rows": [asdict(row) for row in rows], "seconds": round(time.monotonic() - started, 1)}))
        return
    lines = [[row.stage, row.measure, percent(row.before), percent(row.after)] for row in rows]
    title = f"held-out pairs ranked right, % (n = {rows[0].after.count}, topics and phrases never trained on, 95 % intervals)"
    stdout.print(table(title, ["stage", "measure", "before", "after"], lines))
    stdout.print(f"written to {folder}; try: postgrad score {folder}/run/reward {folder}/task/heldout.jsonl", markup=False)
    stdout.print(f"took {duration(time.monotonic() - started)}", markup=False)


def _rows(stages: dict[str, Path]) -> list[Row]:
    reward, dpo = (_first_and_last(stages[name]) for name in ("reward", "dpo"))
    measures = [
        ("reward model", "the chosen answer scores higher", reward, "eval/accuracy"),
        ("DPO", "the policy finds the chosen answer likelier", dpo, "eval/logps/accuracies"),
        ("DPO", "the chosen answer gained more on the reference", dpo, "eval/rewards/accuracies"),
    ]
    return [Row(stage, measure, *(_share(step, name) for step in steps)) for stage, measure, steps, name in measures]


def _first_and_last(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    evaluated = [record for record in read_jsonl(run_dir / "metrics.jsonl") if "eval/pairs" in record]
    return evaluated[0], evaluated[-1]


def _share(record: dict[str, Any], name: str) -> Interval:
    return wilson(round(record[name] * record["eval/pairs"]), int(record["eval/pairs"]))
