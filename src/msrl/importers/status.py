"""Status of an imported key, and the heading of its group in a report."""

from __future__ import annotations

from enum import Enum

from msrl.config.unsupported import NOT_YET_TEXT


class KeyStatus(Enum):
    """Result of the translation of a key; the value describes it in a message."""

    APPLIED = "took effect"
    SAME = "same results"
    SPEED = "changes memory or speed only"
    PLACEMENT = "placement"
    OFF = "has no effect with this value"
    DEAD = "has no effect in the original either"
    DROPPED = "dropped"
    UNSUPPORTED = f"{NOT_YET_TEXT}, and would change results"

    @property
    def heading(self) -> str:
        """Heading of the group: every key of a report is in one of five groups."""
        if self in (KeyStatus.OFF, KeyStatus.DEAD):
            return KeyStatus.SAME.value
        return KeyStatus.DROPPED.value if self is KeyStatus.UNSUPPORTED else self.value


HEADINGS = tuple(dict.fromkeys(status.heading for status in KeyStatus))
