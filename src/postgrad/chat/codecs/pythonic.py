"""`[add(a=1), look_up(city="Oslo")]`: a Python list of calls with named literal arguments. Llama 3.2, Llama 4, ToolACE, LFM2.

A list is recognised where a line begins with `[name(`, or after the marker that some models put before it. It is parsed by Python's own
grammar and read as literals, never evaluated. JSON's true, false and null are literals too, because these models write them; a tuple is a
list.
Source: the chat templates of Llama-4 and LFM2, and Meta's prompt format of Llama 3.2.
"""

from __future__ import annotations

import ast
import keyword
import re
import unicodedata
import warnings
from collections.abc import Sequence
from typing import Any

from postgrad.chat.codecs.jsons import dumps, object_of_pairs, require_text
from postgrad.chat.codecs.style import Call, CallStyle, CannotWrite, Parsed, joined, outside
from postgrad.types import MalformedCall, ToolCall

_MARKERS = ("<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>")  # Llama 4's, LFM2's
_MARKER = re.compile("|".join(map(re.escape, _MARKERS)))
_NAME = r"[^\W\d]\w*"
_OPENING = re.compile(rf"(?:^[^\S\n]*|(?:{_MARKER.pattern})\s*)\[(?=\s*{_NAME}(?:\.{_NAME})*\s*\()", re.MULTILINE)
_PIECE = re.compile(
    r'"""(?:\\.|[^\\])*?"""'
    r"|'''(?:\\.|[^\\])*?'''"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])*'"
    r"|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<quote>[\"'])",
    re.DOTALL,
)
_CONSTANTS = {"true": True, "false": False, "null": None}


# ---- writing


def write(content: str, calls: Sequence[ToolCall]) -> str:
    return joined(content, f"[{', '.join(map(_written, calls))}]") if calls else content


def _written(call: ToolCall) -> str:
    if not all(map(_is_name, call.name.split("."))):
        raise CannotWrite(f"{call.name!r} is no name of a Python function")
    for name in call.arguments:
        if not _is_name(name):
            raise CannotWrite(f"{name!r} is no name of a Python argument")
    return f"{call.name}({', '.join(f'{name}={_literal(value)}' for name, value in call.arguments.items())})"


def _is_name(text: str) -> bool:
    """Python reads identifiers in their normal form, so others would come back changed."""
    plain = re.fullmatch(_NAME, text) is not None and text.isidentifier() and not keyword.iskeyword(text)
    return plain and unicodedata.normalize("NFKC", text) == text


def _literal(value: Any) -> str:
    """A JSON value as a Python literal. A JSON string is one already."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{dumps(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_literal, value))}]"
    return dumps(value) if isinstance(value, str) else repr(value)


# ---- reading


def parse(text: str) -> Parsed:
    """
    >>> parse('[add(a=1, b=[2, None])]')
    ('', (ToolCall(name='add', arguments={'a': 1, 'b': [2, None]}, id='call_0'),))
    >>> parse('[1, 2]')
    ('[1, 2]', ())
    """
    parts: list[str] = []
    calls: list[Call] = []
    position = 0
    while opening := _OPENING.search(text, position):
        parts.append(text[position : opening.start()])
        start = opening.end() - 1
        end = _end_of_list(text, start)
        position = len(text) if end is None else end
        written = text[start:position]
        if end is None:
            calls.append(MalformedCall(written.strip(), "the list of calls is not closed: a quote or a bracket is missing"))
        else:
            calls += _read_list(written, start=len(calls))
    parts.append(text[position:])
    return outside([_MARKER.sub("", part) for part in parts] if calls else parts, calls), tuple(calls)


def _end_of_list(text: str, start: int) -> int | None:
    """The position after the bracket that closes the one at `start`; brackets inside strings do not count. None when none does."""
    depth = 0
    for piece in _PIECE.finditer(text, start):
        if piece["quote"]:  # it opens a string that never ends
            return None
        depth += bool(piece["open"]) - bool(piece["close"])
        if not depth and piece["close"]:
            return piece.end()
    return None


def _read_list(text: str, *, start: int) -> list[Call]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of escapes such as "\d"; what they mean is what is read
            tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        return [MalformedCall(text, f"not a Python list of calls: {error.msg}")]
    except (ValueError, RecursionError, MemoryError) as error:
        return [MalformedCall(text, f"not a Python list of calls: {str(error) or 'nested too deeply'}")]
    if not isinstance(tree, ast.List):
        return [MalformedCall(text, "calls are written [name(argument=value), ...]")]
    source = _Source(text)
    return [_read_call(item, source.of(item), index=start + place) for place, item in enumerate(tree.elts)]


class _Source:
    """Gives the text of a node. `ast.get_source_segment` reads all of the text for each."""

    def __init__(self, text: str) -> None:
        self._data = text.encode()
        ends = (ending.end() for ending in re.finditer(rb"\r\n?|\n", self._data))  # Python's lines
        self._lines = [0, *ends]

    def of(self, node: ast.expr) -> str:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return self._data[start : self._lines[node.end_lineno - 1] + node.end_col_offset].decode()


def _read_call(node: ast.expr, written: str, *, index: int) -> Call:
    name = _name(node.func) if isinstance(node, ast.Call) else ""
    if not isinstance(node, ast.Call) or not name:
        return MalformedCall(written, "only calls stand in the list: [name(argument=value), ...]")
    if node.args or any(item.arg is None for item in node.keywords):
        return MalformedCall(written, f"name every argument: {name}(argument=value)")
    names = [str(item.arg) for item in node.keywords]
    if twice := next((name for name in names if names.count(name) > 1), None):
        return MalformedCall(written, f"the argument {twice!r} stands twice")
    try:
        arguments = dict(zip(names, (_value(item.value) for item in node.keywords), strict=True))
        require_text(arguments)
    except (ValueError, RecursionError) as error:
        return MalformedCall(written, str(error) or "nested too deeply")
    return ToolCall(name, arguments, id=f"call_{index}")


def _name(node: ast.expr) -> str:
    """`math.factorial`, or "" when the node is no dotted name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _value(node: ast.expr) -> Any:
    """A literal as JSON knows it. Raises `ValueError` on everything else."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)) if not isinstance(
            number, bool
        ):
            return -number if isinstance(sign, ast.USub) else number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return object_of_pairs([(_key(key), _value(value)) for key, value in zip(keys, values, strict=True)])
    raise ValueError(f"an argument is a literal value, not {ast.unparse(node)[:60]}")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("the keys of an object are strings")


PYTHONIC = CallStyle("pythonic", write, parse, _MARKERS)
