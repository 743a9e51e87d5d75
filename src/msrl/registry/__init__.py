"""Plugins by file name: `algorithms/advantages/rloo.py` provides `estimator: rloo`.

A plugin is a module of a plugin package; it is imported when it is used. Its main function has the
name that the package documents, and the keyword-only parameters of that function are the plugin's
options (`options:` in the configuration). `declarations.py` reads them without an import.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast, get_type_hints

import msrl
from msrl.errors import MsrlError, nearest, validation_problem
from msrl.registry import own

# Packages of plugins. `names` lists their files without an import, so that the schema of the
# configuration can offer the plugins of packages above it as choices.
ADVANTAGES = "msrl.algorithms.advantages"
BENCHMARKS = "msrl.workflows.evaluate.benchmarks"
DIVERGENCES = "msrl.algorithms.divergences"
ENVIRONMENTS = "msrl.environments.builtin"
FAMILIES = "msrl.models.families"
HANDLERS = "msrl.data.handlers"
LOSSES = "msrl.algorithms.losses"
PLATFORMS = "msrl.platforms"
PREFERENCES = "msrl.algorithms.preference"
SAMPLERS = "msrl.data.samplers"
TASKS = "msrl.data.tasks"
TOOL_FORMATS = "msrl.environments.tool_formats"
TRACKERS = "msrl.tracking.trackers"
VERIFIERS = "msrl.rewards.verifiers"
# Functions of plugins that may also be in a file of the user; a tool format is an object.
MAIN_FUNCTIONS = {
    ADVANTAGES: "advantages",
    DIVERGENCES: "divergence",
    LOSSES: "policy_loss",
    PREFERENCES: "preference_loss",
    TOOL_FORMATS: "",
    VERIFIERS: "score",
}
_INTERFACE = "base"  # module of a plugin package that defines what its plugins implement


def names(package: str) -> tuple[str, ...]:
    """Return the sorted plugin names of a package such as `msrl.rewards.verifiers`.

    Neither the package nor its plugins are imported. Files with a leading underscore are helpers.
    """
    files = (file.stem for file in folder(package).glob("*.py"))
    return tuple(sorted(name for name in files if name[0] != "_" and name != _INTERFACE))


def task_package(text: str) -> str | None:
    """Return the plugin of TASKS that generates the rows of `PLUGIN:TASK?KEY=VALUE`, or None."""
    name, separator, _ = text.partition(":")
    return name if separator and name in names(TASKS) else None


def folder(package: str) -> Path:
    """Return the folder of a package of msrl."""
    return Path(msrl.__file__).parent.joinpath(*package.split(".")[1:])


def no_plugin(package: str, name: str) -> str:
    """Return the error message about an unknown plugin, with similar names.

    A package may define `SENSES`, synonyms that users try.
    """
    senses: Mapping[str, Sequence[str]] = getattr(importlib.import_module(package), "SENSES", {})
    hint = nearest(name, names(package), senses)
    return f"there is no such plugin in {package.removeprefix('msrl.')}; {hint}"


def load(package: str, name: str, *, key: str) -> ModuleType:
    """Return the module of plugin `name`, or of `path/file.py:NAME`.

    Raises:
        MsrlError: the plugin does not exist. The message names the configuration `key`.
    """
    if package in MAIN_FUNCTIONS and own.is_own(name):
        return own.load(name, MAIN_FUNCTIONS[package], key)
    require(package, name, key=key)
    return importlib.import_module(f"{package}.{name}")


def require(package: str, name: str, *, key: str) -> None:
    """Raise MsrlError, with the configuration `key`, if there is no plugin of this name."""
    if package in MAIN_FUNCTIONS and own.is_own(name):
        own.require(name, key)
    elif name not in names(package):
        raise MsrlError(f"{key}={name}: {no_plugin(package, name)}")


def plugin_options(
    function: Callable[..., Any], *, with_required: bool = False
) -> dict[str, inspect.Parameter]:
    """Return the options of a plugin: keyword-only parameters of its main function by name.

    Those without a default are arguments that msrl passes, unless `with_required` is set.
    """
    parameters = inspect.signature(function).parameters.values()
    return {
        parameter.name: parameter
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
        and (with_required or parameter.default is not parameter.empty)
    }


def check_options(
    function: Callable[..., Any],
    options: Mapping[str, object],
    *,
    key: str,
    with_required: bool = False,
) -> dict[str, Any]:
    """Return `options` as keyword arguments of `function`.

    Raises:
        MsrlError: an option is unknown, is missing or has a value of another type.
    """
    known = plugin_options(function, with_required=with_required)
    unknown = [name for name in options if name not in known]
    if unknown:
        hint = nearest(unknown[0], known) if known else "the plugin has no options"
        raise MsrlError(f"{key}.{unknown[0]}: unknown option; {hint}")
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in options:
            raise MsrlError(f"{key}.{name}: not set. The plugin requires it.")
    errors = wrong_values(function, options)
    if errors:
        lines = (f"{key}.{name}={options[name]}: {message}" for name, message in errors.items())
        raise MsrlError("; ".join(lines))
    return dict(options)


def wrong_values(function: Callable[..., Any], options: Mapping[str, object]) -> dict[str, str]:
    """Return error messages by option name for values of the wrong type."""
    return type_errors(get_type_hints(function), options) if options else {}


def type_errors(types: Mapping[str, Any], options: Mapping[str, object]) -> dict[str, str]:
    """Return error messages by name for values that do not have the type of that name.

    Numbers must be finite.
    """
    from pydantic import TypeAdapter, ValidationError

    errors = dict[str, str]()
    for name, value in options.items():
        try:
            TypeAdapter(types.get(name, Any)).validate_python(value, strict=True)
        except ValidationError as error:
            errors[name] = validation_problem(error.errors(include_url=False)[0])
        if not _is_finite(value):
            errors[name] = "its numbers must be finite"
    return errors


def _is_finite(value: object) -> bool:
    """Return False if a value is, or contains, NaN or infinity."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, cast("Mapping[object, object]", value).values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, cast("Sequence[object]", value)))
    return not isinstance(value, float) or math.isfinite(value)
