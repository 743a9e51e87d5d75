"""Expansion of one shell command to words, as bash does it, without running anything.

Supported: quotes, `$NAME`, `${NAME:-word}` and its variants, arrays, integer arithmetic, and the
outputs of date, dirname, basename, pwd, realpath, readlink, echo and `cd FOLDER && pwd`. A word
that depends on anything else has a `problem`.
"""

from __future__ import annotations

import ast
import fnmatch
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from msrl.importers.placeholders import is_placeholder

_HOLDS_FLAGS = re.compile(r"(ARGS?|OPTS?|OPTIONS|FLAGS)\}?$", re.IGNORECASE)
_NAME = re.compile(r"\w+|[@*#?$!-]")
_BODY = re.compile(r"(#?)(\w+|[@*])(\[[^\]]*\])?(?:(:?[-=+?]|##?|%%?|//?)(.*))?", re.S)


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command and its line number; `problem` says why its text is not known."""

    text: str
    line: int | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Variable:
    """Value of a variable: its text, and the words of an unquoted expansion."""

    text: str
    words: tuple[Word, ...]
    problem: str = ""


@dataclass(slots=True)
class Scope:
    """Variables of a script, its path, and the empty variables that its commands use."""

    path: str
    variables: dict[str, Variable] = field(default_factory=dict[str, Variable])
    empty: dict[str, int] = field(default_factory=dict[str, int])

    def look_up(self, name: str) -> Variable | None:
        """Return the value that the script, else the environment, gives a variable."""
        if name in self.variables:
            return self.variables[name]
        if name in ("0", "BASH_SOURCE"):
            return _literal(self.path)
        if name in os.environ:
            return _literal(os.environ[name])
        return None


def _literal(text: str, problem: str = "") -> Variable:
    """Return a value whose words are separated by spaces; an unknown text is one word."""
    if problem:
        return Variable(text, (Word(text, None, problem),), problem)
    return Variable(text, tuple(Word(word, None, problem) for word in text.split()), problem)


_EMPTY = Variable("", ())


def expand(text: str, line: int, scope: Scope) -> list[Word]:
    """Return the words of a command whose first line has the number `line`."""
    return _Expander(text, line, scope).words()


def expand_text(text: str, line: int, scope: Scope) -> Variable:
    """Return the expansion of a text in double quotes as one value."""
    expander = _Expander(text, line, scope)
    expander.quoted_until("")
    return Variable(expander.text(), (), expander.problem)


class _Expander:
    """Scanner of one command."""

    def __init__(self, source: str, line: int, scope: Scope) -> None:
        self.source, self.line, self.scope = source, line, scope
        self.pos = 0
        self.pieces: list[str] | None = None
        self.start = line
        self.problem = ""
        self.result: list[Word] = []

    def text(self) -> str:
        return "".join(self.pieces or ())

    def words(self) -> list[Word]:
        source = self.source
        while self.pos < len(source):
            char = source[self.pos]
            if char.isspace():
                self._end_word()
                self._step()
            elif char == "#" and self.pieces is None:
                self._skip_comment()
            elif char in "'\"\\":
                self._quote(char)
            elif char in "$`":
                self._add_unquoted()
            else:
                self._add(char)
                self._step()
        self._end_word()
        return self.result

    def quoted_until(self, end: str) -> None:
        """Add the text up to a closing quote."""
        self._add("")
        while self.pos < len(self.source) and self.source[self.pos] != end:
            char = self.source[self.pos]
            following = self.source[self.pos + 1 : self.pos + 2]
            if char == "\\" and following and following in '$`"\\\n':
                self._add("" if following == "\n" else following)
                self._step(2)
            elif char in "$`":
                self._add_value(self._expansion())
            else:
                self._add(char)
                self._step()
        self._step()

    def _step(self, count: int = 1) -> None:
        self.line += self.source.count("\n", self.pos, self.pos + count)
        self.pos += count

    def _add(self, text: str) -> None:
        if self.pieces is None:
            self.pieces, self.start = [], self.line
        self.pieces.append(text)

    def _add_value(self, value: Variable) -> None:
        self._add(value.text)
        self.problem = self.problem or value.problem

    def _end_word(self) -> None:
        if self.pieces is not None:
            self.result.append(Word(self.text(), self.start, self.problem))
        self.pieces, self.problem = None, ""

    def _skip_comment(self) -> None:
        end = self.source.find("\n", self.pos)
        self._step((end if end >= 0 else len(self.source)) - self.pos)

    def _quote(self, char: str) -> None:
        if char == '"':
            self._step()
            return self.quoted_until('"')
        if char == "\\":
            following = self.source[self.pos + 1 : self.pos + 2]
            blanks = re.match(r"\\[ \t]*(\n|$)", self.source[self.pos :])
            if blanks is not None:  # continued line, with blanks that were not meant
                return self._step(blanks.end())
            self._add(following)
            return self._step(2)
        end = self.source.find("'", self.pos + 1)
        end = len(self.source) if end < 0 else end
        self._add(self.source[self.pos + 1 : end])
        return self._step(end + 1 - self.pos)

    def _add_unquoted(self) -> None:
        """Add an unquoted expansion. One that is a word by itself becomes its own words."""
        is_start = self.pieces is None
        begin, line = self.pos, self.line
        value = self._expansion()
        following = self.source[self.pos : self.pos + 1]
        if not is_start or (following and not following.isspace()):
            return self._add_value(value)
        if value.text or value.words or not value.problem:
            self.result += [replace(word, line=word.line or line) for word in value.words]
            return None
        return self._add_unset(self.source[begin : self.pos], value, line)

    def _add_unset(self, name: str, value: Variable, line: int) -> None:
        """Drop an unset variable, as bash does, unless a flag waits for its value.

        A variable that is named after flags holds no value: it may follow a switch.
        """
        holds_flags = _HOLDS_FLAGS.search(name) is not None
        if not holds_flags and self.result and self.result[-1].text.startswith("--"):
            self.result.append(Word(name, line, value.problem))
        else:
            self.scope.empty.setdefault(name, line)

    # --- expansions

    def _expansion(self) -> Variable:
        source = self.source
        if source[self.pos] == "`":
            return self._output(self._inside("`", "`", 1))
        if source.startswith("$((", self.pos):
            body = self._inside("(", ")", 2)
            return _arithmetic(expand_text(body.strip("()"), self.line, self.scope), self.scope)
        if source.startswith("$(", self.pos):
            return self._output(self._inside("(", ")", 2))
        if source.startswith("${", self.pos):
            return self._parameter(self._inside("{", "}", 2))
        match = _NAME.match(source, self.pos + 1)
        if match is None:
            self._step()
            return _literal("$")
        self._step(match.end() - self.pos)
        return self._value(match[0])

    def _inside(self, opening: str, closing: str, skip: int) -> str:
        """Return the text in brackets and move behind the closing one."""
        depth, pos, quote = 1, self.pos + skip, ""
        while pos < len(self.source) and depth:
            char = self.source[pos]
            if char == "\\":
                pos += 1
            elif quote == "'" or (char == "'" and not quote):
                quote = "" if quote and char == "'" else "'"
            elif char == closing:
                depth -= 1
            elif char == opening:
                depth += 1
            pos += 1
        body = self.source[self.pos + skip : pos - 1]
        self._step(pos - self.pos)
        return body

    def _value(self, name: str) -> Variable:
        value = self.scope.look_up(name)
        if value is not None:
            return value
        if name.isdigit() or not name.replace("_", "a").isalnum():
            return _EMPTY
        return Variable("", (), f"${name} is not set. Set it in the script or export it.")

    def _parameter(self, body: str) -> Variable:
        """Return the value of `${...}`."""
        match = _BODY.fullmatch(body)
        if match is None or match[1]:
            return _literal(f"${{{body}}}", f"${{{body}}} is not supported. Replace it.")
        name, index, action, argument = match[2], match[3], match[4] or "", match[5] or ""
        value = self._value(name)
        if index not in (None, "[@]", "[*]"):
            value = _item(value, index[1:-1])
        if action[-1:] in ("-", "=", "+"):
            return self._default(value, action, argument)
        if action in ("#", "##", "%", "%%", "/", "//"):
            return _trimmed(value, action, expand_text(argument, self.line, self.scope).text)
        return value

    def _default(self, value: Variable, action: str, argument: str) -> Variable:
        """Return the value of `${NAME:-word}`, `${NAME:=word}` or `${NAME:+word}`."""
        is_set = not value.problem and (value.text != "" or not action.startswith(":"))
        if is_set != action.endswith("+"):
            return value if is_set else _EMPTY
        words = tuple(expand(argument, self.line, self.scope))
        problem = next((word.problem for word in words if word.problem), "")
        return Variable(" ".join(word.text for word in words), words, problem)

    def _output(self, body: str) -> Variable:
        commands = [expand(text, self.line, self.scope) for text in re.split(r"&&|;", body)]
        problem = next((w.problem for command in commands for w in command if w.problem), "")
        text = (
            None if problem or "|" in body else _output([_texts(command) for command in commands])
        )
        if text is not None:
            return _literal(text)
        message = f"$({body.strip()}) is the output of a command, which msrl does not run."
        return _literal(f"$({body.strip()})", f"{message} Replace it with its value.")


def _item(value: Variable, index: str) -> Variable:
    if not index.isdigit() or int(index) >= len(value.words):
        return _EMPTY
    word = value.words[int(index)]
    return Variable(word.text, (word,), word.problem)


def _trimmed(value: Variable, action: str, pattern: str) -> Variable:
    """Return a value without the prefix (#) or suffix (%) that matches, or with a replacement."""
    text = value.text
    if action[0] == "/":
        old, _, new = pattern.partition("/")
        return _literal(text.replace(old, new, -1 if action == "//" else 1), value.problem)
    positions = range(len(text) + 1)
    if (action == "##") == (action[0] == "#"):
        positions = reversed(positions)
    if action == "%":
        positions = reversed(range(len(text) + 1))
    for position in positions:
        head, tail = text[:position], text[position:]
        removed, remaining = (head, tail) if action[0] == "#" else (tail, head)
        if fnmatch.fnmatchcase(removed, pattern):
            return _literal(remaining, value.problem)
    return value


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left // right,
    ast.Mod: lambda left, right: left % right,
}


def _arithmetic(expression: Variable, scope: Scope) -> Variable:
    """Return the value of integer arithmetic; names are variables."""
    if expression.problem:
        return _literal(f"$(({expression.text}))", expression.problem)
    try:
        number = _number(ast.parse(expression.text.strip(), mode="eval").body, scope, 0)
        return _literal(str(number))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        text = f"$(({expression.text}))"
        return _literal(text, f"{text} is not a calculation with integers. Replace it.")


def _number(node: ast.expr, scope: Scope, depth: int) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name) and depth < 8:
        value = scope.look_up(node.id)
        text = value.text if value is not None and not value.problem else ""
        return _number(ast.parse(text.strip(), mode="eval").body, scope, depth + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, scope, depth)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _number(node.left, scope, depth), _number(node.right, scope, depth)
        return _OPERATORS[type(node.op)](left, right)
    raise ValueError


def _texts(command: Sequence[Word]) -> list[str]:
    return [word.text for word in command]


def _output(commands: Sequence[Sequence[str]]) -> str | None:
    """Return the output of commands that only name a folder, a file or the time; else None."""
    if len(commands) == 2 and commands[0][:1] == ["["]:
        holds = condition(commands[0])
        return "" if holds is False else _output(commands[1:] if holds else [])
    folder = "."
    for command in commands[:-1]:
        if len(command) < 2 or command[0] != "cd":
            return None
        folder = _joined(folder, command[1])
    last = commands[-1] if commands else ()
    program, arguments = (last[0], last[1:]) if last else ("", ())
    texts = {"pwd": folder, "echo": " ".join(arguments)}
    if program == "date" and len(arguments) <= 1:
        texts["date"] = time.strftime(arguments[0].removeprefix("+") if arguments else "%c")
    names = [word for word in arguments if not word.startswith("-")]
    return texts.get(program) or _path_output(program, names)


def condition(words: Sequence[str]) -> bool | None:
    """Return the value of `[ -z A ]` or `[ A = B ]`; None if it is not known."""
    texts = [word for word in words if word not in ("[", "]", "[[", "]]", "test")]
    if any(is_placeholder(text) for text in texts):
        return None
    if texts[:1] in (["-z"], ["-n"]) and len(texts) < 3:
        return (len(texts) == 1 or not texts[1]) == (texts[0] == "-z")
    if len(texts) == 3 and texts[1] in ("=", "==", "!=", "-eq", "-ne"):
        return (texts[0] == texts[2]) == (texts[1] in ("=", "==", "-eq"))
    return None


def _path_output(program: str, names: Sequence[str]) -> str | None:
    if not names:
        return None
    path = PurePosixPath(names[0])
    if program == "dirname":
        return str(path.parent)
    if program == "basename":
        return path.name.removesuffix(names[1]) if len(names) > 1 else path.name
    return str(path) if program in ("realpath", "readlink") else None


def _joined(folder: str, name: str) -> str:
    """Return a folder and a name below it, without `..` where that is possible."""
    return os.path.normpath(os.path.join(folder, name))  # noqa: PTH118  (paths of another machine)
