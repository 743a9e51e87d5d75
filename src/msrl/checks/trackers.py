"""Checks of trackers and profiles."""

from __future__ import annotations

from collections.abc import Iterator

from msrl import registry
from msrl.checks import plugins
from msrl.config.loader import Resolved
from msrl.plan import derived


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


def check_profile(resolved: Resolved) -> Iterator[str]:
    """Yield a line for each step and rank to trace that the run does not have."""
    config, profile = resolved.config, resolved.config.log.profile
    world, last = derived.world_size(config), config.train.steps
    for step in profile.steps:
        if last is not None and step > last:
            yield resolved.mistake(
                "log.profile.steps", f"has step {step}, but the run ends at train.steps={last}."
            )
    for rank in profile.ranks:
        if rank >= world:
            yield resolved.mistake(
                "log.profile.ranks", f"has rank {rank}, but the {world} ranks are counted from 0."
            )


_MAIN = "open_tracker"
