"""Ray actor of one rollout engine.

vLLM is imported in methods, so that the driver can import this module without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msrl.platforms import get
from msrl.rollout.runtime.engine_loop import EngineLoop, LoopMessage, LoopReport
from msrl.types import Prompt, RolloutGroup, SamplingParams
from msrl.workflows.training.weight_transfer import Bucket, unpack

if TYPE_CHECKING:
    from msrl.rollout.engine import EngineSettings


class RolloutActor:
    """Actor of one rollout engine."""

    def __init__(self, settings: EngineSettings, platform: str) -> None:
        self._settings, self._platform = settings, platform
        self._is_offloaded = False

    def start(self) -> None:
        """Start the engine.

        This is not in the constructor because Ray reports an error of a method with its type and
        message.
        """
        from msrl.rollout.vllm import VllmEngine

        self._engine = VllmEngine(self._settings, get(self._platform))

    def release(self) -> None:
        """End the engine's processes and remove its files before the actor is killed."""
        self._engine.release()

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, policy_version: int
    ) -> tuple[RolloutGroup, ...]:
        """Return a group of completions per prompt."""
        return self._engine.generate(prompts, sampling, policy_version)

    def offload(self, discard_weights: bool) -> None:
        """Release the device's memory, if the platform can and the engine holds it."""
        if not self._is_offloaded:
            self._engine.sleep(discard_weights=discard_weights)
        self._is_offloaded = True

    def onload(self, before_loading: bool) -> None:
        """Take the device's memory again, if it was released."""
        if self._is_offloaded:
            self._engine.wake(before_loading=before_loading)
        self._is_offloaded = False

    def forget_prompts(self) -> None:
        """Clear the records of past prompts."""
        self._engine.forget_prompts()

    def load_weights(self, *stages: tuple[Bucket, ...]) -> None:
        """Load the weights that the ranks of all stages export."""
        self._engine.load_weights(unpack(itertools.chain.from_iterable(stages)))

    # Asynchronous rollouts. No other method may be called between `start_loop` and `stop_loop`.

    def start_loop(self, version: int, waits_for_requests: bool, recompute: bool) -> None:
        """Start to run the engine in a thread. Its weights have this version."""
        self._loop = EngineLoop(
            self._engine, version, waits_for_requests=waits_for_requests, recompute=recompute
        )
        self._loop.start()

    def exchange(self, message: LoopMessage, timeout_s: float) -> LoopReport:
        """Pass a message to the loop and return its report, as `EngineLoop.exchange` does."""
        return self._loop.exchange(message, timeout_s)

    def update_weights(self, version: int, *stages: tuple[Bucket, ...]) -> None:
        """Make the loop load the weights that the ranks of all stages export. Does not wait."""
        self._loop.update(version, lambda: self.load_weights(*stages))

    def pause_loop(self) -> None:
        """Stop after the current step, and keep the requests."""
        self._loop.pause()

    def resume_loop(self) -> None:
        """Continue after `pause_loop`."""
        self._loop.resume()

    def stop_loop(self) -> None:
        """End the thread after the current step."""
        self._loop.close()
