"""1. The contract: a reward is a function of its rollout alone, and survives whatever a model writes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from postgrad.rewards.check.bench import Bench, Probes, Value
from postgrad.rewards.check.finding import Finding, Severity, finding
from postgrad.rewards.check.samples import Draft, Sample, say
from postgrad.types import Prompt, Rollout

Rows = list[tuple[Prompt, Rollout]]

UNSTABLE = ("contract.determinism", "contract.order", "contract.batch")

HOSTILE = ("no message", "an empty message", "1 MB of text", "1 MB of numbers", "100,000 open brackets", "control characters")
HURRIED_S = 2.0
"""Deadline of calls that nobody waits for in training; a reward's own may be shorter."""
_TEXTS = ("", "a word " * 150_000, "12 " * 350_000, "{[(<" * 25_000, "\x00\u202e\ufffd😀\n" * 10)
_SECONDS = 1.2
"""What scoring the good answers may take, all rewards together; each of the other parts half of it. A slow reward is tried on fewer."""
_WATCHED = 16
_REPEATED = 64


def hostile() -> list[Draft]:
    return [Draft(()), *map(say, _TEXTS)]


def check_contract(bench: Bench, samples: Sequence[Sample]) -> tuple[list[Finding], list[int]]:
    """Tries every reward on the good rollouts, as many as it is fast enough for, and on hostile ones. The counts are by reward."""
    good: Rows = [(sample.prompt, sample.good.rollout()) for sample in samples]
    bench.hold([*good, *((samples[0].prompt, draft.rollout()) for draft in hostile())])
    findings: list[Finding] = []
    counts = []
    for index in range(len(bench.rewards)):
        found, count = _one(bench, index, samples)
        findings += found
        counts.append(count)
    unstable = {found.reward for found in findings if found.id in UNSTABLE}
    return findings + list(_probed(bench, good, unstable)), counts


def _one(bench: Bench, index: int, samples: Sequence[Sample]) -> tuple[list[Finding], int]:
    reward = bench.rewards[index]
    count = len(samples)
    first = bench.alone(index, range(min(count, 4)))
    scored = first + bench.alone(index, range(len(first), min(count, affordable(bench, index, most=count, seconds=_SECONDS))))
    rows = [sample.row for sample in samples]
    findings = list(_values(reward.name, reward.range, scored, rows))
    if not any(found.severity == "critical" for found in findings):
        findings += _stable(bench, index, scored, rows)
        findings += _hostile(bench, index, count, rows[0])
    return findings, len(scored)


def affordable(bench: Bench, index: int, *, most: int, seconds: float) -> int:
    """How many calls fit into a reward's part of so many seconds, at least 4."""
    cost = max(bench.cost(index), 1e-6) * len(bench.rewards)
    return max(min(4, most), min(most, int(seconds / cost)))


def _values(name: str, limits: tuple[float, float] | None, scored: Sequence[Value], rows: Sequence[str]) -> Iterator[Finding]:
    """Type, range, exceptions and missing numbers on good rollouts."""
    for kind in dict.fromkeys(value.kind for value in scored if value.kind):
        places = [place for place, value in enumerate(scored) if value.kind == kind]
        message = f"{scored[places[0]].problem}, on {len(places)} of {len(scored)} good answers"
        yield finding(f"contract.{kind}", "critical", name, message, rows=[rows[place] for place in places], hint=_HINTS.get(kind, ""))
    known = [value.value for value in scored if value.value is not None]
    silent = [place for place, value in enumerate(scored) if value.value is None and not value.kind]
    if silent:
        severity: Severity = "critical" if len(silent) == len(scored) else "warning" if len(silent) > 0.2 * len(scored) else "info"
        message = f"abstains (None) on {len(silent)} of {len(scored)} good answers"
        yield finding("contract.abstains", severity, name, message, rows=[rows[place] for place in silent])
    if limits is not None and known:
        outside = [place for place, value in enumerate(scored) if value.value is not None and not _within(value.value, limits)]
        if outside:
            message = f"declares the range {limits[0]:g} … {limits[1]:g} and returns {scored[outside[0]].value:g}"
            yield finding(
                "contract.range", "critical", name, message, rows=[rows[place] for place in outside], hint="declare the true range"
            )


_HINTS = {
    "refused": "return a number, or None where the reward does not apply",
    "exception": "a failing call abstains and is counted; it teaches nothing",
    "timeout": "make it faster, or give it a larger deadline_s",
    "nan": "return None where the reward does not apply",
    "infinite": "return None where the reward does not apply, or bound it",
}


def _within(value: float, limits: tuple[float, float]) -> bool:
    slack = 1e-6 * max(1.0, abs(limits[0]), abs(limits[1]))
    return limits[0] - slack <= value <= limits[1] + slack


def _stable(bench: Bench, index: int, scored: Sequence[Value], rows: Sequence[str]) -> Iterator[Finding]:
    """The same value again, in another order, and in another company."""
    name = bench.rewards[index].name
    places = list(range(min(len(scored), _REPEATED, affordable(bench, index, most=_REPEATED, seconds=_SECONDS / 6))))
    again = bench.alone(index, places)
    if differing := _differing(places, again, scored):
        message = f"gives {_shown(scored[differing[0]])} and then {_shown(again[differing[0]])} for the same rollout"
        yield finding(
            "contract.determinism", "critical", name, message, rows=[rows[p] for p in differing], hint="no randomness, clock or state"
        )
        return
    backwards = bench.alone(index, places[::-1])[::-1]
    if differing := _differing(places, backwards, scored):
        message = "gives another value when the rollouts come in another order: it remembers earlier ones"
        yield finding("contract.order", "critical", name, message, rows=[rows[p] for p in differing], hint="keep no state between calls")
        return
    if bench.rewards[index].form.takes_lists and len(places) > 1:
        yield from _company(bench, index, places, scored, rows)


def _company(bench: Bench, index: int, places: Sequence[int], scored: Sequence[Value], rows: Sequence[str]) -> Iterator[Finding]:
    """A function of lists: alone and together, forwards and backwards."""
    reward = bench.rewards[index]
    together, reversed_ = bench.together(index, places), bench.together(index, places[::-1])[::-1]
    if reward.group:
        if differing := _differing(places, reversed_, together):
            message = "gives a rollout another value when its group comes in another order"
            yield finding("contract.order", "critical", reward.name, message, rows=[rows[p] for p in differing])
    elif differing := _differing(places, together, scored):
        message = f"gives {_shown(scored[differing[0]])} for a rollout alone and {_shown(together[differing[0]])} in a batch"
        hint = "compute each value from its own rollout, or declare @reward(group=True) if the others of its prompt matter"
        yield finding("contract.batch", "critical", reward.name, message, rows=[rows[p] for p in differing], hint=hint)


def _differing(places: Sequence[int], now: Sequence[Value], then: Sequence[Value]) -> list[int]:
    return [place for place, value in zip(places, now, strict=True) if not _same(value, then[place])]


def _same(left: Value, right: Value) -> bool:
    if left.value is None or right.value is None:
        return left.value is right.value
    return math.isclose(left.value, right.value, rel_tol=1e-9, abs_tol=1e-12)


def _shown(value: Value) -> str:
    return "None" if value.value is None else f"{value.value:g}"


def _hostile(bench: Bench, index: int, first: int, row: str) -> Iterator[Finding]:
    """Empty and huge rollouts: an exception or a missed deadline abstains in training, where a lazy model would find it."""
    reward = bench.rewards[index]
    failures: dict[str, list[tuple[str, str]]] = {}
    outside: list[tuple[str, float]] = []
    for number, what in enumerate(HOSTILE):
        (value,) = bench.alone(index, [first + number], deadline_s=min(reward.deadline_s, HURRIED_S))
        if value.kind == "timeout" and not value.skipped and reward.deadline_s > HURRIED_S:
            value = _patiently(bench, index, first + number)
        if value.kind:
            failures.setdefault(value.kind, []).append((what, value.problem))
        elif value.value is not None and reward.range is not None and not _within(value.value, reward.range):
            outside.append((what, value.value))
    for kind, found in failures.items():
        message = f"fails on {', '.join(what for what, _ in found)}: {found[0][1]}"
        yield finding(f"contract.hostile.{kind}", "warning", reward.name, message, rows=[row], hint="return the lowest value instead")
    if outside and reward.range is not None:
        message = (
            f"returns {outside[0][1]:g} for {', '.join(what for what, _ in outside)}, outside {reward.range[0]:g} … {reward.range[1]:g}"
        )
        yield finding("contract.range", "critical", reward.name, message, rows=[row], hint="declare the true range")


def _patiently(bench: Bench, index: int, place: int) -> Value:
    """Once more with the time that it has in training: a busy machine makes slow what is not. A hurry that proves wrong does not count."""
    (value,) = bench.alone(index, [place])
    if value.kind != "timeout":
        bench.late[index] -= 1
    return value


def _probed(bench: Bench, good: Rows, unstable: Collection[str]) -> Iterator[Finding]:
    """Purity and threads, in a second worker whose functions are watched. What failed above is not tried again."""
    probes = Probes(bench.rewards)
    with probes.bench:
        probes.bench.hold(good[:_WATCHED])
        for index, reward in enumerate(bench.rewards):
            places = range(affordable(bench, index, most=min(len(good), _WATCHED), seconds=_SECONDS / 4))
            changed = [place for place, value in zip(places, probes.changed(index, places), strict=True) if value.value]
            if changed:
                message = f"changes what it is given, on {len(changed)} of {len(places)} rollouts"
                hint = "work on a copy; other trainers hand the same object to the next reward"
                rows = [good[place][0].row for place in changed]
                yield finding("contract.purity", "critical", reward.name, message, rows=rows, hint=hint)
            unlike = Value(0.0) if reward.form.asynchronous or reward.name in unstable else probes.unlike_in_threads(index)
            if unlike.value:
                message = f"gives another value in {unlike.value:g} of {len(places)} calls made in threads"
                hint = "no globals, no signals; here rewards run one by one in a process, elsewhere they may not"
                yield finding("contract.threads", "warning", reward.name, message, hint=hint)
