"""Plugins by file name: `algorithms/advantages/rloo.py` is `estimator: rloo`.

A plugin is a module of a plugin package; it is imported when it is used. Its main function has the name that the package
documents, and the keyword-only parameters of that function are the plugin's options (`options:` in the configuration).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, get_type_hints

from msrl.errors import MsrlError, nearest


def names(package: str) -> tuple[str, ...]:
    """The plugin names of a package such as `msrl.rewards.verifiers`, sorted; importing none of the plugins."""
    module = importlib.import_module(package)
    return tuple(sorted(m.name for m in pkgutil.iter_modules(module.__path__) if not m.name.startswith("_")))


def no_plugin(package: str, name: str, aliases: Iterable[str] = ()) -> str:
    """Return the message about a name that no plugin of the package has, with similar ones. A package may list `SENSES` of words."""
    senses: Mapping[str, Sequence[str]] = getattr(importlib.import_module(package), "SENSES", {})
    return f"there is no such plugin in {package.removeprefix('msrl.')}; {nearest(name, [*names(package), *aliases], senses)}"


def load(package: str, name: str, *, key: str) -> ModuleType:
    """The module of plugin `name`. Raises MsrlError that names the configuration `key` when there is none."""
    if name not in names(package):
        raise MsrlError(f"{key}={name}: {no_plugin(package, name)}")
    return importlib.import_module(f"{package}.{name}")


def options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The options of a plugin: the keyword-only parameters of its main function that have a default."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}


def check_options(function: Callable[..., Any], options: Mapping[str, object], *, key: str) -> dict[str, Any]:
    """`options` as keyword arguments of `function`. Raises MsrlError for a name that it does not take, or a value of another type."""
    known = options_of(function)
    unknown = [name for name in options if name not in known]
    if unknown:
        raise MsrlError(f"{key}.{unknown[0]}: not an option here; {nearest(unknown[0], known) if known else 'it takes none'}")
    mistakes = wrong_values(function, options)
    if mistakes:
        raise MsrlError("; ".join(f"{key}.{name}={options[name]}: {what}" for name, what in mistakes.items()))
    return dict(options)


def wrong_values(function: Callable[..., Any], options: Mapping[str, object]) -> dict[str, str]:
    """What is wrong with the values of options, by name, as the annotations of the plugin's main function have it."""
    if not options:
        return {}
    from pydantic import TypeAdapter, ValidationError

    types, mistakes = get_type_hints(function), dict[str, str]()
    for name, value in options.items():
        try:
            TypeAdapter(types.get(name, Any)).validate_python(value, strict=True)
        except ValidationError as error:
            mistakes[name] = error.errors(include_url=False)[0]["msg"]
    return mistakes
