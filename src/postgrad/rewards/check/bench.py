"""Asks rewards for values, in the process in which they run during training."""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from postgrad.rewards.base import view_of
from postgrad.rewards.child import CONCURRENT, FunctionSource, Outcome
from postgrad.rewards.load import LoadedReward
from postgrad.rewards.worker import RewardWorker, WorkerDied
from postgrad.types import Prompt, Rollout

_SPAN = 16
_PATIENCE = 2
"""Missed deadlines after which a reward is not asked again: each costs seconds and a new process."""
_PROBE = "from postgrad.rewards.check import probe as _postgrad_probe\n"
_LIBRARY = "from postgrad.rewards.library import LIBRARY as _postgrad_library\n"


@dataclass(frozen=True, slots=True)
class Value:
    """What one reward made of one rollout. value: None where it abstained or failed.

    problem: "" or what went wrong; skipped: it was not asked; kind: refused, exception, timeout, crash, memory, nan, infinite.
    """

    value: float | None
    kind: str = ""
    problem: str = ""
    skipped: bool = False


class Bench:
    """One worker that holds the rewards and the rollouts to score."""

    def __init__(self, rewards: Sequence[LoadedReward]) -> None:
        self.rewards = tuple(rewards)
        self._worker = RewardWorker([reward.source for reward in rewards])
        self.seconds: dict[int, list[float]] = {index: [] for index in range(len(rewards))}
        self.late = [0] * len(rewards)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def hold(self, rows: Sequence[tuple[Prompt, Rollout]]) -> None:
        """The rollouts that later calls name by their place."""
        self._worker.set_rows([pack(prompt, rollout) for prompt, rollout in rows])

    def alone(self, reward: int, places: Sequence[int], *, deadline_s: float | None = None) -> list[Value]:
        """Each rollout by itself."""
        loaded = self.rewards[reward]
        if loaded.form.asynchronous and not loaded.form.takes_lists:
            spans = [places[start : start + _SPAN] for start in range(0, len(places), _SPAN)]
            return [value for span in spans for value in self._ask(reward, span, deadline_s, concurrent=True)]
        return [value for place in places for value in self._ask(reward, [place], deadline_s)]

    def together(self, reward: int, places: Sequence[int], *, deadline_s: float | None = None) -> list[Value]:
        """All of them in one call where the reward takes lists, else each by itself."""
        if self.rewards[reward].form.takes_lists:
            return self._ask(reward, places, deadline_s)
        return self.alone(reward, places, deadline_s=deadline_s)

    def cost(self, reward: int) -> float:
        """Seconds of a typical call."""
        return statistics.median(self.seconds[reward]) if self.seconds[reward] else 0.0

    def _ask(self, reward: int, places: Sequence[int], deadline_s: float | None, *, concurrent: bool = False) -> list[Value]:
        loaded = self.rewards[reward]
        if self.late[reward] >= _PATIENCE:
            return [Value(None, "timeout", f"missed its deadline {_PATIENCE} times and was not asked again", skipped=True)] * len(places)
        seconds = deadline_s or loaded.deadline_s
        mode: Any = "concurrent" if concurrent else "together" if loaded.form.takes_lists else "single"
        rounds = -(-len(places) // CONCURRENT) if concurrent else 1
        began = time.perf_counter()
        try:
            outcomes = self._worker.call(reward, places, mode=mode, deadline_s=seconds, wall_s=seconds * rounds + loaded.form.asynchronous)
        except WorkerDied as error:
            self.late[reward] += error.kind == "timeout"
            return [Value(None, error.kind, str(error))] * len(places)
        self.seconds[reward].append((time.perf_counter() - began) / len(places))
        return [value_of(outcome) for outcome in outcomes]


class Probes:
    """A second worker with the same rewards under observation."""

    def __init__(self, rewards: Sequence[LoadedReward]) -> None:
        watched = [_probed(index, rewards, "watched") for index in range(len(rewards))]
        threaded = [_probed(index, rewards, "threaded") for index in range(len(rewards))]
        self._count = len(rewards)
        self.bench = Bench([*watched, *threaded])

    def changed(self, reward: int, places: Sequence[int]) -> list[Value]:
        """1 for each rollout whose call changed its own arguments."""
        return self.bench.alone(reward, places)

    def unlike_in_threads(self, reward: int) -> Value:
        """How many of the calls made so far give something else when they are made in threads."""
        return self.bench.alone(self._count + reward, [0])[0]


def pack(prompt: Prompt, rollout: Rollout) -> bytes:
    return pickle.dumps((view_of(prompt, rollout), dict(prompt.columns)), protocol=pickle.HIGHEST_PROTOCOL)


def value_of(outcome: Outcome) -> Value:
    kind, *rest = outcome
    if kind == "turns":
        known = [value for value in rest[0] if value is not None]
        kind, rest = ("value", [sum(known)]) if known else ("none", [])
    if kind == "none":
        return Value(None)
    if kind == "refused":
        return Value(None, "refused", f"returned {rest[0]}")
    if kind == "failed":
        return Value(None, rest[0], rest[1])
    number = float(rest[0])
    if number != number:
        return Value(None, "nan", "returned NaN")
    if number in (float("inf"), float("-inf")):
        return Value(None, "infinite", f"returned {number}")
    return Value(number)


def names_in(path: str, text: str) -> list[str] | dict[str, Any]:
    """The rewards that a file defines, or {"problem": …} when it cannot be loaded. The file runs in a worker, never here."""
    import json

    worker = RewardWorker(
        [FunctionSource("_postgrad_listed", path, f"{text}\n\n{_PROBE}_postgrad_listed = _postgrad_probe.listing(globals())\n")]
    )
    try:
        described = worker.describe()[0]
    except WorkerDied as error:
        return {"problem": {"message": str(error), "where": None}}
    finally:
        worker.close()
    return described if "problem" in described else list(json.loads(described["doc"]))


def _probed(index: int, rewards: Sequence[LoadedReward], probe: str) -> LoadedReward:
    """The reward with a source that wraps it. Every probe of a file must carry the same text: a file is run once."""
    reward = rewards[index]
    path = reward.source.path or "/postgrad/shipped-rewards.py"
    text = (reward.source.text if reward.source.path else _LIBRARY) + "\n\n" + _PROBE
    for number, other in enumerate(rewards):
        if other.source.path == reward.source.path:
            function = other.source.function if other.source.path else f"_postgrad_library[{other.source.function!r}]"
            text += f"_watched_{number} = _postgrad_probe.watched({function})\n_threaded_{number} = _postgrad_probe.threaded({function})\n"
    args: Mapping[str, Any] = (reward.source.args or {}) if probe == "watched" else {}
    source = FunctionSource(f"_{probe}_{index}", path, text, args)
    if probe == "watched":
        return replace(reward, source=source)
    single = replace(reward.form, style="rollout", asynchronous=False, required=(), optional=(), every_column=False, per_turn=False)
    return replace(reward, source=source, form=single, group=False, deadline_s=max(reward.deadline_s, 10.0))
