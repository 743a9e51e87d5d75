"""Weights that training ranks offer to a rollout engine, and how the engine receives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msrl.rollout.weights.buckets import Bucket, merge
from msrl.rollout.weights.channel import ChannelAddress, receive

if TYPE_CHECKING:
    from torch import Tensor

    from msrl.models.shape import Shape


@dataclass(frozen=True, slots=True)
class WeightOffer:
    """One version of the weights for an engine.

    Attributes:
        version: Policy version.
        stages: For each pipeline stage, the channels of its senders, or the references to the
            buckets of each sender.
        verify: Whether the engine returns digests.
        timeout_s: Longest time to wait for a sender, in seconds.
        adapter_scale: Factor of adapters that are sent with the base weights, or alone. None if
            the weights are complete.
    """

    version: int
    stages: tuple[tuple[Any, ...], ...]
    verify: bool
    timeout_s: float
    adapter_scale: float | None = None


def received_tensors(
    offer: WeightOffer, shape: Shape, memory: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of an offer under their Hugging Face names as soon as they are complete.

    Args:
        offer: Weights that the training ranks send.
        shape: Shape of the model.
        memory: Tensors of an earlier version, whose memory is overwritten.

    Raises:
        VerificationError: A tensor is incomplete or of another version.
    """
    from msrl.rollout.weights.assembly import Assembler

    yield from Assembler(shape, memory).assemble(offered_buckets(offer), offer.version)


def offered_buckets(offer: WeightOffer) -> Iterator[Bucket]:
    """Receive the buckets of all senders."""
    return merge([_buckets(sender, offer) for sender in senders] for senders in offer.stages)


def _buckets(sender: ChannelAddress | Sequence[Any], offer: WeightOffer) -> Iterator[Bucket]:
    if isinstance(sender, ChannelAddress):
        return receive(sender, offer.version, offer.timeout_s)
    return _stored_buckets(sender)


def _stored_buckets(references: Sequence[Any]) -> Iterator[Bucket]:
    import ray

    from msrl.rollout.weights.sender import restore

    for reference in references:
        yield restore(ray.get(reference))
