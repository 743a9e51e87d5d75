"""Checks of plugin names and plugin options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msrl import registry
from msrl.config.effects import ROLLOUTS
from msrl.config.loader import Resolved
from msrl.config.unsupported import not_yet
from msrl.errors import nearest
from msrl.registry import own
from msrl.registry.declarations import Declaration, declaration


def check_plugin_name(resolved: Resolved, key: str, package: str, name: str) -> Iterator[str]:
    """Check that a package has a plugin with this name."""
    if package in registry.MAIN_FUNCTIONS and own.is_own(name):
        if problem := own.mistake(name):
            yield resolved.mistake(key, problem)
    elif name not in registry.names(package):
        yield resolved.mistake(key, not_yet(key, name) or registry.no_plugin(package, name))


def check_options(resolved: Resolved, key: str, *plugins: tuple[str, str, str]) -> Iterator[str]:
    """Check the options under `key` against plugins, given as (package, name, main function).

    Plugins are not imported.
    """
    options: dict[str, object] = resolved.value(key)
    if not options:
        return
    declared = [(declaration(package, name, key=key), main) for package, name, main in plugins]
    known = sorted({option for plugin, main in declared for option in plugin.options(main)})
    for option in options:
        if option not in known:
            choices = nearest(option, known) if known else "the plugins have no options"
            yield resolved.mistake(f"{key}.{option}", f"unknown option; {choices}")
    for plugin, main in declared:
        values = {
            option: value for option, value in options.items() if option in plugin.options(main)
        }
        for option, message in plugin.wrong_values(main, values).items():
            yield resolved.mistake(f"{key}.{option}", message)
        yield from _check_ranges(resolved, key, options, plugin)


def _check_ranges(
    resolved: Resolved, key: str, options: Mapping[str, object], plugin: Declaration
) -> Iterator[str]:
    """Check numbers under `key` against the `OPTION_RANGES` of a plugin.

    A range is a lower bound, which is excluded, and an upper bound, which is included, or None.
    """
    for option, (low, high) in plugin.constant("OPTION_RANGES", {}).items():
        value = options.get(option)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if value <= low or (high is not None and value > high):
            yield resolved.mistake(f"{key}.{option}", _range_text(low, high))


def _range_text(low: float, high: float | None) -> str:
    """Describe a range. A lower bound just below 0 means that 0 is allowed."""
    lower = "at least 0" if round(low, 6) == 0 > low else f"above {low:g}"
    return f"must be {lower}" + ("" if high is None else f" and at most {high:g}")


# Keys whose plugin may be a function in a file of the user: its package, the commands that read the
# key, and the number of its positional parameters.
_FUNCTIONS = {
    "algo.advantage.estimator": (registry.ADVANTAGES, ROLLOUTS, 1),
    "algo.distill.divergence": (registry.DIVERGENCES, ROLLOUTS, 2),
    "algo.policy_loss": (registry.LOSSES, ROLLOUTS, 1),
    "algo.preference.loss": (registry.PREFERENCES, ("train-dpo",), 1),
}


def check_own_plugins(resolved: Resolved, command: str) -> Iterator[str]:
    """Yield a line for each function in a file of the user that does not exist or does not fit."""
    for key, (package, commands, count) in _FUNCTIONS.items():
        name: str = resolved.value(key)
        if command not in commands or not own.is_own(name):
            continue
        if problem := own.mistake(name):
            yield resolved.mistake(key, problem)
            continue
        functions = declaration(package, name, key=key).functions
        function = functions.get(registry.MAIN_FUNCTIONS[package])
        if function is None:
            yield resolved.mistake(key, "is no function that the file defines. Name one.")
        elif len(function.args.posonlyargs + function.args.args) != count:
            arguments = "one positional argument" if count == 1 else "two positional arguments"
            remedy = "Change the function: options are keyword-only parameters."
            yield resolved.mistake(key, f"must take {arguments}. {remedy}")
