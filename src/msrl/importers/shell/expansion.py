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
from dataclasses import replace
from pathlib import PurePosixPath

from msrl.importers.shell.conditions import evaluated
from msrl.importers.shell.values import EMPTY, Scope, Variable, Word, literal, unquoted

_HOLDS_FLAGS = re.compile(r"(ARGS?|OPTS?|OPTIONS|FLAGS)\}?$", re.IGNORECASE)
_NAME = re.compile(r"\w+|[@*#?$!-]")
_BODY = re.compile(
    r"([#!]?)(\w+|[@*#?])(\[[^\]]*\])?(?:(:?[-=+?]|##?|%%?|//?|:|\^\^?|,,?)(.*))?", re.S
)
_BRACES = re.compile(r"(?<!\S)([^\s{}'\"$`\\]*)\{([^\s{}'\"$`\\]*)\}([^\s{}'\"$`\\]*)(?!\S)")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
# A quoted list that is a word by itself: its items stay words.
_LIST = re.compile(r'"(?:\$@|\$\{@(?::[^{}"]*)?\}|\$\{\w+\[@\](?::[^{}"]*)?\})"(?=\s|$)')
MAX_RANGE = 1000
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "e": "\x1b", "a": "\a", "b": "\b", "0": "\0"}


def expand(text: str, line: int, scope: Scope) -> list[Word]:
    """Return the words of a command whose first line has the number `line`."""
    return _Expander(_expand_braces(text), line, scope).words()


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
            elif (
                char == "~"
                and self.pieces is None
                and re.match(r"~(?=[/\s]|$)", source[self.pos :])
            ):
                self._add(os.environ.get("HOME", "~"))
                self._step()
            elif source.startswith("$'", self.pos):
                self._ansi_quote()
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
            listed = _LIST.match(self.source, self.pos)
            if listed is not None and self.pieces is None:
                self._step()
                self.result += [
                    replace(w, line=w.line or self.line) for w in self._expansion().words
                ]
                return self._step()
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

    def _ansi_quote(self) -> None:
        """Add a text in `$'...'`, in which backslashes have the meaning that C gives them."""
        match = re.match(r"\$'((?:\\.|[^'\\])*)'?", self.source[self.pos :], re.S)
        assert match is not None
        escape = re.compile(r"\\(.)", re.S)
        self._add(escape.sub(lambda found: _ESCAPES.get(found[1], found[1]), match[1]))
        self._step(match.end())

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
            return literal("$")
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
            return EMPTY
        if self.scope.unset_is_empty:
            self.scope.empty.setdefault(name, self.line)
            return EMPTY
        return Variable("", (), f"${name} is not set. Set it in the script or export it.")

    def _parameter(self, body: str) -> Variable:
        """Return the value of `${...}`."""
        match = _BODY.fullmatch(body)
        if match is None:
            return literal(f"${{{body}}}", f"${{{body}}} is not supported. Replace it.")
        name, index, action, argument = match[2], match[3], match[4] or "", match[5] or ""
        value = self._value(name)
        if match[1] == "!" and not value.problem:
            value = self._value(value.text)
        if index not in (None, "[@]", "[*]"):
            value = self._item(value, index[1:-1])
        if match[1] == "#":
            return literal(str(len(value.words if index else value.text)), value.problem)
        return self._changed(name, value, action, argument, is_list=bool(index) or name in "@*")

    def _item(self, value: Variable, index: str) -> Variable:
        """Return `${NAME[index]}`, which is empty for an index that does not exist."""
        if value.problem:
            return value
        number = calculate(expand_text(index, self.line, self.scope), self.scope)
        if number is None or not -len(value.words) <= number < len(value.words):
            return EMPTY
        word = value.words[number]
        return Variable(word.text, (word,), word.problem)

    def _changed(
        self, name: str, value: Variable, action: str, argument: str, *, is_list: bool
    ) -> Variable:
        """Return a value after the action of `${NAME<action>argument}`."""
        if action[-1:] in ("-", "=", "+"):
            changed = self._default(value, action, argument)
            if action[-1] == "=":
                self.scope.variables[name] = changed
            return changed
        if value.problem or action[-1:] in ("", "?"):
            return value
        if action == ":":
            return self._slice(value, argument, is_list=is_list)
        if action[0] in "^,":
            return literal(_with_case(value.text, action))
        if action[0] == "/":
            return self._replaced(value, action, argument)
        return _trimmed(value, action, expand_text(argument, self.line, self.scope).text)

    def _slice(self, value: Variable, argument: str, *, is_list: bool) -> Variable:
        """Return `${NAME:offset:length}` of a text or of the words of a list."""
        texts = expand_text(argument, self.line, self.scope).text.split(":")
        bounds = [calculate(Variable(text, ()), self.scope) for text in texts]
        if None in bounds or len(bounds) > 2:
            problem = f"${{...:{argument}}} is not supported. Replace it."
            return literal(f"${{...:{argument}}}", problem)
        start = (bounds[0] or 0) - (1 if is_list and value.words == self.scope.arguments else 0)
        end = None if len(bounds) < 2 else start + (bounds[1] or 0)
        if is_list:
            words = value.words[max(start, 0) : end]
            return Variable(" ".join(word.text for word in words), words)
        return literal(value.text[start:end])

    def _replaced(self, value: Variable, action: str, argument: str) -> Variable:
        """Return `${NAME/pattern/text}`. The pattern is a glob; `#` and `%` anchor it."""
        match = re.match(r"((?:\\.|[^/\\])*)(?:/(.*))?$", argument, re.S)
        assert match is not None
        pattern = expand_text(match[1].replace("\\/", "/"), self.line, self.scope).text
        new = expand_text(unquoted(match[2] or ""), self.line, self.scope).text
        anchors = {"#": (r"\A", "", pattern[1:]), "%": ("", r"\Z", pattern[1:])}
        before, after, glob = anchors.get(pattern[:1], ("", "", pattern))
        expression = fnmatch.translate(unquoted(glob)).removeprefix("(?s:").removesuffix(r")\Z")
        count = 0 if action == "//" else 1
        changed = re.sub(f"(?s){before}{expression}{after}", lambda _: new, value.text, count=count)
        return literal(changed) if glob else value

    def _default(self, value: Variable, action: str, argument: str) -> Variable:
        """Return the value of `${NAME:-word}`, `${NAME:=word}` or `${NAME:+word}`."""
        is_set = not value.problem and (value.text != "" or not action.startswith(":"))
        if is_set != action.endswith("+"):
            return value if is_set else EMPTY
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
            return literal(text)
        message = f"$({body.strip()}) is the output of a command, which msrl does not run."
        return literal(f"$({body.strip()})", f"{message} Replace it with its value.")


def _trimmed(value: Variable, action: str, pattern: str) -> Variable:
    """Return a value without the prefix (#) or suffix (%) that matches."""
    text = value.text
    positions = range(len(text) + 1)
    if (action == "##") == (action[0] == "#"):
        positions = reversed(positions)
    if action == "%":
        positions = reversed(range(len(text) + 1))
    for position in positions:
        head, tail = text[:position], text[position:]
        removed, remaining = (head, tail) if action[0] == "#" else (tail, head)
        if fnmatch.fnmatchcase(removed, pattern):
            return literal(remaining, value.problem)
    return value


def _with_case(text: str, action: str) -> str:
    change = str.upper if action[0] == "^" else str.lower
    return change(text) if len(action) > 1 else change(text[:1]) + text[1:]


def _expand_braces(text: str) -> str:
    """Return a text with `{a,b}` and `{1..3}` written out, outside of quotes."""

    def write_out(match: re.Match[str]) -> str:
        before = text[: match.start()]
        is_quoted = any(before.count(quote) % 2 for quote in "'\"")
        numbers = _RANGE.fullmatch(match[2])
        items = match[2].split(",")
        if numbers is not None:
            first, last = int(numbers[1]), int(numbers[2])
            step = 1 if last >= first else -1
            items = [str(n) for n in range(first, last + step, step)[:MAX_RANGE]]
        if is_quoted or (len(items) < 2 and numbers is None):
            return match[0]
        return " ".join(f"{match[1]}{item}{match[3]}" for item in items)

    return _BRACES.sub(write_out, text)


def _quotient(left: int, right: int) -> int:
    """Return the quotient, rounded toward zero as in C."""
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _power(left: int, right: int) -> int:
    if not 0 <= right <= MAX_POWER:
        raise ValueError
    return left**right


MAX_POWER = 64
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: _quotient,
    ast.Mod: lambda left, right: left - right * _quotient(left, right),
    ast.Pow: _power,
}
_RELATIONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: lambda left, right: left == right,
    ast.NotEq: lambda left, right: left != right,
    ast.Lt: lambda left, right: left < right,
    ast.LtE: lambda left, right: left <= right,
    ast.Gt: lambda left, right: left > right,
    ast.GtE: lambda left, right: left >= right,
}
_ASSIGNED = re.compile(
    r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)|\s*([A-Za-z_]\w*)(\+\+|--)\s*", re.S
)
_TERNARY = re.compile(r"(.+?)\?(.+?):(.+)", re.S)


def _arithmetic(expression: Variable, scope: Scope) -> Variable:
    """Return the value of integer arithmetic; names are variables."""
    if expression.problem:
        return literal(f"$(({expression.text}))", expression.problem)
    number = calculate(expression, scope)
    if number is not None:
        return literal(str(number))
    text = f"$(({expression.text}))"
    return literal(text, f"{text} is not a calculation with integers. Replace it.")


def calculate(expression: Variable, scope: Scope) -> int | None:
    """Return the value of an arithmetic expression, or None. Assignments change the scope."""
    if expression.problem or len(expression.text) > MAX_EXPRESSION:
        return None
    if match := _ASSIGNED.fullmatch(expression.text):
        return _assign(match, scope)
    if match := _TERNARY.fullmatch(expression.text):
        condition = calculate(Variable(match[1], ()), scope)
        return (
            None
            if condition is None
            else calculate(Variable(match[2 if condition else 3], ()), scope)
        )
    text = expression.text.replace("&&", " and ").replace("||", " or ")
    text = re.sub(r"!(?!=)", " not ", text).strip()
    try:
        return _number(ast.parse(text, mode="eval").body, scope, 0)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


MAX_EXPRESSION = 1000


def _assign(match: re.Match[str], scope: Scope) -> int | None:
    """Perform `NAME = expression`, `NAME += expression` or `NAME++`."""
    name = match[1] or match[4]
    operator, text = (match[5][0], "1") if match[5] else (match[2], match[3])
    right = calculate(Variable(text, ()), scope)
    whole = f"{name} {operator} ({right})" if operator else str(right)
    value = None if right is None else calculate(Variable(whole, ()), scope)
    if value is None:
        problem = f"${name} is not a calculation with integers. Replace it with its value."
        scope.variables[name] = Variable(f"${name}", (Word(f"${name}", None, problem),), problem)
        return None
    before = scope.look_up(name)
    scope.variables[name] = literal(str(value))
    is_postfix = bool(match[5]) and before is not None and before.text.isdigit()
    return int(before.text) if is_postfix and before is not None else value


def _number(node: ast.expr, scope: Scope, depth: int) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.Name) and depth < 8:
        return _named_number(node.id, scope, depth)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd | ast.Not):
        operand = _number(node.operand, scope, depth)
        signs = {ast.USub: -operand, ast.UAdd: operand, ast.Not: int(not operand)}
        return signs[type(node.op)]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _number(node.left, scope, depth), _number(node.right, scope, depth)
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _RELATIONS:
        left, right = (_number(side, scope, depth) for side in (node.left, node.comparators[0]))
        return int(_RELATIONS[type(node.ops[0])](left, right))
    if isinstance(node, ast.BoolOp):
        values = [_number(value, scope, depth) != 0 for value in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    raise ValueError


def _named_number(name: str, scope: Scope, depth: int) -> int:
    """Return the number in a variable; an unset or empty variable is 0."""
    value = scope.look_up(name)
    if value is not None and value.problem:
        raise ValueError
    text = value.text.strip() if value is not None else ""
    return _number(ast.parse(text, mode="eval").body, scope, depth + 1) if text else 0


def _texts(command: Sequence[Word]) -> list[str]:
    return [word.text for word in command]


def _output(commands: Sequence[Sequence[str]]) -> str | None:
    """Return the output of commands that only name a folder, a file or the time; else None."""
    if len(commands) == 2 and commands[0][:1] == ["["]:
        words = [Word(text, None) for text in commands[0][1:] if text != "]"]
        holds = evaluated([(word, "") for word in words])
        return "" if holds is False else _output(commands[1:] if holds else [])
    folder = "."
    for command in commands[:-1]:
        if len(command) < 2 or command[0] != "cd":
            return None
        folder = _joined(folder, command[1])
    last = commands[-1] if commands else ()
    program, arguments = (last[0], last[1:]) if last else ("", ())
    texts = {"pwd": folder, "echo": " ".join(word for word in arguments if word != "-n")}
    if program == "expr":
        value = calculate(Variable(" ".join(arguments), ()), Scope(""))
        return None if value is None else str(value)
    if program == "seq" and len(arguments) <= 2 and all(map(str.isdigit, arguments)):
        numbers = [int(text) for text in ("1", *arguments)[-2:]]
        return " ".join(map(str, range(numbers[0], numbers[1] + 1)[:MAX_RANGE]))
    if program == "date" and len(arguments) <= 1:
        texts["date"] = time.strftime(arguments[0].removeprefix("+") if arguments else "%c")
    names = [word for word in arguments if not word.startswith("-")]
    return texts.get(program) or _path_output(program, names)


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
