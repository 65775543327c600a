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
from postgrad.rollout.results import exception_text
from postgrad.suggest import did_you_mean, did_you_mean_file

_OURS = str(Path(__file__).resolve().parents[1])


def load_attribute(spec: str, base: Path) -> Any:
    """The object behind `spec`; files are relative to `base`. A file is executed once per process, however often it is named."""
    target, colon, name = spec.rpartition(":")
    if not colon or not target or not name:
        raise RecipeError(f"{spec!r} names no tool", where=spec, hint="write it as `tools.py:function`")
    module = _load_file(base / target, spec) if target.endswith(".py") else _import(target, spec)
    try:
        return getattr(module, name)
    except Exception as error:  # a module may have a `__getattr__` of its own
        if not isinstance(error, AttributeError):
            raise _import_failure(spec, error) from error
        found = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = did_you_mean(name, found, f"it has: {', '.join(found) or 'nothing callable'}")
        raise RecipeError(f"{target} has no `{name}`", where=spec, hint=hint) from None


def _load_file(path: Path, spec: str) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        hint = did_you_mean_file(path, "the path is relative to the recipe")
        raise RecipeError(f"{path} does not exist", where=spec, hint=hint)
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
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):  # the user's
            raise
        raise _import_failure(spec, error) from error
    return module


def _import(target: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(target)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _import_failure(spec, error) from error


def _import_failure(spec: str, error: BaseException) -> RecipeError:
    """Says where the user's own code failed: the last frame of the real traceback that is not postgrad's, or the line of a syntax error."""
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((frame for frame in reversed(frames) if not frame.filename.startswith((_OURS, "<"))), frames[-1])
        place = f"{frame.filename}:{frame.lineno} in {frame.name}"
    return RecipeError(f"cannot be imported: {exception_text(error)} ({place})", where=spec)
