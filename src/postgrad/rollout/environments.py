"""An environment is a class whose methods are tools and whose instance belongs to one rollout.

1. `Environment`        the class: what its `reset` asks for.
2. `environment_tools`  its public methods as tools.
3. `open_instances`     one rollout's instances, made and reset; `end_session` asks for their last word and closes them.
4. `ToolSession`        the tools of one rollout, with its own instances.

`episode` says what an instance may tell beside the results of its tools: `done`, `reward`, `get_reward`, `snapshot` and `restore`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from postgrad.errors import DataError, RecipeError
from postgrad.rollout.declare import BoundTool, Tool, call, options_of
from postgrad.rollout.episode import LIFECYCLE, done_at_reset, final_reward
from postgrad.rollout.results import exception_text
from postgrad.rollout.signature import parameters_of, read_signature
from postgrad.types import Prompt


@dataclass(frozen=True, slots=True)
class Environment:
    """A class with state for one rollout. Its public methods are tools, except

    reset(self, …)    called before the first turn with the dataset columns that it names. Where the dataset has no such column, `seed`
                      is one number for all samples of a prompt, `row` all columns, `prompt` the messages. The text that it returns, if
                      any, is appended to the last user message.
    close(self)       called when the rollout has ended, however it ended.
    get_reward, snapshot, restore     see `episode`.
    """

    factory: Callable[[], Any]
    name: str
    open_s: float | None = None
    """Seconds in which it is made and reset; None = what one call may take."""

    def reset_arguments(self, prompt: Prompt, *, seed: int = 0) -> dict[str, Any]:
        """What `reset` asks for. Raises `DataError` for a column that the row lacks. seed: see `episode.start_seed`."""
        reset = getattr(self.factory, "reset", None)
        if reset is None:
            return {}
        parameters = list(inspect.signature(reset).parameters.values())[1:]
        named = [item for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
        given = {"seed": seed, "row": dict(prompt.columns), "prompt": messages, **prompt.columns}
        needed = [item.name for item in named if item.default is item.empty]
        if missing := [name for name in needed if name not in given]:
            what = f"{self.name}.reset asks for column {missing[0]!r}, which this row lacks (it has: {', '.join(prompt.columns) or 'none'})"
            raise DataError(what, where=prompt.row, hint="add the column to the data or give the parameter a default")
        everything = dict(prompt.columns) if any(item.kind is item.VAR_KEYWORD for item in parameters) else {}
        return everything | {item.name: given[item.name] for item in named if item.name in given}


@dataclass(frozen=True, slots=True)
class ToolSession:
    """The tools of one rollout, by name. `instances` are its environments, `observation` what their resets returned."""

    tools: Mapping[str, BoundTool]
    instances: tuple[Any, ...] = ()
    observation: str = ""

    def close(self) -> None:
        """Close every environment; the first error is raised after all have been closed."""
        errors: list[BaseException] = []
        for instance in self.instances:
            try:
                call(getattr(instance, "close", lambda: None), {})
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]


@dataclass(frozen=True, slots=True)
class Ending:
    """reward: what `get_reward` of the environments returned, summed; None when none has it. failure: what went wrong when it was asked,
    which spoils the rollout. problem: what went wrong when they were closed, which does not. Both "" when nothing did."""

    reward: float | None = None
    failure: str = ""
    problem: str = ""


def end_session(session: ToolSession) -> Ending:
    """Ask for the final reward, then close every environment. Runs user code: call it where it can be abandoned."""
    rewards, failure, problem = [], "", ""
    try:
        rewards = [reward for instance in session.instances if (reward := final_reward(instance)) is not None]
    except BaseException as error:
        failure = exception_text(error)
    try:
        session.close()
    except BaseException as error:  # the environment's code
        problem = exception_text(error)
    return Ending(sum(rewards) if rewards and not failure else None, failure, problem)


def open_instances(environments: Sequence[Environment], reset_arguments: Sequence[Mapping[str, Any]]) -> ToolSession:
    """Make and reset one rollout's environments: a session that has no tools yet. Runs user code: call it where it can be abandoned.

    What was made is closed again when a later constructor or reset raises.
    """
    session = ToolSession({})
    observations: list[str] = []
    try:
        for environment, arguments in zip(environments, reset_arguments, strict=True):
            instance = environment.factory()
            session = ToolSession({}, (*session.instances, instance))
            observed = call(instance.reset, arguments) if hasattr(instance, "reset") else None
            observations += [_observation(observed, environment.name)] if observed is not None else []
            if done_at_reset(instance):
                raise ValueError(f"{environment.name} is done as soon as it was reset: it leaves the model nothing to do")
    except BaseException:
        with suppress(BaseException):  # what was made may be unfit to be closed; what went wrong first is what counts
            session.close()
        raise
    return ToolSession({}, session.instances, "\n".join(observations))


def _observation(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}.reset returns the first observation as text, or None; it returned {type(value).__name__}")
    return value


def environment_tools(factory: type, index: int, *, where: str) -> list[Tool]:
    """The public methods of an environment class, the `index`-th of its toolbox. Raises `RecipeError` when it has none."""
    needed = [
        item.name
        for item in parameters_of(factory, where=where)
        if item.default is item.empty and item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)
    ]
    if needed:
        hint = "an environment is made without arguments; take dataset columns in `reset`"
        raise RecipeError(f"{factory.__name__} needs the argument `{needed[0]}`", where=where, hint=hint)
    if inspect.isabstract(factory):
        raise RecipeError(
            f"{factory.__name__} is abstract: no instance can be made of it", where=where, hint="name a class derived from it"
        )
    for name in LIFECYCLE:
        if not callable(getattr(factory, name, len)):
            raise RecipeError(f"{factory.__name__}.{name} is no method", where=where, hint=f"postgrad calls {name}: name it otherwise")
    methods = [
        method
        for name, method in inspect.getmembers(factory, inspect.isfunction)
        if not name.startswith("_") and name not in LIFECYCLE and not isinstance(inspect.getattr_static(factory, name), staticmethod)
    ]
    if not methods:
        raise RecipeError(f"{factory.__name__} has no public method", where=where, hint="each public method of an environment is a tool")
    if hasattr(factory, "snapshot") != hasattr(factory, "restore"):
        hint = "an environment has both or neither"
        raise RecipeError(f"{factory.__name__} has one of snapshot and restore, not the other", where=where, hint=hint)
    tools = []
    for method in methods:
        options = options_of(method)
        spec, signature = read_signature(method, name=options.name or method.__name__, where=where, bound=True)
        tools.append(Tool(spec, signature, method, options, index))
    return tools
