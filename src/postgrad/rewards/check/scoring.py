"""2. Lazy strategies and 3. the scope matrix score the same rollouts: per sample the good one, its mutants and the lazy ones.

They are handed to a reward that takes lists as one group, so that rewards which compare rollouts have something to compare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from postgrad.rewards.check.bench import Bench
from postgrad.rewards.check.contract import HURRIED_S, affordable
from postgrad.rewards.check.lazy import strategies
from postgrad.rewards.check.mutate import mutants
from postgrad.rewards.check.samples import Case, Sample
from postgrad.rewards.ledger import weighted_total

_SECONDS = 1.2
"""What all rewards together may take."""
_MOST = 40


@dataclass(frozen=True, slots=True)
class Failure:
    """A reward that could not score a case of a sample. skipped: it was not asked, after too many missed deadlines."""

    reward: str
    case: tuple[str, str]
    row: str
    kind: str
    problem: str
    skipped: bool = False


@dataclass(frozen=True)
class Scored:
    """values [S, C, K]: S samples, C cases (the good one first), K rewards. NaN where there is no such case, and where a reward abstained
    or failed; present [S, C] tells them apart."""

    rows: tuple[str, ...]
    cases: tuple[tuple[str, str], ...]
    values: NDArray[np.float64]
    present: NDArray[np.bool_]
    failures: tuple[Failure, ...] = ()

    @property
    def good(self) -> NDArray[np.float64]:
        return self.values[:, 0]

    def totals(self, weights: Sequence[float], chosen: Sequence[bool] | None = None) -> NDArray[np.float64]:
        """[S, C] weighted sums over the chosen rewards, as in training: what abstains counts with the mean of its group."""
        keep = np.ones(len(weights), dtype=bool) if chosen is None else np.asarray(chosen, dtype=bool)
        samples, cases, _ = self.values.shape
        flat = self.values.reshape(samples * cases, -1)[:, keep]
        totals = weighted_total(flat, np.asarray(weights, dtype=np.float64)[keep], cases).reshape(samples, cases)
        totals[~self.present] = np.nan
        return totals


def score(bench: Bench, samples: Sequence[Sample], rewards: Sequence[int]) -> Scored:
    """Every case of as many samples as the slowest of the rewards (by their number on the bench) allows, spread over the file."""
    chosen = _spread(samples, _count(bench, samples, rewards))
    tried = [_cases(sample, lazy) for sample, lazy in zip(chosen, strategies(chosen), strict=True)]
    names = tuple(dict.fromkeys((case.kind, case.name) for cases in tried for case in cases))
    values = np.full((len(chosen), len(names), len(rewards)), np.nan)
    present = np.zeros((len(chosen), len(names)), dtype=bool)
    bench.hold(
        [
            (sample.prompt, case.draft.rollout(number))
            for sample, cases in zip(chosen, tried, strict=True)
            for number, case in enumerate(cases)
        ]
    )
    failures: list[Failure] = []
    start = 0
    for row, cases in enumerate(tried):
        places = range(start, start + len(cases))
        columns = [names.index((case.kind, case.name)) for case in cases]
        present[row, columns] = True
        for index, reward in enumerate(rewards):
            loaded = bench.rewards[reward]
            found = bench.together(
                reward, places, deadline_s=min(loaded.deadline_s, HURRIED_S + loaded.form.asynchronous * loaded.deadline_s)
            )
            values[row, columns, index] = [np.nan if value.value is None else value.value for value in found]
            failures += [
                Failure(loaded.name, (case.kind, case.name), chosen[row].row, value.kind, value.problem, value.skipped)
                for case, value in zip(cases, found, strict=True)
                if value.kind
            ]
        start += len(cases)
    return Scored(tuple(sample.row for sample in chosen), names, values, present, tuple(failures))


def _cases(sample: Sample, lazy: Sequence[tuple[str, object]]) -> list[Case]:
    changed = [Case(layer, name, draft) for layer, name, draft in mutants(sample.good)]
    return [Case("good", "the good answer", sample.good), *changed, *(Case("lazy", name, draft) for name, draft in lazy)]  # type: ignore[arg-type]


def _count(bench: Bench, samples: Sequence[Sample], rewards: Sequence[int]) -> int:
    per_sample = 1 + len(list(mutants(samples[0].good))) + len(next(strategies(samples[:1])))
    most = min(len(samples), _MOST)
    calls = min((affordable(bench, index, most=most * per_sample, seconds=_SECONDS) for index in rewards), default=0)
    return max(min(3, most), min(most, calls // per_sample))


def _spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """`count` samples at equal distances, from the first on."""
    return [samples[number * len(samples) // count] for number in range(count)]
