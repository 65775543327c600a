"""Imports the object that a recipe names as `file.py:name` or `package.module:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from postgrad.errors import RecipeError


def load_attribute(spec: str, base: Path) -> Any:
    """The object behind `spec`; files are relative to `base`. A file is executed once per process, however often it is named."""
    target, colon, name = spec.rpartition(":")
    if not colon or not target or not name:
        raise RecipeError(f"{spec!r} names no tool", where=spec, hint="write it as `tools.py:function`")
    module = _load_file(base / target, spec) if target.endswith(".py") else _import(target, spec)
    try:
        return getattr(module, name)
    except AttributeError:
        found = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        what = f"{target} has no `{name}`"
        raise RecipeError(what, where=spec, hint=f"it has: {', '.join(found) or 'nothing callable'}") from None


def _load_file(path: Path, spec: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise RecipeError(f"{path} does not exist", where=spec, hint="the path is relative to the recipe")
    content = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    name = f"postgrad_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{content}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # the file may import its neighbours, also later; at the end, so that it shadows nothing
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses, enums and pydantic look their module up there
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failure(spec, error) from error
    return module


def _import(target: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(target)
    except (Exception, SystemExit) as error:
        raise _import_failure(spec, error) from error


def _import_failure(spec: str, error: BaseException) -> RecipeError:
    """Says where the user's own code failed: the last frame of the real traceback, or the line of a syntax error."""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno} in {frame.name}"
    return RecipeError(f"cannot be imported: {type(error).__name__}: {error} ({place})", where=spec)
