"""`postgrad demo`: the whole line on this machine, from a model that cannot call a tool to one that does.

1. write the task's files   2. judge the base model   3. train the stages of recipe.yaml   4. judge after each   5. show it
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from postgrad.cli.chapter import folder_of, percent, prepared, watching
from postgrad.cli.console import PlainReporter, duration, stderr, stdout, table
from postgrad.demo import task
from postgrad.demo.shop import task as shop
from postgrad.rollout.record import group_to_json
from postgrad.train.evaluate import Evaluation
from postgrad.train.recipe import GRPORecipe, Pipeline
from postgrad.train.recipe_file import LoadedRecipe
from postgrad.train.run import evaluate, run
from postgrad.train.statistics import Interval, wilson
from postgrad.types import Rollout


@dataclass(frozen=True)
class Chapter:
    """One story.

    about:  the task in a few words.       write: puts its files into a folder.
    recipe: the pipeline, a file of postgrad.demo.
    after:  what a model is called after each of its stages; the last one is shown, on problems that differ in the column `kind`.
    """

    about: str
    write: Callable[..., object]
    kind: str
    recipe: str
    folder: str
    after: Mapping[str, str]
    quick: tuple[str, ...]


_SFT_GRPO = {"sft": "after SFT", "grpo": "after GRPO"}
_WORD_PROBLEMS = ("word problems, a calculator", task.write, "operator")
CHAPTERS = {
    "tools": Chapter(*_WORD_PROBLEMS, "recipe.yaml", "demo", _SFT_GRPO, ("stages.grpo.max_steps=3",)),
    "ppo": Chapter(
        *_WORD_PROBLEMS, "ppo.yaml", "demo-ppo", {**_SFT_GRPO, "ppo": "after PPO"}, ("stages.grpo.max_steps=2", "stages.ppo.max_steps=2")
    ),
    "shop": Chapter("a shop, two tools", shop.write, "item", "shop/recipe.yaml", "demo-shop", _SFT_GRPO, ("stages.grpo.max_steps=2",)),
}
SETS = {"heldout.jsonl": "held out", "unseen.jsonl": "unseen templates"}


@dataclass(frozen=True)
class Row:
    """One model on one set. `accuracy` is the reward named correctness; a call is well formed when the tool ran it."""

    model: str
    data: str
    well_formed: Interval
    accuracy: Interval
    tokens: float


def run_demo(name: str, *, quick: bool, seed: int, run_dir: Path | None, overwrite: bool, json_output: bool) -> None:
    started = time.monotonic()
    chapter = CHAPTERS[name]
    folder = folder_of(chapter.folder, run_dir, quick=quick, overwrite=overwrite)
    loaded = _prepare(chapter, folder, seed=seed, quick=quick)
    assert isinstance(loaded.recipe, Pipeline)
    recipe = loaded.recipe.stages["grpo"]
    assert isinstance(recipe, GRPORecipe)
    stderr.print(f"SmolLM2-135M, {chapter.about}. Everything is written to {folder}", markup=False)
    with watching() as watcher:
        judge = _Judge(recipe, loaded, folder, watcher, last=list(chapter.after.values())[-1], kind=chapter.kind)
        rows = judge.rows("base", _base_model(loaded.recipe))
        run(loaded, watcher)
        for stage, label in chapter.after.items():
            rows += judge.rows(label, str(Path(loaded.recipe.stages[stage].run_dir) / "model"))
    _print(rows, judge, folder, json_output=json_output, seconds=time.monotonic() - started)


def _base_model(pipeline: Pipeline) -> str:
    """The model that the first stage starts from."""
    return next(iter(pipeline.stages.values())).model


def _prepare(chapter: Chapter, folder: Path, *, seed: int, quick: bool) -> LoadedRecipe:
    sizes = {"heldout": 48, "unseen": 24} if quick else {}
    overrides = chapter.quick if quick else ()
    return prepared(folder, chapter.recipe, lambda base: chapter.write(base, seed, **sizes), seed=seed, overrides=overrides)


@dataclass
class _Judge:
    """Evaluates models on both sets, and keeps each result in a file: what was judged once is not judged again."""

    recipe: GRPORecipe
    loaded: LoadedRecipe
    folder: Path
    watcher: PlainReporter
    last: str
    """What the finished model is called."""
    kind: str

    def rows(self, name: str, model: str) -> list[Row]:
        return [self._row(name, model, data) for data in SETS]

    def _row(self, name: str, model: str, data: str) -> Row:
        path = self._path(name, data)
        if not path.exists():
            self.watcher.note(f"judging {name} on {SETS[data]} problems (greedy)")
            result = evaluate(self.recipe, self.loaded.base, model=model, data=data, reporter=self.watcher)
            record = {"row": _row_json(name, data, result), "groups": [group_to_json(group) for group in result.groups]}
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(record, ensure_ascii=False), encoding="utf-8")
        row = json.loads(path.read_text(encoding="utf-8"))["row"]
        return Row(row["model"], row["data"], Interval(**row["well_formed"]), Interval(**row["accuracy"]), row["tokens"])

    def groups(self, name: str, data: str) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = json.loads(self._path(name, data).read_text(encoding="utf-8"))["groups"]
        return groups

    def _path(self, name: str, data: str) -> Path:
        return self.folder / "evaluations" / f"{name.replace(' ', '-').lower()}-{Path(data).stem}.json"


def _row_json(name: str, data: str, result: Evaluation) -> dict[str, Any]:
    rollouts = [group.rollouts[0] for group in result.groups]
    tokens = sum(rollout.sampled_tokens for rollout in rollouts) / len(rollouts)
    well_formed = wilson(sum(map(called_well, rollouts)), len(rollouts))
    return asdict(Row(name, data, well_formed, result.rewards["correctness"], tokens))


def called_well(rollout: Rollout) -> bool:
    """The model called a tool, and every call could be executed."""
    return bool(rollout.tool_results) and not any(result.error for result in rollout.tool_results)


def _print(rows: Sequence[Row], judge: _Judge, folder: Path, *, json_output: bool, seconds: float) -> None:
    if json_output:
        print(json.dumps({"rows": [asdict(row) for row in rows], "folder": str(folder), "seconds": round(seconds, 1)}, indent=1))
        return
    for data, title in SETS.items():
        lines = [[row.model, percent(row.well_formed), percent(row.accuracy), f"{row.tokens:.1f}"] for row in rows if row.data == data]
        count = next(row.accuracy.count for row in rows if row.data == data)
        stdout.print()
        stdout.print(
            table(f"{title} (n = {count}, greedy, 95 % intervals)", ["", "well-formed calls %", "accuracy %", "tokens per answer"], lines)
        )
    stdout.print()
    for index in _three(judge):
        _side_by_side(judge, index)
    stdout.print(
        f"written to {folder}: task/ (data, recipe, rewards, tool), run/STAGE (rollouts, metrics, model), evaluations/",
        markup=False,
    )
    stdout.print(f"took {duration(seconds)}", markup=False)


def _three(judge: _Judge) -> list[int]:
    """Problems of three kinds, the first of each."""
    groups = judge.groups(judge.last, "heldout.jsonl")
    kinds = [group["prompt"]["columns"][judge.kind] for group in groups]
    return [kinds.index(kind) for kind in list(dict.fromkeys(kinds))[:3]]


def _side_by_side(judge: _Judge, index: int) -> None:
    before, after = (judge.groups(name, "heldout.jsonl")[index] for name in ("base", judge.last))
    question = before["prompt"]["messages"][-1]["content"]
    stdout.print(f"{question}  (answer: {before['prompt']['columns']['answer']})", style="bold", markup=False)
    stdout.print(table("", ["before", judge.last], [[_told(before), _told(after)]]))
    stdout.print()


def _told(group: dict[str, Any]) -> str:
    lines = []
    for message in group["rollouts"][0]["messages"]:
        if message["role"] == "tool":
            lines.append(f"→ {message['content']}")
            continue
        lines += [message["content"]] if message.get("content") else []
        lines += [f"calls {call['name']}({json.dumps(call['arguments'])})" for call in message.get("tool_calls", ())]
    return "\n".join(lines) or "(nothing)"
