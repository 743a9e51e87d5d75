"""Checks of the names and options of plugins, for every section that names some."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from msrl import registry
from msrl.config.loader import Resolved
from msrl.config.not_yet import not_yet
from msrl.errors import nearest


def plugin(resolved: Resolved, key: str, package: str, name: str, aliases: Iterable[str] = ()) -> Iterator[str]:
    """A line when a package has no plugin of this name."""
    if name not in (*registry.names(package), *aliases):
        yield resolved.mistake(key, not_yet(key, name) or registry.no_plugin(package, name, aliases))


def options(resolved: Resolved, key: str, *plugins: tuple[str, str, str], own: Collection[str] = ()) -> Iterator[str]:
    """Lines for options that none of the plugins (package, name, main function) takes, that have a key of their `own` elsewhere, or whose
    values are of another type.

    Plugins are imported only if options are given.
    """
    options: dict[str, object] = resolved.value(key)
    if not options:
        return
    functions = [getattr(registry.load(package, name, key=key), main) for package, name, main in plugins]
    known = sorted({option for function in functions for option in registry.options_of(function)} - set(own))
    for option in options:
        if option not in known:
            yield resolved.mistake(f"{key}.{option}", f"not an option here; {nearest(option, known) if known else 'it takes none'}")
    for function in functions:
        mine = {option: value for option, value in options.items() if option in registry.options_of(function)}
        for option, what in registry.wrong_values(function, mine).items():
            yield resolved.mistake(f"{key}.{option}", what)
