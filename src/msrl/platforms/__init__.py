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
    """The platform to run on. Raises MsrlError when it was asked for by name and something is missing."""
    if name == "auto":
        return next(p for p in map(get, NAMES) if p.missing() is None)
    platform = get(name)
    missing = platform.missing()
    if missing:
        raise MsrlError(f"cluster.platform={name}: {missing}")
    return platform
