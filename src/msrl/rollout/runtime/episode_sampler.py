"""Episodes with an engine that nothing else uses during the episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msrl.environments.pool import EnvironmentPool
from msrl.rollout.engine import StepEngine, sample_seeds
from msrl.rollout.episodes.runner import EpisodeRunner
from msrl.rollout.episodes.settings import EpisodeSettings
from msrl.rollout.runtime.engine_loop import EngineLoop, GroupRequest
from msrl.types import Prompt, RolloutGroup, SamplingParams


class EpisodeEngine(StepEngine, Protocol):
    """An engine whose steps the caller runs, with its limit of tokens."""

    max_model_len: int


class EpisodeSampler:
    """Sampler of whole episodes. Its pool of environments stays open.

    Args:
        engine: Engine that samples the answers.
        pool: Processes of the environments.
        settings: Settings of the episodes.
    """

    def __init__(
        self, engine: EpisodeEngine, pool: EnvironmentPool, settings: EpisodeSettings
    ) -> None:
        self._engine, self._pool, self._settings = engine, pool, settings

    def runner(self) -> EpisodeRunner:
        """Return a new runner of episodes."""
        engine, settings = self._engine, self._settings
        return EpisodeRunner(
            self._pool, settings, settings.template(), engine.max_model_len, engine.text
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        policy_version: int,
        *,
        on_finished: Callable[[int], object] | None = None,
    ) -> tuple[RolloutGroup, ...]:
        """Return a group of episodes per prompt, in order.

        `on_finished` is called with numbers of episodes as they finish.
        """
        loop = EngineLoop(self._engine, policy_version, episodes=self.runner())
        seeds, count = sample_seeds(prompts, sampling, policy_version), sampling.num_samples
        requests = [
            GroupRequest(str(n), prompt, sampling, tuple(seeds[n * count : (n + 1) * count]))
            for n, prompt in enumerate(prompts)
        ]
        groups = loop.complete(
            requests, in_lockstep=self._settings.in_lockstep, on_finished=on_finished
        )
        return tuple(groups[request.key] for request in requests)
