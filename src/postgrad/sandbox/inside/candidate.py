"""Runs the program and answers calls of what it defines. It knows no test and no verdict."""

from __future__ import annotations

import functools
import io
import os
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

from .wire import pack, receive, send, unpack


def serve(program: str, *, calls: int, replies: int) -> NoReturn:
    for fd in (calls, replies):
        os.set_inheritable(fd, False)
    objects: list[Any] = []
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.stdin = io.StringIO("")

    def answer(act: Callable[[], Any]) -> None:
        try:
            reply = ("value", _held(act(), objects))
        except SystemExit:
            os._exit(0)
        except BaseException as error:
            reply = ("raised", next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"))
        send(replies, pack(reply, lambda item: item.number if type(item) is _Kept else None))

    def define() -> list[str]:
        exec(compile(program, "<program>", "exec"), module.__dict__)
        return _public(module)

    answer(define)
    while True:
        answer(functools.partial(_act, unpack(receive(calls), objects.__getitem__), module))


def _public(module: types.ModuleType) -> list[str]:
    """What the program itself defines and can be called."""
    return [name for name, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == "__main__"]


def _act(request: Any, module: types.ModuleType) -> Any:
    kind, subject, *rest = request
    if kind == "name":
        return getattr(module, subject)(*rest[0], **rest[1])
    if kind == "iter":
        return iter(subject)
    if kind == "next":
        return next(([item] for item in subject), [])
    return getattr(subject, rest[0]) if kind == "get" else subject(*rest[0], **rest[1])


def _held(value: Any, objects: list[Any]) -> Any:
    """Subclasses of plain types as the plain type (Counter → dict, a named tuple → tuple); what is no data is held and named."""
    if value is None:
        return None
    scalars: tuple[Any, ...] = (bool, int, float, complex, str, bytes)
    for kind in scalars:
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if isinstance(value, dict):
        return {_held(key, objects): _held(item, objects) for key, item in value.items()}
    for group in (list, tuple, set, frozenset):
        if isinstance(value, group):
            return group(_held(item, objects) for item in value)
    return _Kept(value, objects)


class _Kept:
    """Marks an object that stays here."""

    def __init__(self, value: Any, objects: list[Any]) -> None:
        objects.append(value)
        self.number = len(objects) - 1
