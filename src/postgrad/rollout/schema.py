"""Arguments of tools that bring a JSON Schema of their own (MCP, OpenAPI): validated against it, with errors the model can act on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from jsonschema import SchemaError
from jsonschema.exceptions import ValidationError
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry

from postgrad.errors import RecipeError
from postgrad.rollout.signature import ArgumentError

_SHOWN_PROBLEMS = 5
_SHOWN_CHARS = 60


class SchemaArguments:
    """The validator of one tool. `schema` is a JSON Schema of type object; its references lie within it.

    Raises `RecipeError` when it is no valid JSON Schema.
    """

    def __init__(self, schema: Mapping[str, Any], *, tool: str, where: str | None = None) -> None:
        kind = validator_for(schema, default=Draft202012Validator)
        try:
            kind.check_schema(dict(schema))
        except SchemaError as error:
            raise RecipeError(f"tool `{tool}`: its arguments have no valid JSON Schema: {error.message}", where=where) from error
        for reference in _references(schema):
            if not _leads_somewhere(reference, schema):
                raise RecipeError(f"tool `{tool}`: its arguments' schema refers to {reference!r}, which it does not contain", where=where)
            if _leads_to_itself(reference, schema):
                raise RecipeError(
                    f"tool `{tool}`: in its arguments' schema {reference!r} refers to itself and to nothing else", where=where
                )
        self._validator = kind(schema, registry=Registry())  # one that fetches nothing

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as they are: nothing is repaired, no default is filled in."""
        try:
            json.dumps(dict(arguments), allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise ArgumentError(f"the arguments are not valid JSON: {error}") from error
        try:
            found = [text for error in self._validator.iter_errors(dict(arguments)) for text in _texts(error)]
        except RecursionError as error:
            raise ArgumentError("the arguments are nested too deeply") from error
        problems = list(dict.fromkeys(found))  # each of two missing properties is reported with both
        if problems:
            more = [f"and {len(problems) - _SHOWN_PROBLEMS} more"] if len(problems) > _SHOWN_PROBLEMS else []
            raise ArgumentError("; ".join(problems[:_SHOWN_PROBLEMS] + more))
        return dict(arguments)


def _texts(error: ValidationError) -> list[str]:
    path = _path(error.absolute_path)
    value: Any = error.validator_value
    instance: Any = error.instance
    schema: Any = error.schema
    if error.validator == "required":
        return [f"missing required argument '{_join(path, name)}'" for name in value if name not in instance]
    if error.validator == "additionalProperties" and value is False:
        known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        takes = f" (it takes: {', '.join(known) or 'no arguments'})"
        extra = [name for name in instance if name not in known and not any(re.search(pattern, name) for pattern in patterns)]
        return [f"unexpected argument '{_join(path, name)}'{takes}" for name in extra]
    return [f"argument '{path}' is {_shown(instance)}: {_expected(error)}" if path else error.message]


def _expected(error: ValidationError) -> str:
    """What the schema wants, without repeating the whole value that it got."""
    value: Any = error.validator_value
    if error.validator == "type":
        return f"should be {' or '.join([value] if isinstance(value, str) else value)}"
    if error.validator in ("enum", "const"):
        return f"should be {_shown(value) if error.validator == 'const' else ' or '.join(_shown(item) for item in value)}"
    if error.validator in ("anyOf", "oneOf") and error.context:
        return " or ".join(dict.fromkeys(_expected(part) for part in error.context))
    return f"does not fit {error.validator}: {_shown(value)}"


def _path(steps: Iterable[str | int]) -> str:
    path = ""
    for step in steps:
        path = f"{path}[{step}]" if isinstance(step, int) else _join(path, step)
    return path


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def _leads_somewhere(reference: str, schema: Any) -> bool:
    """True for a JSON pointer to a part of the schema. Anything else (an anchor, another document) is refused: nothing is fetched."""
    if reference == "#":
        return True
    if not reference.startswith("#/"):
        return False
    try:
        point(schema, reference)
    except (KeyError, IndexError, TypeError, ValueError):
        return False
    return True


def _leads_to_itself(reference: str, schema: Any) -> bool:
    """True where following references never comes to anything but references: no value could be held against that."""
    seen: set[str] = set()
    while reference not in seen:
        seen.add(reference)
        found = schema if reference == "#" else point(schema, reference)
        if not isinstance(found, Mapping) or not isinstance(found.get("$ref"), str) or not _leads_somewhere(found["$ref"], schema):
            return False
        reference = found["$ref"]
    return True


def point(document: Any, reference: str) -> Any:
    """What `#/a/b/0` points at. Raises `KeyError`, `IndexError`, `TypeError` or `ValueError` when nothing is there.

    >>> point({"a": {"b/c": [5]}}, "#/a/b~1c/0")
    5
    """
    node = document
    for step in reference.removeprefix("#/").split("/"):
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        node = node[int(name)] if isinstance(node, list) else node[name]
    return node
