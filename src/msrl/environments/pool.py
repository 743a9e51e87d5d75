"""Processes that run environments, one per episode, with a hard time limit per call."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from msrl.environments.base import EnvironmentSource, EpisodeFault, Opening, StepResult

ENVIRONMENT_COLUMN = "environment"  # column of a row that selects one of several environments
DEFAULT_MEMORY_BYTES = 4 << 30


class EnvironmentPool:
    """Context manager of the processes of all open episodes.

    `sources` are environments by name. The column `environment` of a row selects one; a row
    without it uses the first. Calls return at once with a future. At most `max_running` calls run
    at the same time; the time limit of a call begins when it runs. A fault ends its episode: later
    calls of the episode return the same fault.
    """

    def __init__(
        self,
        sources: Mapping[str, EnvironmentSource],
        *,
        tool_format: str = "hermes",
        max_running: int = 64,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        max_message_bytes: int = 1 << 20,
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Load all environments.

        Raises:
            MsrlError: A user's file cannot be loaded.
        """
        raise NotImplementedError

    def open(self, episode_id: str, row: dict[str, Any]) -> Future[Opening | EpisodeFault]:
        """Create the environment of an episode and reset it."""
        raise NotImplementedError

    def step(self, episode_id: str, answer: str) -> Future[StepResult | EpisodeFault]:
        """Pass an answer of the model to the environment of an open episode."""
        raise NotImplementedError

    def close(self, episode_id: str) -> None:
        """End an episode. A running call is killed; its future returns a fault."""
        raise NotImplementedError

    def stop(self) -> None:
        """End all episodes and processes. Repeated calls have no effect."""
        raise NotImplementedError
