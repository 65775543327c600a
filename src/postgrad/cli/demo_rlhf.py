"""`postgrad demo rlhf`: SFT, pairs of the SFT model's own answers, a reward model, PPO; judged on questions that nothing was trained on.

1. write the task's files   2. run the stages of rlhf.yaml   3. judge the SFT model and the PPO model   4. show it
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from postgrad.cli.chapter import folder_of, percent, plain, prepared, watching
from postgrad.cli.console import PlainReporter, duration, stderr, stdout, table
from postgrad.demo import rlhf
from postgrad.rollout.record import group_to_json
from postgrad.train.evaluate import Evaluation, kl_to
from postgrad.train.recipe import Pipeline, PPORecipe
from postgrad.train.recipe_file import LoadedRecipe
from postgrad.train.run import evaluate, run
from postgrad.train.run_directory import read_jsonl
from postgrad.train.stages import stage_recipe
from postgrad.train.statistics import Interval, wilson

SIZES = {"sft": 240, "train": 240, "heldout": 120}
QUICK_SIZES = {"sft": 240, "train": 48, "heldout": 24}
QUICK = (
    "stages.sft.max_steps=6", "stages.pairs.batch.prompts=24", "stages.reward.max_steps=4", "stages.reward.evaluation.rows=16",
    "stages.ppo.max_steps=2", "stages.ppo.batch.prompts=12",
)  # fmt: skip
MODELS = {"sft": "after SFT", "ppo": "after PPO"}
MEASURES = {
    "reward_model": "reward model's score",
    "courteous": "courteous % (annotator)",
    "informative": "passes the sentence on %",
}


@dataclass(frozen=True)
class Row:
    """One model on the held-out questions. kl: nats per answer to the SFT model, from the answers that this model sampled."""

    model: str
    measures: dict[str, Interval]
    kl: Interval | None
    tokens: float


@dataclass(frozen=True)
class Story:
    """What the demo has to tell."""

    pairs: dict[str, int]
    ranked: tuple[Interval, Interval]
    rows: tuple[Row, ...]
    answers: tuple[tuple[str, str, str], ...]
    """question, answer after SFT, answer after PPO"""


def run_rlhf(*, quick: bool, seed: int, run_dir: Path | None, overwrite: bool, json_output: bool) -> None:
    started = time.monotonic()
    folder = folder_of("demo-rlhf", run_dir, quick=quick, overwrite=overwrite)
    loaded = _prepare(folder, seed=seed, quick=quick)
    stderr.print(f"SmolLM2-135M, courteous and curt answers. Everything is written to {folder}", markup=False)
    with watching() as watcher:
        run(loaded, watcher)
        story = _story(loaded, folder, watcher)
    seconds = time.monotonic() - started
    if json_output:
        print(json.dumps(asdict(story) | {"folder": str(folder), "seconds": round(seconds, 1)}, ensure_ascii=False, indent=1))
        return
    _print(story, folder, seconds)


def _prepare(folder: Path, *, seed: int, quick: bool) -> LoadedRecipe:
    sizes = QUICK_SIZES if quick else SIZES
    overrides = QUICK if quick else ()
    return prepared(folder, "rlhf.yaml", lambda base: rlhf.write(base, seed, **sizes), seed=seed, overrides=overrides)


def _story(loaded: LoadedRecipe, folder: Path, watcher: PlainReporter) -> Story:
    assert isinstance(loaded.recipe, Pipeline)
    stages = {name: Path(stage.run_dir) for name, stage in loaded.recipe.stages.items()}
    judged = {name: _judged(name, loaded, folder, watcher) for name in MODELS}
    rows = tuple(_row(MODELS[name], record) for name, record in judged.items())
    return Story(_pairs(stages["pairs"]), _ranked(stages["reward"]), rows, _three(judged["sft"]["groups"], judged["ppo"]["groups"]))


def _judged(stage: str, loaded: LoadedRecipe, folder: Path, watcher: PlainReporter) -> dict[str, Any]:
    """The stage's model on the held-out questions; what was judged once is read from its file."""
    path = folder / "evaluations" / f"{stage}.json"
    if not path.exists():
        watcher.note(f"judging the model {MODELS[stage]} on held-out questions (sampled at temperature 1)")
        assert isinstance(loaded.recipe, Pipeline)
        recipe = stage_recipe(loaded.recipe, loaded.recipe.stages["ppo"])
        assert isinstance(recipe, PPORecipe)
        model = str(Path(loaded.recipe.stages[stage].run_dir) / "model")
        result = evaluate(recipe, loaded.base, model=model, data="heldout.jsonl", reporter=watcher)
        kl = None if stage == "sft" else kl_to(recipe.model, result, recipe)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(_record(result, kl), ensure_ascii=False), encoding="utf-8")
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def _record(result: Evaluation, kl: Interval | None) -> dict[str, Any]:
    return {
        "measures": {name: asdict(result.rewards[name]) for name in MEASURES},
        "kl": None if kl is None else asdict(kl),
        "tokens": result.metrics["eval/completions/mean_length"],
        "groups": [group_to_json(group) for group in result.groups],
    }


def _row(model: str, record: dict[str, Any]) -> Row:
    measures = {name: Interval(**value) for name, value in record["measures"].items()}
    return Row(model, measures, None if record["kl"] is None else Interval(**record["kl"]), record["tokens"])


def _pairs(run_dir: Path) -> dict[str, int]:
    """What became of the prompts, as the stage itself counted it."""
    event = [record for record in read_jsonl(run_dir / "events.jsonl") if record["event"] == "pairs"][-1]
    return {name: int(event.get(name, 0)) for name in ("train", "heldout", "tied", "too_few", "unreadable", "answers_cut")}


def _ranked(run_dir: Path) -> tuple[Interval, Interval]:
    """Held-out pairs that the reward model ranks right, before and after."""
    steps = [record for record in read_jsonl(run_dir / "metrics.jsonl") if "eval/pairs" in record]
    first, last = (wilson(round(step["eval/accuracy"] * step["eval/pairs"]), int(step["eval/pairs"])) for step in (steps[0], steps[-1]))
    return first, last


def _three(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> tuple[tuple[str, str, str], ...]:
    """The first three questions, whatever was answered."""
    return tuple((old["prompt"]["columns"]["question"], _answer(old), _answer(new)) for old, new in zip(before[:3], after[:3], strict=True))


def _answer(group: dict[str, Any]) -> str:
    return group["rollouts"][0]["text"].strip() or "(nothing)"


# ---- what is shown


def _print(story: Story, folder: Path, seconds: float) -> None:
    pairs, (before, after) = story.pairs, story.ranked
    without = ", ".join(f"{pairs[name]} {name.replace('_', ' ')}" for name in ("tied", "too_few", "unreadable", "answers_cut"))
    stdout.print(f"pairs of the SFT model's own answers: {pairs['train']}, held out {pairs['heldout']} ({without})", markup=False)
    title = f"held-out pairs ranked right, % (n = {after.count}, prompts that the reward model never saw, 95 % intervals)"
    stdout.print(table(title, ["", "before", "after"], [["reward model", percent(before), percent(after)]]))
    stdout.print()
    count = story.rows[0].measures["courteous"].count
    title = f"held-out questions (n = {count}, other subjects and wordings, sampled at temperature 1, 95 % intervals)"
    columns = ["", *MEASURES.values(), "KL to the SFT model, nats per answer", "tokens"]
    stdout.print(table(title, columns, [_line(row) for row in story.rows]))
    stdout.print()
    for question, old, new in story.answers:
        stdout.print(question, style="bold", markup=False)
        stdout.print(table("", list(MODELS.values()), [[old, new]]))
        stdout.print()
    stdout.print(
        f"written to {folder}: task/ (data, recipe, annotator), run/STAGE (rollouts, metrics, pairs, models), evaluations/", markup=False
    )
    stdout.print(f"took {duration(seconds)}", markup=False)


def _line(row: Row) -> list[str]:
    score, *shares = (row.measures[name] for name in MEASURES)
    return [row.model, plain(score), *(percent(share) for share in shares), plain(row.kl) if row.kl else "0", f"{row.tokens:.1f}"]
