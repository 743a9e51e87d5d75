"""Functions of users, named `path/file.py:function`. They run in the workers of `pool.py` alone; here their file is read, not executed.

A function is called as a verifier's `score` is: `(response, answer, **options)`, with `extra` where it names such a parameter.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

from msrl.errors import nearest

_Definition = ast.FunctionDef | ast.AsyncFunctionDef


def split(function: str) -> tuple[str, str]:
    """The file and the name in it."""
    file, _, name = function.rpartition(":")
    return file, name


def mistake(function: str, options: Mapping[str, object]) -> str | None:
    """Why there is no such function, or why it does not take these options; None when all is in order as far as the text tells."""
    file, name = split(function)
    if not file or not name.isidentifier():
        return "must be path/file.py:function"
    if not Path(file).is_file():
        return f"there is no file {file}"
    try:
        tree = ast.parse(Path(file).read_bytes(), file)
    except (SyntaxError, ValueError) as error:
        return f"{file} is no Python: {error}"
    bound = dict(_bound(tree.body))
    if name not in bound:
        return f"{file} defines no {name}; {nearest(name, bound) if bound else 'it defines nothing'}"
    return _signature_mistake(bound[name], options)


def _bound(body: Iterable[ast.stmt]) -> Iterable[tuple[str, _Definition | None]]:
    """The names that a module binds at its top, with the definition of those that are functions."""
    for statement in body:
        if isinstance(statement, _Definition):
            yield statement.name, statement
        elif isinstance(statement, ast.ImportFrom | ast.Import):
            yield from ((alias.asname or alias.name, None) for alias in statement.names)
        elif isinstance(statement, ast.Assign):
            yield from ((target.id, None) for target in statement.targets if isinstance(target, ast.Name))


def _signature_mistake(definition: _Definition | None, options: Mapping[str, object]) -> str | None:
    if definition is None:
        return None
    if isinstance(definition, ast.AsyncFunctionDef):
        return f"{definition.name} is asynchronous; give a plain function"
    parameters = definition.args
    positional = [*parameters.posonlyargs, *parameters.args]
    if len(positional) < 2 and parameters.vararg is None:
        return f"{definition.name} must take (response, answer)"
    known = {argument.arg for argument in [*positional[2:], *parameters.kwonlyargs]}
    unknown = [name for name in options if name not in known]
    if unknown and parameters.kwarg is None:
        return f"{definition.name} takes no option {unknown[0]}; {nearest(unknown[0], known) if known else 'it takes none'}"
    return None
