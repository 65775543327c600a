"""Gold calls: the tool calls that a row of a dataset says are right, in the forms in which people write them.

    [{"name": "add", "arguments": {"a": 1}}, …]             also in OpenAI's `function` wrapper, and arguments or all of it as JSON text
    [{"add": {"a": [1], "unit": ["cm", "metre", ""]}}, …]   BFCL's possible answers: per parameter the values that are accepted;
                                                            "" among them = it may be left out

Values of the first form are compared as JSON. Values of the second are compared as BFCL's own checker does: text without case, spaces and
the characters , . / - _ * ^, with " for '; and an object or a list of objects holds accepted values again.
(Source: `ast_checker.py` of the Berkeley Function-Calling Leaderboard.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from postgrad.types import ToolCall


@dataclass(frozen=True, slots=True)
class Exactly:
    """One value, and no other."""

    value: Any
    optional: bool = False

    def fits(self, value: Any) -> bool:
        return same_json(self.value, value)

    def example(self) -> Any:
        return self.value


@dataclass(frozen=True, slots=True)
class OneOf:
    """BFCL's accepted values of a parameter, without the "" that makes it optional."""

    values: tuple[Any, ...]
    optional: bool

    def fits(self, value: Any) -> bool:
        return any(_accepts(accepted, value) for accepted in self.values)

    def example(self) -> Any:
        return _example(self.values[0])


@dataclass(frozen=True, slots=True)
class GoldCall:
    """One call that is right. `arguments` says of each parameter what fits and whether it may be left out."""

    name: str
    arguments: Mapping[str, Exactly | OneOf]

    @property
    def required(self) -> frozenset[str]:
        return frozenset(name for name, value in self.arguments.items() if not value.optional)

    def example(self) -> ToolCall:
        """A call that is right: the first of the accepted values, without what may be left out.

        >>> (call,) = gold_calls([{"area": {"base": [10, 10.0], "unit": ["", "cm"]}}])
        >>> call.example()
        ToolCall(name='area', arguments={'base': 10}, id='')
        """
        return ToolCall(self.name, {name: value.example() for name, value in self.arguments.items() if not value.optional})


def gold_calls(value: Any) -> list[GoldCall] | None:
    """The calls that a column means; None when it means none.

    >>> gold_calls('[{"function": {"name": "add", "arguments": {"a": 1}}}]')
    [GoldCall(name='add', arguments={'a': Exactly(value=1, optional=False)})]
    """
    try:
        value = read_json(value) if isinstance(value, str) else value
        if not isinstance(value, Sequence):
            return None
        return [_accepted_call(item) if _is_accepted_form(item) else _plain_call(item) for item in value]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def read_json(text: str) -> Any:
    """Strict JSON. Raises `ValueError` for anything else, repeated keys, NaN and Infinity included.

    >>> read_json('{"a": [1, 2]}')
    {'a': [1, 2]}
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refused)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def same_json(left: Any, right: Any) -> bool:
    """Equal as JSON: 1 is 1.0, but true is not 1, and text is not a number."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same_json(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same_json, left, right))
    return bool(left == right)


# ---- plain calls


def _plain_call(item: Any) -> GoldCall:
    function = item.get("function", item)
    arguments = function.get("arguments", {})
    arguments = read_json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(function["name"], str) or not isinstance(arguments, Mapping):
        raise ValueError("no call")
    return GoldCall(function["name"], {name: Exactly(value) for name, value in arguments.items()})


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key stands twice")
    return values


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# ---- BFCL's accepted values


def _is_accepted_form(item: Any) -> bool:
    """One name, and under it a list of accepted values for each parameter."""
    if not isinstance(item, Mapping) or len(item) != 1 or not {"function", "arguments"}.isdisjoint(item):
        return False
    (parameters,) = item.values()
    return isinstance(parameters, Mapping) and all(isinstance(values, list | tuple) and values for values in parameters.values())


def _accepted_call(item: Mapping[str, Any]) -> GoldCall:
    ((name, parameters),) = item.items()
    return GoldCall(name, {parameter: _one_of(values) for parameter, values in parameters.items()})


def _one_of(values: Sequence[Any]) -> OneOf:
    kept = tuple(value for value in values if value != "")
    return OneOf(kept or ("",), optional="" in values)


def _accepts(accepted: Any, value: Any) -> bool:
    if isinstance(accepted, str):
        return isinstance(value, str) and _standard(accepted) == _standard(value)
    if isinstance(accepted, list | tuple):
        return isinstance(value, list | tuple) and len(accepted) == len(value) and all(map(_accepts, accepted, value))
    if isinstance(accepted, Mapping):
        return isinstance(value, Mapping) and _accepts_object(accepted, value)
    return same_json(accepted, value)


def _accepts_object(accepted: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    options = {key: _one_of(values if isinstance(values, list | tuple) else [values]) for key, values in accepted.items()}
    missing = [key for key, option in options.items() if key not in value and not option.optional]
    return not missing and all(key in options and options[key].fits(item) for key, item in value.items())


def _example(accepted: Any) -> Any:
    if isinstance(accepted, list | tuple):
        return [_example(item) for item in accepted]
    if isinstance(accepted, Mapping):
        options = {key: _one_of(values if isinstance(values, list | tuple) else [values]) for key, values in accepted.items()}
        return {key: option.example() for key, option in options.items() if not option.optional}
    return accepted


def _standard(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')
