"""Aggregation of losses that are averaged per micro-batch, as in MindSpeed.

The original takes the mean over the tokens of each micro-batch, and then the mean over
micro-batches and data-parallel ranks. Two cases equal a simpler mode: micro-batches of one sample
are the mean over sequences of their token means, and a single micro-batch is the mean over tokens.
Sources: MindSpeed-RL 05a90d77, models/loss and models/base/base_training_engine.py; MindSpeed-LLM
c77308a1, posttrain_gpt.py. Megatron divides by the number of micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from msrl.config.sources import Node, Origin, wrap
from msrl.importers.translation import SourceKey, Translation

_MODE, _SHARDS = "algo.aggregate.mode", "train.updates.shards"
VALUE_MODE = "algo.value.aggregate"
_SAMPLES, _TOKENS = "algo.aggregate.samples_per_group", "algo.aggregate.tokens_per_group"


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Micro-batches of the original.

    Attributes:
        entry: key that sets their size.
        samples: samples of each, or at most on average with `tokens`; None if it is not known.
        tokens: largest number of tokens of each; None if they have a fixed number of samples.
        ranks: data-parallel size; None if it is not known.
        is_shuffled: True if msrl shuffles the samples, while the original shuffles batches.
    """

    entry: SourceKey | None
    samples: int | None
    tokens: int | None = None
    ranks: int | None = None
    is_shuffled: bool = False

    @property
    def is_known(self) -> bool:
        has_size = self.samples is not None or self.tokens is not None
        return has_size and self.ranks is not None and not self.is_shuffled


def put_aggregation(
    translation: Translation,
    micro_batches: MicroBatches,
    num_samples: int | None,
    *,
    has_critic: bool = False,
) -> None:
    """Set the aggregation mode of the policy and the critic.

    `num_samples` is the number of samples of an update.
    """
    size, ranks = micro_batches.samples, micro_batches.ranks
    if size == 1:
        for key in (_MODE, *([VALUE_MODE] if has_critic else [])):
            translation.set_default(key, "seq-mean-token-mean")
        return None
    is_one = size is not None and num_samples is not None and size >= num_samples
    if is_one and ranks == 1 and micro_batches.tokens is None:
        return translation.set_default(_MODE, "token-mean")
    if micro_batches.is_known:
        return _put_groups(translation, micro_batches, has_critic=has_critic)
    text = "the original averages the token means of micro-batches"
    return translation.approximate(micro_batches.entry, _MODE, "token-mean", text)


def _put_groups(translation: Translation, micro_batches: MicroBatches, *, has_critic: bool) -> None:
    """Set the groups of samples whose token means are averaged."""
    entry = micro_batches.entry
    origin = Origin(translation.name) if entry is None else entry.origin

    def node(value: object) -> Node:
        return wrap(value, origin)

    translation.set(_MODE, node("micro-batch-mean"))
    if has_critic:
        translation.set(VALUE_MODE, node("micro-batch-mean"))
    if micro_batches.samples is not None:
        translation.set(_SAMPLES, node(micro_batches.samples))
    if micro_batches.tokens is not None:
        translation.set(_TOKENS, node(micro_batches.tokens))
    if micro_batches.ranks != 1:
        translation.set(_SHARDS, node(micro_batches.ranks))
