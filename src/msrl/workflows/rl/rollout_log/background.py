"""Thread that writes the files of a step while the next step runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """Thread that runs one call at a time.

    At most one call waits for its end, so that the files never fall behind by more than one step.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="files")
        self._pending: Future[None] | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Begin a call after the one before has ended.

        Raises:
            Exception: The call before failed.
        """
        self.wait()
        self._pending = self._thread.submit(write)

    def wait(self) -> None:
        """Wait for the end of the call.

        Raises:
            Exception: The call failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """End the thread after its call. A failure of the call is not raised."""
        self._thread.shutdown()
