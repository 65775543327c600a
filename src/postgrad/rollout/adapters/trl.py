"""What TRL's `GRPOTrainer(environment_factory=…)` takes, as an environment (TRL 1.16.0: `reset`, public methods as tools, `get_reward`).

    # tools.py
    Wordle = trl_environment(WordleEnv)            the recipe: tools: [tools.py:Wordle], rewards: [{use: environment}]

The differences: an instance is made for each rollout instead of being reset again and again, `close` is called, and what `reset` returns
begins a new paragraph. A mapping of several factories, chosen by a column `environment`, has no counterpart. `environment.reward` read by a
reward function is here `rollout.tool_results[-1].reward`, or the reward `environment` with `calls: last`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from postgrad.errors import RecipeError


def trl_environment(factory: Callable[[], Any]) -> type:
    """An environment class from a class, or from a function that makes an instance. The function is called once now, to see its methods.

    `reset` gets the row as TRL hands it over: every column, and `prompt` (a list of messages). Raises `RecipeError` for what TRL would
    refuse too: an instance without `reset`.
    """
    kind = factory if inspect.isclass(factory) else type(factory())
    if not callable(getattr(kind, "reset", None)):
        raise RecipeError(f"{kind.__name__} has no reset, which TRL's environments need", hint="define reset(self, **kwargs)")
    members: dict[str, Any] = {
        name: _delegate(name, method) for name, method in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")
    }
    members = {name: method for name, method in members.items() if name != "reset"}
    return type(kind.__name__, (_Adapted,), {"__doc__": kind.__doc__, "factory": staticmethod(factory), **members})


class _Adapted:
    """Hands everything on to an instance of the other library's class."""

    factory: Callable[[], Any]

    def __init__(self) -> None:
        self._inner = self.factory()

    def reset(self, prompt: list[dict[str, Any]], row: Mapping[str, Any]) -> Any:
        return self._inner.reset(**{"prompt": prompt, **row})

    @property
    def done(self) -> Any:
        return getattr(self._inner, "done", False) is True

    @property
    def reward(self) -> Any:
        """TRL gives the name no meaning: what is no number says nothing."""
        value = getattr(self._inner, "reward", None)
        return value if isinstance(value, Real) else None


def _delegate(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: _Adapted, *arguments: Any, **named: Any) -> Any:
        return getattr(self._inner, name)(*arguments, **named)

    return call
