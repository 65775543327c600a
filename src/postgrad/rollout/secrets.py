"""Secrets that a tool is given: read from environment variables, and taken out of every text that leaves the tool."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from postgrad.errors import RecipeError

HIDDEN = "[secret]"
_SHORTEST = 6


class Secrets:
    """Values that no text may contain. Text is searched for the values themselves and, for "Bearer TOKEN", for TOKEN.

    Values of less than 6 characters are no secrets: they stand in too many texts.

    >>> Secrets(["Bearer abcdef"]).hide("you sent abcdef")
    'you sent [secret]'
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        parts = {part for value in values for part in (value, _token(value)) if len(part) >= _SHORTEST}
        self._parts = sorted(parts, key=len, reverse=True)

    def hide(self, text: str) -> str:
        for part in self._parts:
            text = text.replace(part, HIDDEN)
        return text


def read_variables(names: Iterable[str], *, key: str) -> dict[str, str]:
    """Name → value of environment variables, which may hold secrets or not. Raises `RecipeError` for one that is not set."""
    values = {name: os.environ.get(name, "") for name in names}
    if missing := next((name for name, value in values.items() if not value), None):
        raise RecipeError(f"the environment variable {missing} is not set", key=key, hint=f"export {missing}=...")
    return values


def read_secrets(names: Mapping[str, str], *, key: str) -> dict[str, str]:
    """What → the secret in the environment variable that `names` gives for it.

    Raises `RecipeError` for one that is not set, or is too short to be recognised in a text.
    """
    values = read_variables(names.values(), key=key)
    if short := next((name for name, value in values.items() if len(_token(value)) < _SHORTEST), None):
        what = f"the value of {short} is shorter than {_SHORTEST} characters, and could not be kept out of what the model reads"
        raise RecipeError(what, key=key, hint="use a longer secret")
    return {what: values[name] for what, name in names.items()}


def _token(value: str) -> str:
    return value.rpartition(" ")[2]
