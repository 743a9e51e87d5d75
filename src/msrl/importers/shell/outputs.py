"""Output of commands that only name a folder, a file, a number or the time, without a run.

These are cd, pwd, dirname, basename, realpath, readlink, echo, printf, date, expr and seq, and the
question whether Python has a package.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Sequence
from pathlib import PurePosixPath

from msrl.importers.shell.arithmetic import calculate
from msrl.importers.shell.conditions import evaluate
from msrl.importers.shell.values import Scope, Variable, Word

MAX_RANGE = 1000
_FORMAT = re.compile(r"%(%|[-0]?\d{0,3}(?:\.\d{1,3})?[sd])")
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}


def output(commands: Sequence[Sequence[str]]) -> str | None:
    """Return the output of commands that `&&` or `;` connects; None if unknown before a run."""
    if len(commands) == 2 and commands[0][:1] == ["["]:
        words = [Word(text, None) for text in commands[0][1:] if text != "]"]
        holds = evaluate([(word, "") for word in words])
        return "" if holds is False else output(commands[1:] if holds else [])
    folder = "."
    for command in commands[:-1]:
        if len(command) < 2 or command[0] != "cd":
            return None
        folder = _join_path(folder, command[1])
    last = commands[-1] if commands else ()
    program, arguments = (last[0], last[1:]) if last else (":", ())
    return _program_output(program, arguments, folder)


def _program_output(program: str, arguments: Sequence[str], folder: str) -> str | None:
    if program in (":", "true"):
        return ""
    if program == "expr":
        value = calculate(Variable(" ".join(arguments), ()), Scope(""))
        return None if value is None else str(value)
    if program == "seq":
        return _sequence(arguments)
    if program == "printf":
        return printf_output(arguments)
    texts = {"pwd": folder, "echo": " ".join(word for word in arguments if word != "-n")}
    if program == "date" and len(arguments) <= 1:
        texts["date"] = time.strftime(arguments[0].removeprefix("+") if arguments else "%c")
    names = [word for word in arguments if not word.startswith("-")]
    return texts.get(program) or _path_output(program, names)


_PROBE = re.compile(
    r"""\s*python3?\ -c\ (?P<quote>['"])import\ (?P<name>\w+)(?P=quote)(?:\s+(?:\d|&)?>\S+)*
    \s*&&\s*echo\ (?P<yes>[\w.-]+)\s*\|\|\s*echo\ (?P<no>[\w.-]+)\s*""",
    re.X,
)


def probe_output(source: str) -> str | None:
    """Return the output of `python -c 'import NAME' && echo YES || echo NO`; None for another."""
    match = _PROBE.fullmatch(source)
    if match is None:
        return None
    return match["yes"] if importlib.util.find_spec(match["name"]) else match["no"]


def printf_output(arguments: Sequence[str]) -> str | None:
    """Return the output of printf, which repeats its format until it has read all arguments."""
    arguments = arguments[1:] if arguments[:1] == ["--"] else arguments
    if not arguments or "%" in _FORMAT.sub("", arguments[0]):
        return None
    pattern, values = arguments[0], list(arguments[1:])
    fields = [field for field in _FORMAT.findall(pattern) if field != "%"]
    try:
        text = _format_once(pattern, fields, values)
        while fields and values:
            text += _format_once(pattern, fields, values)
    except ValueError:
        return None
    return re.sub(r"\\([nt\\])", lambda match: _ESCAPES[match[1]], text)


def _format_once(pattern: str, fields: Sequence[str], values: list[str]) -> str:
    """Return the format once, and remove the values that it reads."""
    texts = [values.pop(0) if values else "" for _ in fields]
    pairs = zip(fields, texts, strict=True)
    return pattern % tuple(int(text or 0) if field[-1] == "d" else text for field, text in pairs)


def _sequence(arguments: Sequence[str]) -> str | None:
    """Return the numbers of seq, with another separator after `-s`."""
    separator, numbers = " ", list(arguments)
    if numbers and numbers[0].startswith("-s"):
        separator = numbers.pop(0)[2:] or (numbers.pop(0) if numbers else " ")
    if not 1 <= len(numbers) <= 3 or not all(_INTEGER.fullmatch(text) for text in numbers):
        return None
    values = [int(text) for text in numbers]
    first, last = (1 if len(values) == 1 else values[0]), values[-1]
    step = values[1] if len(values) == 3 else 1
    if step == 0:
        return None
    items = range(first, last + (1 if step > 0 else -1), step)[:MAX_RANGE]
    return separator.join(map(str, items))


def _path_output(program: str, names: Sequence[str]) -> str | None:
    if not names:
        return None
    path = PurePosixPath(names[0])
    if program == "dirname":
        return str(path.parent)
    if program == "basename":
        return path.name.removesuffix(names[1]) if len(names) > 1 else path.name
    return str(path) if program in ("realpath", "readlink") else None


def _join_path(folder: str, name: str) -> str:
    """Return a folder and a name below it, without `..` where that is possible."""
    return os.path.normpath(os.path.join(folder, name))  # noqa: PTH118  (paths of another machine)
