"""Commands and flags of a shell script.

The script is interpreted as bash would run it: variables, arrays, functions, branches, loops and
conditions that compare texts. No program is started: `$NAME` is the value that the script assigns,
else that of the environment. What only a run knows has no text but a problem, also a variable that
differs between the branches of such a condition.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from msrl.config.sources import Node, Origin, scalar
from msrl.errors import ManyErrors, MsrlError
from msrl.importers.placeholders import is_placeholder
from msrl.importers.shell import syntax
from msrl.importers.shell.expanded_conditions import holds
from msrl.importers.shell.expansion import calculate, expand, expand_text
from msrl.importers.shell.values import Scope, Variable, Word, unquoted
from msrl.importers.table import canonical

MAX_REPEATS = 1000
MAX_CALLS = 50
MAX_STEPS = 20_000
MAX_CHARACTERS = 1_000_000  # of one variable
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
_DECLARATIONS = ("export", "local", "readonly", "declare", "typeset")
_PRINTING = ("echo", "printf", "cat")
# Programs whose exit status depends on the machine.
_CHECKING = (
    "grep", "egrep", "which", "command", "type", "pgrep", "diff", "cmp", "lsof", "nc", "ping",
    "read", "getopts", "nvidia-smi", "npu-smi", "wait", "hash",
)  # fmt: skip


@dataclass(slots=True)
class Script:
    """Commands of a script in order, and the variables that it sets."""

    name: str
    commands: list[list[Word]] = field(default_factory=list[list[Word]])
    exported: dict[str, Word] = field(default_factory=dict[str, Word])
    scope: Scope = field(init=False)

    def __post_init__(self) -> None:
        self.scope = Scope(self.name)


class _StopError(Exception):
    """End of a script (`exit`), function (`return`) or loop (`break`, `continue`)."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def parse_script(text: str, name: str) -> Script:
    """Return the commands of a script. Words of unknown text have a problem.

    Raises:
        MsrlError: the text is not a shell script.
    """
    interpreter = _Interpreter(Script(name))
    try:
        interpreter.run(syntax.parse(text, name))
    except _StopError:
        return interpreter.script
    except RecursionError:
        raise MsrlError(f"{name}: is nested too deeply. Use fewer levels.") from None
    return interpreter.script


class _Interpreter:
    """Execution of commands. The status of a command is None if only a run knows it."""

    def __init__(self, script: Script) -> None:
        self.script, self.scope = script, script.scope
        self.functions: dict[str, syntax.Node] = {}
        self.num_unknown = 0  # open branches whose condition is not known
        self.num_calls, self.num_steps = 0, 0

    def run(self, nodes: Sequence[syntax.Node]) -> bool | None:
        """Run commands and return the status of the last one."""
        status: bool | None = True
        for node in nodes:
            status = self.run_node(node)
        return status

    def run_node(self, node: syntax.Node) -> bool | None:
        self.num_steps += 1
        if self.num_steps > MAX_STEPS:
            raise _StopError("exit")
        handlers: dict[type, Callable[..., bool | None]] = {
            syntax.Simple: self._simple, syntax.Arithmetic: self._arithmetic,
            syntax.Pipeline: self._pipeline, syntax.AndOr: self._and_or,
            syntax.CommandGroup: self._group, syntax.If: self._if, syntax.For: self._for,
            syntax.While: self._while, syntax.CaseCommand: self._case,
            syntax.FunctionDefinition: self._define,
        }  # fmt: skip
        return handlers[type(node)](node)

    # --- Lists and branches ---

    def _pipeline(self, node: syntax.Pipeline) -> bool | None:
        status = [self.run_node(command) for command in node.commands][-1]
        return (not status) if node.negated and status is not None else status

    def _and_or(self, node: syntax.AndOr) -> bool | None:
        status: bool | None = True
        for operator, part in node.parts:
            if operator and status is not None and status != (operator == "&&"):
                continue
            if operator and status is None:
                self._either(node.line, partial(self.run_node, part))
            else:
                status = self.run_node(part)
        return status

    def _group(self, node: syntax.CommandGroup) -> bool | None:
        if not node.is_subshell:
            return self.run(node.body)
        variables = dict(self.scope.variables)
        try:
            return self.run(node.body)
        except _StopError:
            return True
        finally:
            self.scope.variables = variables

    def _if(self, node: syntax.If) -> bool | None:
        bodies: list[Callable[[], object]] = []
        for condition, body in node.branches:
            status = self.run(condition) if condition else True
            if status is False:
                continue
            if status is True and not bodies:
                return self.run(body)
            bodies.append(partial(self.run, body))
            if status is True:
                return self._either(node.line, *bodies, is_complete=True)
        return self._either(node.line, *bodies) if bodies else True

    def _case(self, node: syntax.CaseCommand) -> bool | None:
        word = _joined(expand(node.word, node.line, self.scope))
        if word.problem:
            bodies = [partial(self.run, body) for _, body in node.branches]
            return self._either(node.line, *bodies)
        for patterns, body in node.branches:
            if any(fnmatch.fnmatchcase(word.text, unquoted(pattern)) for pattern in patterns):
                return self.run(body)
        return True

    def _either(
        self, line: int, *bodies: Callable[[], object], is_complete: bool = False
    ) -> bool | None:
        """Run branches of which a run chooses one, or none unless they are complete.

        A variable that differs between them has no known value.
        """
        before = dict(self.scope.variables)
        branches = [] if is_complete else [before]
        self.num_unknown += 1
        for body in bodies:
            self.scope.variables = dict(before)
            with contextlib.suppress(_StopError):
                body()
            branches.append(self.scope.variables)
        self.num_unknown -= 1
        names = dict.fromkeys(name for variables in branches for name in variables)
        self.scope.variables = {name: _merged(name, branches, line) for name in names}
        return None

    # --- Loops and functions ---

    def _for(self, node: syntax.For) -> bool | None:
        problem = f"${node.name} changes in the loop of line {node.line}. Write its commands out."
        words = [Word("", node.line, problem)]
        if node.words is not None:
            words = expand(node.words, node.line, self.scope)
        for word in words[:MAX_REPEATS]:
            if node.name:
                self.scope.variables[node.name] = Variable(word.text, (word,), word.problem)
            if self._repeat(node.body):
                break
        return True

    def _while(self, node: syntax.While) -> bool | None:
        for _ in range(MAX_REPEATS):
            status = self.run(node.condition)
            if status is None:
                return self._either(node.line, partial(self._repeat, node.body))
            if status is node.is_until or self._repeat(node.body):
                break
            first = node.condition[0] if node.condition else None
            if isinstance(first, syntax.Simple) and first.text in ("true", "false", ":"):
                break  # ends by a condition that only a run knows
        return True

    def _repeat(self, body: Sequence[syntax.Node]) -> bool:
        """Run the body of a loop and return True if it ends the loop."""
        try:
            self.run(body)
        except _StopError as stop:
            if stop.kind not in ("break", "continue"):
                raise
            return stop.kind == "break"
        return False

    def _define(self, node: syntax.FunctionDefinition) -> bool | None:
        self.functions[node.name] = node.body
        return True

    def _call(self, words: Sequence[Word]) -> bool | None:
        if self.num_calls >= MAX_CALLS:
            return None
        arguments, self.scope.arguments = self.scope.arguments, tuple(words[1:])
        self.num_calls += 1
        try:
            return self.run_node(self.functions[words[0].text])
        except _StopError as stop:
            if stop.kind != "return":
                raise
            return True
        finally:
            self.scope.arguments = arguments
            self.num_calls -= 1

    # --- Simple commands ---

    def _arithmetic(self, node: syntax.Arithmetic) -> bool | None:
        value = calculate(expand_text(node.text, node.line, self.scope), self.scope)
        return None if value is None else value != 0

    def _simple(self, node: syntax.Simple) -> bool | None:
        if node.text.startswith("[["):
            return holds(node.text[2:-2], node.line, self.scope, splits=False)
        source = node.text
        line, assigned = node.line, list[str]()
        for raw, start in _raw_words(source):
            if not _ASSIGNMENT.fullmatch(raw):
                line += source.count("\n", 0, start)
                source = source[start:]
                break
            assigned.append(raw)
        else:
            for raw in assigned:
                self._assign(raw, node.line)
            return True
        keyword = source.split(maxsplit=1)[0] if source.strip() else ""
        if keyword in _DECLARATIONS:
            return self._declare(source, line)
        if keyword in ("[", "test"):
            return holds(source, line, self.scope, splits=True)
        words = expand(source, line, self.scope)
        return self._command(words, assigned, node.line) if words else True

    def _command(self, words: list[Word], assigned: Sequence[str], line: int) -> bool | None:
        """Run a command: a function, a builtin that has an effect here, or a program."""
        name = words[0].text
        builtins = {
            "set": self._set, "shift": self._shift, "unset": self._unset, "let": self._let,
            "eval": self._eval, "bash": self._shell, "sh": self._shell, ":": self._nothing,
            "true": self._nothing, "read": self._read, "exit": self._stop, "return": self._stop,
            "break": self._stop, "continue": self._stop,
        }  # fmt: skip
        if name in self.functions:
            return self._call(words)
        if name in builtins:
            return builtins[name](words)
        if name == "false":
            return False
        if name not in _PRINTING:
            for raw in assigned:
                self._export_prefix(raw, line)
            self.script.commands.append(words)
        return None if name in _CHECKING or words[0].problem else True

    def _nothing(self, words: Sequence[Word]) -> bool | None:
        return True

    def _stop(self, words: Sequence[Word]) -> bool | None:
        """End a loop, a function or the script. Failures are checks that msrl does not make."""
        kind = words[0].text
        fails = len(words) > 1 and words[1].text != "0"
        if kind in ("exit", "return") and fails:
            return False
        if kind == "exit" and self.num_unknown:
            return None
        raise _StopError(kind)

    def _set(self, words: Sequence[Word]) -> bool | None:
        texts = [word.text for word in words]
        if "--" in texts:
            self.scope.arguments = tuple(words[texts.index("--") + 1 :])
        return True

    def _shift(self, words: Sequence[Word]) -> bool | None:
        count = int(words[1].text) if len(words) > 1 and words[1].text.isdigit() else 1
        self.scope.arguments = self.scope.arguments[count:]
        return True

    def _unset(self, words: Sequence[Word]) -> bool | None:
        for word in words[1:]:
            self.scope.variables.pop(word.text, None)
            self.scope.removed.add(word.text)
            self.script.exported.pop(word.text, None)
        return True

    def _read(self, words: Sequence[Word]) -> bool | None:
        for word in words[1:]:
            if re.fullmatch(r"[A-Za-z_]\w*", word.text):
                reason = f"${word.text} is read from the input"
                variable = _without_value(word.text, reason, word.line)
                self.scope.variables[word.text] = variable
        return None

    def _let(self, words: Sequence[Word]) -> bool | None:
        value: int | None = 0
        for word in words[1:]:
            value = calculate(Variable(word.text, (), word.problem), self.scope)
        return None if value is None else value != 0

    def _eval(self, words: Sequence[Word]) -> bool | None:
        return self._run_text(" ".join(word.text for word in words[1:]), words[1:])

    def _shell(self, words: Sequence[Word]) -> bool | None:
        options = [word.text for word in words[1:2]]
        if len(words) > 2 and re.fullmatch(r"-\w*c", options[0]):
            return self._run_text(words[2].text, words[2:3])
        self.script.commands.append(list(words))
        return True

    def _run_text(self, text: str, words: Sequence[Word]) -> bool | None:
        """Run a text as commands, on the line of its words."""
        if any(word.problem for word in words) or self.num_calls >= MAX_CALLS:
            self.script.commands.append(list(words))
            return None
        self.num_calls += 1
        count = len(self.script.commands)
        try:
            return self.run(syntax.parse(text, self.script.name))
        finally:
            self.num_calls -= 1
            line = words[0].line if words else None
            for command in self.script.commands[count:]:
                command[:] = [replace(word, line=line) for word in command]

    # --- Assignments ---

    def _assign(self, raw: str, line: int) -> str:
        """Assign a value and return the name of the variable."""
        match = _ASSIGNMENT.fullmatch(raw)
        assert match is not None
        name, index, appends, value = match.groups()
        variable = _variable(value.strip(), line, self.scope)
        if index is not None:
            variable = _without_value(name, f"{name}{index} is an element of an array", line)
        elif appends and name in self.scope.variables:
            before = self.scope.variables[name]
            words = (*before.words, *variable.words)
            problem = before.problem or variable.problem
            variable = Variable(before.text + variable.text, words, problem)
        if len(variable.text) > MAX_CHARACTERS or len(variable.words) > MAX_CHARACTERS:
            raise MsrlError(f"{self.script.name}:{line}: {name}: its value is too long.")
        self.scope.variables[name] = variable
        if name in self.script.exported:
            self.script.exported[name] = _exported_word(variable, line)
        return name

    def _declare(self, source: str, line: int) -> bool | None:
        raw_words = [raw for raw, _ in _raw_words(source)]
        options = "".join(raw for raw in raw_words[1:] if re.fullmatch(r"[-+]\w+", raw))
        exports = raw_words[0] == "export" or "x" in options
        status = True
        for raw in raw_words[1:]:
            if re.fullmatch(r"[-+]\w+", raw):
                continue
            is_assigned = _ASSIGNMENT.fullmatch(raw) is not None
            texts = [raw] if is_assigned else [w.text for w in expand(raw, line, self.scope)]
            for text in texts:
                if "=" in text and not _ASSIGNMENT.fullmatch(text):
                    status = False  # bash reports the name and continues
                    continue
                name = self._assign(text, line) if "=" in text else text
                if exports and name in self.scope.variables:
                    self.script.exported[name] = _exported_word(self.scope.variables[name], line)
        return status

    def _export_prefix(self, raw: str, line: int) -> None:
        """Export a variable that is set for one command (`NAME=value program`)."""
        match = _ASSIGNMENT.fullmatch(raw)
        assert match is not None
        variable = _variable(match[4], line, self.scope)
        self.script.exported[match[1]] = _exported_word(variable, line)


def _raw_words(source: str) -> list[tuple[str, int]]:
    """Return the words of a command as they are written, with their positions."""
    words: list[tuple[str, int]] = []
    pos = 0
    while pos < len(source):
        if source[pos].isspace() or source.startswith("\\\n", pos):
            pos += 1 if source[pos].isspace() else 2
            continue
        if source[pos] == "#":
            end = source.find("\n", pos)
            pos = len(source) if end < 0 else end
            continue
        end = syntax.word_end(source, pos)
        words.append((source[pos:end], pos))
        pos = end
    return words


def _merged(name: str, branches: Sequence[dict[str, Variable]], line: int) -> Variable:
    values = [variables.get(name) for variables in branches]
    first = values[0]
    if first is not None and all(
        value is not None and _texts(value) == _texts(first) for value in values
    ):
        return first
    return _without_value(name, f"${name} depends on a condition of line {line}", line)


def _texts(variable: Variable) -> tuple[object, ...]:
    return variable.text, variable.problem, tuple(word.text for word in variable.words)


def _without_value(name: str, reason: str, line: int | None) -> Variable:
    problem = f"{reason}, which msrl does not evaluate. Replace it with its value."
    return Variable(f"${name}", (Word(f"${name}", line, problem),), problem)


def _variable(value: str, line: int, scope: Scope) -> Variable:
    """Return the value of an assignment. A placeholder with spaces stays one word."""
    if value.startswith("("):
        return _array(value, line, scope)
    if value.startswith("'") and value.endswith("'") and value.count("'") == 2:
        return Variable(value[1:-1], tuple(Word(word, line) for word in value[1:-1].split()))
    inner = _unquoted(value)
    whole = (
        expand_text(inner, line, scope) if inner != value else _joined(expand(value, line, scope))
    )
    if is_placeholder(whole.text) and "--" not in whole.text:
        return Variable(whole.text, (Word(whole.text, line, whole.problem),), whole.problem)
    if inner != value or not whole.problem:
        return Variable(whole.text, tuple(expand(inner, line, scope)), whole.problem)
    return Variable(whole.text, whole.words, whole.problem)


def _array(value: str, line: int, scope: Scope) -> Variable:
    words = tuple(expand(value.strip()[1:-1], line, scope))
    if any(re.match(r"\[[^\]]*\]=", word.text) for word in words):
        return _without_value("ARRAY", "an array has names as indices", line)
    return Variable(" ".join(word.text for word in words), words)


def _joined(words: Sequence[Word]) -> Variable:
    problem = next((word.problem for word in words if word.problem), "")
    return Variable(" ".join(word.text for word in words), tuple(words), problem)


def _exported_word(variable: Variable, line: int | None) -> Word:
    return Word(variable.text, line, variable.problem)


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
