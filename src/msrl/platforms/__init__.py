"""Devices: `resolve("auto")` picks npu, then cuda, then cpu, whichever this machine has."""

from __future__ import annotations

import importlib

from msrl.errors import MsrlError
from msrl.platforms.base import Platform

NAMES = ("npu", "cuda", "cpu")


def get(name: str) -> Platform:
    """The platform of that name, whether or not this machine has it."""
    return importlib.import_module(f"msrl.platforms.{name}").PLATFORM


def resolve(name: str = "auto") -> Platform:
    """The platform to run on. Raises MsrlError when something is missing: of the one that was asked for, or of each."""
    if name == "auto":
        return _first()
    platform = get(name)
    missing = platform.missing()
    if missing:
        raise MsrlError(f"cluster.platform={name}: {missing}")
    return platform


def _first() -> Platform:
    lacking: list[str] = []
    for platform in map(get, NAMES):
        missing = platform.missing()
        if missing is None:
            return platform
        lacking.append(f"{platform.name}: {missing}")
    raise MsrlError(f"cluster.platform=auto: this machine is ready for none; {'; '.join(lacking)}")
