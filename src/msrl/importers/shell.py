"""Parser for the commands and flags of a shell script.

It supports continuation lines, comments between them, quotes, pipes and variables. It runs nothing:
`$NAME` is the value that the script assigns, else that of the environment. Redirections are
ignored.
"""

from __future__ import annotations

import io
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msrl.config.sources import Node, Origin, scalar
from msrl.errors import MsrlError
from msrl.importers.table import canonical

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.S)
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")
_PIECE = re.compile(
    r"""(?P<quoted>'[^']*'|"(?:\\.|[^"\\])*"|\\.)"""
    r"""|(?P<comment>(?<!\S)\#[^\n]*)"""
    r"""|(?P<redirect>(?:(?<!\S)\d)?&?(?:>>?|<)(?:&\d|[^\S\n]*[^\s|&;]+))"""
    r"""|(?P<end>\|\|?|&&?|;+)"""
    r"""|(?P<plain>.)""",
    re.S | re.X,
)


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command and its line number."""

    text: str
    line: int | None


@dataclass(slots=True)
class Script:
    """Commands of a script in order, and the variables that it sets."""

    name: str
    commands: list[list[Word]] = field(default_factory=list[list[Word]])
    variables: dict[str, list[Word]] = field(default_factory=dict[str, list[Word]])
    exported: dict[str, Word] = field(default_factory=dict[str, Word])


def parse_script(text: str, name: str) -> Script:
    """Return the parsed script.

    Raises:
        MsrlError: for an unclosed quote or an undefined variable.
    """
    script = Script(name)
    for first, statement in _statements(text):
        for line, command in _commands(statement, first):
            _add_command(script, command, line)
    return script


def _add_command(script: Script, command: str, line: int) -> None:
    """Add an assignment to the variables, or other words to the commands."""
    assignment = _ASSIGNMENT.fullmatch(command.strip())
    words = _words(command, line, script.name)
    is_export = command.strip().startswith("export")
    if assignment and len(words) == (2 if is_export else 1):
        value = _expanded(_words(_unquoted(assignment[2]), line, script.name), script)
        script.variables[assignment[1]] = value
        if is_export:
            script.exported[assignment[1]] = Word(" ".join(word.text for word in value), line)
    elif words:
        script.commands.append(_expanded(words, script))


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield complete statements with the number of their first line.

    A comment between continued lines does not end a statement.
    """
    pending, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith("#") and (not pending or not _is_open(pending)):
            pending += "\n" if pending else ""
            continue
        first = first or number
        pending += line + "\n"
        if _is_open(pending) or line.rstrip().endswith("\\"):
            continue
        yield first, pending
        pending, first = "", 0
    if pending:
        yield first, pending


def _commands(statement: str, first: int) -> Iterator[tuple[int, str]]:
    """Yield the commands of a statement with their first lines.

    Pipes, `&&`, `;` and `&` separate commands. Comments and redirections are removed.
    """
    text, line = "", first
    for match in _PIECE.finditer(statement):
        if match.lastgroup == "end":
            yield line, text
            text, line = "", first + statement.count("\n", 0, match.end())
        elif match.lastgroup not in ("comment", "redirect"):
            text += match[0]
    yield line, text


def _is_open(text: str) -> bool:
    """Return True if a quote is not closed."""
    try:
        shlex.split(text, comments=True)
    except ValueError as error:
        return "quotation" in str(error)
    return False


def _words(text: str, first: int, name: str) -> list[Word]:
    """Return the words of a statement with the lines in which they begin."""
    stream = io.StringIO(text)
    lexer = shlex.shlex(stream, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[Word] = []
    while True:
        try:
            word = lexer.get_token()
        except ValueError as error:
            raise MsrlError(f"{name}:{first}: cannot parse the command: {error}") from None
        if word is None:
            return words
        if word.strip("\n"):
            end = stream.tell()
            before = (
                text.count("\n", 0, end)
                - (text[end - 1 : end] == "\n")
                - word.strip("\n").count("\n")
            )
            words.append(Word(word.strip("\n"), first + before))


def _unquoted(value: str) -> str:
    value = value.strip()
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _expanded(words: Sequence[Word], script: Script) -> list[Word]:
    """Return the words with variables replaced; a word that is one variable becomes its words."""
    expanded: list[Word] = []
    for word in words:
        variable = _VARIABLE.fullmatch(word.text)
        name = (variable[1] or variable[2]) if variable else None
        if name in script.variables:
            expanded += script.variables[name]
        else:
            expanded.append(Word(_substituted(word, script), word.line))
    return expanded


def _substituted(word: Word, script: Script) -> str:
    return _VARIABLE.sub(lambda match: _value(match[1] or match[2], word, script), word.text)


def _value(name: str, word: Word, script: Script) -> str:
    if name in script.variables:
        return " ".join(word.text for word in script.variables[name])
    if name in os.environ:
        return os.environ[name]
    raise MsrlError(
        f"{script.name}:{word.line}: {word.text}: ${name} is not set. "
        "Set it in the script or export it."
    )


def flags(words: Sequence[Word], name: str) -> Node:
    """Return `--flag value ...` as a tree.

    A flag without a value is true, one with several values is a list. Words before the first flag
    are ignored.
    """
    entries: dict[str, Node] = {}
    key, values = "", list[Word]()
    line: int | None = None

    def close() -> None:
        if key:
            if canonical(key) in entries:
                raise MsrlError(f"{Origin(name, line)}: {key}: duplicate flag")
            entries[canonical(key)] = _node(values, Origin(name, line))

    for word in words:
        if word.text.startswith("--"):
            close()
            key, equals, value = word.text.partition("=")
            values, line = [Word(value, word.line)] if equals else [], word.line
        else:
            values.append(word)
    close()
    return Node(entries, Origin(name, None))


def _node(values: Sequence[Word], origin: Origin) -> Node:
    if not values:
        return Node(True, origin, "true")
    nodes = tuple(Node(scalar(word.text), origin, word.text) for word in values)
    return nodes[0] if len(nodes) == 1 else Node(nodes, origin)
