"""`postgrad demo hacking|sparsity|collapse|conflict`: a trap of reward design, named by the doctor, and the remedy that it names.

1. write the task's files   2. train `before` and `after` from one warm start   3. ask the doctor about both   4. show it

The recipes of `before` and `after` differ only in the remedy, at the same number of rollouts. Both evaluate on held-out questions before
their first and after their last step, so the numbers of the table are those that the runs wrote.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from postgrad.cli.chapter import folder_of, percent, prepared, watching
from postgrad.cli.console import duration, stderr, stdout, table
from postgrad.demo.traps import weekdays
from postgrad.rewards.doctor import Diagnosis, Finding, Skipped, examine, observe
from postgrad.rewards.doctor.finding import Result
from postgrad.rewards.doctor.render import WORDS, fix_line, line_of, summary
from postgrad.rewards.doctor.run_files import flat
from postgrad.train.recipe import GRPORecipe, Pipeline
from postgrad.train.recipe_file import LoadedRecipe
from postgrad.train.run import run
from postgrad.train.run_directory import RunDirectory
from postgrad.train.statistics import Interval

T = TypeVar("T")
STAGES = ("before", "after")
QUICK = tuple(f"stages.{stage}.{key}" for stage in STAGES for key in ("max_steps=2", "evaluation.rows=24"))


@dataclass(frozen=True)
class Trap:
    """One chapter.

    title:    what the trap is called.          check: the doctor's check that is to name it.
    remedies: (check, recipe key) of the fixes that the `after` recipe follows.
    watched:  checks whose numbers are compared.
    measures: what is read off the held-out questions, by reward.
    """

    title: str
    check: str
    remedies: tuple[tuple[str, str], ...]
    watched: tuple[str, ...]
    measures: Mapping[str, str]


TRAPS = {
    "hacking": Trap(
        "reward hacking", "R18", (("R18", "rewards"),), ("R18", "R12"),
        {"right": "right day %", "mentioned": "right day mentioned %"},
    ),
    "sparsity": Trap(
        "reward sparsity", "R9", (("R9", "rewards"),), ("R9", "R1"),
        {"counted": "counted without a mistake %", "progress": "part of the way counted %"},
    ),
    "collapse": Trap(
        "GRPO collapse", "R1", (("R1", "rollout.temperature"), ("R1", "rollout.group_size")), ("R1", "R13"),
        {"right": "right day %", "on_the_way": "days on the way named %"},
    ),
    "conflict": Trap(
        "conflicting rewards", "R5", (("R5", "rewards"),), ("R5", "R4"),
        {"right": "right day %", "shows_work": "as many days as on the way %"},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """What the doctor says under one check: its number, and passed, skipped, or how grave it is."""

    check: str
    title: str
    value: float | None
    verdict: str


@dataclass(frozen=True)
class Side:
    """A run: the doctor's readings over all of it and over its last two windows, its summary, the line of the check that is to name the
    trap ("" when it passed), and a question of the last step with its answer."""

    readings: tuple[Reading, ...]
    at_the_end: tuple[Reading, ...]
    summary: str
    named: str
    sample: tuple[str, str]


@dataclass(frozen=True)
class Story:
    """What the chapter has to tell. heldout: by measure, after the warm start, before and after the remedy; tokens likewise."""

    before: Side
    after: Side
    remedies: tuple[str, ...]
    changed: tuple[str, ...]
    heldout: dict[str, tuple[Interval, Interval, Interval]]
    tokens: tuple[float, float, float]


def run_trap(name: str, *, quick: bool, seed: int, run_dir: Path | None, overwrite: bool, json_output: bool) -> None:
    started = time.monotonic()
    folder = folder_of(f"demo-{name}", run_dir, quick=quick, overwrite=overwrite)
    overrides = QUICK if quick else ()
    loaded = prepared(folder, f"traps/{name}.yaml", lambda base: weekdays.write(base, seed), seed=seed, overrides=overrides)
    stderr.print(f"SmolLM2-135M, which weekday is it in n days? Everything is written to {folder}", markup=False)
    with watching() as watcher:
        run(loaded, watcher)
    story = story_of(TRAPS[name], loaded)
    seconds = time.monotonic() - started
    if json_output:
        print(json.dumps(asdict(story) | {"folder": str(folder), "seconds": round(seconds, 1)}, ensure_ascii=False, indent=1))
        return
    show(TRAPS[name], story)
    stdout.print(f"written to {folder}: task/ (data, recipe, rewards), run/before and run/after; try: postgrad doctor {folder}/run/before")
    stdout.print(f"took {duration(seconds)}", markup=False)


# ---- what is told


def story_of(trap: Trap, loaded: LoadedRecipe) -> Story:
    """Read off the finished runs."""
    assert isinstance(loaded.recipe, Pipeline)
    recipes = [recipe for stage in STAGES if isinstance(recipe := loaded.recipe.stages[stage], GRPORecipe)]
    runs = [RunDirectory(Path(recipe.run_dir)) for recipe in recipes]
    diagnoses = [examine(observe(run.path)) for run in runs]
    before, after = (_side(trap, diagnosis, run) for diagnosis, run in zip(diagnoses, runs, strict=True))
    first, last = ([record for record in run.metrics() if "eval/reward" in record] for run in runs)
    shown = (first[0], first[-1], last[-1])
    count = recipes[0].evaluation.rows or 0
    heldout = {name: _three(_interval(record, name, count) for record in shown) for name in trap.measures}
    tokens = _three(float(record["eval/completions/mean_length"]) for record in shown)
    return Story(before, after, followed(trap, diagnoses[0]), changes(*recipes), heldout, tokens)


def followed(trap: Trap, diagnosis: Diagnosis) -> tuple[str, ...]:
    """The fixes, in the doctor's words, that the `after` recipe follows; those that it did not name on this run are left out."""
    fixes = {(finding.id, fix.key): f"{finding.id}: {fix_line(fix)}" for finding in diagnosis.findings for fix in reversed(finding.fixes)}
    return tuple(fixes[remedy] for remedy in trap.remedies if remedy in fixes)


def changes(before: GRPORecipe, after: GRPORecipe) -> tuple[str, ...]:
    """`rollout.temperature: 0.2 → 1.0`, for every key in which two recipes differ."""
    old, new = (flat(recipe.model_dump(mode="json", exclude={"run_dir"})) for recipe in (before, after))
    return tuple(f"{key}: {_shown(key, old[key])} → {_shown(key, new[key])}" for key in old if old[key] != new[key])


def _shown(key: str, value: Any) -> str:
    if key != "rewards":
        return str(value)
    return ", ".join(f"{reward['weight']:g} × {reward['name'] or reward['use'].rpartition(':')[2]}" for reward in value if reward["weight"])


def _side(trap: Trap, diagnosis: Diagnosis, run: RunDirectory) -> Side:
    observed = diagnosis.observed
    last = len(observed.windows) - 1
    end = examine(observed.join(max(0, last - 1), last))
    named = next((line_of(finding) for finding in diagnosis.findings if finding.id == trap.check), "")
    group = run.read_rollouts(observed.step_range[1])[0]
    sample = group["prompt"]["messages"][-1]["content"], group["rollouts"][0]["text"].strip()
    return Side(_readings(trap, diagnosis), _readings(trap, end), summary(diagnosis), named, sample)


def _readings(trap: Trap, diagnosis: Diagnosis) -> tuple[Reading, ...]:
    results: tuple[Result, ...] = (*diagnosis.findings, *diagnosis.passed, *diagnosis.skipped)
    return tuple(_reading(item) for check in trap.watched for item in results if item.id == check)


def _reading(item: Result) -> Reading:
    if isinstance(item, Skipped):
        return Reading(item.id, item.title, None, "skipped")
    verdict = WORDS[item.severity].lower() if isinstance(item, Finding) else "passed"
    value = item.evidence.get("value")
    return Reading(item.id, item.title, None if value is None or math.isnan(value) else value, verdict)


def _interval(record: Mapping[str, Any], reward: str, count: int) -> Interval:
    mean, low, high = (float(record[f"eval/rewards/{reward}/{end}"]) for end in ("mean", "low", "high"))
    return Interval(mean, low, high, count)


def _three(values: Iterable[T]) -> tuple[T, T, T]:
    one, two, three = values
    return one, two, three


# ---- what is shown


def show(trap: Trap, story: Story) -> None:
    stdout.print(f"the trap: {trap.title}", style="bold", markup=False)
    stdout.print(f"the doctor on `before`: {story.before.named or f'does not name it here ({trap.check} passed)'}", markup=False)
    for remedy in story.remedies:
        stdout.print(f"it says what to change: {remedy}", markup=False)
    for change in story.changed:
        stdout.print(f"changed in `after`: {change}", markup=False)
    stdout.print()
    columns = (story.before.readings, story.before.at_the_end, story.after.readings, story.after.at_the_end)
    rows = [[f"{item[0].check} {item[0].title}", *map(_number, item)] for item in zip(*columns, strict=True)]
    heads = ["check", "before", "before, at the end", "after", "after, at the end"]
    stdout.print(table("the doctor's numbers: where they were worst, and in the last two windows", heads, rows))
    for name, side in zip(STAGES, (story.before, story.after), strict=True):
        stdout.print(f"all checks on {name}: {side.summary}", markup=False)
    stdout.print()
    lines = [[label, *map(percent, story.heldout[name])] for name, label in trap.measures.items()]
    lines.append(["tokens per answer", *(f"{value:.1f}" for value in story.tokens)])
    count = next(iter(story.heldout.values()))[0].count
    title = f"held-out questions (n = {count}, other wordings and other days, greedy, 95 % intervals)"
    stdout.print(table(title, ["", "warm start", "before", "after"], lines))
    stdout.print()
    for name, side in zip(STAGES, (story.before, story.after), strict=True):
        stdout.print(f"{name}, last step: {side.sample[0]}", style="bold", markup=False)
        stdout.print(f"  {side.sample[1] or '(nothing)'}", markup=False)


def _number(reading: Reading) -> str:
    return reading.verdict if reading.value is None else f"{reading.value:.2f} {reading.verdict}"
