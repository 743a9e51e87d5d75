"""Prompts and seeds of asynchronous rollouts by their number in the order of prompts."""

from __future__ import annotations

import functools

from msrl.rollout.engine import sample_seeds
from msrl.rollout.runtime.engine_loop import GroupRequest
from msrl.types import Prompt, SamplingParams
from msrl.workflows.rl.curriculum import Curriculum
from msrl.workflows.rl.setup import Prompts

_CACHED_STEPS = 32


class NumberedPrompts:
    """Prompts with the seeds of the step in which a synchronous run would sample them.

    The seeds therefore depend neither on delays nor on a resume, and a prompt that is issued again
    keeps them.
    """

    def __init__(
        self,
        prompts: Prompts | Curriculum,
        batch: int,
        sampling: SamplingParams,
        greedy: SamplingParams | None = None,
    ) -> None:
        self._prompts, self._batch, self._sampling = prompts, batch, sampling
        self._greedy = greedy
        self._step = functools.lru_cache(_CACHED_STEPS)(self._load_step)

    def find(self, number: int) -> Prompt:
        """Return the prompt of a number."""
        step, position = divmod(number, self._batch)
        return self._step(step)[0][position]

    def request(self, number: int, key: str) -> GroupRequest:
        """Return the request for the group of a number."""
        step, position = divmod(number, self._batch)
        prompts, seeds = self._step(step)
        count = self._sampling.num_samples
        own_seeds = seeds[position * count : (position + 1) * count]
        prompt = prompts[position]
        return GroupRequest(key, prompt, self._sampling, tuple(own_seeds), self._greedy)

    def _load_step(self, step: int) -> tuple[list[Prompt], list[int | None]]:
        """Return the prompts of a step and the seeds of all their samples."""
        prompts = self._prompts.after(step * self._batch, self._batch)
        return prompts, sample_seeds(prompts, self._sampling, policy_version=step)
