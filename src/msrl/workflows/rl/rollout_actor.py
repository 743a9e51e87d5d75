"""Ray actor of one rollout engine.

vLLM is imported in methods, so that the driver can import this module without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msrl.models.families import load_shape
from msrl.platforms import get
from msrl.rollout.weights.channel import machine_id
from msrl.rollout.weights.digest import Digests
from msrl.types import Prompt, RolloutGroup, SamplingParams
from msrl.workflows.rl.weight_offer import WeightOffer, received_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from msrl.rollout.engine import EngineSettings


class RolloutActor:
    """Actor of one rollout engine."""

    def __init__(self, settings: EngineSettings, platform: str) -> None:
        self._settings, self._platform = settings, platform
        self._is_offloaded = False
        self._received = dict[str, "Tensor"]()
        self._must_verify = False

    def start(self) -> None:
        """Start the engine.

        This is not in the constructor because Ray reports an error of a method with its type and
        message.
        """
        from msrl.rollout.vllm import VllmEngine

        self._shape = load_shape(self._settings.model_dir)
        self._engine = VllmEngine(self._settings, get(self._platform))

    def release(self) -> None:
        """End the engine's processes and remove its files before the actor is killed."""
        self._engine.release()

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, policy_version: int
    ) -> tuple[RolloutGroup, ...]:
        """Return a group of completions per prompt."""
        return self._engine.generate(prompts, sampling, policy_version)

    def offload(self) -> None:
        """Release the device's memory, if the platform can and the engine holds it."""
        if not self._is_offloaded:
            self._engine.sleep()
        self._is_offloaded = True

    def onload(self) -> None:
        """Take the device's memory again, if it was released."""
        if self._is_offloaded:
            self._engine.wake()
        self._is_offloaded = False

    def forget_prompts(self) -> None:
        """Clear the records of past prompts."""
        self._engine.forget_prompts()

    def machine(self) -> str:
        """Return the machine within which weights can be sent through shared memory."""
        return machine_id()

    def load_weights(self, offer: WeightOffer) -> Sequence[Digests]:
        """Receive and load weights, tensor by tensor; return digests if the offer requests them."""
        tensors = received_tensors(offer, self._shape)
        return self._engine.load_weights(tensors, verify=offer.verify)

    def receive_weights(self, offer: WeightOffer) -> None:
        """Receive weights and hold them in main memory, which later versions overwrite."""
        self._received = dict(received_tensors(offer, self._shape, self._received))
        self._must_verify = offer.verify

    def apply_weights(self) -> Sequence[Digests]:
        """Load the weights that were received; return digests if their offer requested them."""
        return self._engine.load_weights(self._received.items(), verify=self._must_verify)

    def call_vllm(self, method: str, *arguments: Any) -> None:
        """Call a method of vLLM's workers, for transfers from device to device."""
        self._engine.call_workers(method, *arguments)

    def begin_digests(self) -> None:
        """Begin to compute digests of the weights that are loaded from a device."""
        self._engine.call_workers("begin_digests", str(self._settings.model_dir))

    def end_digests(self) -> Sequence[Digests]:
        """Return the digests since `begin_digests`, one for each process of the engine."""
        return self._engine.call_workers("end_digests")
