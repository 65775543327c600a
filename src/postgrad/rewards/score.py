"""Score groups of rollouts: every reward on every rollout, each call with its deadline, each failure counted.

A rollout that ended for reasons outside the model (`StopReason.INFRASTRUCTURE`) is not scored. What a reward cannot score is NaN, never
0, and every NaN that is not the function's own `None` has an entry in `failures`.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from postgrad.errors import DataError, RunError
from postgrad.rewards.base import RewardRole, view_of
from postgrad.rewards.child import CONCURRENT, Mode, Outcome
from postgrad.rewards.ledger import outcome_total, weighted_total
from postgrad.rewards.load import LoadedReward
from postgrad.rewards.worker import RewardWorker, WorkerDied
from postgrad.types import Group, StopReason

FailureKind = Literal["exception", "timeout", "crash", "memory", "nan", "infinite"]
_PROMPT_HEAD = 200
_ASYNC_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """One rollout that one reward could not score. `row` is the prompt's file:line, `sample` the rollout's place in its group."""

    reward: str
    row: str
    sample: int
    kind: FailureKind
    message: str
    prompt_head: str
    traceback: str = ""
    place: str = ""
    """`file.py:line` of the user's code that raised."""

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        return f"reward {self.reward} failed at {self.row}: {self.message}{place}"


@dataclass(frozen=True, slots=True)
class RewardCount:
    """Rollouts that one reward scored, abstained from (`None`) and failed on, and the seconds it took."""

    scored: int
    abstained: int
    failed: int
    seconds: float


@dataclass(frozen=True)
class Scores:
    """values [N, K], NaN = not scored; N rollouts in the order of the groups, `group_size` each; K rewards."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    roles: tuple[RewardRole, ...]
    values: NDArray[np.float64]
    group_size: int
    failures: tuple[RewardFailure, ...] = ()
    counts: Mapping[str, RewardCount] = field(default_factory=dict)
    turns: Mapping[str, Mapping[int, Sequence[float]]] = field(default_factory=dict)
    """By name of a reward that judges each turn, by rollout: what each turn earned (0 where it abstained). Their sum is the value."""

    @cached_property
    def totals(self) -> NDArray[np.float64]:
        """[N] weighted sums; NaN where every reward abstained."""
        return weighted_total(self.values, self.weights, self.group_size)

    @cached_property
    def outcome_totals(self) -> NDArray[np.float64] | None:
        """[N] weighted sums of the outcome rewards; None when there is no such reward."""
        return outcome_total(self.values, self.weights, self.roles, self.group_size)

    def with_reward(self, name: str, *, weight: float, role: RewardRole, values: Sequence[float]) -> Scores:
        """These scores and one more reward, computed elsewhere (a reward model)."""
        column = np.asarray(values, dtype=np.float64)
        if column.shape != self.values.shape[:1] or np.isinf(column).any():
            raise RunError(f"reward {name} gave values of shape {column.shape} for {len(self.values)} rollouts, or an infinite one")
        missing = int(np.isnan(column).sum())
        return Scores(
            names=(*self.names, name),
            weights=(*self.weights, weight),
            roles=(*self.roles, role),
            values=np.column_stack([self.values, column]),
            group_size=self.group_size,
            failures=self.failures,
            counts={**self.counts, name: RewardCount(len(column) - missing, missing, 0, 0.0)},
            turns=self.turns,
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """One rollout to score: `index` among the N, `group` among the B, `packed` for the worker."""

    index: int
    group: int
    row: str
    sample: int
    prompt_head: str
    packed: bytes


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of one function. `rows` are positions in the list of rows to score."""

    rows: tuple[int, ...]
    mode: Mode


class Scorer:
    """Scores groups with `rewards`; the worker process starts at the first call and ends with the `with` block.

    memory_gb: how much one worker may allocate beyond what its functions hold after loading; None = no limit.

        with Scorer(load_rewards(specs, folder)) as scorer:
            scores = scorer.score(groups)
    """

    def __init__(self, rewards: Sequence[LoadedReward], *, memory_gb: float | None = 4.0) -> None:
        self.rewards = tuple(rewards)
        self._worker = RewardWorker([reward.source for reward in rewards], memory_gb=memory_gb)
        self._lock = threading.Lock()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the worker process; a later `score` starts another."""
        self._worker.close()

    def score(self, groups: Sequence[Group]) -> Scores:
        """All rewards on all rollouts. Groups must have one size.

        Raises `RunError` when a function returns something that is no reward, or fails under `on_error: stop`, or returns an infinite
        value under `on_nonfinite: stop`.
        """
        sizes = {len(group.rollouts) for group in groups}
        if len(sizes) != 1:
            raise ValueError(f"groups of one size are scored together, got sizes {sorted(sizes)}")
        rows = list(_rows(groups))
        values = np.full((sum(len(group.rollouts) for group in groups), len(self.rewards)), np.nan)
        failures: list[RewardFailure] = []
        counts: dict[str, RewardCount] = {}
        turns: dict[str, dict[int, Sequence[float]]] = {reward.name: {} for reward in self.rewards if reward.form.per_turn}
        with self._lock:
            self._worker.set_rows([row.packed for row in rows])
            for number, reward in enumerate(self.rewards):
                began, failed = time.perf_counter(), len(failures)
                for position, outcome in self._outcomes(number, reward, rows):
                    place = rows[position].index
                    values[place, number] = _value(outcome, reward, rows[position], failures)
                    if outcome[0] == "turns" and not math.isnan(values[place, number]):
                        turns[reward.name][place] = [value or 0.0 for value in outcome[1]]
                scored = int((~np.isnan(values[:, number])).sum())
                failed = len(failures) - failed
                counts[reward.name] = RewardCount(scored, len(rows) - scored - failed, failed, time.perf_counter() - began)
        return Scores(
            names=tuple(reward.name for reward in self.rewards),
            weights=tuple(reward.weight for reward in self.rewards),
            roles=tuple(reward.role for reward in self.rewards),
            values=values,
            group_size=sizes.pop(),
            failures=tuple(failures),
            counts=counts,
            turns=turns,
        )

    def _outcomes(self, number: int, reward: LoadedReward, rows: Sequence[_Row]) -> Iterator[tuple[int, Outcome]]:
        """(position, outcome) of every row. A call that covers several rows and fails is repeated row by row, so that one bad
        rollout costs one value; only a declared group reward, whose values depend on one another, fails as a whole."""
        waiting = _calls(reward, rows)
        while waiting:
            call = waiting.pop(0)
            outcomes = self._ask(number, reward, call)
            if len(call.rows) > 1 and not reward.group and _spoiled(call, outcomes):
                waiting = [*(_Call((row,), "single") for row in call.rows), *waiting]
            elif isinstance(outcomes, WorkerDied):
                yield from ((row, ["failed", outcomes.kind, str(outcomes), "", ""]) for row in call.rows)
            else:
                yield from zip(call.rows, outcomes, strict=True)

    def _ask(self, number: int, reward: LoadedReward, call: _Call) -> list[Outcome] | WorkerDied:
        rounds = -(-len(call.rows) // CONCURRENT) if call.mode == "concurrent" else 1
        wall = reward.deadline_s * rounds + (_ASYNC_GRACE_S if reward.form.asynchronous else 0.0)
        try:
            return self._worker.call(number, call.rows, mode=call.mode, deadline_s=reward.deadline_s, wall_s=wall)
        except WorkerDied as error:
            return error


def _spoiled(call: _Call, outcomes: list[Outcome] | WorkerDied) -> bool:
    """Whether one row's failure took the others of the call with it. Concurrent rows fail one by one unless the process dies."""
    if isinstance(outcomes, WorkerDied):
        return True
    return call.mode == "together" and any(outcome[0] == "failed" for outcome in outcomes)


def _rows(groups: Sequence[Group]) -> Iterator[_Row]:
    index = 0
    for number, group in enumerate(groups):
        prompt = group.prompt
        asked = prompt.raw_text if prompt.raw_text is not None else (prompt.messages[-1].content if prompt.messages else "")
        for rollout in group.rollouts:
            if rollout.stop is not StopReason.INFRASTRUCTURE:
                packed = _pack((view_of(prompt, rollout), dict(prompt.columns)), prompt.row)
                yield _Row(index, number, prompt.row, rollout.sample, asked[:_PROMPT_HEAD], packed)
            index += 1


def _pack(row: Any, where: str) -> bytes:
    try:
        return pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise DataError(f"a column cannot be handed to the reward process: {error}", where=where) from None


def _calls(reward: LoadedReward, rows: Sequence[_Row]) -> list[_Call]:
    """Lists go prompt by prompt, async functions all at once, the rest one by one."""
    if reward.form.takes_lists:
        return [_Call(positions, "together") for positions in _by_prompt(rows)]
    if reward.form.asynchronous and rows:
        return [_Call(tuple(range(len(rows))), "concurrent")]
    return [_Call((position,), "single") for position in range(len(rows))]


def _by_prompt(rows: Sequence[_Row]) -> list[tuple[int, ...]]:
    positions: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        positions.setdefault(row.group, []).append(position)
    return [tuple(group) for group in positions.values()]


def _value(outcome: Outcome, reward: LoadedReward, row: _Row, failures: list[RewardFailure]) -> float:
    """The value of an outcome, NaN for an abstention; failures are recorded, or end the run where the recipe says so."""
    if outcome[0] == "turns":
        judged = [value for value in outcome[1] if value is not None]
        outcome = ["value", sum(judged)] if judged else ["none"]
    kind = outcome[0]
    place = f"{row.row}, sample {row.sample}"
    if kind == "none":
        return math.nan
    if kind == "refused":
        raise RunError(f"reward {reward.name} returned {outcome[1]}, at {place}", where=reward.where)
    if kind == "failed":
        failure = RewardFailure(reward.name, row.row, row.sample, outcome[1], outcome[2], row.prompt_head, *outcome[3:])
        stop, hint = reward.on_error == "stop", "on_error: abstain counts such failures and goes on"
    elif math.isfinite(outcome[1]):
        return float(outcome[1])
    elif math.isnan(outcome[1]):
        failure = RewardFailure(reward.name, row.row, row.sample, "nan", "returned NaN", row.prompt_head)
        stop, hint = False, ""
    else:
        failure = RewardFailure(reward.name, row.row, row.sample, "infinite", f"returned {outcome[1]}", row.prompt_head)
        stop, hint = reward.on_nonfinite == "stop", "return None where the reward does not apply; on_nonfinite: abstain goes on"
    if stop:
        trace = f"\n{failure.traceback}" if failure.traceback else ""
        raise RunError(f"reward {reward.name}: {failure.message}, at {place} ({row.prompt_head!r}){trace}", where=reward.where, hint=hint)
    failures.append(failure)
    return math.nan
