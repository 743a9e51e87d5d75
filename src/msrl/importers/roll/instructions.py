"""Instructions of ROLL's games, from the checkout that contains a file.

The files set no instructions: the texts are in the classes of the environments. Their literals are
parsed, nothing is run. Source: ROLL 8eb27cc2, roll/pipeline/agentic/env.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path("roll", "pipeline", "agentic", "env")
_MAX_BYTES = 1 << 20
_TEXT, _VOCABULARY, _SYMBOLS, _ACTIONS = (
    "env_instruction",
    "GRID_VOCAB",
    "GRID_LOOKUP",
    "ACTION_LOOKUP",
)


@dataclass(frozen=True, slots=True)
class GameTexts:
    """Texts of a game: the two sentences introduce the symbols and the actions."""

    instruction: str
    sentences: tuple[str, str]
    vocabulary: Mapping[str, str]
    symbols: Mapping[int, str]
    actions: tuple[str, ...]

    def instructions(self, instruction: str | None, vocabulary: Mapping[str, str] | None) -> str:
        """Return the instructions, with the texts of a file in place of the texts of the class."""
        meanings = (self.vocabulary if vocabulary is None else vocabulary).items()
        first, second = self.sentences
        symbols = ", ".join(f"{symbol}: {meaning}" for symbol, meaning in meanings)
        text = self.instruction if instruction is None else instruction
        return f"{text}{first}{symbols}{second}{', '.join(self.actions)}"


def game_texts(file: str, folder: str) -> GameTexts | None:
    """Return the texts of the environment in a folder; None without a checkout above the file."""
    for parent in Path(file).resolve().parents:
        module = parent / _FOLDER / folder / "env.py"
        if module.is_file() and module.stat().st_size <= _MAX_BYTES:
            return _read(module)
    return None


@cache
def _read(module: Path) -> GameTexts | None:
    try:
        tree = ast.parse(module.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    values: dict[str, Any] = {}
    for name, value in _attributes(tree):
        values.setdefault(name, value)
    sentences = tuple(_sentences(tree))
    if values.keys() != {_TEXT, _VOCABULARY, _SYMBOLS, _ACTIONS} or len(sentences) != 2:
        return None
    actions = tuple(map(str, values[_ACTIONS].values()))
    return GameTexts(values[_TEXT], sentences, values[_VOCABULARY], values[_SYMBOLS], actions)


def _attributes(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of attributes that a class sets to literals."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        name = node.targets[0].attr
        value = _literal(node.value)
        is_text = name == _TEXT and isinstance(value, str)
        if is_text or (
            name in (_VOCABULARY, _SYMBOLS, _ACTIONS) and isinstance(value, dict) and value
        ):
            yield name, value


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, or of an f-string without fields; None for others."""
    if isinstance(node, ast.JoinedStr):
        pieces = [piece.value for piece in node.values if isinstance(piece, ast.Constant)]
        return "".join(map(str, pieces)) if len(pieces) == len(node.values) else None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return None


def _sentences(tree: ast.Module) -> Iterator[str]:
    """Yield the texts that begin a line of the instructions, in their order."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "get_instructions":
            for statement in node.body:
                value = statement.value if isinstance(statement, ast.Assign) else None
                first = value.left if isinstance(value, ast.BinOp) else None
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value
