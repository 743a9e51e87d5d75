"""Parser for the commands and flags of a shell script.

It supports continuation lines, comments between them, quotes, pipes, variables, arrays and
branches whose condition compares known texts. It runs nothing: `$NAME` is the value that the script
assigns, else that of the environment. Redirections are ignored.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msrl.config.sources import Node, Origin, scalar
from msrl.errors import ManyErrors
from msrl.importers.expansion import Scope, Variable, Word, condition, expand, expand_text
from msrl.importers.placeholders import is_placeholder
from msrl.importers.table import canonical

__all__ = ["Script", "Word", "flags", "parse_script", "repeated_flags"]

_ASSIGNMENT = re.compile(r"(?:(export|local|readonly|declare)\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.S)
_ARRAY = re.compile(r"\s*(?:\w+\s+)?\w+\+?=\((?!\()")
_KEYWORDS = ("then", "do", "else", "elif", "fi", "done", "esac", "time", "nohup", "exec", "{", "}")
_NESTED = r"\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\)"
_PIECE = re.compile(
    rf"""(?P<output>\${_NESTED}|\$\{{[^{{}}]*\}}|`[^`]*`)"""
    r"""|(?P<quoted>'[^']*'|"(?:\\.|[^"\\])*"|\\.)"""
    r"""|(?P<comment>(?<!\S)\#[^\n]*)"""
    r"""|(?P<redirect>(?:(?<!\S)\d)?&?(?:>>?|<)(?:&\d|[^\S\n]*[^\s|&;]+))"""
    r"""|(?P<end>\|\|?|&&?|;+)"""
    r"""|(?P<plain>.)""",
    re.S | re.X,
)


@dataclass(slots=True)
class Script:
    """Commands of a script in order, and the variables that it sets."""

    name: str
    commands: list[list[Word]] = field(default_factory=list[list[Word]])
    exported: dict[str, Word] = field(default_factory=dict[str, Word])
    scope: Scope = field(init=False)
    branches: list[_Branch] = field(default_factory=list["_Branch"])

    def __post_init__(self) -> None:
        self.scope = Scope(self.name)


@dataclass(slots=True)
class _Branch:
    """Open `if`. A branch runs unless its condition is known to be false."""

    runs: bool
    is_done: bool  # a condition that is known to be true has been met


def parse_script(text: str, name: str) -> Script:
    """Return the parsed script. Words of unknown text have a problem, which `flags` reports."""
    script = Script(name)
    for first, statement in _statements(text):
        for line, command in _commands(statement, first):
            text = command.lstrip()
            _add_command(script, text.rstrip(), line + command[: -len(text) or None].count("\n"))
    return script


def _add_command(script: Script, command: str, line: int) -> None:
    """Add an assignment to the variables, or other words to the commands."""
    command = _enter_branch(script, command, line)
    if not command or not all(branch.runs for branch in script.branches):
        return
    assignment = _ASSIGNMENT.fullmatch(command)
    if assignment and _is_one_word(assignment[4]):
        _assign(script, assignment, line)
        return
    words = expand(command, line, script.scope)
    if words and words[0].text == "export":
        _export(script, words[1:])
    elif words:
        script.commands.append(words)


def _enter_branch(script: Script, command: str, line: int) -> str:
    """Follow if, elif, else and fi, and return the command after the keyword."""
    keyword, _, following = command.partition(" ")
    if keyword in ("if", "elif"):
        holds = _condition(expand(following, line, script.scope))
        if keyword == "if":
            script.branches.append(_Branch(runs=True, is_done=False))
        _choose(script.branches, holds)
        return ""
    if keyword == "else":
        _choose(script.branches, True)
    elif keyword == "fi" and script.branches:
        script.branches.pop()
    if keyword in ("for", "while", "until", "case", "fi"):
        return ""
    if keyword not in _KEYWORDS:
        return command
    return _enter_branch(script, following.strip(), line) if following else ""


def _choose(branches: list[_Branch], condition: bool | None) -> None:
    if branches:
        branch = branches[-1]
        branch.runs = not branch.is_done and condition is not False
        branch.is_done = branch.is_done or condition is True


def _condition(words: Sequence[Word]) -> bool | None:
    """Return the value of a condition; None if it is not known."""
    is_known = not any(word.problem for word in words)
    return condition([word.text for word in words]) if is_known else None


def _is_one_word(value: str) -> bool:
    """Return True if the value of an assignment ends with the command."""
    if value.startswith("("):
        return value.rstrip().endswith(")")
    depth = 0
    for match in _PIECE.finditer(value):
        if match.lastgroup == "plain" and match[0].isspace() and not depth:
            return not value[match.start() :].strip()
    return True


def _assign(script: Script, assignment: re.Match[str], line: int) -> None:
    keyword, name, appends, value = assignment.groups()
    variable = _variable(value.strip(), line, script.scope)
    if appends and name in script.scope.variables:
        before = script.scope.variables[name]
        words = (*before.words, *variable.words)
        variable = Variable(before.text + variable.text, words, before.problem or variable.problem)
    script.scope.variables[name] = variable
    if keyword == "export":
        script.exported[name] = _exported_word(variable, line)


def _variable(value: str, line: int, scope: Scope) -> Variable:
    """Return the value of an assignment. A placeholder with spaces stays one word."""
    if value.startswith("("):
        words = tuple(expand(value.strip()[1:-1], line, scope))
        return Variable(" ".join(word.text for word in words), words)
    if value.startswith("'") and value.endswith("'") and value.count("'") == 2:
        return Variable(value[1:-1], tuple(Word(word, line) for word in value[1:-1].split()))
    inner = _unquoted(value)
    whole = (
        expand_text(inner, line, scope) if inner != value else _joined(expand(value, line, scope))
    )
    if is_placeholder(whole.text) and "--" not in whole.text:
        return Variable(whole.text, (Word(whole.text, line, whole.problem),), whole.problem)
    return Variable(whole.text, tuple(expand(inner, line, scope)), whole.problem)


def _joined(words: Sequence[Word]) -> Variable:
    problem = next((word.problem for word in words if word.problem), "")
    return Variable(" ".join(word.text for word in words), tuple(words), problem)


def _export(script: Script, words: Sequence[Word]) -> None:
    """Export the variables of `export A B=1`."""
    for word in words:
        name, equals, value = word.text.partition("=")
        if equals:
            text = (Word(value, word.line, word.problem),) if value else ()
            script.scope.variables[name] = Variable(value, text, word.problem)
        if name in script.scope.variables:
            script.exported[name] = _exported_word(script.scope.variables[name], word.line)


def _exported_word(variable: Variable, line: int | None) -> Word:
    return Word(variable.text, line, variable.problem)


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
    """Return True if a quote or the bracket of an array is not closed."""
    if _ARRAY.match(text) and not re.search(r"\)\s*(#.*)?$", text):
        return True
    try:
        shlex.split(text, comments=True)
    except ValueError as error:
        return "quotation" in str(error)
    return False


def _unquoted(value: str) -> str:
    is_quoted = len(value) > 1 and value[0] == value[-1] == '"' and '"' not in value[1:-1]
    return value[1:-1] if is_quoted else value


def flags(words: Sequence[Word], name: str, *, is_complete: bool = True) -> Node:
    """Return `--flag value ...` as a tree; of a repeated flag the last value, as argparse does.

    A flag without a value is true, one with several values is a list. Words before the first flag
    are ignored.

    Raises:
        ManyErrors: if `is_complete` and the text of a word is not known.
    """
    problems = [
        f"{Origin(name, word.line)}: {word.text}: {word.problem}" for word in words if word.problem
    ]
    if problems and is_complete:
        raise ManyErrors(list(dict.fromkeys(problems)))
    return Node(dict(_flag_nodes(words, name)), Origin(name, None))


def repeated_flags(words: Sequence[Word], name: str) -> list[tuple[str, Node]]:
    """Return the flags with values that a later flag of the same name overrides."""
    nodes = _flag_nodes(words, name)
    last = {key: number for number, (key, _) in enumerate(nodes)}
    return [(key, node) for number, (key, node) in enumerate(nodes) if last[key] != number]


def _flag_nodes(words: Sequence[Word], name: str) -> list[tuple[str, Node]]:
    nodes: list[tuple[str, Node]] = []
    key, values = "", list[Word]()
    line: int | None = None
    for word in [*words, Word("--", None)]:
        if not word.text.startswith("--"):
            values.append(word)
            continue
        if key:
            nodes.append((canonical(key), _node(values, Origin(name, line))))
        key, equals, value = word.text.partition("=")
        values, line = [Word(value, word.line)] if equals else [], word.line
    return nodes


def _node(values: Sequence[Word], origin: Origin) -> Node:
    if not values:
        return Node(True, origin, "true")
    nodes = tuple(Node(scalar(word.text), origin, word.text) for word in values)
    return nodes[0] if len(nodes) == 1 else Node(nodes, origin)
