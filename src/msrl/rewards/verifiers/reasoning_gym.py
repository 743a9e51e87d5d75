"""Scores of tasks of reasoning-gym, as the package computes them: usually from 0.0 to 1.0.

The ground truth is the record of the row (`reasoning_tasks.py`), so another machine needs neither
the seed nor the generator to score it. The answer is the content of the last answer tags.

The package evaluates answers of some tasks, and texts of their rows, as Python. Here, these answers
must be literals, or formulas without other names than variables and functions; any other answer
scores 0.0.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Callable

from msrl import reasoning_tasks
from msrl.errors import MsrlError
from msrl.reasoning_tasks import Record, read_record
from msrl.rewards.math.extract import Part, extract_part, shorten

WRONG = 0.0
NEEDS_ANSWER = True
# Tasks whose answers the package passes to `eval` and to sympy's `parse_expr`.
LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
FORMULAS = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    }
)
_FUNCTIONS = (
    "Abs acos acosh acot asin asinh atan atanh cos cosh cot csc exp log sec sin sinh sqrt tan tanh"
)
_NAMES = frozenset((*_FUNCTIONS.split(), "pi"))
_NAME = re.compile(r"[A-Za-z](?:_?\d+)?")
_FORMULA_TOKENS = (
    tokenize.NUMBER,
    tokenize.OP,
    tokenize.NEWLINE,
    tokenize.NL,
    tokenize.ENDMARKER,
)
_LITERAL_NODES = (
    ast.Expression,
    ast.Constant,
    ast.List,
    ast.Tuple,
    ast.UnaryOp,
    ast.USub,
    ast.UAdd,
    ast.Load,
)


def score(response: str, answer: str, *, part: Part = "answer") -> float:
    """Return the score of the package.

    `part` selects the last answer tags, the complete response, its last line or its last box.
    """
    record = _read(answer)
    claimed = extract_part(response, part)
    if claimed is not None and not is_harmless(record.task, claimed):
        return WRONG
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _score(record, claimed)


def answer_refusal(answer: str, **_: object) -> str | None:
    """Return the reason why a ground truth is no record that the installed package scores."""
    try:
        _read(answer)
    except MsrlError as error:
        return str(error)
    return None


def refusal(**_: object) -> str | None:
    """Return the reason why the verifier cannot run on this machine, or None."""
    return None if reasoning_tasks.is_installed() else reasoning_tasks.MISSING


def prepare() -> None:
    """Import the package, which takes seconds."""
    reasoning_tasks.is_installed()


def explain(response: str, answer: str, *, part: Part = "answer") -> str:
    """Return what the package scores."""
    claimed, record = extract_part(response, part), _read(answer)
    if claimed is None:
        return f"The response has no part `{part}`."
    if not is_harmless(record.task, claimed):
        return f"The part `{part}` is neither a literal nor a formula: {shorten(claimed)}."
    truth = record.entry["answer"]
    known = "Several answers are right." if truth is None else f"A right answer: {shorten(truth)}."
    return f"The part `{part}` is {shorten(claimed)}. {known}"


def is_harmless(task: str, claimed: str) -> bool:
    """Return False if the package would execute more of an answer than a literal or a formula."""
    if task in LITERALS:
        return is_literal(claimed)
    return task not in FORMULAS or is_formula(claimed)


def is_literal(text: str) -> bool:
    """Return True for texts that are no Python, one name, or lists of numbers and texts."""
    try:
        tree = ast.parse(text.lstrip(" \t"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    if isinstance(tree.body, ast.Name):
        return True
    return all(isinstance(node, _LITERAL_NODES) for node in ast.walk(tree))


def is_formula(text: str) -> bool:
    """Return True for texts of numbers, variables and functions, and those that are no tokens."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text.strip()).readline))
    except (tokenize.TokenError, SyntaxError):
        return True
    return text.isascii() and all(
        token.type in _FORMULA_TOKENS
        or (
            token.type == tokenize.NAME
            and (token.string in _NAMES or _NAME.fullmatch(token.string))
        )
        for token in tokens
    )


# Texts of rows that the package evaluates: the member of the entry or its metadata, and what it is.
EVALUATED: dict[str, tuple[str, Callable[[str], bool]]] = {
    "bitwise_arithmetic": ("problem", is_formula),
    "intermediate_integration": ("integrand", is_formula),
    "number_sorting": ("answer", is_literal),
    "polynomial_multiplication": ("answer", is_formula),
    "simple_integration": ("integrand", is_formula),
}


def _read(answer: str) -> Record:
    """Return the record of a ground truth.

    Raises:
        MsrlError: It is none, or the package would execute a text of it.
    """
    record = read_record(answer)
    if record.task in EVALUATED:
        name, is_allowed = EVALUATED[record.task]
        text = {**record.entry["metadata"], "answer": record.entry["answer"]}.get(name)
        if not isinstance(text, str) or not is_allowed(text):
            raise MsrlError(f"of task {record.task} has no formula as {name}: {str(text)[:60]!r}")
    return record


def _score(record: Record, claimed: str | None) -> float:
    """Return the score of an answer. An answer that the package cannot read is wrong.

    Raises:
        Exception: The package cannot score the right answer of the row either.
    """
    try:
        return float(record.dataset.score_answer(claimed, record.entry))
    except MemoryError:
        raise
    except Exception:
        record.dataset.score_answer(record.entry["answer"], record.entry)
        return WRONG
