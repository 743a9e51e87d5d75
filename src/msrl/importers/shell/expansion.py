"""Expansion of one shell command to words, as bash does it, without running anything.

Supported: quotes, `$NAME`, `${NAME:-word}` and its variants, arrays, integer arithmetic, and the
outputs of the commands of `outputs.py`. A word that depends on anything else has a `problem`.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Sequence

from msrl.errors import MsrlError
from msrl.importers.shell.arithmetic import arithmetic, calculate, unset_problem
from msrl.importers.shell.braces import MAX_ITEMS, TooManyWordsError, expand_braces
from msrl.importers.shell.outputs import output, probe_output
from msrl.importers.shell.values import (
    EMPTY,
    Scope,
    Variable,
    Word,
    fields,
    item,
    literal,
    unquote,
)

_HOLDS_FLAGS = re.compile(r"(ARGS?|OPTS?|OPTIONS|FLAGS)\}?$", re.IGNORECASE)
_NAME = re.compile(r"\w+|[@*#?$!-]")
_BODY = re.compile(
    r"([#!]?)(\w+|[@*#?])(\[[^\]]*\])?(?:(:?[-=+?]|##?|%%?|//?|:|\^\^?|,,?)(.*))?", re.S
)
# A quoted list: its items stay words.
_LIST = re.compile(r'"(?:\$@|\$\{@(?::[^{}"]*)?\}|\$\{\w+\[@\](?::[^{}"]*)?\})"')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "e": "\x1b", "a": "\a", "b": "\b", "0": "\0"}


def expand(text: str, line: int, scope: Scope, *, may_cut: bool = False) -> list[Word]:
    """Return the words of a command whose first line has the number `line`.

    With `may_cut`, a word with braces expands to its first MAX_ITEMS + 1 words at most.

    Raises:
        MsrlError: A word with braces expands to too many words, and `may_cut` is False.
    """
    try:
        braceless = expand_braces(text, may_cut=may_cut)
    except TooManyWordsError as error:
        word = str(error) if len(str(error)) <= 60 else f"{str(error)[:60]}..."
        raise MsrlError(
            f"{scope.path}:{line}: {word} expands to more than {MAX_ITEMS:,} words. Write fewer."
        ) from None
    return _Expander(braceless, line, scope).words()


def expand_value(text: str, line: int, scope: Scope) -> Variable:
    """Return the expansion of the text of an assignment, which bash does not split into words."""
    expander = _Expander(text, line, scope, splits=False)
    words = expander.words()
    problem = next((word.problem for word in words if word.problem), "")
    if len(words) == 1 and problem and not words[0].text:  # an unset variable by itself
        return Variable("", (), problem)
    return Variable(" ".join(word.text for word in words), tuple(words), problem)


def expand_text(text: str, line: int, scope: Scope) -> Variable:
    """Return the expansion of a text in double quotes as one value."""
    expander = _Expander(text, line, scope)
    expander.quoted_until("")
    return Variable(expander.text(), (), expander.problem)


class _Expander:
    """Scanner of one command."""

    def __init__(self, source: str, line: int, scope: Scope, *, splits: bool = True) -> None:
        self.source, self.line, self.scope = source, line, scope
        self.splits = splits
        self.is_quoted = False
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
            elif source.startswith('$"', self.pos):
                self._step()  # a text to translate
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
        self.is_quoted = True
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
        self.is_quoted = False
        self._step()

    def _step(self, count: int = 1) -> None:
        self.line += self.source.count("\n", self.pos, self.pos + count)
        self.pos += count

    def _add(self, text: str, line: int | None = None) -> None:
        if self.pieces is None:
            self.pieces, self.start = [], line or self.line
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
            if _LIST.match(self.source, self.pos):
                return self._add_list()
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
        self._add(escape.sub(lambda escaped: _ESCAPES.get(escaped[1], escaped[1]), match[1]))
        self._step(match.end())

    def _add_unquoted(self) -> None:
        """Add an unquoted expansion: its words, of which the first and last may be parts of words.

        A text before the expansion belongs to its first word, a text after it to the last one.
        """
        is_start = self.pieces is None
        begin, line = self.pos, self.line
        value = self._expansion()
        if value.problem and not value.words:
            return self._add_unknown(self.source[begin : self.pos], value, line, is_start=is_start)
        if not self.splits:
            return self._add_value(value)
        separators = self.scope.separators()
        if value.text[:1].isspace() and not separators:
            self._end_word()
        self._add_words(fields(value, separators), line)
        if value.text[-1:].isspace() and not separators:
            self._end_word()
        return None

    def _add_list(self) -> None:
        """Add a quoted list such as `"${NAME[@]}"`, whose items stay words."""
        self._step()
        begin = self.pos
        value = self._expansion()
        if value.problem and not value.words:
            self.scope.empty.setdefault(self.source[begin : self.pos], self.line)
        self._add_words(value.words, self.line)
        self._step()

    def _add_words(self, words: Sequence[Word], line: int) -> None:
        """Add words, of which the first continues an open word and the last stays open."""
        for number, word in enumerate(words):
            if number > 0:
                self._end_word()
            self._add(word.text, word.line or line)
            self.problem = self.problem or word.problem

    def _add_unknown(self, name: str, value: Variable, line: int, *, is_start: bool) -> None:
        """Add an expansion without a value: a word by itself, or a part of one."""
        following = self.source[self.pos : self.pos + 1]
        is_word = self.splits and is_start and (not following or following.isspace())
        return self._add_unset(name, value, line) if is_word else self._add_value(value)

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
        if source.startswith(("$((", "$["), self.pos):
            return self._arithmetic(is_old=source[self.pos + 1] == "[")
        if source.startswith("$(", self.pos):
            return self._output(self._inside("(", ")", 2))
        if source.startswith("${", self.pos):
            return self._parameter(self._inside("{", "}", 2))
        match = _NAME.match(source, self.pos + 1)
        if match is None:
            self._step()
            return literal("$")
        self._step(match.end() - self.pos)
        self._report_missing(match[0])
        return self._value(match[0]).first()

    def _report_missing(self, name: str) -> None:
        """Report an argument of the script that is not given, which is empty."""
        if name.isdigit() and not self.scope.unset_is_empty and self.scope.look_up(name) is None:
            self.scope.empty.setdefault(f"${name}", self.line)

    def _arithmetic(self, *, is_old: bool) -> Variable:
        """Return the value of `$((...))`, or of the older `$[...]`."""
        body = self._inside("[", "]", 2) if is_old else self._inside("(", ")", 2)
        if not is_old:
            body = body.removeprefix("(").removesuffix(")")
        return arithmetic(expand_text(body, self.line, self.scope), self.scope)

    def _inside(self, opening: str, closing: str, skip: int) -> str:
        """Return the text in brackets and move past the closing one."""
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
        return Variable("", (), unset_problem(name))

    def _parameter(self, body: str) -> Variable:
        """Return the value of `${...}`."""
        match = _BODY.fullmatch(body)
        if match is None:
            return literal(f"${{{body}}}", f"${{{body}}} is not supported. Replace it.")
        name, index, action, argument = match[2], match[3], match[4] or "", match[5] or ""
        is_list = index in ("[@]", "[*]") or name in "@*"
        if not action:
            self._report_missing(name)
        value = self._value(name)
        if match[1] == "!" and (index or value.problem):
            return literal(f"${{{body}}}", value.problem or f"${{{body}}} is not supported.")
        if match[1] == "!":
            name = value.first().text
            value = self._value(name)
        if index == "[*]" and self.scope.separators():
            value = literal(self.scope.separators()[0].join(word.text for word in value.words))
        elif index is not None and not is_list:
            value = self._item(value, index[1:-1])
        elif not is_list:
            value = value.first()
        if match[1] == "#":
            return literal(str(len(value.words if is_list else value.text)), value.problem)
        return self._apply_action(name, value, action, argument, is_list=is_list)

    def _item(self, value: Variable, index: str) -> Variable:
        """Return `${NAME[index]}`, which is empty for an index that does not exist."""
        if value.problem:
            return value
        unset: list[str] = []
        number = calculate(expand_text(index, self.line, self.scope), self.scope, unset)
        if unset and not self.scope.unset_is_empty:
            return Variable("", (), unset_problem(unset[0]))
        if number is None or not -len(value.words) <= number < len(value.words):
            return EMPTY
        return item(value.words[number])

    def _apply_action(
        self, name: str, value: Variable, action: str, argument: str, *, is_list: bool
    ) -> Variable:
        """Return a value after the action of `${NAME<action>argument}`."""
        if action[-1:] in ("-", "=", "+"):
            is_set = self.scope.look_up(name) is not None
            changed = self._default(value, action, argument, is_set=is_set)
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
            return self._replace_pattern(value, action, argument)
        return _trim(value, action, expand_text(argument, self.line, self.scope).text)

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

    def _replace_pattern(self, value: Variable, action: str, argument: str) -> Variable:
        """Return `${NAME/pattern/text}`. The pattern is a glob; `#` and `%` anchor it."""
        match = re.match(r"((?:\\.|[^/\\])*)(?:/(.*))?$", argument, re.S)
        assert match is not None
        pattern = expand_text(match[1].replace("\\/", "/"), self.line, self.scope).text
        new = expand_text(unquote(match[2] or ""), self.line, self.scope).text
        anchors = {"#": (r"\A", "", pattern[1:]), "%": ("", r"\Z", pattern[1:])}
        before, after, glob = anchors.get(pattern[:1], ("", "", pattern))
        expression = fnmatch.translate(unquote(glob)).removeprefix("(?s:").removesuffix(r")\Z")
        count = 0 if action == "//" else 1
        changed = re.sub(f"(?s){before}{expression}{after}", lambda _: new, value.text, count=count)
        return literal(changed) if glob else value

    def _default(self, value: Variable, action: str, argument: str, *, is_set: bool) -> Variable:
        """Return the value of `${NAME:-word}`, `${NAME:=word}` or `${NAME:+word}`."""
        if is_set and value.problem:
            return value  # whether it is empty is known only at run time
        has_value = is_set and (value.text != "" or not action.startswith(":"))
        if has_value != action.endswith("+"):
            return value if has_value else EMPTY
        if self.is_quoted or not self.splits:
            whole = self._default_text(argument)
            return Variable(whole.text, (Word(whole.text, None, whole.problem),), whole.problem)
        words = tuple(expand(argument, self.line, self.scope))
        problem = next((word.problem for word in words if word.problem), "")
        return Variable(" ".join(word.text for word in words), words, problem, is_split=True)

    def _default_text(self, argument: str) -> Variable:
        """Return a default as one text; in quotes, its own double quotes are no characters."""
        if not self.is_quoted:
            return expand_value(argument, self.line, self.scope)
        return expand_text(re.sub(r'(?<!\\)"', "", argument), self.line, self.scope)

    def _output(self, body: str) -> Variable:
        """Return the output of a command; a comment has none."""
        lines = [line for line in body.split("\n") if not line.lstrip().startswith("#")]
        source = "\n".join(lines).strip()
        commands = [expand(text, self.line, self.scope) for text in _commands(source)]
        problem = next((w.problem for command in commands for w in command if w.problem), "")
        texts = [_arguments(command) for command in commands if command]
        is_known = not problem and None not in texts and not re.search(r"[|\n]", _blank(source))
        text = output([command for command in texts if command is not None]) if is_known else None
        text = probe_output(body) if text is None else text
        if text is not None:
            return literal(text)
        message = f"$({body.strip()}) is the output of a command, which msrl does not run."
        return literal(f"$({body.strip()})", f"{message} Replace it with its value.")


_QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", re.S)


_REDIRECTION = re.compile(r"(?:\d*|&)[<>].*", re.S)


def _blank(source: str) -> str:
    """Return a text with its quoted parts blanked out."""
    return _QUOTED.sub(lambda match: "_" * len(match[0]), source)


def _arguments(command: Sequence[Word]) -> list[str] | None:
    """Return a command without redirections; None if its output goes elsewhere."""
    texts = [word.text for word in command]
    arguments = [text for text in texts if not _REDIRECTION.fullmatch(text)]
    is_printed = texts[0] not in ("echo", "printf") or arguments == texts
    return arguments if is_printed else None


def _commands(source: str) -> list[str]:
    """Return the commands that `&&` and `;` connect, outside of quotes."""
    blank = _blank(source)
    starts = [0, *(match.end() for match in re.finditer(r"&&|;", blank))]
    ends = [*(match.start() for match in re.finditer(r"&&|;", blank)), len(source)]
    return [source[start:end] for start, end in zip(starts, ends, strict=True)]


def _trim(value: Variable, action: str, pattern: str) -> Variable:
    """Return a value without the prefix (#) or suffix (%) that matches."""
    text = value.text
    positions = range(len(text) + 1)
    if action in ("##", "%"):  # a long prefix and a short suffix end late
        positions = reversed(positions)
    for position in positions:
        head, tail = text[:position], text[position:]
        removed, remaining = (head, tail) if action[0] == "#" else (tail, head)
        if fnmatch.fnmatchcase(removed, pattern):
            return literal(remaining, value.problem)
    return value


def _with_case(text: str, action: str) -> str:
    change = str.upper if action[0] == "^" else str.lower
    return change(text) if len(action) > 1 else change(text[:1]) + text[1:]
