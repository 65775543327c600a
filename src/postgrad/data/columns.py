"""Which format the rows have, and the recipe's `columns:` map, which turns other rows into one of these formats.

Formats (found by column names, printed at the start of a run):

    messages            a `messages` (or `conversations`) list, optionally `tools`
    prompt+completion   `prompt` and `completion`, each text or messages
    prompt              `prompt` alone; every other column is handed to the rewards

`columns:` maps a field of these formats, or a role, to a column of the file:

    columns: {prompt: question}                                     # gsm8k: prompts; `answer` stays a column for the rewards
    columns: {prompt: question, completion: answer}                 # gsm8k: SFT
    columns: {user: [instruction, input], assistant: output}        # alpaca; joined by a blank line, empty ones left out
    columns: {system: persona, user: query, assistant: reply}       # one message per role, in this order
    columns: {messages: dialog, tools: functions}                   # other names

`system`, `user`, `assistant` make `messages`; without `assistant` they make a prompt.
Columns that the map names are used up; all others stay.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from postgrad.data.files import Row
from postgrad.errors import DataError, RecipeError

FIELDS = ("messages", "prompt", "completion", "tools", "system", "user", "assistant")
_ROLES = ("system", "user", "assistant")
_SUGGESTIONS = (
    ({"instruction", "output"}, "{user: [instruction, input], assistant: output}"),
    ({"question", "answer"}, "{prompt: question} (rewards read `answer`) or {prompt: question, completion: answer}"),
    ({"question"}, "{prompt: question}"),
    ({"text"}, "{prompt: text}"),
)

Columns = Mapping[str, str | Sequence[str]]


def check_columns(columns: Columns) -> None:
    """Raises `RecipeError` on an unknown field, a value that is no column name, or fields that exclude each other."""
    for field, value in columns.items():
        if field not in FIELDS:
            near = difflib.get_close_matches(field, FIELDS, n=1)
            raise RecipeError(
                f"unknown field {field!r}",
                where="data.columns",
                hint=f"did you mean {near[0]}?" if near else f"fields: {', '.join(FIELDS)}",
            )
        if not value or not all(isinstance(name, str) for name in _names(value)):
            raise RecipeError(f"{field} takes a column name or a list of them", where="data.columns", hint="e.g. {prompt: question}")
    kinds = [kind for kind, members in _KINDS.items() if any(member in columns for member in members)]
    if len(kinds) > 1:
        raise RecipeError(
            f"the map mixes {' and '.join(kinds)}", where="data.columns", hint="use messages, or prompt (and completion), or roles"
        )
    if ("completion" in columns and "prompt" not in columns) or ("assistant" in columns and "user" not in columns):
        raise RecipeError("an answer without a question", where="data.columns", hint="map the prompt (or user) column too")


_KINDS = {"messages": ("messages",), "prompt/completion": ("prompt", "completion"), "roles": _ROLES}


def apply_columns(rows: Sequence[Row], columns: Columns) -> tuple[Row, ...]:
    """Rows in the format that the map makes. Raises `DataError` when a mapped column is in none of the rows."""
    check_columns(columns)
    if not columns or not rows:
        return tuple(rows)
    found = {name for row in rows for name in row.fields}
    for field, value in columns.items():
        for name in _names(value):
            if name not in found:
                raise DataError(f"no row has the column {name!r} (mapped to {field})", where=rows[0].name, hint=f"found: {_listed(found)}")
    return tuple(Row(row.name, _mapped(row.fields, columns)) for row in rows)


def detect(rows: Sequence[Row]) -> str:
    """The one format of all rows. Raises `DataError` on none, or on two in one file."""
    formats = Counter(_format(row.fields) for row in rows)
    if len(formats) > 1:
        (first, count), (second, other) = formats.most_common(2)
        where = next(row.name for row in rows if _format(row.fields) == second)
        names = [name or "unknown" for name in (first, second)]
        raise DataError(
            f"two formats in one file: {names[0]} ({count} rows) and {names[1]} ({other} rows)", where=where, hint="split the file"
        )
    name = next(iter(formats))
    if not name:
        raise _unknown(rows[0])
    return name


def _format(fields: Mapping[str, Any]) -> str:
    if "messages" in fields or ("conversations" in fields and not {"chosen", "rejected"} & set(fields)):
        return "messages"
    if "prompt" in fields and not {"chosen", "rejected"} & set(fields):
        return "prompt+completion" if "completion" in fields else "prompt"
    return ""


def _unknown(row: Row) -> DataError:
    names = set(row.fields)
    suggestion = next((text for needed, text in _SUGGESTIONS if needed <= names), None)
    hint = (
        f"map the columns: data.columns: {suggestion}"
        if suggestion
        else "name the columns in data.columns, e.g. {user: question, assistant: reply}"
    )
    if "input_ids" in names:
        hint = "token ids do not say which of them are the answer; give the text or messages they were made from"
    if any("chosen" in name for name in names):
        hint = "these look like preference pairs, which have no single answer to train on"
    near = next((f"; nearest format: {word}" for word in ("messages", "prompt") if difflib.get_close_matches(word, names, n=1)), "")
    return DataError(f"unknown format; columns found: {_listed(names)}{near}", where=row.name, hint=hint)


def _mapped(fields: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    used = {name for value in columns.values() for name in _names(value)}
    mapped: dict[str, Any] = {
        name: value for name, value in fields.items() if name not in used and name not in ("messages", "prompt", "completion")
    }
    mapped |= {field: _value(fields, value) for field, value in columns.items() if field not in _ROLES}
    roles = [{"role": role, "content": _value(fields, columns[role])} for role in _ROLES if role in columns]
    if roles:
        turns = [turn for turn in roles if turn["role"] != "system" or turn["content"]]
        mapped["messages" if "assistant" in columns else "prompt"] = turns
    return mapped


def _value(fields: Mapping[str, Any], value: str | Sequence[str]) -> Any:
    if isinstance(value, str):
        return fields.get(value)
    parts = [fields.get(name) for name in value]
    return "\n\n".join(str(part) for part in parts if part not in (None, ""))


def _names(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
