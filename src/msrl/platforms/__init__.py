"""Platforms (kinds of devices).

`resolve("auto")` selects the first of npu, cuda and cpu that this machine supports.
"""

from __future__ import annotations

import importlib

from msrl.errors import MsrlError
from msrl.platforms.base import Platform

NAMES = ("npu", "cuda", "cpu")


def get(name: str) -> Platform:
    """Return the platform `name`. This machine need not support it."""
    return importlib.import_module(f"msrl.platforms.{name}").PLATFORM


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


def _first_supported() -> Platform:
    problems: list[str] = []
    for platform in map(get, NAMES):
        missing = platform.missing()
        if missing is None:
            return platform
        problems.append(f"{platform.name}: {missing}")
    raise MsrlError(
        f"cluster.platform=auto: this machine supports no platform; {'; '.join(problems)}"
    )
