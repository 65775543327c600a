"""JSON inside calls: read strictly, and every fault said in words that a model can act on."""

from __future__ import annotations

import json
from typing import Any

from postgrad.chat.codecs.style import Call
from postgrad.types import MalformedCall, ToolCall


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def read_json(text: str) -> tuple[Any, int, str]:
    """(value, characters read, "") or (None, 0, why the text is not JSON). What follows the value is left alone."""
    start = len(text) - len(text.lstrip())
    try:
        value, end = _DECODER.raw_decode(text, start)
        require_text(value)
    except json.JSONDecodeError as error:
        return None, 0, f"invalid JSON: {error.msg} at character {error.pos - start}"
    except RecursionError:
        return None, 0, "invalid JSON: nested too deeply"
    except ValueError as error:
        return None, 0, f"invalid JSON: {error}"
    return value, end, ""


def require_text(value: Any) -> None:
    """Raises `ValueError` where a value holds a lone surrogate (an escape can write it, but no text can hold it), NaN or infinity."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def call_of_object(value: Any, text: str, *, index: int, keys: tuple[str, ...] = ("arguments",)) -> Call:
    """The call that a JSON object with `name` and one of `keys` is; `text` is how it was written."""
    if not isinstance(value, dict):
        return MalformedCall(text, f"a call is a JSON object, not {json_type(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall(text, 'the call has no "name"' if name is None or name == "" else '"name" must be a string')
    key = next((key for key in keys if key in value), None)
    if key is None:
        return MalformedCall(text, f'the call has no "{keys[0]}" object')
    return named_call(name, value[key], text, index=index, key=key)


def named_call(name: str, arguments: Any, text: str, *, index: int, key: str = "arguments") -> Call:
    """A call whose arguments are an object. Text that holds JSON (encoded twice), null, lists and numbers are not repaired."""
    if not isinstance(arguments, dict):
        return MalformedCall(text, f'"{key}" must be a JSON object, not {json_type(arguments)}')
    return ToolCall(name, arguments, id=f"call_{index}")


def json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names[type(value)]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large a number")
    return value


def object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises `ValueError` where a key stands twice: which of its values is meant, nobody can say."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=object_of_pairs)
