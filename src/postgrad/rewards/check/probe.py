"""What the check adds to a reward file, in the worker: it watches calls for changed inputs, repeats them in threads, and lists rewards."""

from __future__ import annotations

import functools
import inspect
import json
import pickle
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from postgrad.rewards.base import call_form, declaration_of

_WORKERS = 8
_calls: dict[Any, list[tuple[bytes, str]]] = {}


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, returning 1 where it changed what it was given and 0 where not, in the shape of its own values."""
    form = call_form(function) if _has_form(function) else None

    def judge(before: bytes, given: Any, returned: Any) -> Any:
        _calls.setdefault(function, []).append((before, repr(returned)))
        changed = float(pickle.dumps(given) != before)
        if form is not None and (form.takes_lists or form.per_turn):
            return [changed] * len(returned)
        return changed

    @functools.wraps(function)
    def plain(*arguments: Any, **named: Any) -> Any:
        before = pickle.dumps((arguments, named))
        return judge(before, (arguments, named), function(*arguments, **named))

    @functools.wraps(function)
    async def waiting(*arguments: Any, **named: Any) -> Any:
        before = pickle.dumps((arguments, named))
        return judge(before, (arguments, named), await function(*arguments, **named))

    return waiting if form is not None and form.asynchronous else plain


def threaded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward that repeats the watched calls in threads, and returns how many of them now give something else."""

    def repeat(rollout: Any) -> float:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(_WORKERS) as pool:
                return float(sum(pool.map(functools.partial(_differs, function), _calls.get(function, []))))
        finally:
            sys.setswitchinterval(interval)

    return repeat


def _differs(function: Callable[..., Any], call: tuple[bytes, str]) -> bool:
    arguments, named = pickle.loads(call[0])
    try:
        return repr(function(*arguments, **named)) != call[1]
    except Exception:  # it raised nothing the first time, so this is a difference
        return True


def listing(module: Mapping[str, Any]) -> Callable[..., Any]:
    """A function whose docstring names the module's own rewards, as JSON."""

    def names(rollout: Any) -> None:
        return None

    names.__doc__ = json.dumps([name for name, value in module.items() if not name.startswith("_") and _is_own(value, module)])
    return names


def _is_own(value: Any, module: Mapping[str, Any]) -> bool:
    combined = declaration_of(value) is not None and getattr(value, "__module__", "") == "postgrad.rewards.combine"
    own = inspect.isfunction(value) and value.__module__ == module["__name__"]
    return (own or combined) and _has_form(value)


def _has_form(function: Any) -> bool:
    try:
        call_form(function)
    except (ValueError, TypeError):
        return False
    return True
