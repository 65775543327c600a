"""Preference pairs of a model's own answers: the model answers each prompt several times, rewards judge, the best and the worst are a pair.

    prompts ─ ① answers ─ ② score ─ ③ best and worst of each group ─▶ rollout files ─ ④ ─▶ pairs.jsonl, heldout.jsonl

①  `rollout.agent.collect`, as in GRPO.
②  Reward functions and reward models, as in GRPO: the annotator.
③  `decided`: which two answers, or why there is no pair. Every group is written to the rollout file with what became of it.
④  `export`: the pairs of all rollout files, in order; the pairs of whole prompts are held out.

Nothing is trained, so a checkpoint holds only the counts, and a run that was killed writes the same files.

An answer that a limit cut is no side of a pair: encoded again, it would get an end token that the model never wrote.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from postgrad.chat import ChatFormat
from postgrad.data.files import Place, Row
from postgrad.data.limit import UNLIMITED, Limit
from postgrad.data.messages import BadRow
from postgrad.data.pipeline import encode_row
from postgrad.data.preferences import PairEncoder
from postgrad.data.tally import Tally
from postgrad.errors import DataError, RunError
from postgrad.rewards.ledger import equal_groups
from postgrad.rewards.metrics import reward_metrics
from postgrad.rewards.score import Scores
from postgrad.rollout.metrics import rollout_metrics
from postgrad.rollout.record import group_to_json
from postgrad.train.datasets import HELDOUT, PAIRS
from postgrad.train.files import write_text
from postgrad.train.loop import Reporter, Timer
from postgrad.train.order import positions_in_run
from postgrad.train.recipe import PairsRecipe
from postgrad.train.run_directory import RunDirectory
from postgrad.train.sampling import Sampling
from postgrad.types import Group, Prompt, Rollout, StopReason, ToolSpec

Json = dict[str, Any]
OWN_COLUMNS = frozenset({"prompt", "chosen", "rejected", "margin"})
WHY = {
    "tied": "tied (the totals of their answers are equal)",
    "too_few": "with fewer than two usable answers",
    "unreadable": "whose two answers cannot be read as a pair",
}
LEFT_OUT = {"cut": "cut by a limit", "unscored": "without a score", "empty": "empty", "infrastructure": "spoiled by the infrastructure"}


# ③ which two answers ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """`dropped`: why the group gives no pair ("" = it does). left_out: per answer, why it can be no side of one ("" = it can)."""

    dropped: str
    left_out: tuple[str, ...]
    chosen: int = -1
    rejected: int = -1
    margin: float = 0.0


def decided(group: Group, totals: Sequence[float]) -> Decision:
    """The best and the worst usable answer, of equal ones the first; `margin` is the difference of their totals."""
    left_out = tuple(why_left_out(rollout, total) for rollout, total in zip(group.rollouts, totals, strict=True))
    usable = np.where([not why for why in left_out], totals, np.nan)
    if equal_groups(usable, len(usable))[0]:
        return Decision("tied" if np.isfinite(usable).sum() > 1 else "too_few", left_out)
    chosen, rejected = int(np.nanargmax(usable)), int(np.nanargmin(usable))
    return Decision("", left_out, chosen, rejected, float(usable[chosen] - usable[rejected]))


def why_left_out(rollout: Rollout, total: float) -> str:
    if rollout.stop is StopReason.INFRASTRUCTURE:
        return "infrastructure"
    if rollout.stop.truncated:
        return "cut"
    if np.isnan(total):
        return "unscored"
    answer = rollout.final_answer if rollout.messages else rollout.text
    return "" if answer.strip() else "empty"


def pair_row(record: Mapping[str, Any]) -> Json:
    """A row of pairs.jsonl from a line of a rollout file: prompt, both answers, margin, and the prompt's columns."""
    prompt, pair = record["prompt"], record["pair"]
    chosen, rejected = (record["rollouts"][pair[side]] for side in ("chosen", "rejected"))
    raw = prompt["raw_text"] is not None
    row: Json = {
        "prompt": prompt["raw_text"] if raw else prompt["messages"],
        "chosen": chosen["text" if raw else "messages"],
        "rejected": rejected["text" if raw else "messages"],
        "margin": pair["margin"],
    }
    tools = {"tools": record["tools"]} if record["tools"] else {}
    return {**row, **prompt["columns"], **tools}


@dataclass(frozen=True)
class Reading:
    """Reads a pair as a later stage will, so that whatever could not be read there is counted here."""

    chat: ChatFormat

    def refusal(self, row: Json) -> str | None:
        raw = isinstance(row["prompt"], str)
        encoder = PairEncoder(chat=self.chat, limit=Limit(UNLIMITED), text_prompts="raw" if raw else "chat")
        try:
            encode_row(encoder, Row(Place(PAIRS, 1), row), "preference", Tally())
        except (BadRow, DataError) as error:
            return error.what if isinstance(error, DataError) else str(error)
        return None


# one run ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairingParts:
    """What a run is made of; `build.build_pairs` makes it from a recipe."""

    sampling: Sampling
    directory: RunDirectory
    reporter: Reporter


class Untrained:
    """No weights change, so there are none to save."""

    def save_state(self, folder: Path) -> None: ...
    def load_state(self, folder: Path) -> None: ...


@dataclass
class Pairing:
    """One run; see `loop.Method`."""

    recipe: PairsRecipe
    parts: PairingParts
    headline: tuple[str, ...] = ("pairs/made", "pairs/tied", "reward", "reward_std", "completions/mean_length")
    engine: Untrained = field(default_factory=Untrained)
    timer: Timer = field(default_factory=Timer)
    counts: Counter[str] = field(default_factory=Counter)
    said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.total_steps, self.total_prompts = positions_in_run(
            size=len(self.parts.sampling.prompts),
            epochs=self.recipe.epochs,
            per_step=self.recipe.batch.prompts,
            max_steps=self.recipe.max_steps,
        )
        self.reading = Reading(self.parts.sampling.policy.chat)

    def step(self, step: int) -> dict[str, float]:
        first = (step - 1) * self.recipe.batch.prompts
        last = min(first + self.recipe.batch.prompts, self.total_prompts)
        groups = self._answers(step, range(first, last))  # ①
        scores = self._scored(groups)  # ②
        records = [self._record(step, group, scores, index) for index, group in enumerate(groups)]  # ③
        self.parts.directory.write_rollouts(step, records)
        self._tell_failures(step, scores)
        for name in (*(record["dropped"] or "made" for record in records), *_causes(records)):
            self.counts[name] += 1
        counted = {f"pairs/{name}": float(self.counts[name]) for name in ("made", *WHY)}
        counted |= {f"pairs/answers_{name}": float(self.counts[f"answers_{name}"]) for name in LEFT_OUT}
        return counted | reward_metrics(scores) | rollout_metrics(groups) | {"epoch": self.parts.sampling.epochs(last)} | self.timer.take()

    def _answers(self, step: int, positions: Sequence[int]) -> list[Group]:
        with self.timer.part("rollout"):
            return self.parts.sampling.groups(step, positions)

    def _scored(self, groups: Sequence[Group]) -> Scores:
        with self.timer.part("reward"):
            return self.parts.sampling.score(groups)

    def _record(self, step: int, group: Group, scores: Scores, index: int) -> Json:
        """One line of a rollout file: the group, its scores, which two answers are the pair, or why there is none."""
        size = scores.group_size
        here = slice(index * size, (index + 1) * size)
        decision = decided(group, scores.totals[here].tolist())
        entries = [
            {
                "rewards": {name: _json(value) for name, value in zip(scores.names, values, strict=True)},
                "total": _json(total),
                "left_out": why,
            }
            for values, total, why in zip(scores.values[here].tolist(), scores.totals[here].tolist(), decision.left_out, strict=True)
        ]
        pair = {"chosen": decision.chosen, "rejected": decision.rejected, "margin": decision.margin}
        tools = [tool.to_json() for tool in self._tools(group.prompt)]
        record = {"step": step, "dropped": decision.dropped, **group_to_json(group), "scores": entries, "pair": pair, "tools": tools}
        if decision.dropped:
            return record | {"pair": None}
        if reason := self.reading.refusal(pair_row(record)):
            self._once("unreadable", f"a pair of {group.prompt.row} cannot be read as one: {reason}")
            return record | {"pair": None, "dropped": "unreadable"}
        return record

    def _tools(self, prompt: Prompt) -> tuple[ToolSpec, ...]:
        return (*self.parts.sampling.toolbox.specs, *prompt.tools)

    def _tell_failures(self, step: int, scores: Scores) -> None:
        for failure in scores.failures:
            self.parts.directory.event("reward_failure", step=step, **asdict(failure))
            self._once(f"{failure.reward} {failure.kind}", str(failure))

    def _once(self, kind: str, text: str) -> None:
        if kind not in self.said:
            self.said.add(kind)
            self.parts.reporter.note(text)

    def sample_one(self, step: int) -> tuple[Group, Scores]:
        """The first prompt's answers, scored: what a dry run shows."""
        groups = self._answers(step, [0])
        return groups[0], self._scored(groups)

    # what the loop needs beside `step`

    def evaluate(self, step: int) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {"counts": dict(self.counts)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.counts = Counter(state["counts"])

    def export(self, folder: Path) -> None:
        """④ Beside the folder where others write a model: pairs.jsonl, and heldout.jsonl where the recipe holds prompts out."""
        run = self.parts.directory
        records = [record for step in range(1, self.total_steps + 1) for record in run.read_rollouts(step)]
        rows = [pair_row(record) for record in records if record["pair"] is not None]
        if not rows:
            raise RunError(f"no pair came of {len(records)} prompts: {told(self.counts)}", hint=_advice(self.counts))
        train, heldout = split_prompts(rows, self.recipe.heldout, seed=self.recipe.seed)
        for name, part in ((HELDOUT, heldout), (PAIRS, train)):  # PAIRS last: where it stands, the run has written all
            if part:
                write_text(folder.parent / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part))
        text = f"{len(train)} pairs in {PAIRS}" + (f", {len(heldout)} of other prompts in {HELDOUT}" if heldout else "")
        self.parts.reporter.note(f"{text}; {told(self.counts)}")
        run.event("pairs", train=len(train), heldout=len(heldout), **self.counts)


def _causes(records: Sequence[Json]) -> list[str]:
    return [f"answers_{entry['left_out']}" for record in records for entry in record["scores"] if entry["left_out"]]


def told(counts: Mapping[str, int]) -> str:
    """What gave no pair, and which answers could be no side of one, in words."""
    groups = [f"{counts[name]} {text}" for name, text in WHY.items() if counts.get(name)]
    answers = [f"{counts[f'answers_{name}']} {text}" for name, text in LEFT_OUT.items() if counts.get(f"answers_{name}")]
    parts = ["prompts without a pair: " + ", ".join(groups)] if groups else ["every prompt gave a pair"]
    return "; ".join(parts + (["answers left out: " + ", ".join(answers)] if answers else []))


def _advice(counts: Mapping[str, int]) -> str:
    if counts.get("answers_cut", 0) > counts.get("tied", 0):
        return "let the answers end: raise rollout.max_tokens, or start from a model that writes its end token"
    return "let the answers differ: raise rollout.temperature or rollout.group_size, or look at the rewards in rollouts/"


def split_prompts(rows: Sequence[Json], share: float | None, *, seed: int) -> tuple[list[Json], list[Json]]:
    """(to learn from, held out). All pairs of a prompt are on one side; about `share` of the prompts, at least one, are held out.

    Which they are depends on the prompts and the seed alone. Raises `RunError` where one prompt cannot be split in two.
    """
    if share is None:
        return list(rows), []
    keys = [json.dumps(row["prompt"], sort_keys=True) for row in rows]
    prompts = sorted(set(keys))
    if len(prompts) < 2:
        raise RunError("only one prompt gave pairs, so none can be held out", hint="leave heldout out, or give more prompts")
    count = min(len(prompts) - 1, max(1, round(share * len(prompts))))
    held = {prompts[index] for index in np.random.default_rng(seed & 0xFFFFFFFF).permutation(len(prompts))[:count].tolist()}
    sides: tuple[list[Json], list[Json]] = ([], [])
    for key, row in zip(keys, rows, strict=True):
        sides[key in held].append(row)
    return sides


def check_columns(prompts: Sequence[Prompt]) -> None:
    """Raises `DataError` for a column that a pair has no room for, because it has one of that name itself."""
    for prompt in prompts:
        if taken := sorted(OWN_COLUMNS & set(prompt.columns)):
            hint = f"rename the column, or map another with data.columns; a pair's own are {', '.join(sorted(OWN_COLUMNS))}"
            raise DataError(f"the column {taken[0]!r} cannot stand beside a pair's own", where=prompt.row, hint=hint)


def _json(value: float) -> float | None:
    return value if np.isfinite(value) else None
