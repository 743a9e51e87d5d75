"""Checks of `log.options`."""

from __future__ import annotations

from collections.abc import Iterator

from msrl import registry
from msrl.checks import plugins
from msrl.config.loader import Resolved


def check_tracker_options(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each option of a tracker that is unknown, wrong or has no effect."""
    log = resolved.config.log
    for name in log.options:
        key = f"log.options.{name}"
        if name not in registry.names(registry.TRACKERS):
            yield resolved.mistake(key, registry.no_plugin(registry.TRACKERS, name))
        elif name not in log.trackers:
            yield resolved.mistake(key, f"has no effect. Add {name} to log.trackers.")
        else:
            yield from plugins.check_options(resolved, key, (registry.TRACKERS, name, _MAIN))


_MAIN = "open_tracker"
