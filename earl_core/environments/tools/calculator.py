"""Arithmetic as a tool."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_NAMES: dict[str, Any] = {
    name: getattr(math, name)
    for name in ("pi", "e", "sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "floor")
} | {"ceil": math.ceil, "abs": abs, "round": round, "min": min, "max": max}
_MOST_DIGITS = 1000
_MOST_CHARACTERS = 1000


def calculator(expression: str) -> str:
    """Computes an arithmetic expression and returns its value.

    Args:
        expression: The expression in Python's notation, such as 12 * (3 + 4) or sqrt(2) ** 3.
    """
    if len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"an expression has at most {_MOST_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    return str(_value(tree.body))


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.Name) and node.id in ("pi", "e"):
        return _NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _NAMES.get(node.func.id)
        if callable(function):
            return function(*map(_value, node.args))
    raise ValueError(
        f"{ast.unparse(node)} is not supported: use numbers, + - * / // % **, parentheses and "
        f"{', '.join(_NAMES)}"
    )


def _power(base: Any, exponent: Any) -> Any:
    digits = math.log10(abs(base)) * exponent if base else 0
    if digits > _MOST_DIGITS:
        raise ValueError(f"the result has over {_MOST_DIGITS} digits")
    return base**exponent


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > 4 * _MOST_DIGITS:
        raise ValueError(f"the result has over {_MOST_DIGITS} digits")
    return value
