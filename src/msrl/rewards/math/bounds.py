"""Bounds of formulas, which are checked before anything computes their values.

math-verify parses `10^{10^{10}}` without its value and then computes all digits, in a call of C
code that no signal interrupts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy2
from sympy.concrete.expr_with_limits import ExprWithLimits

MAX_BITS = 100_000  # of the numerator or denominator of a value: 30,000 digits
MAX_TERMS = 10_000  # of a power of a sum after its expansion
# Functions that latex2sympy2_extended (1.11) computes while it parses, most of them of matrices.
_COMPUTED = re.compile(
    r"\\operatorname\*?\s*\{\s*(?:eye|zeros|ones|diag|hstack|vstack|rank|tr|trace|rref|nullspace"
    r"|norm|cols|rows|eig|eigen\w*|diagonalize|svd|SVD|ortho?|orthogonal(?:ize)?)\s*\}"
)
_GROWING = (sympy.factorial, sympy.factorial2, sympy.gamma, sympy.subfactorial)
_MAX_LOG2 = math.log2(MAX_BITS)

_Sizes = Mapping[Any, float]


class UnboundedError(Exception):
    """The value of a formula would exceed a bound."""


def is_computed_while_parsed(text: str) -> bool:
    """Return True if a function of the text would be computed before its bounds are known."""
    return _COMPUTED.search(text) is not None


def require_bounded(formula: Any) -> None:
    """Check the sizes of all values inside a parsed formula, without computing them.

    Raises:
        UnboundedError: One has more than `MAX_BITS` bits, or more than `MAX_TERMS` terms.
    """
    if isinstance(formula, (sympy.Basic, sympy.MatrixBase)):
        _size(formula, {})


def _size(node: Any, indices: _Sizes) -> float:
    """Return a bound of the bits of numerator and denominator of a value.

    `indices` has the sizes of the indices of the sums and products around it.
    """
    if isinstance(node, sympy.MatrixBase):
        size = sum(_size(entry, indices) for entry in node.flat())
    elif isinstance(node, ExprWithLimits):
        size = _size_over_limits(node, indices)
    elif not getattr(node, "args", ()):
        size = _atom_size(node, indices)
    else:
        sizes = [_size(child, indices) for child in node.args]
        size = _compound_size(node, sizes, indices)
    if not size <= MAX_BITS:
        raise UnboundedError(f"a value has more than {MAX_BITS:,} bits")
    return size


def _atom_size(node: Any, indices: _Sizes) -> float:
    if isinstance(node, sympy.Float):
        return node._prec + abs(node._mpf_[2])
    if isinstance(node, sympy.Rational):
        return max(_log2(node.p), _log2(node.q))
    return indices.get(node, 1.0)


def _log2(number: int) -> float:
    """Return the logarithm of an integer of any size."""
    bits = abs(number).bit_length()
    return bits if bits > 1000 else math.log2(max(1, abs(number)))


def _compound_size(node: Any, sizes: list[float], indices: _Sizes) -> float:
    if isinstance(node, (sympy.Pow, sympy.MatPow)):
        return _power_size(node, sizes, indices)
    if isinstance(node, sympy.exp):
        return _times(1.5, sizes[0])  # the logarithm of e is 1.44
    if isinstance(node, _GROWING):
        return _times(max(1.0, sizes[0]), sizes[0])
    if isinstance(node, sympy.binomial):
        return min(_growth(1.0, sizes[0]), _growth(sizes[0], sizes[1]))
    if isinstance(node, sympy.Add) and all(child.is_Integer for child in node.args):
        return max(sizes) + math.log2(len(sizes))
    return sum(sizes) + 1


def _power_size(node: Any, sizes: list[float], indices: _Sizes) -> float:
    base, exponent = node.args
    size, exponent_size = sizes
    if exponent.free_symbols - indices.keys():
        return size + exponent_size + 1
    if isinstance(base, sympy.Add) and base.free_symbols and exponent.is_Integer:
        count, power = len(base.args), abs(int(exponent))
        if math.comb(min(power, MAX_TERMS) + count - 1, count - 1) > MAX_TERMS:
            raise UnboundedError(f"a power has more than {MAX_TERMS:,} terms")
    return _times(size, exponent_size)


def _times(size: float, count_size: float) -> float:
    """Return the size of a product of as many factors as a number of the other size."""
    size = _growth(size, count_size)
    if size > MAX_BITS:
        raise UnboundedError(f"a value has more than {MAX_BITS:,} bits")
    return size


def _growth(size: float, count_size: float) -> float:
    if size == 0.0:  # the base is 1 or -1
        return 0.0
    return math.inf if count_size > _MAX_LOG2 + 1 else size * 2.0**count_size


def _size_over_limits(node: Any, indices: _Sizes) -> float:
    """Return the size of a sum, a product or an integral."""
    inner = dict(indices)
    count_size = 0.0
    for index, *ends in node.limits:
        end_sizes = list(_end_sizes(ends, indices))
        inner[index] = max(end_sizes, default=1.0)
        count_size += sum(end_sizes)
    size = _size(node.function, inner)
    if isinstance(node, sympy.Product):
        return _times(size, count_size)
    return size + count_size


def _end_sizes(ends: list[Any], indices: _Sizes) -> Iterator[float]:
    for end in ends:
        yield _size(end, indices)


class _Converter(latex2sympy2._Latex2Sympy):
    """Converter of parsed LaTeX that computes no values beyond the bounds."""

    def convert_binom(self, binom: Any) -> Any:
        """Return a binomial coefficient."""
        top, bottom = self.convert_expr(binom.upper), self.convert_expr(binom.lower)
        coefficient = sympy.binomial(top, bottom, evaluate=False)
        require_bounded(coefficient)
        return sympy.binomial(top, bottom)

    def handle_gcd_lcm(self, f: str, args: Any) -> Any:
        """Return a greatest common divisor, or a least common multiple."""
        for value in args:
            require_bounded(value)
        return super().handle_gcd_lcm(f, args)


latex2sympy2._Latex2Sympy = _Converter
