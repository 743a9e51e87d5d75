"""From a loss per token to one number. The normaliser is global and is passed in, so that no split of the batch changes the result."""

from __future__ import annotations

from torch import Tensor


def token_mean(
    values: Tensor,  # [N]
    mask: Tensor,  # [N] bool
    *,
    num_tokens: float,
) -> Tensor:  # scalar
    """The sum of `values` where `mask` is True, over the `num_tokens` tokens of all ranks and micro-batches of the update.

    Raises ValueError when that number is not positive: an update without a token to learn from has no mean.
    """
    if num_tokens <= 0:
        raise ValueError(f"num_tokens={num_tokens}: an update needs at least one token that is not masked out")
    return values.masked_fill(~mask, 0.0).sum() / num_tokens
