"""What the instance of an environment says beside the results of its tools. All of it is user code: ask where it can be abandoned.

after each call    `done`: the rollout is over · `reward`: what the call earned. Attributes or properties; both optional.
at the end         `get_reward()`: what the whole rollout earned. Optional; may be async.
for the journal    `snapshot()` → a JSON value, and `restore(state)`: where a run that was killed goes on, a new instance that was reset
                   gets the state that the old one was in. Optional; without them its calls are made again.

What an environment raises here, or says in another type, is a failure of the environment and never the model's.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from postgrad.protocols import InfrastructureError
from postgrad.rollout.declare import call
from postgrad.rollout.results import exception_text

LIFECYCLE = ("reset", "close", "get_reward", "snapshot", "restore")
"""Methods of an environment that are no tools."""


@runtime_checkable
class Resumable(Protocol):
    """An environment whose state can be written down. `restore` is called on an instance that was reset as the first one was."""

    def snapshot(self) -> Any: ...
    def restore(self, state: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Standing:
    """done: nothing more can be done here. reward: what the call earned, None = the environment does not say."""

    done: bool = False
    reward: float | None = None


NOTHING_SAID = Standing()


def standing(instance: Any) -> Standing:
    """Where the environment stands after a call. Raises `InfrastructureError`."""
    try:
        done, reward = getattr(instance, "done", False), getattr(instance, "reward", None)
    except Exception as error:
        raise InfrastructureError(f"{type(instance).__name__}: {exception_text(error)}") from error
    # Methods of these names are tools like any others.
    return Standing(
        done=False if callable(done) else _truth(done, instance),
        reward=None if reward is None or callable(reward) else _number(reward, f"{type(instance).__name__}.reward"),
    )


def final_reward(instance: Any) -> float | None:
    """What `get_reward()` returns; None when there is no such method, or it returns None. Raises `InfrastructureError`."""
    method = getattr(instance, "get_reward", None)
    if method is None:
        return None
    name = f"{type(instance).__name__}.get_reward"
    try:
        reward = call(method, {})
    except Exception as error:
        raise InfrastructureError(f"{name}: {exception_text(error)}") from error
    return None if reward is None else _number(reward, name)


def take_snapshot(instance: Any) -> Any:
    """The state as a JSON value; None when the environment cannot say it. Raises `InfrastructureError`."""
    if not isinstance(instance, Resumable):
        return None
    name = f"{type(instance).__name__}.snapshot"
    try:
        state = call(instance.snapshot, {})
        same = json.loads(json.dumps(state, allow_nan=False)) == state
    except Exception as error:
        raise InfrastructureError(f"{name}: {exception_text(error)}") from error
    if state is None or not same:  # such as a tuple, or a dict with numbers for keys: it would not come back as it was
        raise InfrastructureError(f"{name} returns a JSON value (dict with text keys, list, text, number, true, false)")
    return state


def put_back(instance: Any, state: Any) -> None:
    """Bring a new instance to the state of a snapshot. Raises `InfrastructureError`."""
    try:
        call(instance.restore, {"state": state})
    except Exception as error:
        raise InfrastructureError(f"{type(instance).__name__}.restore: {exception_text(error)}") from error


def start_seed(run_seed: int, index: int) -> int:
    """The seed of the environments of one prompt, the same for all of its samples. In [0, 2^32).

    run_seed: the recipe's. index: the prompt's place in the run's order, so another pass over the data starts elsewhere.

    >>> start_seed(0, 0) == start_seed(0, 0), start_seed(0, 0) == start_seed(0, 1)
    (True, False)
    """
    return int.from_bytes(hashlib.sha256(f"environment {run_seed} {index}".encode()).digest()[:4], "big")


def _truth(value: Any, instance: Any) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):  # numpy's own
        return bool(value)
    raise InfrastructureError(f"{type(instance).__name__}.done is True or False, not {type(value).__name__}")


def _number(value: Any, name: str) -> float:
    single = getattr(value, "item", None) if getattr(value, "shape", None) == () else None
    number = value if single is None else single()  # a scalar of numpy or torch
    if isinstance(number, Real) and math.isfinite(number):
        return float(number)
    raise InfrastructureError(f"{name} is a finite number or None, not {number!r}"[:200])
