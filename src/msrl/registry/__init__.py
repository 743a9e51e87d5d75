"""Plugins by file name: `algorithms/advantages/rloo.py` provides `estimator: rloo`.

A plugin is a module of a plugin package; it is imported when it is used. Its main function has the
name that the package documents, and the keyword-only parameters of that function are the plugin's
options (`options:` in the configuration).
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Union, get_type_hints

from msrl.errors import MsrlError, nearest


def names(package: str) -> tuple[str, ...]:
    """Return the sorted plugin names of a package such as `msrl.rewards.verifiers`.

    The plugins are not imported.
    """
    module = importlib.import_module(package)
    return tuple(
        sorted(m.name for m in pkgutil.iter_modules(module.__path__) if not m.name.startswith("_"))
    )


def no_plugin(package: str, name: str, aliases: Iterable[str] = ()) -> str:
    """Return the error message about an unknown plugin, with similar names.

    A package may define `SENSES`, synonyms that users try.
    """
    senses: Mapping[str, Sequence[str]] = getattr(importlib.import_module(package), "SENSES", {})
    hint = nearest(name, [*names(package), *aliases], senses)
    return f"there is no such plugin in {package.removeprefix('msrl.')}; {hint}"


def load(package: str, name: str, *, key: str) -> ModuleType:
    """Return the module of plugin `name`.

    Raises:
        MsrlError: the plugin does not exist. The message names the configuration `key`.
    """
    _require(package, name, key)
    return importlib.import_module(f"{package}.{name}")


def _require(package: str, name: str, key: str) -> None:
    if name not in names(package):
        raise MsrlError(f"{key}={name}: {no_plugin(package, name)}")


def declaration(package: str, name: str, *, key: str) -> Declaration:
    """Return the declarations in the file of plugin `name`, without importing it.

    Raises:
        MsrlError: the plugin does not exist. The message names the configuration `key`.
    """
    _require(package, name, key)
    return _declaration(package, name)


def plugin_options(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the options of a plugin.

    They are the keyword-only parameters of its main function that have a default.
    """
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}


def check_options(
    function: Callable[..., Any], options: Mapping[str, object], *, key: str
) -> dict[str, Any]:
    """Return `options` as keyword arguments of `function`.

    Raises:
        MsrlError: an option is unknown or has a value of another type.
    """
    known = plugin_options(function)
    unknown = [name for name in options if name not in known]
    if unknown:
        hint = nearest(unknown[0], known) if known else "the plugin has no options"
        raise MsrlError(f"{key}.{unknown[0]}: unknown option; {hint}")
    errors = wrong_values(function, options)
    if errors:
        lines = (f"{key}.{name}={options[name]}: {message}" for name, message in errors.items())
        raise MsrlError("; ".join(lines))
    return dict(options)


def wrong_values(function: Callable[..., Any], options: Mapping[str, object]) -> dict[str, str]:
    """Return error messages by option name for values of the wrong type."""
    return _wrong_values(get_type_hints(function), options) if options else {}


def _wrong_values(types: Mapping[str, Any], options: Mapping[str, object]) -> dict[str, str]:
    from pydantic import TypeAdapter, ValidationError

    errors = dict[str, str]()
    for name, value in options.items():
        try:
            TypeAdapter(types.get(name, Any)).validate_python(value, strict=True)
        except ValidationError as error:
            errors[name] = error.errors(include_url=False)[0]["msg"]
    return errors


@dataclass(frozen=True, slots=True)
class Declaration:
    """Declarations in the file of a plugin, read from its syntax tree.

    The file is not imported, because its imports may be heavy.
    """

    constants: Mapping[str, object]
    aliases: Mapping[str, ast.expr]
    functions: Mapping[str, ast.FunctionDef]

    def constant(self, name: str, default: Any = None) -> Any:
        """Return the literal that the file assigns to `name`, or `default`."""
        return self.constants.get(name, default)

    def has_parameter(self, function: str, name: str) -> bool:
        """Return True if `function` has a parameter of this name."""
        arguments = self.functions[function].args
        return name in {
            argument.arg
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        }

    def options(self, function: str) -> dict[str, Any]:
        """Return the types of the options of `function` by name.

        Options are the keyword-only parameters that have a default.
        """
        arguments = self.functions[function].args
        pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        return {
            argument.arg: self._type(argument.annotation)
            for argument, default in pairs
            if default is not None
        }

    def wrong_values(self, function: str, options: Mapping[str, object]) -> dict[str, str]:
        """Return messages for option values that do not fit their annotations, by name."""
        return _wrong_values(self.options(function), options) if options else {}

    def _type(self, annotation: ast.expr | None) -> Any:
        """Return the type that an annotation describes.

        Plain types, unions and literals are supported. The type of other annotations is Any.
        """
        match annotation:
            case ast.Name(id=name) if name in self.aliases:
                return self._type(self.aliases[name])
            case ast.Name(id=name):
                return _PLAIN_TYPES.get(name, Any)
            case ast.Constant(value=None):
                return None
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return Union[self._type(left), self._type(right)]  # noqa: UP007 - the operands are known at run time only
            case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
                value = ast.literal_eval(choices)
                return Literal[value]  # pyright: ignore[reportInvalidTypeForm] - the choices are known at run time only
            case _:
                return Any


_PLAIN_TYPES: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str)}


@functools.cache
def _declaration(package: str, name: str) -> Declaration:
    path = Path(importlib.import_module(package).__path__[0]) / f"{name}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    constants, aliases = dict[str, object](), dict[str, ast.expr]()
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            target = node.targets[0].id
            try:
                constants[target] = ast.literal_eval(node.value)
            except ValueError:
                aliases[target] = node.value
    return Declaration(constants, aliases, functions)
