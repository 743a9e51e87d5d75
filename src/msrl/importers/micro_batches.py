"""Aggregation of losses that are averaged per micro-batch, as in MindSpeed-RL.

The original takes the mean over the tokens of each micro-batch, and then the mean over
micro-batches and data-parallel ranks. Two cases equal a mode of msrl: micro-batches of one sample
are the mean over sequences of their token means, and a single micro-batch is the mean over tokens.
Source: MindSpeed-RL 05a90d77, models/loss; Megatron divides by the number of micro-batches.
"""

from __future__ import annotations

from msrl.importers.translation import SourceKey, Translation

_KEY = "algo.aggregate.mode"


def put_aggregation(
    translation: Translation, entry: SourceKey | None, size: int | None, num_samples: int | None
) -> None:
    """Set the aggregation mode.

    Args:
        translation: translation to change.
        entry: key that sets the size of micro-batches.
        size: samples of a micro-batch; None if it differs between micro-batches.
        num_samples: samples of an update if one data-parallel rank has all of them, else None.
    """
    if size == 1:
        return translation.set_default(_KEY, "seq-mean-token-mean")
    if size is not None and num_samples is not None and size >= num_samples:
        return translation.set_default(_KEY, "token-mean")
    text = "the original averages the token means of micro-batches"
    return translation.approximate(entry, _KEY, "token-mean", text)
