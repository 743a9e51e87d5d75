"""Commands and flags of a shell script.

The script is interpreted as bash would run it: variables, arrays, functions, branches, loops and
conditions that compare texts. No program is started: `$NAME` is the value that the script assigns,
else the environment's value. A value that is known only at run time has a problem instead of a
text, and so has a variable that differs between the branches of a condition on such a value.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from msrl.config.sources import Node, Origin, scalar
from msrl.errors import ManyErrors, MsrlError
from msrl.files import read_user_text
from msrl.importers.placeholders import is_placeholder
from msrl.importers.shell import syntax
from msrl.importers.shell.arithmetic import calculate, unknown_result
from msrl.importers.shell.expanded_conditions import holds
from msrl.importers.shell.expansion import expand, expand_text, expand_value
from msrl.importers.shell.outputs import printf_output
from msrl.importers.shell.values import EMPTY, Scope, Variable, Word, unquote
from msrl.importers.table import canonical
from msrl.limits import whole_number

MAX_REPEATS = 1000
MAX_CALLS = 50
MAX_STEPS = 20_000
MAX_CHARACTERS = 1_000_000  # of one variable
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
_DECLARATIONS = ("export", "local", "readonly", "declare", "typeset")
_PRINTING = ("echo", "printf", "cat")
_READING = ("xargs", "parallel")  # programs that run another one with the words that they read
# Programs whose exit status depends on the machine.
_CHECKING = (
    "grep", "egrep", "which", "command", "type", "pgrep", "diff", "cmp", "lsof", "nc", "ping",
    "read", "getopts", "nvidia-smi", "npu-smi", "wait", "hash",
)  # fmt: skip


@dataclass(slots=True)
class Script:
    """Commands of a script in order, and the variables that it sets.

    `sources` are the files that it includes by `source`; None for a file that was not read.
    `repairs` are lines that bash reads differently, with the reason.
    """

    name: str
    commands: list[list[Word]] = field(default_factory=list[list[Word]])
    exported: dict[str, Word] = field(default_factory=dict[str, Word])
    sources: list[tuple[Word, Path | None]] = field(default_factory=list[tuple[Word, Path | None]])
    repairs: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    scope: Scope = field(init=False)

    def __post_init__(self) -> None:
        self.scope = Scope(self.name)


class _StopError(Exception):
    """End of a script (`exit`), function (`return`) or loop (`break`, `continue`)."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def parse_script(text: str, name: str, arguments: Sequence[str] = ()) -> Script:
    """Return the commands of a script that is called with arguments ($1, $2, ...).

    Words of unknown text have a problem.

    Raises:
        MsrlError: the text is not a shell script.
    """
    text = text.removeprefix("\ufeff")
    interpreter = _Interpreter(Script(name, repairs=syntax.repairs(text)))
    interpreter.scope.arguments = tuple(Word(argument, None) for argument in arguments)
    try:
        interpreter.run(syntax.parse(text, name))
    except _StopError:
        return interpreter.script
    except RecursionError:
        raise MsrlError(f"{name}: is nested too deeply. Use fewer levels.") from None
    return interpreter.script


class _Interpreter:
    """Execution of commands. The status of a command is None if it is known only at run time."""

    def __init__(self, script: Script) -> None:
        self.script, self.scope = script, script.scope
        self.functions: dict[str, syntax.Node] = {}
        self.locals: list[dict[str, Variable | None]] = []  # hidden values, by function call
        self.exports_all = False
        self.num_unknown = 0  # open branches whose condition is not known
        self.num_calls, self.num_steps, self.num_sources = 0, 0, 0

    def run(self, nodes: Sequence[syntax.Node]) -> bool | None:
        """Run commands and return the status of the last one."""
        status: bool | None = True
        for node in nodes:
            status = self.run_node(node)
        return status

    def run_node(self, node: syntax.Node) -> bool | None:
        self.num_steps += 1
        if self.num_steps > MAX_STEPS:
            raise MsrlError(
                f"{self.scope.path}: the script runs more than {MAX_STEPS:,} commands. Remove its "
                "long loops."
            )
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
        for operator, pipeline in node.pipelines:
            if operator and status is not None and status != (operator == "&&"):
                continue
            if operator and status is None:
                self._run_branches(node.line, partial(self.run_node, pipeline))
            else:
                status = self.run_node(pipeline)
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
                return self._run_branches(node.line, *bodies, is_complete=True)
        return self._run_branches(node.line, *bodies) if bodies else True

    def _case(self, node: syntax.CaseCommand) -> bool | None:
        word = _join_words(expand(node.word, node.line, self.scope))
        if word.problem:
            bodies = [partial(self.run, body) for _, body, _ in node.branches]
            return self._run_branches(node.line, *bodies)
        status: bool | None = True
        is_falling = False
        for patterns, body, end in node.branches:
            if not is_falling and not self._matches(word.text, patterns, node.line):
                continue
            status = self.run(body)
            is_falling = end == ";&"
            if end not in (";&", ";;&"):
                break
        return status

    def _matches(self, text: str, patterns: Sequence[str], line: int) -> bool:
        """Return True if a pattern of a branch matches. Quoted patterns are texts."""
        for pattern in patterns:
            globbed = expand_text(unquote(pattern), line, self.scope.with_empty()).text
            if text == globbed if pattern[:1] in "'\"" else fnmatch.fnmatchcase(text, globbed):
                return True
        return False

    def _run_branches(
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
        self.scope.variables = {name: _merge_branches(name, branches, line) for name in names}
        return None

    # --- Loops and functions ---

    def _for(self, node: syntax.For) -> bool | None:
        if node.arithmetic is not None:
            return self._run_counted_loop(node, node.arithmetic.split(";"))
        words = expand(node.words, node.line, self.scope, may_cut=True)
        for word in words[:MAX_REPEATS]:
            self.scope.variables[node.name] = Variable(word.text, (word,), word.problem)
            if self._repeat(node.body):
                return True
        if len(words) <= MAX_REPEATS:
            return True
        self.scope.variables[node.name] = unknown_result(node.name, node.line)
        return self._end_unfinished_loop(node)

    def _run_counted_loop(self, node: syntax.For, expressions: Sequence[str]) -> bool | None:
        """Run `for ((first; condition; change))`."""
        first, condition, change = (*expressions, "", "", "")[:3]
        self._calculate(first, node.line)
        for _ in range(MAX_REPEATS):
            value = self._calculate(condition, node.line) if condition.strip() else 1
            if value is None:
                self._forget(first, node.line)
                return self._run_branches(node.line, partial(self._repeat, node.body))
            if value == 0 or self._repeat(node.body):
                return True
            self._calculate(change, node.line)
        self._forget(first, node.line)
        return self._end_unfinished_loop(node)

    def _calculate(self, text: str, line: int) -> int | None:
        unset: list[str] = []
        value = calculate(expand_text(text, line, self.scope), self.scope, unset)
        for name in unset:
            self.scope.empty.setdefault(name, line)
        return value

    def _while(self, node: syntax.While) -> bool | None:
        for _ in range(MAX_REPEATS):
            status = self.run(node.condition)
            if status is None:
                return self._run_branches(node.line, partial(self._repeat, node.body))
            if status is node.is_until or self._repeat(node.body):
                return True
            first = node.condition[0] if node.condition else None
            if isinstance(first, syntax.Simple) and first.text in ("true", "false", ":"):
                return True  # ends by a condition that is known only at run time
        return self._end_unfinished_loop(node)

    def _end_unfinished_loop(self, node: syntax.For | syntax.While) -> bool | None:
        """End a loop at the limit of repeats. The variables that it changes have no known value."""
        return self._run_branches(node.line, partial(self._repeat, node.body))

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
        self.locals.append({})
        try:
            return self.run_node(self.functions[words[0].text])
        except _StopError as stop:
            if stop.kind != "return":
                raise
            return True
        finally:
            self.scope.arguments = arguments
            self.num_calls -= 1
            self._restore(self.locals.pop())

    def _restore(self, variables: Mapping[str, Variable | None]) -> None:
        """Give variables their earlier values; None removes one."""
        for name, variable in variables.items():
            if variable is None:
                self.scope.variables.pop(name, None)
            else:
                self.scope.variables[name] = variable

    # --- Simple commands ---

    def _arithmetic(self, node: syntax.Arithmetic) -> bool | None:
        value = self._calculate(node.text, node.line)
        if value is None:
            self._forget(node.text, node.line)
        return None if value is None else value != 0

    def _forget(self, expression: str, line: int) -> None:
        """Give the variable that an expression assigns a value that is not known."""
        name = re.match(r"\s*([A-Za-z_]\w*)\s*(?:[-+*/%&|^]?=(?!=)|\+\+|--)", expression)
        if name is not None:
            self.scope.variables[name[1]] = unknown_result(name[1], line)

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
            "true": self._nothing, "read": self._read, "mapfile": self._read,
            "readarray": self._read, "exit": self._stop, "return": self._stop,
            "break": self._stop, "continue": self._stop, "source": self._source,
            ".": self._source, "exec": self._exec, "printf": self._print,
        }  # fmt: skip
        if name in self.functions:
            return self._call_with(assigned, words, line)
        if name in builtins:
            return builtins[name](words)
        if name == "false" or (name == "getopts" and not self.scope.arguments):
            return False
        words, variables = _without_env(words)
        if any(word.text.rpartition("/")[2] in _READING for word in words):
            problem = "adds words that it reads. Write them in the command"
            words = [*words, Word(name, line, problem)]
        for word in variables:
            self.script.exported[word.text.partition("=")[0]] = replace(
                word, text=word.text.partition("=")[2]
            )
        if name not in _PRINTING:
            for raw in assigned:
                self._export_prefix(raw, line)
            self.script.commands.append(words)
        return None if name in _CHECKING or words[0].problem else True

    def _call_with(self, assigned: Sequence[str], words: Sequence[Word], line: int) -> bool | None:
        """Call a function with the variables that are set for this call (`NAME=value f`)."""
        names = [raw.partition("=")[0].removesuffix("+") for raw in assigned]
        before = {name: self.scope.variables.get(name) for name in names}
        for raw in assigned:
            self._assign(raw, line)
        try:
            return self._call(words)
        finally:
            self._restore(before)

    def _source(self, words: Sequence[Word]) -> bool | None:
        """Run the commands of another file, if it is there."""
        name = words[1] if len(words) > 1 else Word("", None)
        file = None if name.problem else _sourced_file(name.text, self.script.name)
        if file is None or self.num_calls >= MAX_CALLS:
            self.script.sources.append((name, None))
            return None
        self.script.sources.append((name, file))
        self.num_calls += 1
        self.num_sources += 1
        try:
            text = read_user_text(file)
        except MsrlError:
            return False
        try:
            return self.run(syntax.parse(text, str(file)))
        except _StopError as stop:
            if stop.kind != "return":
                raise
            return True
        finally:
            self.num_calls -= 1
            self.num_sources -= 1

    def _exec(self, words: list[Word]) -> bool | None:
        """Run a program in place of the script, which ends."""
        if len(words) < 2:
            return True
        self._command(words[1:], (), words[0].line or 0)
        if self.num_unknown:
            return None
        raise _StopError("exit")

    def _print(self, words: Sequence[Word]) -> bool | None:
        """Assign the output of `printf -v NAME FORMAT ...`."""
        if len(words) < 4 or words[1].text != "-v":
            return True
        name, line = words[2].text, words[0].line
        text = (
            None
            if any(word.problem for word in words)
            else printf_output([w.text for w in words[3:]])
        )
        value = _without_value(name, f"${name} is the output of printf", line)
        self.scope.variables[name] = (
            value if text is None else _split(text, line or 0, [], self.scope)
        )
        return True

    def _nothing(self, words: Sequence[Word]) -> bool | None:
        return True

    def _stop(self, words: Sequence[Word]) -> bool | None:
        """End a loop, a function or the script. Failures are checks that msrl does not make."""
        kind = words[0].text
        fails = len(words) > 1 and words[1].text != "0"
        if kind in ("exit", "return") and fails:
            return False
        if kind == "return" and not self.locals and not self.num_sources:
            return False  # bash reports it and continues
        if kind == "exit" and self.num_unknown:
            return None
        raise _StopError(kind)

    def _set(self, words: Sequence[Word]) -> bool | None:
        texts = [word.text for word in words]
        self.exports_all = self.exports_all or "-a" in texts or "allexport" in texts
        self.exports_all = self.exports_all and "+a" not in texts
        if "--" in texts:
            self.scope.arguments = tuple(words[texts.index("--") + 1 :])
        return True

    def _shift(self, words: Sequence[Word]) -> bool | None:
        count = whole_number(words[1].text) if len(words) > 1 else None
        count = 1 if count is None else count
        self.scope.arguments = self.scope.arguments[count:]
        return True

    def _unset(self, words: Sequence[Word]) -> bool | None:
        for word in words[1:]:
            name, bracket, _ = word.text.partition("[")
            if bracket:
                reason = f"an item of {name} is removed"
                self.scope.variables[name] = _without_value(name, reason, word.line)
                continue
            self.scope.variables.pop(name, None)
            self.scope.removed.add(name)
            self.script.exported.pop(name, None)
        return True

    def _read(self, words: Sequence[Word]) -> bool | None:
        """Forget the variables of read, mapfile and readarray."""
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
            if value is None:
                self._forget(word.text, word.line or 0)
        return None if value is None else value != 0

    def _eval(self, words: Sequence[Word]) -> bool | None:
        return self._run_text(" ".join(word.text for word in words[1:]), words[1:])

    def _shell(self, words: Sequence[Word]) -> bool | None:
        options = [word.text for word in words[1:2]]
        if len(words) > 2 and re.fullmatch(r"-\w*c", options[0]):
            return self._run_shell(words)
        self.script.commands.append(list(words))
        return True

    def _run_shell(self, words: Sequence[Word]) -> bool | None:
        """Run `bash -c TEXT NAME ARGUMENT ...`, whose variables belong to another process."""
        scope = self.scope
        path = words[3].text if len(words) > 3 else scope.path
        self.scope = replace(
            scope, path=path, variables=dict(scope.variables), arguments=tuple(words[4:])
        )
        try:
            return self._run_text(words[2].text, words[2:3])
        except _StopError:
            return True
        finally:
            self.scope = scope

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
        refers_to_itself = re.search(rf"\$(?:{name}\b|\{{{name}\}})", value) is not None
        if refers_to_itself and self.scope.look_up(name) is None:
            self.scope.empty.setdefault(name, line)
            self.scope.variables[name] = EMPTY
        variable = _variable(value.strip(), line, self.scope)
        if index is not None:
            variable = _without_value(name, f"{name}{index} is an element of an array", line)
        elif appends and name in self.scope.variables:
            variable = _append(self.scope.variables[name], variable)
        if len(variable.text) > MAX_CHARACTERS or len(variable.words) > MAX_CHARACTERS:
            raise MsrlError(f"{self.script.name}:{line}: {name}: its value is too long.")
        self.scope.variables[name] = variable
        if name in self.script.exported or self.exports_all:
            self.script.exported[name] = _exported_word(variable, line)
        return name

    def _declare(self, source: str, line: int) -> bool | None:
        raw_words = [raw for raw, _ in _raw_words(source)]
        options = "".join(raw for raw in raw_words[1:] if re.fullmatch(r"[-+]\w+", raw))
        exports = raw_words[0] == "export" or "x" in options
        is_local = raw_words[0] in ("local", "declare", "typeset") and "g" not in options
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
                if is_local and self.locals:
                    hidden = re.split(r"\+?=|\[", text)[0]
                    self.locals[-1].setdefault(hidden, self.scope.variables.get(hidden))
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


# Files that set up a machine. Their variables have the values of msrl's environment.
_MACHINE_FILES = (
    "set_env.sh", "setenv.bash", "activate", ".bashrc", "bashrc", ".bash_profile", ".profile",
    "profile", "conda.sh",
)  # fmt: skip
MAX_SOURCE_BYTES = 1_000_000


def _sourced_file(name: str, script: str) -> Path | None:
    """Return the file of `source NAME`, relative to the working folder or the script's folder."""
    if not name or Path(name).name in _MACHINE_FILES:
        return None
    for file in (Path(name), Path(script).parent / name):
        if file.is_file() and file.stat().st_size <= MAX_SOURCE_BYTES:
            return file
    return None


def _without_env(words: list[Word]) -> tuple[list[Word], list[Word]]:
    """Return a command without `env NAME=value ...` before it, and these variables."""
    if words[0].text != "env":
        return words, []
    number = 1
    while number < len(words) and (
        _ASSIGNMENT.fullmatch(words[number].text) or words[number].text.startswith("-")
    ):
        takes_value = words[number].text in ("-u", "--unset", "-C", "--chdir")
        number += 2 if takes_value else 1
    variables = [word for word in words[1:number] if _ASSIGNMENT.fullmatch(word.text)]
    return words[number:] or words, variables


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


def _merge_branches(name: str, branches: Sequence[dict[str, Variable]], line: int) -> Variable:
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
    inner = _text_without_quotes(value)
    if value.startswith("'") and value.endswith("'") and value.count("'") == 2:
        return _split(value[1:-1], line, [], scope)
    whole = expand_text(inner, line, scope) if inner != value else expand_value(value, line, scope)
    if _is_replaced(whole.text):
        return Variable(whole.text, (Word(whole.text, line, whole.problem),), whole.problem)
    if whole.problem and inner == value:
        return whole
    words = expand(inner, line, scope) if inner != value else whole.words
    if whole.problem:
        return Variable(whole.text, tuple(words), whole.problem)
    return _split(whole.text, line, words, scope)


def _append(before: Variable, after: Variable) -> Variable:
    """Return the value of `NAME+=after`: more items of an array, or more text."""
    problem = before.problem or after.problem
    if before.is_array:
        text = f"{before.text} {after.text}".strip()
        return Variable(text, (*before.words, *after.words), problem, is_array=True)
    words, following = list(before.words), list(after.words)
    has_blank = before.text[-1:].isspace() or after.text[:1].isspace()
    if words and following and not has_blank:
        last, first = words.pop(), following.pop(0)
        words.append(
            replace(last, text=last.text + first.text, problem=last.problem or first.problem)
        )
    return Variable(before.text + after.text, (*words, *following), problem)


def _split(text: str, line: int, words: Sequence[Word], scope: Scope) -> Variable:
    """Return a text as a value. `words` are its words with their lines, if they are the same.

    Quotes in a text are characters. A placeholder in the text stays one word.
    """
    if any(" " in word.text and _is_replaced(word.text) for word in words):
        return Variable(text, tuple(words))
    texts = [text]
    for variable in scope.variables.values():
        if " " in variable.text and variable.text in text and _is_replaced(variable.text):
            texts = [text for item in texts for text in _around(item, variable.text)]
    split: list[str] = []
    for item in texts:
        split += [item] if _is_replaced(item) else item.split()
    if [word.text for word in words] != split:
        words = [Word(word, line) for word in split]
    return Variable(text, tuple(words))


def _is_replaced(text: str) -> bool:
    """Return True for a placeholder, whose value will have no blanks."""
    return is_placeholder(text) and "--" not in text


def _around(text: str, placeholder: str) -> list[str]:
    """Return a text as the parts around a placeholder, with the placeholder between them."""
    items: list[str] = []
    for piece in text.split(placeholder):
        items += [placeholder, piece]
    return items[1:]


def _array(value: str, line: int, scope: Scope) -> Variable:
    words = tuple(expand(value.strip()[1:-1], line, scope))
    if any(re.match(r"\[[^\]]*\]=", word.text) for word in words):
        return _without_value("ARRAY", "an array has names as indices", line)
    return Variable(" ".join(word.text for word in words), words, is_array=True)


def _join_words(words: Sequence[Word]) -> Variable:
    problem = next((word.problem for word in words if word.problem), "")
    return Variable(" ".join(word.text for word in words), tuple(words), problem)


def _exported_word(variable: Variable, line: int | None) -> Word:
    return Word(variable.text, line, variable.problem)


def _text_without_quotes(value: str) -> str:
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
