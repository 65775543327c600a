"""From a typed Python function to what the model is told of it, and from the model's arguments to what the function is given.

1. `read_signature`  function → `ToolSpec` and a `Signature` that validates; `RecipeError` when types or the docstring are missing.
2. `Signature.validate`  a JSON object → keyword arguments, or `ArgumentError` naming each wrong parameter by its path.

Arguments are validated by pydantic in strict JSON mode, against the very schema that the model was shown: `"3"` and `3.0` are no
integers, `1` is no boolean, an integer is a number, an enum takes its value. Nothing is repaired: a policy that is rewarded for
calls that only work here has learned calls that fail elsewhere.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired, Protocol, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict

from postgrad.errors import RecipeError
from postgrad.rollout.docstring import parse_docstring
from postgrad.rollout.results import exception_text
from postgrad.types import ToolSpec

_SHOWN_PROBLEMS = 5
_SHOWN_CHARS = 60


class ArgumentError(Exception):
    """The arguments do not fit the tool's schema; the text names each parameter and is meant for the model."""


class Arguments(Protocol):
    """Validates the arguments of one tool."""

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What the function is given. Raises `ArgumentError`."""
        ...


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of one tool, in order, and pydantic's validator for them."""

    parameters: tuple[str, ...]
    adapter: TypeAdapter[dict[str, Any]]

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments for the function. Left-out optional parameters stay out: the function has its own defaults."""
        try:
            text = json.dumps(dict(arguments), allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise ArgumentError(f"the arguments are not valid JSON: {error}") from error
        try:
            return self.adapter.validate_json(text)
        except ValidationError as error:
            raise ArgumentError(self._explain(error, arguments)) from error

    def _explain(self, error: ValidationError, arguments: Mapping[str, Any]) -> str:
        """One sentence per wrong parameter; the alternatives of a union are joined by "or"."""
        problems: dict[str, list[str]] = {}
        for item in error.errors(include_url=False):
            path = _path(item["loc"], item["type"], arguments)
            if item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
                problems[path] = [f"unexpected argument '{path}' (it takes: {', '.join(self.parameters) or 'no arguments'})"]
            elif item["type"] == "missing":
                problems[path] = [f"missing required argument '{path}'"]
            elif path in problems:
                problems[path][-1] += f" or {_lower_first(item['msg'])}"
            else:
                problems[path] = [f"argument '{path}' is {_shown(item['input'])}: {_lower_first(item['msg'])}"]
        texts = [text for parts in problems.values() for text in parts]
        more = [f"and {len(texts) - _SHOWN_PROBLEMS} more"] if len(texts) > _SHOWN_PROBLEMS else []
        return "; ".join(texts[:_SHOWN_PROBLEMS] + more)


def read_signature(function: Callable[..., Any], *, name: str, where: str, bound: bool = False) -> tuple[ToolSpec, Signature]:
    """What the model is told of `function`, and the validator of its arguments. `bound`: the first parameter is `self`.

    Raises `RecipeError` for a missing docstring, a parameter without a type, a type that JSON cannot carry, or a parameter that
    cannot be passed by name.
    """
    if inspect.isasyncgenfunction(function):
        hint = "return a list, or await what there is and return it"
        raise RecipeError(f"tool `{name}` is an async generator, whose results nobody can wait for", where=where, hint=hint)
    text = inspect.getdoc(function)
    if not text:
        raise RecipeError(
            f"tool `{name}` has no docstring", where=where, hint="say in one sentence what it does: the model reads this text"
        )
    docstring = parse_docstring(text)
    hints = _type_hints(function, name=name, where=where)
    parameters = list(parameters_of(function, where=where))
    if bound and not parameters:
        raise RecipeError(f"tool `{name}` is a method without self", where=where, hint=f"write def {name}(self, …)")
    parameters = parameters[1 if bound else 0 :]
    fields = {item.name: _field(item, hints, docstring.parameters, name=name, where=where) for item in parameters}
    adapter = _adapter(name, fields, where=where)
    return ToolSpec(name, docstring.summary, compact_schema(adapter.json_schema())), Signature(tuple(fields), adapter)


def parameters_of(function: Callable[..., Any], *, where: str) -> Sequence[inspect.Parameter]:
    """Raises `RecipeError` for what Python cannot say the parameters of, such as a class of its own in C."""
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (ValueError, TypeError) as error:
        raise RecipeError(f"its parameters cannot be read: {error}", where=where, hint="write a Python function that calls it") from error


def _type_hints(function: Callable[..., Any], *, name: str, where: str) -> dict[str, Any]:
    target = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004 (an instance with __call__)
    try:
        return get_type_hints(target, include_extras=True)
    except NameError as error:
        raise RecipeError(
            f"tool `{name}`: a type in its signature is unknown: {error}", where=where, hint="import it in that file"
        ) from error
    except Exception as error:  # types that are written as text are the user's code, and run here
        raise RecipeError(f"tool `{name}`: a type in its signature cannot be read: {exception_text(error)}", where=where) from error


def _field(item: inspect.Parameter, hints: Mapping[str, Any], texts: Mapping[str, str], *, name: str, where: str) -> Any:
    """The `TypedDict` entry of one parameter: its type, its description and, for the model to read, its default."""
    if item.kind in (item.VAR_POSITIONAL, item.VAR_KEYWORD, item.POSITIONAL_ONLY):
        raise RecipeError(f"tool `{name}`: parameter `{item}` cannot be passed by name", where=where, hint="write each parameter out")
    if item.name not in hints:
        hint = f"write the type the model must send, such as `{item.name}: str`"
        raise RecipeError(f"tool `{name}`: parameter `{item.name}` has no type", where=where, hint=hint)
    annotation = hints[item.name]
    description = texts.get(item.name) or _annotated_text(annotation)
    typed = annotation if description is None else Annotated[annotation, Field(description=description)]
    if item.default is inspect.Parameter.empty:
        return typed
    return NotRequired[Annotated[typed, Field(json_schema_extra=_default(item.default))]]


def _annotated_text(annotation: Any) -> str | None:
    """`Annotated[int, "how many"]` describes its parameter; a pydantic `Field` inside speaks for itself."""
    if get_origin(annotation) is not Annotated:
        return None
    extras = get_args(annotation)[1:]
    if any(isinstance(extra, FieldInfo) and extra.description for extra in extras):
        return None
    return next((extra for extra in extras if isinstance(extra, str)), None)


def _default(value: Any) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return {}  # a default that JSON cannot write is the function's own business
    return {"default": value}


def _adapter(name: str, fields: dict[str, Any], *, where: str) -> TypeAdapter[dict[str, Any]]:
    make: Any = TypedDict  # pydantic wants this class before Python 3.12; a type checker knows it only with a literal name
    arguments = make(name, fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    try:
        adapter: TypeAdapter[dict[str, Any]] = TypeAdapter(arguments)
        adapter.json_schema()
    except PydanticUserError as error:
        what = f"tool `{name}`: a parameter has a type without a JSON Schema: {error.message.splitlines()[0]}"
        raise RecipeError(
            what, where=where, hint="use str, int, float, bool, list, dict, Literal, Enum, a dataclass or a TypedDict"
        ) from error
    except Exception as error:  # a constraint that cannot be, such as a pattern that is no regular expression
        what = f"tool `{name}`: a parameter has a type that cannot be: {' '.join(exception_text(error).split())}"
        raise RecipeError(what, where=where, hint="look at the constraints: Field(gt=…, pattern=…), Literal[…]") from error
    return adapter


def compact_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON Schema of type object without titles, which repeat the names and cost prompt tokens, and with references written out."""
    definitions = schema.get("$defs", {})
    compact = _compact({key: value for key, value in schema.items() if key != "$defs"}, definitions, ())
    compact.setdefault("properties", {})
    if _refers(compact):  # a type that contains itself
        compact["$defs"] = {key: _compact(value, {}, ()) for key, value in definitions.items()}
    return dict(compact)


def _compact(node: Any, definitions: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    if isinstance(node, list):
        return [_compact(item, definitions, path) for item in node]
    if not isinstance(node, dict):
        return node
    target = str(node.get("$ref", "")).removeprefix("#/$defs/")
    if target in definitions and target not in path:
        merged = definitions[target] | {key: value for key, value in node.items() if key != "$ref"}
        return _compact(merged, definitions, (*path, target))
    compact = {}
    for key, value in node.items():
        if key == "properties":
            compact[key] = {name: _compact(item, definitions, path) for name, item in value.items()}
        elif key in ("default", "const", "enum", "examples"):
            compact[key] = value  # data, not schema
        elif not (key == "title" and isinstance(value, str)):
            compact[key] = _compact(value, definitions, path)
    return compact


def _refers(node: Any) -> bool:
    if isinstance(node, dict):
        return "$ref" in node or any(_refers(value) for value in node.values())
    return isinstance(node, list) and any(_refers(value) for value in node)


def _path(location: Sequence[int | str], kind: str, arguments: Any) -> str:
    """`options.limit` or `items[2].name`. pydantic also puts the branch of a union into its path; the model sent no such key."""
    names_a_key = any(word in kind for word in ("missing", "extra", "unexpected"))
    path = ""
    value = arguments
    for index, step in enumerate(location):
        if isinstance(value, list) and isinstance(step, int) and step < len(value):
            path, value = f"{path}[{step}]", value[step]
        elif isinstance(value, Mapping) and (step in value or (names_a_key and index == len(location) - 1)):
            path, value = f"{path}.{step}" if path else str(step), value.get(step)
    return path or "arguments"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
