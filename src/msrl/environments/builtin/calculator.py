"""Questions with a calculator: the tool `calculate` evaluates arithmetic.

The reward comes from the reward sources, or is 1.0 for the right number with `reward=True`.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from msrl.environments.base import Environment, StepResult
from msrl.environments.builtin._prompts import row_prompt
from msrl.environments.tools import tool
from msrl.types import Message

_MAX_CHARS = 200
_MAX_BITS = 4096  # of an integer
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Calculator(Environment):
    """Environment with a calculator."""

    def __init__(self, prompt_column: str, system: str, *, has_reward: bool) -> None:
        self._prompt_column, self._system, self._has_reward = prompt_column, system, has_reward
        self._true: Decimal | None = None

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the question of the row.

        Raises:
            ValueError: The ground truth has no number, but answers are compared with it.
        """
        answer = str(row.get("answer", ""))
        self._true = _last_number(answer)
        if self._has_reward and self._true is None:
            raise ValueError(f"the ground truth {answer[:100]!r} has no number")
        return row_prompt(row, self._prompt_column, self._system)

    def finish(self, answer: str) -> StepResult:
        """Compare the last number of the answer with the ground truth."""
        if not self._has_reward:
            return StepResult([], done=True)
        is_right = _last_number(answer) == self._true
        return StepResult([], float(is_right), True, {"success": is_right})

    @tool
    def calculate(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: Numbers, parentheses and the operators + - * / // % **.
        """
        return str(evaluate(expression))


def evaluate(expression: str) -> int | float:
    """Return the value of an arithmetic expression.

    Raises:
        ValueError: It is no arithmetic expression, or its value is too large.
        ZeroDivisionError: It divides by zero.
    """
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"the expression has more than {_MAX_CHARS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("this is no arithmetic expression") from None
    return _value(tree.body)


def environment(*, prompt_column: str = "", system: str = "", reward: bool = False) -> Environment:
    """Return a new environment.

    Args:
        prompt_column: Column with the question. Empty keeps the prompt of the row, which must show
            the tool.
        system: System text; empty for none.
        reward: Reward the answer whose last number equals the ground truth's.
    """
    return Calculator(prompt_column, system, has_reward=reward)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return _apply(kind, _value(left), _value(right))
        case _:
            raise ValueError("this is no arithmetic expression")


def _apply(kind: ast.operator, left: int | float, right: int | float) -> int | float:
    if isinstance(kind, ast.Pow):
        _check_power(left, right)
    value = _OPERATORS[type(kind)](left, right)
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("the value is no finite real number")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError("the value is too large")
    return value


def _check_power(base: int | float, exponent: int | float) -> None:
    """Refuse powers that take long to compute."""
    if not (isinstance(base, int) and isinstance(exponent, int)):
        return
    if base.bit_length() * abs(exponent) > _MAX_BITS:
        raise ValueError("the value is too large")


def _last_number(text: str) -> Decimal | None:
    """Return the exact value of the last number in a text."""
    numbers = _NUMBER.findall(text.replace(",", ""))
    return Decimal(numbers[-1]) if numbers else None
