"""User functions as reward sources, configured as `path/file.py:function`.

They run only in the worker processes of `pool.py`. This module parses their files without executing
them. A function has the signature of a verifier's `score`: `(response, answer, **options)`, and
receives `extra` if it has such a parameter.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

from msrl.errors import nearest

_Definition = ast.FunctionDef | ast.AsyncFunctionDef


def split(function: str) -> tuple[str, str]:
    """Split `path/file.py:function` into the path and the name of the function."""
    file, _, name = function.rpartition(":")
    return file, name


def mistake(function: str, options: Mapping[str, object]) -> str | None:
    """Return the reason why a function cannot be called with these options.

    Returns None if the source text shows no problem.
    """
    file, name = split(function)
    if not file or not name.isidentifier():
        return "must be path/file.py:function"
    if not Path(file).is_file():
        return f"file {file} does not exist"
    try:
        tree = ast.parse(Path(file).read_bytes(), file)
    except (SyntaxError, ValueError) as error:
        return f"{file} is not Python: {error}"
    definitions = dict(_module_names(tree.body))
    if name not in definitions:
        hint = nearest(name, definitions) if definitions else "it defines nothing"
        return f"{file} defines no {name}; {hint}"
    return _signature_mistake(definitions[name], options)


def _module_names(body: Iterable[ast.stmt]) -> Iterable[tuple[str, _Definition | None]]:
    """Yield the names that a module binds at its top level; functions with their definition."""
    for statement in body:
        if isinstance(statement, _Definition):
            yield statement.name, statement
        elif isinstance(statement, ast.ImportFrom | ast.Import):
            yield from ((alias.asname or alias.name, None) for alias in statement.names)
        elif isinstance(statement, ast.Assign):
            names = [target for target in statement.targets if isinstance(target, ast.Name)]
            yield from ((target.id, None) for target in names)


def _signature_mistake(definition: _Definition | None, options: Mapping[str, object]) -> str | None:
    if definition is None:
        return None
    if isinstance(definition, ast.AsyncFunctionDef):
        return f"{definition.name} is asynchronous; use a plain function"
    parameters = definition.args
    positional = [*parameters.posonlyargs, *parameters.args]
    if len(positional) < 2 and parameters.vararg is None:
        return f"{definition.name} must take (response, answer)"
    known = {argument.arg for argument in [*positional[2:], *parameters.kwonlyargs]}
    unknown = [name for name in options if name not in known]
    if unknown and parameters.kwarg is None:
        hint = nearest(unknown[0], known) if known else "it takes no options"
        return f"{definition.name} takes no option {unknown[0]}; {hint}"
    return None
