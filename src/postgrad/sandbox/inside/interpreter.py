"""A Python interpreter that runs one cell after another, in one namespace. What a cell prints goes to descriptor 1."""

from __future__ import annotations

import ast
import io
import json
import linecache
import os
import sys
import traceback
import types
from typing import Any, NoReturn

from .wire import Lost, receive, send

LONGEST_TEXT = 2**16
"""Characters of a value or of an error; the caller shortens them again."""


def serve(*, requests: int, replies: int) -> NoReturn:
    """Each request is JSON {"code": text}; each reply {"value": text or null, "error": text or null}."""
    for fd in (requests, replies):
        os.set_inheritable(fd, False)
    sys.stdin = io.StringIO("")
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    count = 0
    while True:
        try:
            code = json.loads(receive(requests))["code"]
        except Lost:
            os._exit(0)
        count += 1
        value, error = _run(code, module.__dict__, f"<cell {count}>")
        _flush()
        send(replies, json.dumps({"value": value, "error": error}).encode())


def _run(code: str, space: dict[str, Any], name: str) -> tuple[str | None, str | None]:
    """(repr of the last expression, None where there is none or it is None; the error)."""
    linecache.cache[name] = (len(code), None, f"{code}\n".splitlines(keepends=True), name)
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), space)
        value = eval(compile(ast.Expression(last.value), name, "eval"), space) if isinstance(last, ast.Expr) else None
        return (None if value is None else _text(repr(value))), None
    except BaseException as error:
        return None, _text(_described(error))


def _described(error: BaseException) -> str:
    """The traceback, from the first line of a cell on."""
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
        trace = trace.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, trace, limit=-8)).rstrip()
    except BaseException:  # the exception's own `__str__` is the cell's code
        return type(error).__name__


def _text(text: str) -> str:
    return str.__str__(text)[:LONGEST_TEXT].encode("utf-8", "backslashreplace").decode()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # a cell may have put anything there
            return
