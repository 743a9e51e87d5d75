"""Checks of plugin names and plugin options."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from msrl import registry
from msrl.config.loader import Resolved
from msrl.config.unsupported import not_yet
from msrl.errors import nearest
from msrl.registry.declarations import declaration


def check_plugin_name(
    resolved: Resolved, key: str, package: str, name: str, aliases: Iterable[str] = ()
) -> Iterator[str]:
    """Check that a package has a plugin with this name."""
    if name not in (*registry.names(package), *aliases):
        yield resolved.mistake(
            key, not_yet(key, name) or registry.no_plugin(package, name, aliases)
        )


def check_options(
    resolved: Resolved, key: str, *plugins: tuple[str, str, str], own: Collection[str] = ()
) -> Iterator[str]:
    """Check the options under `key` against plugins, given as (package, name, main function).

    Options in `own` are set by another key and count as unknown. Plugins are not imported.
    """
    options: dict[str, object] = resolved.value(key)
    if not options:
        return
    declared = [(declaration(package, name, key=key), main) for package, name, main in plugins]
    known = sorted(
        {option for plugin, main in declared for option in plugin.options(main)} - set(own)
    )
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


def check_ranges(resolved: Resolved, key: str, *plugins: tuple[str, str, str]) -> Iterator[str]:
    """Check numbers under `key` against the `OPTION_RANGES` of plugins.

    A range is a lower bound, which is excluded, and an upper bound, which is included, or None.
    """
    options: dict[str, object] = resolved.value(key) or {}
    for package, name, _ in plugins:
        ranges = declaration(package, name, key=key).constant("OPTION_RANGES", {})
        for option, (low, high) in ranges.items():
            value = options.get(option)
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if value <= low or (high is not None and value > high):
                yield resolved.mistake(f"{key}.{option}", _range_text(low, high))


def _range_text(low: float, high: float | None) -> str:
    """Describe a range. A lower bound just below 0 means that 0 is allowed."""
    lower = "at least 0" if round(low, 6) == 0 > low else f"above {low:g}"
    return f"must be {lower}" + ("" if high is None else f" and at most {high:g}")
