"""Making mutants: every way to change one node of a module's syntax tree that could be a real mistake.

    + − × ÷ swapped, ** → *, & | and or swapped      < ≤ > ≥ moved by their bound and negated, == is in negated
    minus, not and ~ dropped                          a number one larger, a flag flipped, a name changed
    an `if` negated, an `a if c else b` decided       a checking statement deleted
    a call dropped (a mask, a clamp, an exp)          where(c, a, b) → a, → b
    a keyword or the mask argument left out           min and max, any and all swapped

Left alone: docstrings, messages, annotations, decorators, imports and what is raised.
A mutant's name is `module.function: before → after`, with `#2` for a second one of the same words. No line numbers: code may move.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "src" / "postgrad" / "formulas"
LEFT_OUT = {"__init__", "sheet"}  # exports, and data about the formulas: no formula in either

OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
SWAPS = {"minimum": "maximum", "amin": "amax", "min": "max", "any": "all", "zeros_like": "ones_like"}
SWAPS |= {after: before for before, after in SWAPS.items()}
TYPE_CHANGERS = {"bool", "int", "float"}  # calls that change a type and no number

NodePath = tuple[tuple[str, int | None], ...]
"""The way from the root of a syntax tree to a node: (field, index in the field's list)."""


@dataclass(frozen=True)
class Mutant:
    """`module` and `function` say where, `name` is its identity; the node at `path` changes in the `way`-th way."""

    module: str
    function: str
    name: str
    path: NodePath
    way: int

    def tree(self) -> ast.Module:
        """The whole module with the one node changed."""
        tree = source_of(self.module)
        _replace(tree, self.path, list(_ways(_at(tree, self.path)))[self.way](_at(tree, self.path)))
        return ast.fix_missing_locations(tree)


def module_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in LEFT_OUT)


def source_of(module: str) -> ast.Module:
    return ast.parse((FOLDER / f"{module}.py").read_text())


def mutants_of(module: str) -> list[Mutant]:
    source = source_of(module)
    seen: Counter[str] = Counter()
    found = []
    for path, function in _places(source):
        node = _at(source, path)
        for number, way in enumerate(_ways(node)):
            name = f"{module}.{function}: {_words(node)} → {_words(way(copy.deepcopy(node)))}"
            seen[name] += 1
            found.append(Mutant(module, function, name if seen[name] == 1 else f"{name} #{seen[name]}", path, number))
    return found


def _places(tree: ast.Module) -> Iterator[tuple[NodePath, str]]:
    """Every node that may change, as the way to it from the root, with the qualified name of its function."""

    def walk(node: ast.AST, path: NodePath, scope: tuple[str, ...]) -> Iterator[tuple[NodePath, str]]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            scope = (*scope, node.name)
        is_statement = path[-1:] == (("value", None),) and isinstance(_at(tree, path[:-1]), ast.Expr)
        if not is_statement:  # the call of a statement goes with it; its arguments still change
            yield path, ".".join(scope) or "(module)"
        for field, value in ast.iter_fields(node):
            if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
                continue
            if field in ("annotation", "returns", "decorator_list", "bases", "type_comment") or _is_text(node, field):
                continue
            for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
                if isinstance(child, ast.AST) and not _is_speech(node, child):
                    yield from walk(child, (*path, (field, index)), scope)

    return walk(tree, (), ())


def _is_text(node: ast.AST, field: str) -> bool:
    """Docstrings, f-strings, aliases such as Literal[...] and the contents of `raise`."""
    is_alias = isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript) and ast.unparse(node.value).startswith("Literal")
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_alias or is_docstring or isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom)


def _is_speech(node: ast.AST, child: ast.AST) -> bool:
    """A text handed to a function: what it says to people."""
    return isinstance(node, ast.Call) and isinstance(child, ast.JoinedStr | ast.Constant) and isinstance(getattr(child, "value", ""), str)


def _words(node: ast.AST) -> str:
    text = ast.unparse(node.test) if isinstance(node, ast.If) else ast.unparse(node)
    return " ".join(text.split())


def _at(tree: ast.AST, path: NodePath) -> ast.AST:
    for field, index in path:
        value = getattr(tree, field)
        tree = value if index is None else value[index]
    return tree


def _replace(tree: ast.Module, path: NodePath, node: ast.AST) -> None:
    field, index = path[-1]
    parent = _at(tree, path[:-1])
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


Way = Callable[[Any], Any]
"""Changes a node, in place or by returning another."""


def _ways(node: ast.AST) -> Iterator[Way]:
    match node:
        case ast.BinOp() | ast.BoolOp():
            yield from (_with(op=other()) for other in OPERATORS.get(type(node.op), ()))
        case ast.Compare():
            for place, op in enumerate(node.ops):
                others = OPERATORS[type(op)] if len(node.ops) == 1 else OPERATORS[type(op)][:1]
                yield from (_with_comparison(place, other()) for other in others)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            yield lambda n: ast.Constant(1 - value)  # −1 → 0: the other end of a shape or a slice
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
            yield lambda n: n.operand
        case ast.Constant():
            yield from (_with(value=value) for value in _other_constants(node.value))
        case ast.If():
            yield lambda n: _with(test=ast.UnaryOp(ast.Not(), n.test))(n)
        case ast.IfExp():
            yield lambda n: n.body
            yield lambda n: n.orelse
        case ast.Expr(value=ast.Call()):
            yield lambda n: ast.Pass()
        case ast.Call():
            yield from _ways_of_call(node)


def _ways_of_call(node: ast.Call) -> Iterator[Way]:
    """The call dropped (the mask of a `where`, an exp, a clamp), each keyword dropped, the function swapped for its opposite."""
    is_method = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) not in ("torch", "math")
    if is_method:
        yield lambda n: n.func.value
    elif ast.unparse(node.func) not in TYPE_CHANGERS:
        kept = [place for place, argument in enumerate(node.args) if not isinstance(argument, ast.Starred | ast.Constant | ast.JoinedStr)]
        if ast.unparse(node.func) == "torch.where":
            yield from (_argument(place) for place in (1, 2))
        elif kept:
            yield _argument(kept[0])
    if isinstance(node.func, ast.Attribute) and node.func.attr in SWAPS:
        yield lambda n: _with(func=_with(attr=SWAPS[n.func.attr])(n.func))(n)
    if node.args[1:] and ast.unparse(node.args[-1]) == "mask":
        yield _with(args=node.args[:-1])
    for place in range(len(node.keywords)):
        yield _with(keywords=node.keywords[:place] + node.keywords[place + 1 :])


def _other_constants(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    elif isinstance(value, str):
        yield f"not {value}"


def _argument(place: int) -> Way:
    return lambda n: n.args[place]


def _with(**fields: object) -> Way:
    def change(node: Any) -> Any:
        for field, value in fields.items():
            setattr(node, field, value)
        return node

    return change


def _with_comparison(place: int, op: ast.AST) -> Way:
    def change(node: Any) -> Any:
        node.ops[place] = op
        return node

    return change
