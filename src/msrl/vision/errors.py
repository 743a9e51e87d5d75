"""Errors of single images."""

from __future__ import annotations

from msrl.errors import MsrlError


class ImageError(MsrlError):
    """An image that cannot be used. `reason` is the same for all images with the problem."""

    def __init__(self, reason: str, problem: str) -> None:
        self.reason, self.problem = reason, problem
        super().__init__(f"{reason}: {problem}")

    def __reduce__(self) -> tuple[type[ImageError], tuple[str, str]]:
        """Pickle both texts, so that the error can be sent from a worker."""
        return type(self), (self.reason, self.problem)
