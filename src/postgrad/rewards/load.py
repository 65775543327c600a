"""Find the reward functions that a recipe names, and check the columns they ask for.

The file's text is read once and the functions run from that text, in the worker process only: editing `rewards.py` while a run goes on
changes nothing, and the trainer never imports user code.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from postgrad.errors import DataError, RecipeError, about, reason
from postgrad.rewards.base import CallForm, RewardRole, Scope
from postgrad.rewards.child import FunctionSource
from postgrad.rewards.library import LIBRARY
from postgrad.rewards.worker import RewardWorker, WorkerDied
from postgrad.suggest import did_you_mean, did_you_mean_file

DEADLINE_S = 5.0
"""Seconds that one call may take where neither the recipe nor the function says."""

Policy = Literal["abstain", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """One entry of the recipe's `rewards:`. None = what the function declares.

    on_error:     an exception, a crash or a missed deadline: the row abstains with a counted failure, or the run stops.
    on_nonfinite: the same for an infinite value. NaN always abstains and is counted.
    """

    use: str
    weight: float = 1.0
    role: RewardRole | None = None
    name: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float | None = None
    on_error: Policy = "abstain"
    on_nonfinite: Policy = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedReward:
    """A reward that is known to load and to be callable. The function itself lives in the worker process.

    scope, claim, range: what it declares, None where it declares nothing.
    group:  called with all rollouts of a prompt at once, because their values depend on one another.
    where:  file:function, or the library's name. sha256: of the file's text ("" for the library).
    """

    name: str
    weight: float
    role: RewardRole
    scope: Scope | None
    claim: str | None
    range: tuple[float, float] | None
    group: bool
    deadline_s: float
    on_error: Policy
    on_nonfinite: Policy
    form: CallForm
    where: str
    sha256: str
    source: FunctionSource


def load_rewards(
    specs: Sequence[Mapping[str, Any] | RewardSpec] | Mapping[int, Mapping[str, Any] | RewardSpec],
    base: Path | str,
    *,
    allow_unsafe_exec: bool = False,
) -> list[LoadedReward]:
    """Load what the recipe's `rewards:` names, all of it or some, by number; paths are relative to `base`.

    Raises `RecipeError` for a missing file or function, a file that cannot be imported (with the line of the last frame), a function
    that cannot be called as a reward, names that are not unique, and a reward that runs code where there is no sandbox, unless
    `allow_unsafe_exec`.
    """
    keys, checked, sources = [], [], []
    for index, given in specs.items() if isinstance(specs, Mapping) else enumerate(specs):
        keys.append(f"rewards[{index}]")
        with about(keys[-1]):
            checked.append(_spec(given))
            sources.append(dataclasses.replace(_source(checked[-1], Path(base)), unsafe_exec=allow_unsafe_exec))
    worker = RewardWorker(sources, memory_gb=None)
    try:
        described = worker.describe()
    except WorkerDied as error:
        files = ", ".join(sorted({source.path for source in sources if source.path}))
        raise RecipeError(
            f"the reward files could not be loaded: {error}", where=files, key="rewards", hint="importing the file must end by itself"
        ) from None
    finally:
        worker.close()
    loaded = []
    for key, spec, source, answer in zip(keys, checked, sources, described, strict=False):
        with about(key):
            loaded.append(_loaded(spec, source, answer))
    _refuse_duplicates(loaded)
    return loaded


def check_columns(rewards: Sequence[LoadedReward], columns: Collection[str], *, given: Collection[str] = ()) -> None:
    """Raise `DataError` when a reward asks for a column that the data lacks and that the run does not give it."""
    for reward in rewards:
        for missing in (name for name in reward.form.required if name not in columns and name not in given):
            hint = did_you_mean(missing, columns, f"rename the column, or bind it in the recipe: args: {{{missing}: …}}")
            found = ", ".join(sorted(columns)) or "none"
            raise DataError(f"reward {reward.name} asks for the column {missing!r}; the columns are {found}", where=reward.where, hint=hint)


def _spec(spec: Mapping[str, Any] | RewardSpec) -> RewardSpec:
    if not isinstance(spec, RewardSpec):
        known = [f.name for f in dataclasses.fields(RewardSpec)]
        for key in (key for key in spec if key not in known):
            hint = did_you_mean(str(key), known, f"the keys are {', '.join(known)}")
            raise RecipeError(f"unknown key {key!r}", hint=hint)
        if "use" not in spec:
            raise RecipeError("`use` is missing", hint="use: rewards.py:function, or the name of a shipped reward")
        spec = RewardSpec(**spec)
    _check_values(spec)
    return spec


def _check_values(spec: RewardSpec) -> None:
    weight: Any = spec.weight
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise RecipeError(f"not a finite number: {spec.weight!r}", key="weight")
    if spec.role is not None and spec.role not in get_args(RewardRole):
        raise RecipeError(f"outcome or shaping, not {spec.role!r}", key="role")
    for name in ("on_error", "on_nonfinite"):
        if getattr(spec, name) not in get_args(Policy):
            raise RecipeError(f"abstain or stop, not {getattr(spec, name)!r}", key=name)
    if spec.deadline_s is not None and not (math.isfinite(spec.deadline_s) and spec.deadline_s > 0):
        raise RecipeError(f"not a positive number of seconds: {spec.deadline_s!r}", key="deadline_s")


def _source(spec: RewardSpec, base: Path) -> FunctionSource:
    file, colon, function = spec.use.rpartition(":")
    if not colon and not spec.use.endswith(".py"):
        if spec.use not in LIBRARY:
            hint = did_you_mean(spec.use, LIBRARY, f"shipped rewards: {', '.join(LIBRARY)}; your own: rewards.py:function")
            raise RecipeError(f"there is no shipped reward {spec.use!r}", key="use", hint=hint)
        return FunctionSource(spec.use, args=dict(spec.args))
    if not colon or not function or not file.endswith(".py"):
        raise RecipeError(f"{spec.use!r} names no function", key="use", hint="write file.py:function, for example rewards.py:correct")
    path = (base / file).expanduser().resolve()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = did_you_mean_file(path, "the path is relative to the recipe")
        raise RecipeError(f"cannot read the reward file {path}: {reason(error)}", key="use", hint=hint) from None
    return FunctionSource(function, str(path), text, dict(spec.args))


def _loaded(spec: RewardSpec, source: FunctionSource, answer: Mapping[str, Any]) -> LoadedReward:
    place = f"{source.path}:{source.function}" if source.path else source.function
    if problem := answer.get("problem"):
        raise RecipeError(f"{spec.use}: {problem['message']}", where=problem["where"], key="use", hint=problem.get("hint"))
    facts: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in answer["form"].items()}
    declared = answer["declared"] or {}
    # A function that declares nothing is most likely the task itself.
    role: RewardRole = spec.role or declared.get("role") or "outcome"
    limits = declared.get("range")
    return LoadedReward(
        name=spec.name or declared.get("name") or source.function,
        weight=float(spec.weight),
        role=role,
        scope=declared.get("scope"),
        claim=declared.get("claim"),
        range=None if limits is None else (float(limits[0]), float(limits[1])),
        group=bool(declared.get("group")),
        deadline_s=float(spec.deadline_s or declared.get("deadline_s") or DEADLINE_S),
        on_error=spec.on_error,
        on_nonfinite=spec.on_nonfinite,
        form=CallForm(**facts),
        where=place,
        sha256=hashlib.sha256(source.text.encode()).hexdigest() if source.path else "",
        source=source,
    )


def _refuse_duplicates(rewards: Sequence[LoadedReward]) -> None:
    seen: dict[str, LoadedReward] = {}
    for reward in rewards:
        if reward.name in seen:
            both = f"{seen[reward.name].where} and {reward.where}"
            raise RecipeError(f"two rewards are named {reward.name!r}: {both}", key="rewards", hint="give one of them a name: …")
        seen[reward.name] = reward
