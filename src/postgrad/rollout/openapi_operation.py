"""Reads an OpenAPI document: its operations, with JSON Schemas that stand alone.

1. `read_operations`  document → operations by name; each is read in full only when it is asked for.
2. `Schemas`          local references written out, OpenAPI 3.0's own words (`nullable`, …) put into JSON Schema's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from postgrad.errors import RecipeError
from postgrad.rollout.schema import point

METHODS = ("get", "put", "post", "delete", "patch")
_LONGEST_NAME = 64
_IGNORED_HEADERS = frozenset({"accept", "content-type", "authorization"})  # the specification says so
_STYLES = {"path": ("simple",), "header": ("simple",), "query": ("form", "spaceDelimited", "pipeDelimited", "deepObject")}
_NO_SCHEMA = frozenset({"example", "examples", "xml", "externalDocs", "discriminator", "deprecated", "readOnly", "writeOnly"})
_DATA = frozenset({"enum", "const", "default"})
_MOST_PARTS = 20_000
"""Schemas within the schema of one operation."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """as_json: its value is written as JSON (the document gives it a media type instead of a style)."""

    name: str
    place: Literal["path", "query", "header"]
    style: str
    explode: bool
    as_json: bool


@dataclass(frozen=True, slots=True)
class Body:
    """argument: its name among the arguments. kind: the media type in which it is sent."""

    argument: str
    kind: str


@dataclass(frozen=True, slots=True)
class Operation:
    """parameters: by the name of their argument. schema: of all arguments together."""

    name: str
    method: str
    path: str
    description: str
    parameters: Mapping[str, Parameter]
    body: Body | None
    schema: Mapping[str, Any]
    servers: list[Any]


Given = tuple[frozenset[str], frozenset[str]]
"""Headers (lower case) and query parameters that the recipe fills in."""


def read_operations(document: Mapping[str, Any], *, where: str, given: Given) -> dict[str, Callable[[], Operation]]:
    """By name: `operationId`, or the method and the path. Calling one raises `RecipeError` when it asks for what is not supported."""
    found: dict[str, Callable[[], Operation]] = {}
    for path, item in _mapping(document, "paths", where).items():
        item = _resolved(item, document, where)
        for method in METHODS:
            if method not in item:
                continue
            said = _mapping(item, method, f"{where}, path {path}")
            name = _name(str(said.get("operationId") or f"{method}{path}"))
            if not name:
                raise RecipeError(f"{method.upper()} {path} has an operationId without letters", where=where, hint="give it another")
            if name in found:
                raise RecipeError(f"two operations are called `{name}`", where=where, hint="give each an operationId of its own")
            found[name] = partial(_read_operation, document, name, method, str(path), item, where=where, given=given)
    if not found:
        raise RecipeError("the document has no operations", where=where)
    return found


def _read_operation(
    document: Mapping[str, Any], name: str, method: str, path: str, item: Mapping[str, Any], *, where: str, given: Given
) -> Operation:
    """The document is somebody else's, so anything can stand anywhere: what does not fit the specification is told, with its operation."""
    try:
        operation = _operation(document, name, method, path, item, where=where, given=given)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        what = f"operation `{name}` is not written as OpenAPI wants it: {type(error).__name__}: {error}"
        raise RecipeError(what, where=where, hint="check the document with an OpenAPI validator, or leave the operation out") from error
    named = {parameter.name for parameter in operation.parameters.values() if parameter.place == "path"}
    if missing := next((part for part in re.findall(r"{([^{}]*)}", path) if part not in named), None):
        hint = "add it to the operation's parameters, or leave the operation out"
        raise RecipeError(f"operation `{name}` has {{{missing}}} in its path and no path parameter of that name", where=where, hint=hint)
    return operation


def _operation(
    document: Mapping[str, Any], name: str, method: str, path: str, item: Mapping[str, Any], *, where: str, given: Given
) -> Operation:
    said = item[method]
    schemas = Schemas(document, where=where)
    parameters: dict[str, Parameter] = {}
    properties: dict[str, Any] = {}
    required: list[str] = []
    for raw in _parameters(item, said, document, where):
        if _left_out(raw, given, f"operation `{name}`", where):
            continue
        if not isinstance(raw["name"], str):
            raise TypeError(f"the name {raw['name']!r} of a parameter is no text")
        argument = raw["name"] if raw["name"] not in properties else _unused(f"{raw['name']}_{raw['in']}", properties)
        parameters[argument] = _parameter(raw, f"operation `{name}`", where)
        properties[argument] = _described(schemas.of(_schema_of(raw)), raw.get("description"))
        required += [argument] if raw.get("required") or raw["in"] == "path" else []
    body = None
    if "requestBody" in said:
        content = _resolved(said["requestBody"], document, where)
        argument = "body" if "body" not in properties else "request_body"
        kind, schema = _content(content, f"operation `{name}`", where)
        body = Body(argument, kind)
        properties[argument] = _described(schemas.of(schema), content.get("description"))
        required += [argument] if content.get("required") else []
    texts = [said.get("summary") or item.get("summary"), said.get("description") or item.get("description")]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Operation(
        name, method, path, "\n".join(text.strip() for text in texts if text) or f"{method.upper()} {path}", parameters, body,
        schema | ({"$defs": schemas.shared} if schemas.shared else {}),
        said.get("servers") or item.get("servers") or document.get("servers") or [],
    )  # fmt: skip


def _parameters(item: Mapping[str, Any], said: Mapping[str, Any], document: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """Those of the path, replaced by the operation's of the same name and place."""
    both = [_resolved(raw, document, where) for raw in (*(item.get("parameters") or ()), *(said.get("parameters") or ()))]
    return list({(raw["name"], raw["in"]): raw for raw in both}.values())


def _left_out(raw: Mapping[str, Any], given: Given, what: str, where: str) -> bool:
    """What the model does not fill in."""
    headers, query = given
    if raw["in"] == "cookie":
        if raw.get("required"):
            raise _unsupported(f"{what} needs the cookie {raw['name']!r}", where)
        return True
    if raw["in"] == "header":
        return raw["name"].lower() in headers | _IGNORED_HEADERS
    return raw["in"] == "query" and raw["name"] in query


def _parameter(raw: Mapping[str, Any], what: str, where: str) -> Parameter:
    place = raw["in"]
    if place not in _STYLES:
        raise _unsupported(f"{what} has a parameter in {place!r}", where)
    style = raw.get("style", _STYLES[place][0])
    if style not in _STYLES[place]:
        raise _unsupported(f"{what} writes the parameter {raw['name']!r} in the style {style!r}", where)
    return Parameter(raw["name"], place, style, bool(raw.get("explode", style == "form")), "content" in raw)


def _schema_of(raw: Mapping[str, Any]) -> Any:
    content = raw.get("content")
    return next(iter(content.values())).get("schema", {}) if content else raw.get("schema", {})


def _content(content: Mapping[str, Any], what: str, where: str) -> tuple[str, Any]:
    """The media type in which a body is sent, and its schema."""
    kinds = content.get("content", {})
    as_json = [kind for kind in kinds if kind.split(";")[0].strip() == "application/json" or kind.split(";")[0].strip().endswith("+json")]
    for kind in (*as_json, "application/x-www-form-urlencoded", "text/plain"):
        if kind in kinds:
            return kind, kinds[kind].get("schema", {})
    raise _unsupported(f"{what} takes a body of {', '.join(kinds) or 'no kind'}", where)


def _unsupported(what: str, where: str) -> RecipeError:
    return RecipeError(f"{what}, which is not supported", where=where, hint="leave it out with openapi.exclude, or name others in include")


def _described(schema: dict[str, Any], description: str | None) -> dict[str, Any]:
    return {**schema, "description": description} if description and "description" not in schema else schema


def _name(text: str) -> str:
    """A tool's name: letters, digits, `_` and `-`."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", text).strip("_")[:_LONGEST_NAME]


def _mapping(node: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = node.get(key, {})
    if not isinstance(value, dict):
        raise RecipeError(f"`{key}` is no mapping", where=where)
    return value


def _resolved(node: Any, document: Mapping[str, Any], where: str, seen: tuple[str, ...] = ()) -> Any:
    """What a reference object refers to."""
    if isinstance(node, dict) and isinstance(node.get("$ref"), str):
        reference = node["$ref"]
        if reference in seen:
            raise RecipeError(f"{reference!r} refers to itself", where=where)
        return _resolved(_pointed(document, reference, where), document, where, (*seen, reference))
    if not isinstance(node, dict):
        raise RecipeError(f"found {node!r} where the document must have a mapping", where=where)
    return node


def _pointed(document: Mapping[str, Any], reference: str, where: str) -> Any:
    if not reference.startswith("#/"):
        raise RecipeError(f"{reference!r} refers to another document", where=where, hint="bundle the document into one file first")
    try:
        return point(document, reference)
    except (KeyError, IndexError, TypeError, ValueError):
        raise RecipeError(f"{reference!r} refers to nothing", where=where) from None


class Schemas:
    """Schemas of one operation. `shared` holds those that contain themselves, for `$defs`."""

    def __init__(self, document: Mapping[str, Any], *, where: str) -> None:
        self._document, self._where = document, where
        self._old = str(document.get("openapi", "")).startswith("3.0")
        self._names: dict[str, str] = {}
        self._parts = 0
        self.shared: dict[str, Any] = {}

    def of(self, schema: Any) -> dict[str, Any]:
        if not isinstance(schema, dict | bool):
            raise TypeError(f"{schema!r} is no schema")
        written = self._written(schema, ())
        return written if isinstance(written, dict) else {} if written else {"not": {}}

    def _written(self, node: Any, path: tuple[str, ...]) -> Any:
        if isinstance(node, list):
            return [self._written(item, path) for item in node]
        if not isinstance(node, dict):
            return node
        self._parts += 1
        if self._parts > _MOST_PARTS:
            what = f"a schema has more than {_MOST_PARTS} parts once its references are written out"
            raise RecipeError(what, where=self._where, hint="no model reads that much: leave the operation out with openapi.exclude")
        reference = node.get("$ref")
        if isinstance(reference, str):
            return self._referred(reference, node, path)
        written = {
            key: value if key in _DATA else self._properties(value, path) if key == "properties" else self._written(value, path)
            for key, value in node.items()
            if key not in _NO_SCHEMA and not key.startswith("x-")
        }
        if isinstance(written.get("required"), list) and "properties" in written:
            hidden = set(node["properties"]) - set(written["properties"])
            written["required"] = [name for name in written["required"] if name not in hidden]
        return _translated(written) if self._old else written

    def _properties(self, properties: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        """Without those that only an answer has."""
        return {name: self._written(value, path) for name, value in properties.items() if not self._only_read(value)}

    def _only_read(self, node: Any) -> bool:
        return isinstance(node, dict) and bool(_resolved(node, self._document, self._where).get("readOnly"))

    def _referred(self, reference: str, node: Mapping[str, Any], path: tuple[str, ...]) -> Any:
        if reference not in path:
            target = self._written(_pointed(self._document, reference, self._where), (*path, reference))
            beside = {key: value for key, value in node.items() if key in ("description", "default")}
            return {**target, **beside} if isinstance(target, dict) else target
        if reference not in self._names:
            self._names[reference] = _unused(re.sub(r"\W", "_", reference.rpartition("/")[2]), self._names.values())
            self.shared[self._names[reference]] = self._written(_pointed(self._document, reference, self._where), (reference,))
        return {"$ref": f"#/$defs/{self._names[reference]}"}


def _unused(name: str, taken: Collection[str]) -> str:
    return next(candidate for candidate in (name, *(f"{name}_{number}" for number in range(2, len(taken) + 3))) if candidate not in taken)


def _translated(schema: dict[str, Any]) -> dict[str, Any]:
    """OpenAPI 3.0 → JSON Schema: `nullable`, and limits that a boolean makes exclusive."""
    for limit, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if schema.get(exclusive) is True:
            schema[exclusive] = schema.pop(limit)
        elif schema.get(exclusive) is False:
            del schema[exclusive]
    if schema.pop("nullable", False):
        if isinstance(schema.get("type"), str):
            schema["type"] = [schema["type"], "null"]
        if "enum" in schema and None not in schema["enum"]:
            schema["enum"] = [*schema["enum"], None]
    return schema
