"""The recipe's `columns:` map, which turns rows with other names into one of the formats of `formats`.

It maps a field of a format, or a role, to a column of the file:

    columns: {prompt: query}                                        # prompts; every other column goes to the rewards
    columns: {prompt: question, completion: answer}                 # SFT
    columns: {user: [instruction, input], assistant: output}        # joined by a blank line, empty ones left out
    columns: {system: persona, user: query, assistant: reply}       # one message per role, in this order
    columns: {user: query, chosen: better, rejected: worse}         # preference pairs
    columns: {messages: dialog, tools: functions}                   # other names
    columns: {prompt: query, tool_calls: gold}                      # the calls that are right, for the rewards tool_match and tool_exact

`system`, `user`, `assistant` make `messages`; without `assistant` they make a prompt.
Columns that the map names are used up; all others stay, except those that would make it another format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from postgrad.data.files import Row
from postgrad.errors import DataError, RecipeError
from postgrad.suggest import did_you_mean, nearest

_ROLES = ("system", "user", "assistant")
_FORMAT_FIELDS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
FIELDS = ("messages", "prompt", "completion", "chosen", "rejected", "label", "margin", "text", "tools", "tool_calls", *_ROLES)

Columns = Mapping[str, str | Sequence[str]]


def check_columns(columns: Columns) -> None:
    """Raises `RecipeError` on an unknown field, a value that is no column name, or fields that exclude each other."""
    for field, value in columns.items():
        if field not in FIELDS:
            hint = did_you_mean(field, FIELDS, f"fields: {', '.join(FIELDS)}")
            raise RecipeError(f"unknown field {field!r}", key="data.columns", hint=hint)
        if not value or not all(isinstance(name, str) for name in _names(value)):
            raise RecipeError(f"{field} takes a column name or a list of them", key="data.columns", hint="e.g. {prompt: question}")
    kinds = [kind for kind, members in _KINDS.items() if any(member in columns for member in members)]
    if len(kinds) > 1:
        raise RecipeError(
            f"the map mixes {' and '.join(kinds)}", key="data.columns", hint="use messages, or prompt (and completion), or roles, or text"
        )
    if ("completion" in columns and "prompt" not in columns) or ("assistant" in columns and "user" not in columns):
        raise RecipeError("an answer without a question", key="data.columns", hint="map the prompt (or user) column too")
    if ("chosen" in columns) != ("rejected" in columns):
        raise RecipeError("a pair needs both sides", key="data.columns", hint="map chosen and rejected")


_KINDS = {"messages": ("messages",), "prompt/completion": ("prompt", "completion"), "roles": _ROLES, "text": ("text",)}


def check_present(columns: Columns, found: set[str], *, where: str) -> None:
    """Raises `DataError` with every mapped column that is not among the columns found."""
    missing = {name: field for field, value in columns.items() for name in _names(value) if name not in found}
    if missing:
        listed = " and ".join(f"the column {name!r} (mapped to {field})" for name, field in missing.items())
        near = [match for name in missing if (match := nearest(name, found))]
        meant = f"did you mean {', '.join(near)}? " if near else ""
        raise DataError(f"no row has {listed}", where=where, hint=f"{meant}found: {', '.join(sorted(found)) or 'none'}")


def mapped(row: Row, columns: Columns) -> Row:
    """The row in the format that the map makes."""
    return Row(row.place, _mapped(row.fields, columns)) if columns else row


def _mapped(fields: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    used = {name for value in columns.values() for name in _names(value)}
    result: dict[str, Any] = {name: value for name, value in fields.items() if name not in used and name not in _FORMAT_FIELDS}
    result |= {field: _value(fields, value) for field, value in columns.items() if field not in _ROLES}
    roles = [{"role": role, "content": _value(fields, columns[role])} for role in _ROLES if role in columns]
    if roles:
        turns = [turn for turn in roles if turn["role"] != "system" or turn["content"]]
        result["messages" if "assistant" in columns else "prompt"] = turns
    return result


def _value(fields: Mapping[str, Any], value: str | Sequence[str]) -> Any:
    if isinstance(value, str):
        return fields.get(value)
    parts = [fields.get(name) for name in value]
    return "\n\n".join(str(part) for part in parts if part not in (None, ""))


def _names(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)
