"""Rewards for form: thinking before the answer, and answers that are JSON of a schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from postgrad.gold import read_json
from postgrad.rewards.base import RolloutView, reward
from postgrad.rewards.library.answer import answer_part

_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL | re.IGNORECASE)


@reward(scope="structure", claim="the last message thinks once and then answers", range=(0.0, 1.0))
def think_format(rollout: RolloutView) -> float:
    """1 when the last message is one non-empty <think>…</think> followed by a non-empty answer, with no other think tag."""
    message = rollout.messages[-1] if rollout.messages else None
    if message is None or message.role != "assistant":
        return 0.0
    if message.reasoning:
        clean = not re.search(r"</?think>", message.reasoning + message.content)
        return float(clean and bool(message.reasoning.strip()) and bool(message.content.strip()))
    opened, closed = message.content.count("<think>"), message.content.count("</think>")
    before, _, rest = message.content.partition("<think>")
    thought, _, answer = rest.partition("</think>")
    return float(opened == closed == 1 and not before.strip() and bool(thought.strip()) and bool(answer.strip()))


def _check_schema(schema: Any = None) -> None:
    if schema is not None and _validator(_object(schema)) is None:
        raise ValueError("needs a JSON Schema as schema")


@reward(scope="structure", claim="the answer is JSON that fits the schema", range=(0.0, 1.0), check_args=_check_schema)
def json_schema(rollout: RolloutView, schema: Any) -> float | None:
    """How far the answer is JSON of the schema (an object or its text): 0 no JSON · 0.25 JSON · 0.5 of the right type · 0.75 with every
    required key · 1 valid.

    The answer is nothing but JSON, alone or in one fenced block. Repeated keys, NaN and Infinity are no JSON. Abstains when the schema is
    none, or points outside itself.
    """
    wanted = _object(schema)
    validator = _validator(wanted)
    text = answer_part(rollout.final_answer)
    fenced = _FENCED.fullmatch(text)
    if validator is None or wanted is None:
        return None
    try:
        value = read_json(fenced[1] if fenced else text)
    except ValueError:
        return 0.0
    return _level(validator, wanted, value)


def _level(validator: Any, wanted: Mapping[str, Any], value: Any) -> float | None:
    from referencing.exceptions import Unresolvable

    try:
        if validator.is_valid(value):
            return 1.0
    except (Unresolvable, RecursionError):
        return None
    kinds = wanted.get("type", ())
    if kinds and not any(validator.is_type(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return 0.25
    required = wanted.get("required", ())
    return 0.75 if required and isinstance(value, Mapping) and all(name in value for name in required) else 0.5


def _object(schema: Any) -> dict[str, Any] | None:
    """The schema as an object; None for anything else."""
    try:
        value = read_json(schema) if isinstance(schema, str) else schema
    except ValueError:
        return None
    return dict(value) if isinstance(value, Mapping) and value else None


def _validator(schema: dict[str, Any] | None) -> Any:
    """A validator that fetches nothing from anywhere; None when the schema is none."""
    from jsonschema import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    if schema is None:
        return None
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError:
        return None
    return kind(schema, registry=Registry())
