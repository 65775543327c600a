"""What the instance of an environment says beside the results of its tools. All of it is user code: ask where it can be abandoned.

after each call    `done`: the rollout is over · `reward`: what the call earned. Attributes or properties; both optional.
at the end         `get_reward()`: what the whole rollout earned. Optional; may be async.
for the journal    `snapshot()` → a JSON value, and `restore(state)`: where a run that was killed goes on, a new instance that was reset
                   gets the state that the old one was in. Optional; without them its calls are made again.

What an environment raises here, or says in another type, is a failure of the environment and never the model's.
"""

from __future__ import annotations

import hashlib
import inspect
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
    done, reward = _said(instance, "done", False), _said(instance, "reward", None)
    # Methods of these names are tools like any others.
    return Standing(
        done=False if callable(done) else _truth(done, instance),
        reward=None if reward is None or callable(reward) else _number(reward, f"{type(instance).__name__}.reward"),
    )


def done_at_reset(instance: Any) -> bool:
    """Whether nothing can be done from the start. What cannot be said before the first call is asked again after it."""
    try:
        return standing(instance).done
    except InfrastructureError:
        return False


def final_reward(instance: Any) -> float | None:
    """What `get_reward()` returns; None when there is no such method, or it returns None. Raises `InfrastructureError`."""
    method = getattr(instance, "get_reward", None)
    if method is None:
        return None
    name = f"{type(instance).__name__}.get_reward"
    try:
        reward = call(method, {})
    except BaseException as error:
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
    except BaseException as error:
        raise InfrastructureError(f"{name}: {exception_text(error)}") from error
    if state is None or not same:  # such as a tuple, or a dict with numbers for keys: it would not come back as it was
        raise InfrastructureError(f"{name} returns a JSON value (dict with text keys, list, text, number, true, false)")
    return state


def put_back(instance: Any, state: Any) -> None:
    """Bring a new instance to the state of a snapshot. Raises `InfrastructureError`."""
    try:
        call(instance.restore, {"state": state})
    except BaseException as error:
        raise InfrastructureError(f"{type(instance).__name__}.restore: {exception_text(error)}") from error


def start_seed(run_seed: int, index: int) -> int:
    """The seed of the environments of one prompt, the same for all of its samples. In [0, 2^32).

    run_seed: the recipe's. index: the prompt's place in the run's order, so another pass over the data starts elsewhere.

    >>> start_seed(0, 0) == start_seed(0, 0), start_seed(0, 0) == start_seed(0, 1)
    (True, False)
    """
    return int.from_bytes(hashlib.sha256(f"environment {run_seed} {index}".encode()).digest()[:4], "big")


def _said(instance: Any, name: str, default: Any) -> Any:
    """The attribute; `default` where there is none. A property that raises is there, also when it raises `AttributeError`."""
    try:
        return getattr(instance, name)
    except AttributeError as error:
        if not isinstance(inspect.getattr_static(instance, name, None), property):
            return default
        failure: BaseException = error
    except BaseException as error:
        failure = error
    raise InfrastructureError(f"{type(instance).__name__}.{name}: {exception_text(failure)}") from failure


def _truth(value: Any, instance: Any) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):  # numpy's own
        return bool(value)
    raise InfrastructureError(f"{type(instance).__name__}.done is True or False, not {type(value).__name__}")


def _number(value: Any, name: str) -> float:
    try:
        single = getattr(value, "item", None) if getattr(value, "shape", None) == () else None
        number = value if single is None else single()  # a scalar of numpy or torch
        if isinstance(number, Real) and math.isfinite(number):
            return float(number)
        said = repr(number)[:100]
    except BaseException as error:  # an integer too large for a float, or the value's own code
        said = f"{type(value).__name__} ({exception_text(error)})"
    raise InfrastructureError(f"{name} is a finite number or None, not {said}")
