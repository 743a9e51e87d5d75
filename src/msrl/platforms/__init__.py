"""Platforms (kinds of devices), one module each, selected by `cluster.platform: NAME`.

A module defines PLATFORM, an instance of `base.Platform`, and optionally AUTO_ORDER:
`resolve("auto")` tries the platforms in this order and selects the first that this machine
supports. It does not try a platform without AUTO_ORDER.
"""

from __future__ import annotations

from msrl import registry
from msrl.errors import MsrlError
from msrl.platforms._gloo import share_gloo_devices
from msrl.platforms._stores import bind_stores
from msrl.platforms.base import Platform
from msrl.registry.declarations import declaration

__all__ = [
    "NAMES",
    "auto_names",
    "bind_stores",
    "get",
    "resolve",
    "share_gloo_devices",
]

NAMES = registry.names(registry.PLATFORMS)


def get(name: str) -> Platform:
    """Return the platform `name`. This machine need not support it.

    Raises:
        MsrlError: There is no such platform, or its file defines no PLATFORM.
    """
    module = registry.load(registry.PLATFORMS, name, key="cluster.platform")
    platform = getattr(module, "PLATFORM", None)
    if not isinstance(platform, Platform):
        raise MsrlError(f"{module.__file__}: must define PLATFORM, an instance of a Platform class")
    return platform


def resolve(name: str = "auto") -> Platform:
    """Return the platform to run on.

    Raises:
        MsrlError: this machine does not support the platform, or for "auto" any platform.
    """
    if name == "auto":
        return _first_supported()
    platform = get(name)
    missing = platform.missing()
    if missing:
        raise MsrlError(f"cluster.platform={name}: {missing}")
    return platform


def auto_names() -> tuple[str, ...]:
    """Return the platforms that `auto` tries, in this order."""
    order = {
        name: declaration(registry.PLATFORMS, name, key="").constant("AUTO_ORDER") for name in NAMES
    }
    return tuple(sorted((name for name in NAMES if order[name] is not None), key=order.__getitem__))


def _first_supported() -> Platform:
    problems: list[str] = []
    for platform in map(get, auto_names()):
        missing = platform.missing()
        if missing is None:
            return platform
        problems.append(f"{platform.name}: {missing}")
    raise MsrlError(
        f"cluster.platform=auto: this machine supports no platform; {'; '.join(problems)}"
    )
