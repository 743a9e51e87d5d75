"""Loss that trains the indexers of sparse attention (DeepSeek V3.2, arXiv:2512.02556, section 2.1).

The target of a token is its attention to its chosen keys, summed over all heads and divided by that
sum. The loss is the Kullback-Leibler divergence of the indexer's softmax over the same keys from
the target. It is a mean over all tokens of an update but padding, added up over the indexers, so it
does not depend on how the batch is split over ranks or passes. Inputs of an indexer have no
gradient: the loss changes indexers only, and no other loss changes them.

Letters: N tokens of a micro-batch, n of them on this rank, h heads of this rank with d channels, K
keys that a token chooses, W keys that it attends to at most, m tokens of a block in one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from msrl.models.shape import Mla, Shape
from msrl.trainer import groups
from msrl.trainer.model.balance import count_tokens
from msrl.trainer.model.mixers.sparse_attention import (
    IndexerProducts,
    SparseAttention,
    index_scores,
)
from msrl.trainer.model.packed import PackedSequences
from msrl.types import MicroBatch

_ELEMENTS = 1 << 26  # of the scores of all heads at the same time


class IndexerLoss:
    """Training of the indexers of one model on this rank."""

    def __init__(
        self,
        coef: float,
        shape: Shape,
        model: torch.nn.Module,
        device: torch.device,
        *,
        is_split: bool,  # True if tensor-parallel ranks have different tokens
    ) -> None:
        assert shape.mla is not None and shape.indexer is not None
        self._coef, self._device = coef, device
        self._scale, self._top_k = shape.mla.scale, shape.indexer.top_k
        mixers = (layer.mixer for layer in shape.layers)
        self._num_indexers = sum(isinstance(x, Mla) and x.has_indexer_weights for x in mixers)
        self._is_split = is_split
        self._num_tokens = 1.0
        self._sum = torch.zeros((), device=device)  # over layers and tokens of this rank
        for module in model.modules():
            if isinstance(module, SparseAttention) and module.mla.has_indexer_weights:
                module.add_loss = self._add
                for parameter in module.dsa_indexer.parameters():
                    parameter.requires_grad_(True)
                    # Megatron sums the gradients of marked parameters over tensor-parallel ranks.
                    vars(parameter).update(sequence_parallel=is_split)

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Begin a step over this data-parallel rank's micro-batches. All ranks must call it."""
        self._num_tokens = count_tokens(micro_batches, self._device)
        self._sum.zero_()

    def trained_tokens(self, batch: MicroBatch) -> Tensor:
        """Return which of this rank's tokens are no padding, [n] bool."""
        count = len(batch.token_ids)
        is_real = torch.arange(count, device=self._device) < count - batch.num_padding
        group = groups.tp_group()
        return is_real.chunk(group.size())[group.rank()] if self._is_split else is_real

    def end(self) -> dict[str, float]:
        """Return the loss, averaged over indexers and without its coefficient.

        All ranks must call it and get the same.
        """
        dist.all_reduce(self._sum)
        copies = 1 if self._is_split else groups.tp_group().size()
        return {"indexer_loss": self._sum.item() / copies / self._num_indexers}

    def _add(
        self,
        mixed: Tensor,  # [N, h, v]
        query: Tensor,  # [N, h, d]
        key: Tensor,  # [N, h, d]
        choice: Tensor | None,  # [N, K]
        products: IndexerProducts,
        packed: PackedSequences,
    ) -> Tensor:  # [N, h, v]
        """Return the same output; its backward pass also goes through the loss."""
        assert packed.trained_tokens is not None and packed.context is None
        chosen = Chosen(packed.lengths, choice, self._top_k)
        with torch.no_grad():
            target = attention_to_chosen(query, key, self._scale, chosen)
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self._is_split
                else reduce_from_tensor_model_parallel_region
            )
            target = cast("Tensor", reduce(target))  # [n, W]
            target = target / target.sum(-1, keepdim=True)
        rows = divergences(products, target, chosen)
        loss = rows[packed.trained_tokens].sum() / self._num_tokens
        self._sum += loss.detach()
        return MoEAuxLossAutoScaler.apply(mixed, self._coef * loss)  # pyright: ignore[reportReturnType]


class _Block(NamedTuple):
    """Tokens of one sequence whose scores are computed at the same time."""

    rows: slice  # among the tokens of the caller, m of them
    start: int  # of the sequence among all tokens
    stop: int  # of the block in the sequence
    columns: Tensor  # [m, W or less] positions of the keys in the sequence
    visible: Tensor  # [m, W or less] bool, keys that are not after the token


class Chosen(NamedTuple):
    """Keys that each token of a micro-batch attends to."""

    lengths: Sequence[int]
    choice: Tensor | None  # [N, K], for sequences of more than K tokens
    top_k: int

    @property
    def width(self) -> int:
        return min(self.top_k, max(self.lengths))

    def blocks(self, own: range, num_heads: int, device: torch.device) -> Iterator[_Block]:
        """Yield the blocks of the tokens `own`, with bounded products of heads and keys."""
        start = 0
        for length in self.lengths:
            size = max(1, _ELEMENTS // (num_heads * length))
            end = min(start + length, own.stop)
            for first in range(max(start, own.start), end, size):
                last = min(first + size, end)
                positions = torch.arange(first - start, last - start, device=device)[:, None]
                columns = torch.arange(length, device=device).expand(len(positions), -1)
                if self.choice is not None and length > self.top_k:
                    columns = self.choice[first:last].long()
                rows = slice(first - own.start, last - own.start)
                yield _Block(rows, start, last - start, columns, columns <= positions)
            start += length


def attention_to_chosen(
    query: Tensor,  # [N, h, d]
    key: Tensor,  # [N, h, d]
    scale: float,
    chosen: Chosen,
) -> Tensor:  # [N, W] float32
    """Return the attention of each token to its chosen keys, summed over the heads."""
    num_tokens, heads, _ = query.shape
    result = torch.zeros(num_tokens, chosen.width, device=query.device)
    for block in chosen.blocks(range(num_tokens), heads, query.device):
        keys = key[block.start : block.start + block.stop]
        scores = torch.einsum("qhd,khd->hqk", query[block.rows].float(), keys.float()) * scale
        at = block.columns.clamp(max=block.stop - 1).expand(heads, -1, -1)
        weights = scores.gather(-1, at).masked_fill(~block.visible, -torch.inf).softmax(-1)
        result[block.rows, : weights.shape[-1]] = weights.sum(0)
    return result


def divergences(
    products: IndexerProducts,
    target: Tensor,  # [n, W], rows sum to 1
    chosen: Chosen,
) -> Tensor:  # [n] float32
    """Return the divergence of the indexer's softmax from the target of each token of this rank.

    The backward pass computes the scores again.
    """
    query, weights, keys, (_, _, first) = products
    pieces: list[Tensor] = []
    for block in chosen.blocks(range(first, first + len(query)), query.shape[1], query.device):
        inputs = (
            query[block.rows],
            weights[block.rows],
            keys[block.start : block.start + block.stop],
            target[block.rows, : block.columns.shape[-1]],
            block.columns,
            block.visible,
        )
        pieces.append(
            cast(
                "Tensor",
                checkpoint(_divergence, *inputs, use_reentrant=False, preserve_rng_state=False),
            )
        )
    return torch.cat(pieces)


def _divergence(
    query: Tensor, weights: Tensor, keys: Tensor, target: Tensor, columns: Tensor, visible: Tensor
) -> Tensor:
    """Compute the divergences of a block, [m]."""
    scores = index_scores(query, weights, keys)
    scores = scores.gather(-1, columns.clamp(max=len(keys) - 1)).masked_fill(~visible, -torch.inf)
    logs = scores.log_softmax(-1).masked_fill(~visible, 0.0)
    return (torch.xlogy(target, target) - target * logs).sum(-1)
