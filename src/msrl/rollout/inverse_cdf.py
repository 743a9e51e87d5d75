"""Sampling of tokens by the inverse of their cumulative distribution function.

It needs one random number per token, where the Gumbel-max method needs one per entry of the
vocabulary. Letters: n requests, V tokens of the vocabulary, w weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Generator, Tensor

_BLOCK_TOKENS = 128
_BELOW_ONE = 1 - 2**-53  # the largest number below 1; its product with a number x is less than x


def draw_uniform(count: int, generators: Mapping[int, Generator]) -> Tensor:
    """Return random numbers in [0, 1), [count], in float64.

    Args:
        count: Number of requests.
        generators: Generators of the requests that have their own, by index. The others use
            PyTorch's default generator.
    """
    import torch

    uniform = torch.rand(count, dtype=torch.float64)
    for index, generator in generators.items():
        uniform[index : index + 1].uniform_(generator=generator)
    return uniform


def sample_tokens(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the token ids, [n], at the given values of the cumulative distribution function.

    A block of tokens is chosen by its sum first and then a token in it, so that most of the work is
    a sum. Positions are computed in float64.

    Args:
        probabilities: Of all tokens, [n, V], in float32.
        uniform: Numbers in [0, 1), [n], in float64.
    """
    from torch.nn.functional import pad

    num_requests, vocab_size = probabilities.shape
    num_padding = -vocab_size % _BLOCK_TOKENS
    if num_padding:
        probabilities = pad(probabilities, (0, num_padding))
    blocks = probabilities.view(num_requests, -1, _BLOCK_TOKENS)
    block, position = _invert(blocks.sum(-1), uniform)
    index = block[:, None, None].expand(-1, 1, _BLOCK_TOKENS)
    token, _ = _invert(blocks.gather(1, index).squeeze(1), position)
    return (block * _BLOCK_TOKENS + token).clamp_(max=vocab_size - 1)


def _invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the cumulative sums of weights [n, w] exceed a share of their total.

    Returns:
        The indices, [n], whose weights are positive, and the positions within these weights, [n],
        in [0, 1).
    """
    import torch

    sums = weights.cumsum(-1, dtype=torch.float64)
    goal = (uniform * sums[:, -1])[:, None]
    # If a weight is not a number, the index can be out of range.
    index = torch.searchsorted(sums, goal, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, index)
    position = (goal - (sums.gather(1, index) - weight)) / weight
    return index[:, 0], position[:, 0].clamp_(0, _BELOW_ONE)
