"""Reads what a docstring says of a function and its parameters: Google (`Args:`), numpy (`Parameters` underlined) or reST (`:param x:`)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

_PARAMETERS = ("Args", "Arguments", "Parameters", "Params")
_SECTIONS = (*_PARAMETERS, "Returns", "Return", "Yields", "Raises", "Example", "Examples")
_GOOGLE_HEADER = re.compile(rf"({'|'.join(_SECTIONS)}):\s*$")
_NUMPY_HEADER = re.compile(rf"({'|'.join(_SECTIONS)})\s*$")
_REST_FIELD = re.compile(r":(?P<kind>\w+)(?:\s+[^:]*?)??(?:\s+(?P<name>\w+))?\s*:\s*(?P<text>.*)$")
_GOOGLE_ENTRY = re.compile(r"(?P<name>\w+)\s*(?:\(.*?\))?\s*:\s*(?P<text>.*)$")
_NUMPY_ENTRY = re.compile(r"(?P<name>\w+)\s*(?::.*)?$")


@dataclass(frozen=True, slots=True)
class Docstring:
    """`summary` is everything before the first section; `parameters` maps a parameter's name to its description."""

    summary: str
    parameters: dict[str, str]


def parse_docstring(text: str) -> Docstring:
    """Split a docstring into its summary and its parameters' descriptions. Sections other than the parameters' are left out.

    >>> parse_docstring("Add.\\n\\nArgs:\\n    a (int): first\\n        number\\n    b: second\\n\\nReturns:\\n    the sum")
    Docstring(summary='Add.', parameters={'a': 'first number', 'b': 'second'})
    """
    lines = inspect.cleandoc(text).splitlines()
    summary: list[str] = []
    parameters: dict[str, str] = {}
    for header, body in _sections(lines):
        if header is None:
            summary += body
        elif header in _PARAMETERS:
            parameters |= _entries(body)
        elif header.startswith(":"):
            parameters |= _rest_entry(header, body)
    return Docstring("\n".join(summary).strip(), parameters)


def _sections(lines: list[str]) -> Iterator[tuple[str | None, list[str]]]:
    """Yield (header, body lines); the header is None for free text, a section's name, or a whole reST field line.

    A Google section and a reST field end at the next line that is not indented; a numpy section at the next header.
    """
    header: str | None = None
    underlined = False
    body: list[str] = []
    index = 0
    while index < len(lines):
        line = lines[index]
        following = lines[index + 1] if index + 1 < len(lines) else ""
        new, skip, new_underlined = header, 0, underlined
        if _NUMPY_HEADER.match(line) and re.match(r"-{3,}\s*$", following):
            new, skip, new_underlined = line.strip(), 2, True
        elif match := _GOOGLE_HEADER.match(line):
            new, skip, new_underlined = match.group(1), 1, False
        elif _REST_FIELD.match(line) and line.startswith(":"):
            new, skip, new_underlined = line, 1, False
        elif header is not None and not underlined and line and not line[0].isspace():
            new, new_underlined = None, False
        if skip or new != header:
            yield header, body
            header, underlined, body = new, new_underlined, []
        if not skip:
            body.append(line)
        index += skip or 1
    yield header, body


def _entries(body: list[str]) -> dict[str, str]:
    """Entries `name: text` (Google) or `name : type` with the text below (numpy); deeper lines continue an entry."""
    written = [line for line in body if line.strip()]
    if not written:
        return {}
    margin = min(len(line) - len(line.lstrip()) for line in written)
    pattern = _GOOGLE_ENTRY if margin else _NUMPY_ENTRY
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in written:
        match = pattern.match(line[margin:])
        if match:
            current = found.setdefault(match["name"], [])
            current += [match["text"]] if "text" in match.groupdict() else []
        else:
            current.append(line.strip())
    return {name: " ".join(part.strip() for part in parts if part.strip()) for name, parts in found.items()}


def _rest_entry(field: str, body: list[str]) -> dict[str, str]:
    match = _REST_FIELD.match(field)
    if match is None or match["kind"] not in ("param", "parameter", "arg", "argument") or match["name"] is None:
        return {}
    return {match["name"]: " ".join(part.strip() for part in (match["text"], *body) if part.strip())}
