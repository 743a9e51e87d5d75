"""Ray actor of one rollout engine.

vLLM is imported in methods, so that the driver can import this module without it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msrl.environments.pool import EnvironmentPool
from msrl.models.entries import stack_sizes
from msrl.models.families import load_shape
from msrl.platforms import get
from msrl.rollout.runtime.engine_loop import EngineLoop, LoopMessage, LoopReport
from msrl.rollout.runtime.episode_sampler import EpisodeSampler
from msrl.rollout.weights.channel import machine_id
from msrl.rollout.weights.digest import Digests, TensorDigest, record_digests
from msrl.rollout.weights.verification import check_digests
from msrl.types import Prompt, RolloutGroup, SamplingParams, without_images
from msrl.workflows.rl.weight_offer import WeightOffer, offered_buckets, received_tensors
from msrl.workflows.training.shared_images import Files, with_files

if TYPE_CHECKING:
    from torch import Tensor

    from msrl.rollout.engine import EngineSettings
    from msrl.rollout.episodes.settings import EpisodeSettings


class RolloutActor:
    """Actor of one rollout engine, with the environments of its episodes."""

    def __init__(
        self, settings: EngineSettings, platform: str, episodes: EpisodeSettings | None = None
    ) -> None:
        self._settings, self._platform, self._episodes = settings, platform, episodes
        self._environments: EnvironmentPool | None = None
        self._is_offloaded = False
        self._received = dict[str, "Tensor"]()
        self._offer: WeightOffer | None = None  # of the weights that the actor holds
        self._digests = dict[int, Sequence[Digests]]()  # of versions that the loop has loaded
        self._digests_lock = threading.Lock()
        self._newest_offer: WeightOffer | None = None  # to the loop

    def start(self) -> None:
        """Start the engine.

        This is not in the constructor because Ray reports an error of a method with its type and
        message.
        """
        from msrl.rollout.vllm import VllmEngine
        from msrl.rollout.weights.adapters import AdaptedWeights

        self._shape = load_shape(self._settings.model_dir)
        self._adapted = AdaptedWeights(self._shape)
        if self._episodes is not None:
            self._environments = self._episodes.pool()
            self._environments.start()
        self._engine = VllmEngine(self._settings, get(self._platform))

    def release(self) -> None:
        """End the engine's processes and remove its files before the actor is killed."""
        if self._environments is not None:
            self._environments.stop()
        self._engine.release()

    def _sampler(self) -> EpisodeSampler | None:
        """Return a sampler of episodes with the engine; None if a response is one turn."""
        if self._episodes is None or self._environments is None:
            return None
        return EpisodeSampler(self._engine, self._environments, self._episodes)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        policy_version: int,
        files: Files | None = None,
    ) -> tuple[RolloutGroup, ...]:
        """Return a group of completions per prompt, without the images that the caller has.

        `files` are those of images, if the prompts do not have them.
        """
        sampler = self._sampler() or self._engine
        groups = sampler.generate(with_files(prompts, files), sampling, policy_version)
        return tuple(replace(group, prompt=without_images(group.prompt)) for group in groups)

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

    def machine(self) -> str:
        """Return the machine within which weights can be sent through shared memory."""
        return machine_id()

    def load_weights(self, offer: WeightOffer) -> Sequence[Digests]:
        """Receive and load weights, tensor by tensor; return digests if the offer requests them."""
        tensors = self._tensors(offer)
        return self._load_tensors(tensors, offer, self._adapter_digests(offer))

    def has_base(self) -> bool:
        """Return True if the actor has the base weights, to which it adds adapters."""
        return self._adapted.has_base

    def receive_weights(self, offer: WeightOffer) -> None:
        """Receive weights and hold them in main memory, which later versions overwrite."""
        self._received, self._offer = dict(self._tensors(offer, self._received)), offer

    def apply_weights(self) -> Sequence[Digests]:
        """Load the weights that were received; return digests if their offer requested them."""
        offer = self._offer
        assert offer is not None
        return self._load_tensors(self._received.items(), offer, self._adapter_digests(offer))

    def _tensors(
        self, offer: WeightOffer, memory: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Receive weights, and yield them with their adapters under their Hugging Face names.

        `memory` has tensors of an earlier version, which are overwritten.
        """
        if offer.adapter_scale is None:
            return received_tensors(offer, self._shape, memory)
        self._adapted.receive(offered_buckets(offer), offer.version)
        return self._adapted.merge(offer.version, offer.adapter_scale, memory)

    def _adapter_digests(self, offer: WeightOffer) -> Digests | None:
        """Return the digests of the adapters that arrived last, if the offer requests them.

        They are None if the ranks send complete weights.
        """
        if offer.adapter_scale is None or not offer.verify:
            return None
        return self._adapted.digests()

    def _load_tensors(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        offer: WeightOffer,
        adapter_digests: Digests | None,
    ) -> Sequence[Digests]:
        """Load weights; return the digests of what the ranks sent, if the offer requests them.

        For adapters that the actor adds, the digests of the sums are compared here: those of the
        actor with those of each process of the engine.
        """
        if adapter_digests is None:
            return self._engine.load_weights(tensors, verify=offer.verify)
        sums = dict[str, TensorDigest]()
        recorded = record_digests(tensors, stack_sizes(self._shape), sums)
        check_digests([sums], {0: self._engine.load_weights(recorded, verify=True)})
        return (adapter_digests,)

    def call_vllm(self, method: str, *arguments: Any) -> None:
        """Call a method of vLLM's workers, for transfers from device to device."""
        self._engine.call_workers(method, *arguments)

    def begin_digests(self) -> None:
        """Begin to compute digests of the weights that are loaded from a device."""
        self._engine.call_workers("begin_digests", str(self._settings.model_dir))

    def end_digests(self) -> Sequence[Digests]:
        """Return the digests since `begin_digests`, one for each process of the engine."""
        return self._engine.call_workers("end_digests")

    def finish_device_loading(self) -> None:
        """Prepare to generate with weights that were loaded from a device."""
        self._engine.finish_device_loading()

    # Asynchronous rollouts. No other method may be called between `start_loop` and `stop_loop`.

    def start_loop(self, version: int, waits_for_requests: bool, recompute: bool) -> None:
        """Start to run the engine in a thread. Its weights have this version."""
        sampler = self._sampler()
        self._loop = EngineLoop(
            self._engine,
            version,
            waits_for_requests=waits_for_requests,
            recompute=recompute,
            episodes=None if sampler is None else sampler.runner(),
        )
        self._loop.start()

    def exchange(self, message: LoopMessage, timeout_s: float) -> LoopReport:
        """Pass a message to the loop and return its report, as `EngineLoop.exchange` does."""
        return self._loop.exchange(message, timeout_s)

    def update_weights(self, offer: WeightOffer) -> None:
        """Receive weights, which the loop loads between two steps. Does not wait for that."""
        with self._digests_lock:
            self._newest_offer = offer
            self._digests.pop(offer.version, None)  # of an earlier offer, which others did not get
        memory, self._received = self._received, {}  # None of the versions that the loop may read
        tensors = dict(self._tensors(offer, memory))
        digests = self._adapter_digests(offer)  # before the adapters of the next version arrive
        self._loop.update(offer.version, lambda: self._load(tensors, offer, digests))

    def loaded_digests(self) -> dict[int, Sequence[Digests]]:
        """Return the digests of the versions that the loop has loaded since the last call.

        Of a version that was offered again, they are those of the last offer.
        """
        with self._digests_lock:
            digests, self._digests = self._digests, {}
        return digests

    def _load(
        self, tensors: dict[str, Tensor], offer: WeightOffer, adapter_digests: Digests | None
    ) -> None:
        """Load the weights in the thread of the loop; the next version may use their memory."""
        digests = self._load_tensors(tensors.items(), offer, adapter_digests)
        with self._digests_lock:
            newest = self._newest_offer
            was_offered_again = (
                newest is not None and newest is not offer and newest.version == offer.version
            )
            if offer.verify and not was_offered_again:
                self._digests[offer.version] = digests
        self._received = tensors

    def pause_loop(self) -> None:
        """Stop after the current step, and keep the requests."""
        self._loop.pause()

    def resume_loop(self) -> None:
        """Continue after `pause_loop`."""
        self._loop.resume()

    def stop_loop(self) -> None:
        """End the thread after the current step."""
        self._loop.close()
