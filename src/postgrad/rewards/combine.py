"""Rewards made of rewards. In a reward file, a combination is a name like any other; the recipe says `use: rewards.py:combined`:

    from postgrad.rewards.combine import gate
    combined = gate(correct, polite)

weighted_sum(a, b)            Σ w · r
multiply(a, b)                Π r
gate(outcome, shaping)        outcome + shaping, but shaping counts only where the outcome is reached
clip(a, low=, high=)          r, held within bounds
schedule(a, {step: factor})   r times a factor that depends on the optimizer step
potential(progress)           progress made in each turn, paid at its end, which cannot change what is best

Normalising each reward before they are summed is a key of the recipe (`loss: {normalize: normalize_then_sum}`), because it needs the batch.

A combination asks for the columns of its parts. It abstains where a part abstains: a missing number has no sum. Rewards that abstain for
reasons of their own are better listed one by one in the recipe, where the others keep their value.
Its range and role follow from its parts; its scope is theirs when they have one in common, and otherwise not stated. `name`, `claim` and
`scope` can be given.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from postgrad.rewards.base import CallForm, Declaration, RewardRole, RolloutView, Scope, bind, call_form, declaration_of, reward
from postgrad.rewards.child import as_float
from postgrad.rewards.load import DEADLINE_S
from postgrad.types import Message

Reward = Callable[..., Any]
Range = tuple[float, float]
Fold = Callable[[Sequence[float | None]], float | None]

STEP = "step"
"""The column in which a run hands its optimizer step to the rewards that ask for it."""


def weighted_sum(*parts: Reward, weights: Sequence[float] | None = None, **stated: Any) -> Reward:
    """Σ w_k r_k; weights left out = 1 each."""
    factors = [1.0] * len(parts) if weights is None else [float(weight) for weight in weights]
    if len(factors) != len(parts) or not all(map(math.isfinite, factors)):
        raise ValueError(f"weighted_sum takes one finite weight per reward, got {len(factors)} for {len(parts)}")
    read = _read(parts)
    sums = _sum([_scaled(part.range, factor) for part, factor in zip(read, factors, strict=True)])
    claim = " + ".join(f"{factor:g} × ({part.claim})" for part, factor in zip(read, factors, strict=True))
    fold = _strict(lambda values: math.fsum(factor * value for factor, value in zip(factors, values, strict=True)))
    return _combined(read, fold, sums, claim, stated)


def multiply(*parts: Reward, **stated: Any) -> Reward:
    """Π r_k: all of them must hold. With penalties (values below 0) the sign of a product says little."""
    read = _read(parts)
    product: Range | None = (1.0, 1.0)
    for part in read:
        product = None if product is None or part.range is None else _product(product, part.range)
    return _combined(read, _strict(math.prod), product, " and ".join(part.claim for part in read), stated)


def gate(outcome: Reward, shaping: Reward, *, weight: float = 1.0, reached: float | None = None, **stated: Any) -> Reward:
    """outcome + weight · shaping where the outcome is at least `reached` (left out = its highest value), else outcome + weight · the lowest
    value of shaping: whatever shaping pays, nothing that falls short outranks what reaches the outcome.

    shaping must declare its range, and outcome too unless `reached` is given.
    """
    read = _read((outcome, shaping))
    limits, help_ = read[0].range, read[1].range
    if help_ is None or (reached is None and limits is None) or not (math.isfinite(weight) and weight >= 0):
        raise ValueError("gate needs the ranges that its rewards declare, and a weight of at least 0")
    goal, low = float(limits[1] if limits and reached is None else cast(float, reached)), help_[0]

    def gated(values: Sequence[float | None]) -> float | None:
        result, extra = values
        if result is None or result < goal:  # then what shaping says does not matter
            return None if result is None else result + weight * low
        return None if extra is None else result + weight * extra

    total = _sum([limits, _scaled(help_, weight)])
    return _combined(read, gated, total, f"{read[0].claim}; where that is reached, {read[1].claim}", stated)


def clip(part: Reward, *, low: float = -math.inf, high: float = math.inf, **stated: Any) -> Reward:
    """The reward, held between low and high."""
    if not low <= high:
        raise ValueError(f"clip needs low ≤ high, got {low} and {high}")
    read = _read((part,))
    old = read[0].range or (-math.inf, math.inf)
    limits: Range | None = (min(max(old[0], low), high), min(max(old[1], low), high))
    limits = limits if limits and all(map(math.isfinite, limits)) else None
    return _combined(read, _strict(lambda values: min(max(values[0], low), high)), limits, read[0].claim, stated)


def schedule(part: Reward, factors: Mapping[int, float], **stated: Any) -> Reward:
    """The reward times a factor that depends on the optimizer step: linear between the steps that are given, constant outside of them.

    schedule(polite, {0: 1.0, 200: 0.0}) fades `polite` out over the first 200 steps. The step comes as the column `step`.
    """
    points = sorted((int(step), float(factor)) for step, factor in factors.items())
    if not points or not all(math.isfinite(factor) for _, factor in points):
        raise ValueError("schedule needs at least one step with a finite factor, as in {0: 1.0, 200: 0.0}")
    read = _read((part,))
    ranges = [_scaled(read[0].range, factor) for _, factor in points]
    limits = None if None in ranges else (min(r[0] for r in ranges if r), max(r[1] for r in ranges if r))
    inner = read[0]
    like_inner = dataclasses.replace(_UNDECLARED, scope=inner.scope, role=inner.role)
    parts = [inner, _Part(lambda rollout, step: factor_at(points, step), _STEP_FORM, like_inner)]
    return _combined(parts, _strict(math.prod), limits, inner.claim, stated)


def factor_at(points: Sequence[tuple[int, float]], step: float) -> float:
    """The factor at a step, of (step, factor) in order.

    >>> factor_at([(0, 1.0), (200, 0.0)], 50), factor_at([(0, 1.0), (200, 0.0)], 500)
    (0.75, 0.0)
    """
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= step <= right:
            return low + (high - low) * (step - left) / (right - left)
    return points[0][1] if step < points[0][0] else points[-1][1]


def potential(progress: Callable[..., float | None], *, gamma: float = 1.0, **stated: Any) -> Reward:
    """γ Φ(after the turn) − Φ(before it) for each turn, with Φ = 0 once the rollout is over (Ng, Harada and Russell, 1999).

    progress: called with the messages so far (a tuple, without the prompt) and columns by name; returns Φ ≥ 0, or None to abstain.

    With γ = 1 the turns of a rollout add up to −Φ(before the first), the same for every rollout of the prompt. So it changes nothing in
    GRPO, which pays whole rollouts, and it cannot be farmed; in PPO each turn is paid when it brings progress, which is what it is for.
    """
    if not 0.0 < gamma <= 1.0:
        raise ValueError(f"potential needs 0 < gamma ≤ 1, got {gamma}")
    parameters = list(inspect.signature(progress).parameters.values())
    if not parameters or parameters[0].name != "messages":
        raise ValueError("potential takes a function of `messages` (the turns so far) and columns by name")

    def turns(rollout: RolloutView, **columns: Any) -> list[float] | None:
        ends = [index for index, message in enumerate(rollout.messages) if message.role == "assistant"]
        if len(ends) != rollout.turns or not ends:
            return None
        before = progress(rollout.messages[:0], **columns)
        states = [before, *(progress(_until(rollout.messages, start), **columns) for start in ends[1:]), 0.0]
        if any(state is None for state in states):
            return None
        return [gamma * cast(float, now) - cast(float, then) for then, now in itertools.pairwise(states)]

    keywords = [p.replace(kind=p.KEYWORD_ONLY) if p.kind is p.POSITIONAL_OR_KEYWORD else p for p in parameters[1:]]
    turns.__signature__ = inspect.Signature([_ROLLOUT, *keywords])  # type: ignore[attr-defined]
    turns.__doc__ = inspect.getdoc(progress) or "Progress made in each turn."
    settings = {"scope": None, "claim": "each turn brings progress", "per_turn": True, **stated}
    marked: Reward = reward(**settings)(turns)
    return marked


def _until(messages: Sequence[Message], end: int) -> tuple[Message, ...]:
    """The state that the turn at `end` starts from: everything before it."""
    return tuple(messages[:end])


# ---- how a combination is made


@dataclass(frozen=True)
class _Part:
    call: Reward
    form: CallForm
    declared: Declaration

    @property
    def range(self) -> Range | None:
        return self.declared.range

    @property
    def scope(self) -> Scope | None:
        return self.declared.scope

    @property
    def role(self) -> RewardRole:
        return self.declared.role

    @property
    def claim(self) -> str:
        return self.declared.claim or str(getattr(self.call, "__name__", "a reward"))


_ROLLOUT = inspect.Parameter("rollout", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=RolloutView)
_UNDECLARED = Declaration(role="outcome")  # as a recipe takes a function that declares nothing
_STEP_FORM = CallForm(style="rollout", asynchronous=False, reserved=(), required=(STEP,), optional=(), every_column=False)


def _read(parts: Sequence[Reward]) -> list[_Part]:
    if not parts:
        raise ValueError("a combination needs at least one reward")
    read = [_Part(part, call_form(part), declaration_of(part) or _UNDECLARED) for part in parts]
    if turned := [part.claim for part in read if part.declared.per_turn]:
        raise ValueError(f"a reward that judges each turn cannot be combined ({turned[0]}); list it in the recipe by itself")
    return read


def _combined(parts: Sequence[_Part], fold: Fold, limits: Range | None, claim: str, stated: Mapping[str, Any]) -> Reward:
    """One function with the parts' columns. It takes all rollouts of a prompt at once when one of the parts does."""
    group = any(part.form.takes_lists for part in parts)

    def asked(given: Any, columns: Mapping[str, Any]) -> list[_Asked]:
        return [_ask(part, given if group else [given], columns) for part in parts]

    def result(values: Sequence[Sequence[Any]]) -> Any:
        folded = [fold([None if value is None else as_float(value) for value in row]) for row in zip(*values, strict=True)]
        return folded if group else folded[0]

    async def waiting(given: Any, /, **columns: Any) -> Any:
        return result(
            [part.values([await one if isinstance(one, Awaitable) else one for one in part.returned]) for part in asked(given, columns)]
        )

    def plain(given: Any, /, **columns: Any) -> Any:
        return result([part.values(part.returned) for part in asked(given, columns)])

    combined: Reward = waiting if any(part.form.asynchronous for part in parts) else plain
    combined.__signature__ = _signature(parts, group=group)  # type: ignore[attr-defined]
    combined.__doc__ = claim
    settings: dict[str, Any] = {
        "scope": _shared_scope(parts), "claim": claim, "range": limits, "role": _shared_role(parts), "deadline_s": _deadline(parts),
        "runs_code": any(part.declared.runs_code for part in parts), **stated,
    }  # fmt: skip
    marked: Reward = reward(group=group, **settings)(combined)
    return marked


@dataclass(frozen=True)
class _Asked:
    """What a part returned: one value per rollout, or (`listed`) one list for all of them."""

    returned: list[Any]
    listed: bool

    def values(self, returned: list[Any]) -> list[Any]:
        if not self.listed:
            return returned
        values = returned[0].tolist() if hasattr(returned[0], "tolist") else returned[0]
        return list(values)


def _ask(part: _Part, views: Sequence[RolloutView], columns: Mapping[str, Any]) -> _Asked:
    rows = [(view, columns) for view in views]
    calls = [rows] if part.form.takes_lists else [[row] for row in rows]
    bound = [bind(part.form, call, {}) for call in calls]
    return _Asked([part.call(*positional, **keywords) for positional, keywords in bound], part.form.takes_lists)


def _strict(fold: Callable[[Sequence[float]], float]) -> Fold:
    """Abstains where one of the values is missing."""

    def folded(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return fold(known) if len(known) == len(values) else None

    return folded


def _signature(parts: Sequence[_Part], *, group: bool) -> inspect.Signature:
    """rollout (or rollouts), then the columns of every part; one that any part requires is required."""
    required = list(dict.fromkeys(name for part in parts for name in part.form.required))
    optional = list(dict.fromkeys(name for part in parts for name in part.form.optional if name not in required))
    first = _ROLLOUT.replace(name="rollouts", annotation=inspect.Parameter.empty) if group else _ROLLOUT
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in required]
    named += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in optional]
    rest = [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)] if any(part.form.every_column for part in parts) else []
    return inspect.Signature([first, *named, *rest])


def _shared_scope(parts: Sequence[_Part]) -> Scope | None:
    scopes = {part.scope for part in parts}
    return scopes.pop() if len(scopes) == 1 else None


def _shared_role(parts: Sequence[_Part]) -> RewardRole:
    return "outcome" if any(part.role == "outcome" for part in parts) else "shaping"


def _deadline(parts: Sequence[_Part]) -> float | None:
    """The parts run one after the other. None, the default, when none of them states one."""
    stated = [part.declared.deadline_s for part in parts]
    return sum(seconds or DEADLINE_S for seconds in stated) if any(stated) else None


def _scaled(limits: Range | None, factor: float) -> Range | None:
    return None if limits is None else (min(limits[0] * factor, limits[1] * factor), max(limits[0] * factor, limits[1] * factor))


def _sum(ranges: Sequence[Range | None]) -> Range | None:
    known = [limits for limits in ranges if limits is not None]
    return (sum(low for low, _ in known), sum(high for _, high in known)) if len(known) == len(ranges) else None


def _product(left: Range, right: Range) -> Range:
    corners = [a * b for a in left for b in right]
    return min(corners), max(corners)
