"""Retries of Ray's startup, which has a fixed timeout."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from msrl.errors import MsrlError

_LOG = logging.getLogger("msrl.cluster")
_NUM_STARTS = 3
# In the error of Ray 2.54 to 2.60 if the raylet is late (`ray._private.node`, `Node.__init__`). The
# timeout of 30 s cannot be changed.
_TIMED_OUT = "timed out during startup"

Started = TypeVar("Started")


def retry_timeouts(start: Callable[[], Started]) -> Started:
    """Start Ray, and retry if it timed out, as it does on a busy machine.

    Args:
        start: starts Ray; undoes everything if that fails.

    Raises:
        MsrlError: Ray timed out every time.
    """
    for attempt in range(1, _NUM_STARTS + 1):
        try:
            return start()
        except Exception as error:
            if _TIMED_OUT not in str(error):
                raise
            if attempt == _NUM_STARTS:
                raise MsrlError(
                    f"ray: startup timed out after 30 s, {_NUM_STARTS} times. Check if this "
                    "machine is overloaded."
                ) from error
        _LOG.warning(
            "Ray startup timed out after 30 s, which happens on a busy machine. Trying again."
        )
    raise AssertionError("unreachable")
