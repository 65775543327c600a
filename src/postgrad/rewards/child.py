"""The process in which reward functions run. Started by `worker.RewardWorker`; imports no torch of its own.

It answers one request at a time, in order:

    ("load", sources, memory_bytes)     run the reward files, reply with a description of each function
    ("rows", packed)                    keep the rows of a batch, each as a pickle of (RolloutView, columns)
    ("call", function, rows, mode, s)   reply with one outcome per row

The channel and its rules are `postgrad.worker`'s. The parent enforces deadlines by killing this process.

An outcome is a list: ["value", x] · ["turns", [x, None, …]] · ["none"] · ["refused", what it returned] ·
["failed", kind, message, traceback, place in the user's file].
"""

from __future__ import annotations

import asyncio
import inspect
import math
import pickle
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from postgrad import sandbox
from postgrad.errors import PostgradError, RecipeError
from postgrad.rewards.base import CallForm, RolloutView, bind, call_form, declaration_of
from postgrad.suggest import did_you_mean
from postgrad.worker.child import serve
from postgrad.worker.limits import limit_cpu, limit_memory

CONCURRENT = 16
"""Rows of an async reward that wait at the same time."""

Mode = Literal["single", "together", "concurrent"]
Outcome = list[Any]


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """Where a function comes from: the text of a file as it was when the run began, or (path "") the shipped library.

    unsafe_exec: the recipe says `allow_unsafe_exec`, which holds for the whole process.
    """

    function: str
    path: str = ""
    text: str = ""
    args: Mapping[str, Any] | None = None
    unsafe_exec: bool = False


@dataclass(frozen=True, slots=True)
class _Loaded:
    call: Callable[..., Any]
    form: CallForm
    args: Mapping[str, Any]


class _Late(Exception):
    """An async reward passed its deadline (its own `TimeoutError`s are ordinary exceptions)."""


class _Requests:
    """Answers the requests above."""

    def __init__(self) -> None:
        self._functions: list[_Loaded] = []
        self._rows: list[bytes] = []

    def answer(self, request: Any) -> Any:
        if request[0] == "load":
            self._functions, reply = _load_all(request[1])
            limit_memory(request[2])
            return reply
        if request[0] == "rows":
            self._rows = request[1]
            return len(self._rows)
        _, index, picked, mode, seconds = request
        limit_cpu(seconds)
        return _call(self._functions[index], [self._rows[row] for row in picked], mode, seconds)


def main(read_fd: int, write_fd: int) -> None:
    serve(read_fd, write_fd, _Requests().answer)


# ---------------------------------------------------------------------------------------------------------------- loading


def _load_all(sources: Sequence[FunctionSource]) -> tuple[list[_Loaded], list[dict[str, Any]]]:
    functions: list[_Loaded] = []
    replies: list[dict[str, Any]] = []
    modules: dict[str, types.ModuleType] = {}
    for source in sources:
        try:
            loaded = _load(source, modules)
            replies.append(_describe(loaded))
            functions.append(loaded)
        except BaseException as error:
            return [], [*replies, {"problem": _problem(error)}]
    return functions, replies


def _load(source: FunctionSource, modules: dict[str, types.ModuleType]) -> _Loaded:
    if source.unsafe_exec:
        sandbox.allow_unsafe_exec()
    if source.path:
        if source.path not in modules:
            modules[source.path] = _run_file(source)
        function = _lookup(modules[source.path], source)
    else:
        from postgrad.rewards.library import LIBRARY

        function = LIBRARY[source.function]
    args = source.args or {}
    try:
        form = call_form(function, args)
        declared = declaration_of(function)
        if declared is not None and declared.check_args is not None:
            declared.check_args(**args)
        if declared is not None and declared.runs_code:
            sandbox.isolation()
    except (ValueError, TypeError) as error:
        raise RecipeError(f"{source.function} {error}") from error
    return _Loaded(function, form, args)


def _run_file(source: FunctionSource) -> types.ModuleType:
    """Run the file's text as a module; files beside it can be imported."""
    folder = str(Path(source.path).parent)
    if folder not in sys.path:
        sys.path.append(folder)  # at the end, so that it shadows nothing
    module = types.ModuleType(f"postgrad_rewards_of_{Path(source.path).stem}")
    module.__file__ = source.path
    sys.modules[module.__name__] = module
    exec(compile(source.text, source.path, "exec"), module.__dict__)
    return module


def _lookup(module: types.ModuleType, source: FunctionSource) -> Callable[..., Any]:
    found = getattr(module, source.function, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    if found is not None:
        raise RecipeError(f"{source.function} is a {type(found).__name__}, not a function")
    own = [name for name, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
    hint = did_you_mean(source.function, own, f"it defines: {', '.join(own) or 'no function'}")
    raise RecipeError(f"the file has no function {source.function}", hint=hint)


def _describe(loaded: _Loaded) -> dict[str, Any]:
    declared = declaration_of(loaded.call)
    described = {} if declared is None else {
        "name": declared.name, "scope": declared.scope, "claim": declared.claim, "range": declared.range, "role": declared.role,
        "deadline_s": declared.deadline_s, "group": declared.group,
    }  # fmt: skip
    form = {name: getattr(loaded.form, name) for name in CallForm.__slots__}
    return {"form": form, "declared": described or None, "doc": inspect.getdoc(loaded.call) or ""}


def _problem(error: BaseException) -> dict[str, Any]:
    """What went wrong while loading, and the line of the last frame (of the text, for a syntax error)."""
    if isinstance(error, PostgradError):
        return {"message": error.what, "where": error.where, "hint": error.hint}
    if isinstance(error, SyntaxError):
        return {"message": f"SyntaxError: {error.msg}", "where": f"{error.filename}:{error.lineno}"}
    frames = traceback.extract_tb(error.__traceback__)
    return {"message": _one_line(error), "where": f"{frames[-1].filename}:{frames[-1].lineno}"}


# ---------------------------------------------------------------------------------------------------------------- calling


def _call(function: _Loaded, packed: Sequence[bytes], mode: Mode, seconds: float) -> list[Outcome]:
    if mode == "concurrent":
        return asyncio.run(_all_rows(function, packed, seconds))
    try:
        rows = [pickle.loads(row) for row in packed]
        positional, keywords = bind(function.form, rows, function.args)
        returned = function.call(*positional, **keywords)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_within(returned, seconds))
        return _outcomes(returned, [view for view, _ in rows], function.form)
    except BaseException as error:
        return [_failure(error)] * len(packed)


async def _all_rows(function: _Loaded, packed: Sequence[bytes], seconds: float) -> list[Outcome]:
    """All rows of an async reward, `CONCURRENT` at a time, each with its own deadline."""
    slots = asyncio.Semaphore(CONCURRENT)

    async def one(row: bytes) -> Outcome:
        async with slots:
            try:
                view, columns = pickle.loads(row)
                positional, keywords = bind(function.form, [(view, columns)], function.args)
                return _outcomes(await _within(function.call(*positional, **keywords), seconds), [view], function.form)[0]
            except BaseException as error:
                return _failure(error)

    return await asyncio.gather(*(one(row) for row in packed))


async def _within(awaitable: Any, seconds: float) -> Any:
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await awaitable
    except TimeoutError as error:
        if deadline.expired():
            raise _Late(f"took longer than its deadline of {seconds:g} s") from None
        raise error


def _outcomes(returned: Any, views: Sequence[RolloutView], form: CallForm) -> list[Outcome]:
    """One outcome per row. A list of another length is refused, never stretched."""
    if form.per_turn:
        return [_turns(returned, views[0].turns)]
    if not form.takes_lists:
        return [_outcome(returned)]
    values = _listed(returned, len(views), "numbers")
    return [["refused", values]] * len(views) if isinstance(values, str) else [_outcome(value) for value in values]


def _turns(returned: Any, turns: int) -> Outcome:
    """The values of one rollout's turns; `None` for all of them at once abstains."""
    if returned is None:
        return ["none"]
    values = _listed(returned, turns, "numbers, one for each turn")
    if isinstance(values, str):
        return ["refused", values]
    outcomes = [_outcome(value) for value in values]
    refused = next((outcome for outcome in outcomes if outcome[0] == "refused"), None)
    return refused or ["turns", [outcome[1] if outcome[0] == "value" else None for outcome in outcomes]]


def _listed(returned: Any, count: int, what: str) -> list[Any] | str:
    """The returned values, or what is wrong with them."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple):
        return f"{_named(returned)}, expected a list of {count} {what}"
    if len(values) != count:
        return f"a list of {len(values)}, expected {count} {what}"
    return list(values)


def _outcome(value: Any) -> Outcome:
    if value is None:
        return ["none"]
    try:
        return ["value", as_float(value)]
    except TypeError:
        return ["refused", f"{_named(value)}, expected a number or None"]


def as_float(value: Any) -> float:
    """A bool, int, float, Fraction, Decimal, or a numpy or torch scalar as a float; `TypeError` for anything else.

    >>> as_float(True), as_float(Decimal("0.5"))
    (1.0, 0.5)
    """
    number: Any = value
    if isinstance(value, Real | Decimal):
        try:
            return float(number)
        except OverflowError:  # an int of over 308 digits
            return math.inf if number > 0 else -math.inf
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return as_float(value.item())
    raise TypeError(f"{type(value).__name__} is no number")


def _named(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '…'}"


def _failure(error: BaseException) -> Outcome:
    if isinstance(error, MemoryError):
        return ["failed", "memory", "MemoryError: more memory than a reward may take", "", ""]
    if isinstance(error, _Late):
        return ["failed", "timeout", str(error), "", ""]
    text = "".join(traceback.format_exception(error, limit=-6))
    return ["failed", "exception", _one_line(error), text[-4000:], _own_place(error)]


def _own_place(error: BaseException) -> str:
    """`file.py:line` of the last frame that is neither ours nor a library's; "" where there is none."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [(Path(file).name, line) for file, line in frames if not any(Path(file).is_relative_to(folder) for folder in _NOT_THE_USERS)]
    return "{}:{}".format(*own[-1]) if own else ""


_LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_NOT_THE_USERS = (Path(__file__).parent.parent, *_LIBRARIES)


def _one_line(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[:500]
