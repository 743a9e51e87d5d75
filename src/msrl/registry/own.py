"""Plugins in Python files of users: `path/file.py:NAME` in place of a plugin's name.

Checks parse the file. The processes that use the plugin execute it.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msrl import user_files
from msrl.errors import MsrlError, nearest

Definition = ast.FunctionDef | ast.AsyncFunctionDef
FORM = "path/file.py:NAME"


def is_own(name: str) -> bool:
    """Return True if a plugin's name is a name in a file of the user."""
    return ":" in name or name.endswith(".py") or "/" in name


def split(name: str) -> tuple[str, str]:
    """Split `path/file.py:NAME` into the path and NAME."""
    file, _, attribute = name.rpartition(":")
    return file, attribute


def located(name: str) -> str:
    """Return a name with an absolute path, which processes with another working folder can use."""
    if not is_own(name):
        return name
    file, attribute = split(name)
    return f"{Path(file).absolute()}:{attribute}"


def mistake(name: str) -> str | None:
    """Return the reason why a file does not define NAME, or None. The file is not executed."""
    file, attribute = split(name)
    if not file.endswith(".py") or not attribute.isidentifier():
        return f"must be {FORM}"
    if not Path(file).is_file():
        return f"file {file} does not exist"
    try:
        names = definitions(parse(file))
    except (SyntaxError, ValueError) as error:
        return f"{file} is not Python: {error}"
    if attribute not in names:
        hint = nearest(attribute, names) if names else "it defines nothing"
        return f"{file} defines no {attribute}; {hint}"
    return None


def require(name: str, key: str) -> None:
    """Raise MsrlError, with the configuration `key`, if a file does not define NAME."""
    if problem := mistake(name):
        raise MsrlError(f"{key}={name}: {problem}")


def parse(file: str) -> ast.Module:
    """Return the syntax tree of a file."""
    return user_files.parse(file)


def definitions(tree: ast.Module) -> dict[str, Definition | None]:
    """Return the names that a module binds at its top level; plain functions with their tree."""
    return dict(_bound(tree))


def _bound(tree: ast.Module) -> Iterator[tuple[str, Definition | None]]:
    for statement in tree.body:
        if isinstance(statement, Definition):
            yield statement.name, None if statement.decorator_list else statement
        elif isinstance(statement, ast.ClassDef):
            yield statement.name, None
        elif isinstance(statement, ast.ImportFrom | ast.Import):
            yield from ((alias.asname or alias.name, None) for alias in statement.names)
        elif isinstance(statement, ast.Assign):
            names = [target for target in statement.targets if isinstance(target, ast.Name)]
            yield from ((target.id, None) for target in names)


@functools.cache
def load(name: str, main: str, key: str) -> Any:
    """Execute the file of a plugin, and return its module, whose function `main` is then NAME.

    Without `main`, return NAME itself.

    Raises:
        MsrlError: The file cannot be executed or does not define NAME.
    """
    require(name, key)
    file, attribute = split(name)
    module_name = f"own_{Path(file).stem}_{attribute}"
    try:
        function = user_files.load_function(file, module_name, attribute)
    except user_files.NotLoadedError as error:
        raise MsrlError(f"{key}={name}: {error}") from error
    if not main:
        return function
    module = sys.modules[module_name]
    setattr(module, main, function)
    return module
