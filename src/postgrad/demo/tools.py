"""The demo's tool. The docstring and the annotations are what the model is told."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

MAX_CHARACTERS = 100
MAX_DIGITS = 30

Number = int | float
OPERATIONS: dict[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
SIGNS: dict[type, Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: for example 12 + 34
    """
    # Parsed and walked, never given to eval: the model writes this text. There is no power, so `9**9**9` cannot hang the run.
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression is longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("not an arithmetic expression") from None
    return _written(_compute(tree.body))


def _compute(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](_compute(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = _compute(node.left), _compute(node.right)
        if isinstance(node.op, ast.Div) and right == 0:
            raise ValueError("division by zero")
        return _bounded(OPERATIONS[type(node.op)](left, right))
    raise ValueError("only numbers, + - * / and parentheses are understood")


def _bounded(value: Number) -> Number:
    if not abs(value) < 10**MAX_DIGITS:
        raise ValueError(f"a number of more than {MAX_DIGITS} digits")
    return value


def _written(value: Number) -> str:
    """Whole numbers without a decimal point, others with up to ten significant digits."""
    return str(int(value)) if value == int(value) else f"{value:.10g}"
