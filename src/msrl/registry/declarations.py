"""Declarations in the file of a plugin: constants and options of its main function.

They are read from the syntax tree, because the imports of a plugin may be heavy.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

from msrl import registry
from msrl.registry import own


def declaration(package: str, name: str, *, key: str) -> Declaration:
    """Return the declarations in the file of plugin `name`, without importing it.

    Raises:
        MsrlError: the plugin does not exist. The message names the configuration `key`.
    """
    registry.require(package, name, key=key)
    if own.is_own(name):
        file, attribute = own.split(name)
        return _read(file, {attribute: registry.MAIN_FUNCTIONS[package]})
    return _declaration(package, name)


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

    def option_defaults(self, function: str) -> dict[str, Any]:
        """Return the default of each option of `function`, as source text if it is no literal."""
        arguments = self.functions[function].args
        pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        return {
            argument.arg: _literal(default) for argument, default in pairs if default is not None
        }

    def wrong_values(self, function: str, options: Mapping[str, object]) -> dict[str, str]:
        """Return messages for option values that do not fit their annotations, by name."""
        return registry.type_errors(self.options(function), options) if options else {}

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


# Errors of expressions that are no literals, such as a list as a key.
_NO_LITERAL = (ValueError, TypeError, RecursionError, MemoryError)
_PLAIN_TYPES: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, str)}


def _literal(expression: ast.expr) -> Any:
    """Return the value of a literal, or the source text of another expression."""
    try:
        return ast.literal_eval(expression)
    except _NO_LITERAL:
        return ast.unparse(expression)


@functools.cache
def _declaration(package: str, name: str) -> Declaration:
    return _read(str(registry.folder(package) / f"{name}.py"), {})


def _read(file: str, main: Mapping[str, str]) -> Declaration:
    """Return the declarations of a file. `main` has the plugin's name of a function by its own."""
    tree = own.parse(file)
    definitions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    functions = {main.get(node.name, node.name): node for node in definitions}
    constants, aliases = dict[str, object](), dict[str, ast.expr]()
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            target = node.targets[0].id
            try:
                constants[target] = ast.literal_eval(node.value)
            except _NO_LITERAL:
                aliases[target] = node.value
    return Declaration(constants, aliases, functions)
