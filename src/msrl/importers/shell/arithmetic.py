"""Integer arithmetic of shell scripts: `$((...))`, `((...))`, `let` and indices of arrays.

The operators and their precedence follow C. A name is a variable. In bash an unset one is 0; here
only a counter (`x++`, `x += 1`) and a condition start from 0, and a value that depends on an unset
variable has a problem.
Source: Bash Reference Manual, Shell Arithmetic.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

from msrl.importers.shell.values import Scope, Variable, Word, literal

MAX_EXPRESSION = 1000
MAX_POWER = 64
MAX_VALUE = 1 << 63
_MAX_DEPTH = 40
_TOKEN = re.compile(
    r"\s*(\d+#\w+|0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*"
    r"|\*\*|<<=|>>=|\+\+|--|&&|\|\||<<|>>|[-+*/%&^|<>=!]=|[-+*/%&^|<>=!~?:,()])"
)


def _checked(value: int) -> int:
    """Return a value that bash can compute; of nested powers, the digits would fill the memory."""
    if not -MAX_VALUE <= value < MAX_VALUE:
        raise ValueError
    return value


def _quotient(left: int, right: int) -> int:
    """Return the quotient, rounded toward zero as in C."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _power(left: int, right: int) -> int:
    if not 0 <= right <= MAX_POWER:
        raise ValueError
    return left**right


def _shift(left: int, right: int) -> int:
    if not 0 <= right <= MAX_POWER:
        raise ValueError
    return left << right


_BINARY: dict[str, Callable[[int, int], int]] = {
    "**": _power, "*": operator.mul, "/": _quotient,
    "%": lambda left, right: left - right * _quotient(left, right),
    "+": operator.add, "-": operator.sub, "<<": _shift, ">>": lambda left, right: left >> right,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne, "&": lambda left, right: left & right,
    "^": lambda left, right: left ^ right, "|": lambda left, right: left | right,
}  # fmt: skip
# From the weakest to the strongest.
_LEVELS = (
    ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="),
    ("<<", ">>"), ("+", "-"), ("*", "/", "%"), ("**",),
)  # fmt: skip
_ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "&=", "^=", "|=", "<<=", ">>=")


def arithmetic(expression: Variable, scope: Scope) -> Variable:
    """Return the value of `$((expression))` as text."""
    if expression.problem:
        return literal(f"$(({expression.text}))", expression.problem)
    unset: list[str] = []
    number = calculate(expression, scope, unset)
    text = f"$(({expression.text}))"
    if unset and not scope.unset_is_empty:
        return literal(text, unset_problem(unset[0]))
    if number is not None:
        return literal(str(number))
    return literal(text, f"{text} is not a calculation with integers. Replace it.")


def calculate(expression: Variable, scope: Scope, unset: list[str] | None = None) -> int | None:
    """Return the value of an arithmetic expression, or None. Assignments change the scope.

    The names of unset variables, which count as 0, are added to `unset`.
    """
    if expression.problem or len(expression.text) > MAX_EXPRESSION:
        return None
    names: list[str] = [] if unset is None else unset
    try:
        return _Evaluator(expression.text, scope, names).value()
    except (ValueError, ZeroDivisionError):
        return None


def unset_problem(name: str) -> str:
    """Return the problem of a value that depends on an unset variable."""
    return f"${name} is not set. Set it in the script or export it."


class _Evaluator:
    """Recursive-descent evaluation. A part that is skipped (`0 && x++`) has no effect."""

    def __init__(self, text: str, scope: Scope, unset: list[str], depth: int = 0) -> None:
        self.scope, self.unset, self.depth = scope, unset, depth
        self.tokens, self.pos, self.is_skipped = _tokens(text), 0, False
        if depth > _MAX_DEPTH:
            raise ValueError

    def value(self) -> int:
        """Return the value of the complete expression; an empty one is 0."""
        if not self.tokens:
            return 0
        value = self._comma()
        if self.pos < len(self.tokens):
            raise ValueError
        return value

    def _token(self) -> str:
        return self.tokens[self.pos] if self.pos < len(self.tokens) else ""

    def _accept(self, *texts: str) -> str:
        token = self._token()
        if token not in texts or not token:
            return ""
        self.pos += 1
        return token

    def _comma(self) -> int:
        value = self._assignment()
        while self._accept(","):
            value = self._assignment()
        return value

    def _assignment(self) -> int:
        name, following = self._token(), self.tokens[self.pos + 1 : self.pos + 2]
        if not _is_name(name) or not following or following[0] not in _ASSIGNMENTS:
            return self._ternary()
        self.pos += 2
        num_unset = len(self.unset)
        right = self._assignment()
        problems = [unset_problem(unset) for unset in self.unset[num_unset:]]
        change = following[0].removesuffix("=")
        value = self._combine(change, self._read_counter(name), right) if change else right
        return self._set(name, value, *problems)

    def _set(self, name: str, value: int, *problems: str) -> int:
        if not self.is_skipped:
            unknown = literal(f"${name}", *problems[:1])
            self.scope.variables[name] = unknown if problems else literal(str(value))
        return value

    def _ternary(self) -> int:
        condition = self._binary(0)
        if not self._accept("?"):
            return condition
        first = self._unless(condition == 0, self._comma)
        if not self._accept(":"):
            raise ValueError
        second = self._unless(condition != 0, self._assignment)
        return first if condition else second

    def _unless(self, is_skipped: bool, read: Callable[[], int]) -> int:
        before, self.is_skipped = self.is_skipped, self.is_skipped or is_skipped
        value = read()
        self.is_skipped = before
        return value

    def _binary(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while token := self._accept(*_LEVELS[level]):
            is_decided = (token == "&&" and not left) or (token == "||" and left != 0)
            following = level if token == "**" else level + 1
            right = self._unless(is_decided, lambda following=following: self._binary(following))
            left = self._combine(token, left, right)
        return left

    def _combine(self, token: str, left: int, right: int) -> int:
        if token in ("&&", "||"):
            return int((left and right) if token == "&&" else (left or right)) and 1
        return 0 if self.is_skipped else _checked(int(_BINARY[token](left, right)))

    def _unary(self) -> int:
        if token := self._accept("++", "--"):
            name = self._token()
            if not _is_name(name):
                raise ValueError
            self.pos += 1
            return self._set(name, self._read_counter(name) + (1 if token == "++" else -1))
        if token := self._accept("-", "+", "!", "~"):
            value = self._unary()
            return {"-": -value, "+": value, "!": int(not value), "~": ~value}[token]
        return self._primary()

    def _primary(self) -> int:
        if self._accept("("):
            value = self._comma()
            if not self._accept(")"):
                raise ValueError
            return value
        token = self._token()
        self.pos += 1
        if not _is_name(token):
            return _number(token)
        if change := self._accept("++", "--"):
            value = self._read_counter(token)
            self._set(token, value + (1 if change == "++" else -1))
            return value
        if not self.is_skipped and self.scope.look_up(token) is None:
            self.unset.append(token)
        return self._read_counter(token)

    def _read_counter(self, name: str) -> int:
        """Return the number in a variable, whose text may be an expression; 0 if it is unset."""
        variable = self.scope.look_up(name)
        if variable is None or not variable.text.strip():
            return 0
        if variable.problem:
            raise ValueError
        return _Evaluator(variable.text, self.scope, self.unset, self.depth + 1).value()


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    text = text.strip()
    pos = 0
    while pos < len(text):
        match = _TOKEN.match(text, pos)
        if match is None or text[pos : match.end()].count("(") > 1 or len(tokens) > 200:
            raise ValueError
        tokens.append(match[1])
        pos = match.end()
    return tokens


def _is_name(token: str) -> bool:
    return token[:1].isalpha() or token[:1] == "_"


def _number(token: str) -> int:
    """Return a number: `0x10`, `010` in base 8, or `BASE#DIGITS`."""
    base, mark, digits = token.partition("#")
    if mark:
        return _checked(int(digits, int(base)))
    if token.lower().startswith("0x"):
        return _checked(int(token, 16))
    return _checked(int(token, 8 if len(token) > 1 and token.startswith("0") else 10))


def unknown_result(name: str, line: int | None) -> Variable:
    """Return the value of a variable whose calculation is not known."""
    problem = f"${name} is not a calculation with integers. Replace it with its value."
    return Variable(f"${name}", (Word(f"${name}", line, problem),), problem)
