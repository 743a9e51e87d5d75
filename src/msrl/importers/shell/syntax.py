"""Syntax of shell scripts: commands, lists, branches, loops, functions and here-documents.

The parser keeps the source text of simple commands, which `expansion.py` expands. Redirections and
here-documents are removed. Source of the grammar: POSIX.1-2024, Shell Command Language.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from msrl.errors import MsrlError

MAX_DEPTH = 100
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\Z")
_REDIRECTION = re.compile(r"(?:\d+|&)?(?:>>|>\||>&|<&|<>|>|<)(?!\()")
_HEREDOC = re.compile(r"\d*<<(?!<)(-?)[ \t]*(\\?)(['\"]?)([\w.!@%-]+)\3")
_SPACES = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_FUNCTION = re.compile(r"([A-Za-z_][\w.:-]*)[ \t]*\([ \t]*\)")
_OPERATORS = (";;&", ";;", ";&", "&&", "||", "|&", ";", "&", "|", "(", ")", "\n")
_ENDS = frozenset(("then", "do", "else", "elif", "fi", "done", "esac", "}", ")", ";;", ";&", ";;&"))


@dataclass(frozen=True, slots=True)
class Simple:
    """A simple command as text, or a condition in double brackets."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """`((expression))`."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands that pipes connect. With `negated`, the status is inverted."""

    commands: tuple[Node, ...]
    negated: bool = False


@dataclass(frozen=True, slots=True)
class AndOr:
    """Pipelines that `&&` and `||` connect; the first operator is empty."""

    pipelines: tuple[tuple[str, Node], ...]
    line: int


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """Commands in braces or, as a subshell, in parentheses."""

    body: tuple[Node, ...]
    is_subshell: bool


@dataclass(frozen=True, slots=True)
class If:
    """Branches of (condition, body) in order; the condition of `else` is empty."""

    branches: tuple[tuple[tuple[Node, ...], tuple[Node, ...]], ...]
    line: int


@dataclass(frozen=True, slots=True)
class For:
    """A loop over the words of a text, or `for ((...))`, whose expressions are `arithmetic`."""

    name: str
    words: str
    body: tuple[Node, ...]
    line: int
    arithmetic: str | None = None


@dataclass(frozen=True, slots=True)
class While:
    """A `while` loop, or an `until` loop."""

    condition: tuple[Node, ...]
    body: tuple[Node, ...]
    is_until: bool
    line: int


@dataclass(frozen=True, slots=True)
class CaseCommand:
    """Branches of (patterns, body, terminator) of a word."""

    word: str
    branches: tuple[tuple[tuple[str, ...], tuple[Node, ...], str], ...]
    line: int


@dataclass(frozen=True, slots=True)
class FunctionDefinition:
    """Definition of a function."""

    name: str
    body: Node


Node = (
    Simple
    | Arithmetic
    | Pipeline
    | AndOr
    | CommandGroup
    | If
    | For
    | While
    | CaseCommand
    | FunctionDefinition
)


@dataclass(frozen=True, slots=True)
class _Token:
    """An operator, or the source text of a word, with its position."""

    text: str
    start: int
    end: int
    is_word: bool


def parse(text: str, name: str) -> tuple[Node, ...]:
    """Return the commands of a script.

    Raises:
        MsrlError: a bracket, quote or block is not closed, or the text has a null character.
    """
    if "\0" in text:  # which bash drops, and which no path and no format of a date may contain
        raise MsrlError(f"{name}: contains null characters. Name a shell script.")
    parser = _Parser(_prepare(text), name)
    nodes = parser.body(())
    if parser.token is not None:
        raise parser.error(f"{parser.token.text!r} has no beginning")
    return nodes


def skip_quoted(text: str, pos: int) -> int:
    """Return the position after the quote, expansion or escape at `pos`; the end if it is open."""
    char = text[pos]
    if char == "\\":
        return pos + 2
    if char == "'":
        end = text.find("'", pos + 1)
        return len(text) if end < 0 else end + 1
    if char in '"`':
        return _skip_until(text, pos + 1, char)
    if text.startswith(("$(", "${"), pos):
        return _skip_until(text, pos + 2, ")" if text[pos + 1] == "(" else "}")
    if text.startswith("$'", pos):
        match = re.compile(r"(?:\\.|[^'\\])*'", re.DOTALL).match(text, pos + 2)
        return match.end() if match else len(text)
    return pos + 1


def _skip_until(text: str, pos: int, closing: str) -> int:
    depth = 0
    while pos < len(text):
        char = text[pos]
        if char == closing and not depth:
            return pos + 1
        if closing == ")" and char in "()":
            depth += 1 if char == "(" else -1
        is_nested = char in "\\`" or text.startswith(("$(", "${"), pos)
        is_quote = char in "'\"" and closing not in '"`'
        pos = skip_quoted(text, pos) if is_nested or is_quote else pos + 1
    return len(text)


def word_end(text: str, pos: int) -> int:
    """Return the position after the word at `pos`."""
    start = pos
    while pos < len(text):
        char = text[pos]
        if char == "(" and _ARRAY.match(text[start:pos]):
            pos = _skip_array(text, pos + 1)
        elif text.startswith(("<(", ">("), pos):
            pos = _skip_until(text, pos + 2, ")")
        elif char in " \t\n\r;&|()<>" or text.startswith("\\\n", pos):
            break
        else:
            pos = skip_quoted(text, pos)
    return min(max(pos, start + 1), len(text))


def _prepare(text: str) -> str:
    """Return a text with line feeds, whose comments do not end a continued command."""
    lines = [_BLANKS.sub(r"\\", line.rstrip("\r")) for line in text.split("\n")]
    for number in _comments_inside(lines):
        lines[number] = "\\"
    return "\n".join(lines)


def repairs(text: str) -> list[tuple[int, str]]:
    """Return the lines that bash does not read as their author meant them, with the reason."""
    lines = [line.rstrip("\r") for line in text.split("\n")]
    reasons = [(1, _CARRIAGE_RETURNS)] if text.count("\r\n") > len(lines) // 2 else []
    reasons += [
        (number + 1, _BLANK)
        for number, line in enumerate(lines)
        if _BLANKS.search(line) and _continues(lines, number + 1)
    ]
    plain = [_BLANKS.sub(r"\\", line) for line in lines]
    inside = [number for number in _comments_inside(plain) if not _is_in_array(plain, number)]
    previous = -1
    for number in inside:
        reasons += [(number + 1, _COMMENT)] if number != previous + 1 else []
        previous = number
    return reasons


_BLANKS = re.compile(r"\\[ \t]+$")
_CARRIAGE_RETURNS = "its lines end as on Windows, which bash does not read; msrl does"
_BLANK = (
    "a blank after the backslash ends the command in bash; msrl reads the following flags as "
    "a part of it"
)
_COMMENT = (
    "a comment inside of a continued command ends it in bash (in quotes, it becomes words); msrl "
    "reads the flags after it as a part of the command"
)


def _comments_inside(lines: Sequence[str]) -> list[int]:
    """Return the numbers of the comments that flags of the same command follow."""
    numbers: list[int] = []
    is_continued = False
    for number, line in enumerate(lines):
        is_comment = line.lstrip().startswith("#")
        if is_continued and is_comment and _continues(lines, number):
            numbers.append(number)
        else:
            is_continued = line.endswith("\\") and not is_comment
    return numbers


def _is_in_array(lines: Sequence[str], number: int) -> bool:
    """Return True if a line is an item of `NAME=(`, whose comments bash ignores."""
    for line in reversed(lines[:number]):
        if re.search(r"\w\+?=\(\s*(#.*)?$", line):
            return True
        if line.rstrip().endswith(")") or not line.strip():
            return False
    return False


def _continues(lines: Sequence[str], number: int) -> bool:
    """Return True if flags follow a comment inside of a command."""
    following = next((line for line in lines[number:] if not line.lstrip().startswith("#")), "")
    return following.lstrip().startswith(("-", "$", "2>", "|", ">"))


class _Parser:
    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name
        self.pos, self.depth = 0, 0
        self.redirections: list[tuple[int, int]] = []  # start and end
        self.heredocs: list[tuple[str, bool]] = []
        self.token: _Token | None = None
        self.advance()

    def error(self, problem: str) -> MsrlError:
        return MsrlError(f"{self.name}:{self.line()}: not a shell script: {problem}.")

    def line(self, position: int | None = None) -> int:
        start = self.token.start if self.token is not None and position is None else position
        return self.text.count("\n", 0, len(self.text) if start is None else start) + 1

    # --- Tokens ---

    def advance(self) -> _Token | None:
        """Return the current token and read the next one."""
        before = self.token
        self.token = self._read()
        return before

    def _read(self) -> _Token | None:
        while True:
            self._skip_blanks()
            if self.pos >= len(self.text):
                return None
            if not self._skip_redirection():
                break
        start = self.pos
        operator = next((op for op in _OPERATORS if self.text.startswith(op, start)), None)
        if operator is None:
            self.pos = self._word_end(start)
            return _Token(self.text[start : self.pos], start, self.pos, True)
        self.pos += len(operator)
        if operator == "\n":
            self._skip_heredocs()
        return _Token(operator, start, start + len(operator), False)

    def _skip_blanks(self) -> None:
        if blanks := _SPACES.match(self.text, self.pos):
            self.pos = blanks.end()
        if self.text.startswith("#", self.pos):
            end = self.text.find("\n", self.pos)
            self.pos = len(self.text) if end < 0 else end

    def _skip_redirection(self) -> bool:
        start = self.pos
        heredoc = _HEREDOC.match(self.text, start)
        if heredoc is not None:
            self.heredocs.append((heredoc[4], bool(heredoc[1])))
            self.pos = heredoc.end()
        elif self.text.startswith("<<<", start):
            self.pos = self._target_end(start + 3)
        elif match := _REDIRECTION.match(self.text, start):
            self.pos = self._target_end(match.end())
        else:
            return False
        self.redirections.append((start, self.pos))
        return True

    def _target_end(self, pos: int) -> int:
        while pos < len(self.text) and self.text[pos] in " \t":
            pos += 1
        return self._word_end(pos)

    def _word_end(self, pos: int) -> int:
        return word_end(self.text, pos)

    def _skip_heredocs(self) -> None:
        for delimiter, is_indented in self.heredocs:
            while self.pos < len(self.text):
                end = self.text.find("\n", self.pos)
                end = len(self.text) if end < 0 else end
                line = self.text[self.pos : end]
                self.pos = end + 1
                if (line.lstrip("\t") if is_indented else line) == delimiter:
                    break
        self.heredocs.clear()

    # --- Grammar ---

    def is_at(self, *texts: str) -> bool:
        return self.token is not None and self.token.text in texts

    def expect(self, text: str) -> None:
        if not self.is_at(text):
            raise self.error(f"{text!r} is missing")
        self.advance()

    def skip_separators(self) -> None:
        while self.is_at("\n", ";", "&"):
            self.advance()

    def body(self, ends: Sequence[str]) -> tuple[Node, ...]:
        """Return the commands up to one of the words that end them."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error("its blocks are nested too deeply")
        nodes: list[Node] = []
        self.skip_separators()
        while self.token is not None and not self.is_at(*(ends or _ENDS)):
            nodes.append(self._and_or())
            self.skip_separators()
        if ends and self.token is None:
            raise self.error(f"{ends[-1]!r} is missing")
        self.depth -= 1
        return tuple(nodes)

    def _and_or(self) -> Node:
        line, pipelines = self.line(), [("", self._pipeline())]
        while self.is_at("&&", "||"):
            operator = self.token.text if self.token is not None else ""
            self.advance()
            self.skip_separators()
            pipelines.append((operator, self._pipeline()))
        return pipelines[0][1] if len(pipelines) == 1 else AndOr(tuple(pipelines), line)

    def _pipeline(self) -> Node:
        negated = False
        while self.is_at("!", "time"):
            negated ^= self.is_at("!")
            self.advance()
        commands = [self._command()]
        while self.is_at("|", "|&"):
            self.advance()
            self.skip_separators()
            commands.append(self._command())
        if len(commands) == 1 and not negated:
            return commands[0]
        return Pipeline(tuple(commands), negated)

    def _command(self) -> Node:
        token = self.token
        if token is None:
            raise self.error("a command is missing")
        blocks = {
            "if": self._if, "for": self._for, "select": self._for, "while": self._while,
            "until": self._while, "case": self._case, "{": self._group, "(": self._group,
            "function": self._function, "[[": self._condition,
        }  # fmt: skip
        if token.text == "(" and self.text.startswith("((", token.start):
            return self._arithmetic()
        if token.text in blocks:
            return blocks[token.text]()
        if token.is_word and _FUNCTION.match(self.text, token.start):
            return self._function()
        return self._simple()

    def _simple(self) -> Node:
        first = self.token
        if first is None or not first.is_word:
            raise self.error(f"{first.text if first else ''!r} is not a command")
        end, num_redirections = first.end, len(self.redirections)
        while self.token is not None and self.token.is_word:
            end = self.token.end
            self.advance()
        spans = [s for s in self.redirections[num_redirections:] if first.start <= s[0] < end]
        return Simple(self._remove_spans(first.start, end, spans), self.line(first.start))

    def _remove_spans(self, start: int, end: int, spans: Sequence[tuple[int, int]]) -> str:
        """Return the source without these spans, but with all of its line feeds."""
        text = ""
        for first, after in spans:
            text += self.text[start:first] + "\\\n" * self.text.count("\n", first, after)
            start = after
        return text + self.text[start:end]

    def _condition(self) -> Node:
        start = self.token.start if self.token is not None else self.pos
        match = re.compile(r"\s\]\](?=[\s;&|)]|$)").search(self.text, start)
        if match is None:
            raise self.error("']]' is missing")
        self.pos = match.end()
        self.advance()
        return Simple(self.text[start : match.end()], self.line(start))

    def _arithmetic(self) -> Arithmetic:
        start = self.token.start if self.token is not None else self.pos
        end = _skip_until(self.text, start + 1, ")")
        self.pos = end
        self.advance()
        return Arithmetic(self.text[start + 2 : end - 2], self.line(start))

    def _group(self) -> Node:
        is_subshell = self.is_at("(")
        self.advance()
        body = self.body((")",) if is_subshell else ("}",))
        self.advance()
        return CommandGroup(body, is_subshell)

    def _function(self) -> Node:
        if self.is_at("function"):
            self.advance()
        token = self.advance()
        name = token.text if token is not None else ""
        if self.is_at("("):
            self.advance()
            self.expect(")")
        self.skip_separators()
        return FunctionDefinition(name, self._command())

    def _if(self) -> Node:
        line = self.line()
        branches: list[tuple[tuple[Node, ...], tuple[Node, ...]]] = []
        while self.is_at("if", "elif"):
            self.advance()
            condition = self.body(("then",))
            self.advance()
            branches.append((condition, self.body(("elif", "else", "fi"))))
        if self.is_at("else"):
            self.advance()
            branches.append(((), self.body(("fi",))))
        self.expect("fi")
        return If(tuple(branches), line)

    def _for(self) -> Node:
        line, name, words = self.line(), "", ""
        arithmetic: str | None = None
        self.advance()
        if self.is_at("("):
            arithmetic = self._arithmetic().text
        else:
            token = self.advance()
            name, words = token.text if token is not None else "", '"$@"'
        if self.is_at("in"):
            start = self.pos
            self.advance()
            end = start
            while self.token is not None and self.token.is_word:
                end = self.token.end
                self.advance()
            words = self.text[start:end]
        self.skip_separators()
        return For(name, words, self._loop_body(), line, arithmetic)

    def _while(self) -> Node:
        line, is_until = self.line(), self.is_at("until")
        self.advance()
        condition = self.body(("do",))
        return While(condition, self._loop_body(), is_until, line)

    def _loop_body(self) -> tuple[Node, ...]:
        self.expect("do")
        body = self.body(("done",))
        self.advance()
        return body

    def _case(self) -> Node:
        line = self.line()
        self.advance()
        token = self.advance()
        word = token.text if token is not None else ""
        self.skip_separators()
        self.expect("in")
        self.skip_separators()
        branches: list[tuple[tuple[str, ...], tuple[Node, ...], str]] = []
        while self.token is not None and not self.is_at("esac"):
            branches.append(self._case_branch())
            self.skip_separators()
        self.expect("esac")
        return CaseCommand(word, tuple(branches), line)

    def _case_branch(self) -> tuple[tuple[str, ...], tuple[Node, ...], str]:
        if self.is_at("("):
            self.advance()
        patterns: list[str] = []
        while self.token is not None and not self.is_at(")"):
            if self.token.is_word:
                patterns.append(self.token.text)
            self.advance()
        self.expect(")")
        body = self.body((";;", ";&", ";;&", "esac"))
        end = ";;" if self.is_at("esac") or self.token is None else self.token.text
        if not self.is_at("esac"):
            self.advance()
        return tuple(patterns), body, end


def _skip_array(text: str, pos: int) -> int:
    """Return the position behind an array, whose comments may contain brackets and quotes."""
    while pos < len(text) and text[pos] != ")":
        if text[pos] == "#" and text[pos - 1].isspace():
            end = text.find("\n", pos)
            pos = len(text) if end < 0 else end
        else:
            pos = skip_quoted(text, pos)
    return pos + 1
