"""Latent attention to keys that an indexer chooses (DeepSeek V3.2, arXiv:2512.02556).

A query in a sequence of at most K tokens attends to all visible keys, so the indexer is computed
for longer sequences only. Its choice is exact and has no gradient. An indexer is frozen unless a
separate loss trains it (`trainer/model/indexer_loss.py`). Tensor- and context-parallel ranks choose
the keys of their own tokens, among the keys of all tokens.

Letters: N tokens of the complete sequences of a micro-batch (n tokens on this rank), c channels, q
channels of the latent of the queries, j heads of the indexer with i channels, r of which are
rotated, K chosen keys of a query, L tokens of a sequence, m of which this rank has.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from msrl.models.shape import Indexer, Mla
from msrl.trainer.model.context import gather_sequences, rank_positions
from msrl.trainer.model.mixers.latent_attention import LatentAttention
from msrl.trainer.model.packed import PackedSequences
from msrl.trainer.model.rope import rotate

_ELEMENTS = 1 << 26  # of the scores of all heads at the same time
_NORM_EPS = 1e-6


class IndexerProducts(NamedTuple):
    """What the scores of an indexer are computed from, on one rank."""

    query: Tensor  # [n, j, i]
    weights: Tensor  # [n, j]
    keys: Tensor  # [N, i]
    own: tuple[int, int, int]  # context-parallel rank and size, first token (`_own_tokens`)


class AddLoss(Protocol):
    """Function that adds the loss of an indexer to the backward pass of the attention's output."""

    def __call__(
        self,
        mixed: Tensor,  # [N, h, v]
        query: Tensor,  # [N, h, d]
        key: Tensor,  # [N, h, d]
        choice: Tensor | None,  # [N, K]
        products: IndexerProducts,
        packed: PackedSequences,
    ) -> Tensor: ...


class SparseAttention(LatentAttention):
    """Latent attention with an indexer, or with the choice of the layer `chooser` before it.

    `add_loss` is set where the indexer is trained.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, mla: Mla, chooser: int, **_: object
    ) -> None:
        super().__init__(config, layer_number, mla=mla)
        assert mla.indexer is not None
        self.indexer, self.chooser = mla.indexer, chooser
        self.add_loss: AddLoss | None = None
        if mla.has_indexer_weights:
            self.dsa_indexer = DsaIndexer(config, mla)

    @torch.no_grad()
    def _choose(
        self,
        hidden: Tensor,  # [n, 1, c]
        query_latent: Tensor,  # [n, 1, q]
        packed: PackedSequences,
    ) -> Tensor | None:  # [N, K]
        assert packed.shared is None, "models with experts do not share rows"
        if max(packed.lengths) <= self.indexer.top_k:
            return None
        if self.mla.has_indexer_weights:
            # The backward pass of later layers may need it once more.
            packed.choices[self.chooser] = self.dsa_indexer(hidden, query_latent, packed)
        return packed.choices[self.chooser]

    def _train_indexer(
        self,
        mixed: Tensor,  # [N, h, v]
        query: Tensor,  # [N, h, p + r]
        key: Tensor,  # [N, h, p + r]
        choice: Tensor | None,
        inputs: tuple[Tensor, Tensor],  # as of `_choose`
        packed: PackedSequences,
    ) -> Tensor:
        if self.add_loss is None or packed.trained_tokens is None or not torch.is_grad_enabled():
            return mixed
        hidden, query_latent = (x.detach() for x in inputs)
        products = self.dsa_indexer.products(hidden, query_latent, packed)
        return self.add_loss(mixed, query.detach(), key.detach(), choice, products, packed)


class _Frozen(torch.nn.Module):
    """Parameters of a module that are not trained, unless `IndexerLoss` unfreezes them."""

    def __init__(self, dtype: torch.dtype, weight: Sequence[int], bias: Sequence[int] = ()) -> None:
        super().__init__()
        self.weight = _parameter(dtype, weight)
        self.bias = _parameter(dtype, bias) if bias else None


def _parameter(dtype: torch.dtype, size: Sequence[int]) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(*size, dtype=dtype), requires_grad=False)


class DsaIndexer(torch.nn.Module):
    """Indexer of a layer, under MindSpeed's parameter names."""

    def __init__(self, config: TransformerConfig, mla: Mla) -> None:
        super().__init__()
        assert mla.indexer is not None and mla.q_lora_rank is not None
        self.indexer, self.is_split = mla.indexer, config.sequence_parallel
        heads, width = self.indexer.num_heads, self.indexer.head_dim
        dtype = config.params_dtype
        self.wq_b = _Frozen(dtype, (heads * width, mla.q_lora_rank))
        self.wk = _Frozen(dtype, (width, config.hidden_size))
        self.k_norm = _Frozen(torch.float32, (width,), (width,))
        self.weights_proj = _Frozen(dtype, (heads, config.hidden_size))

    def forward(
        self,
        hidden: Tensor,  # [n, 1, c]
        query_latent: Tensor,  # [n, 1, q]
        packed: PackedSequences,
    ) -> Tensor:  # [N, K]
        """Return the positions in its sequence that each token attends to, int32.

        Rows of sequences of at most K tokens have no meaning.
        """
        query, weights, keys, own = self.products(hidden, query_latent, packed)
        choice = choose_keys(query, weights, keys, packed.lengths, own, self.indexer)
        return self._gather(choice, packed)

    def products(
        self,
        hidden: Tensor,  # [n, 1, c]
        query_latent: Tensor,  # [n, 1, q]
        packed: PackedSequences,
    ) -> IndexerProducts:
        """Return the rotated queries and keys, and the weights of the heads."""
        own = self._own_tokens(packed, len(hidden))
        size = self.indexer.num_heads, self.indexer.head_dim
        query = F.linear(query_latent, self.wq_b.weight).unflatten(-1, size)  # [n, 1, j, i]
        key = F.linear(hidden, self.wk.weight).float()
        key = F.layer_norm(key, key.shape[-1:], self.k_norm.weight, self.k_norm.bias, _NORM_EPS)
        key = key.to(hidden.dtype).unsqueeze(2)  # [n, 1, 1, i]
        rotation = packed.rotations[self.indexer.rotary]
        if self.is_split:
            first = parallel_state.get_tensor_model_parallel_rank() * len(hidden)
            rows = torch.arange(first, first + len(hidden), device=hidden.device)
            rotation = rotation.select(rows)
        query, key = (rotate(x, rotation).squeeze(1) for x in (query, key))
        weights = F.linear(hidden.float(), self.weights_proj.weight.float()).squeeze(1)
        weights = weights * (size[0] * size[1]) ** -0.5  # [n, j]
        keys = self._gather(key.squeeze(1), packed)  # [N, i]
        return IndexerProducts(query, weights, keys, own)

    def _own_tokens(self, packed: PackedSequences, count: int) -> tuple[int, int, int]:
        """Return which of all tokens this rank has: context-parallel rank and size, first token.

        The tokens of a context-parallel rank are split among tensor-parallel ranks in their order.
        """
        context = packed.context
        rank, size = (0, 1)
        if context is not None:
            rank, size = (f(context.groups.ranks) for f in (dist.get_rank, dist.get_world_size))
        part = parallel_state.get_tensor_model_parallel_rank() if self.is_split else 0
        return rank, size, part * count

    def _gather(self, x: Tensor, packed: PackedSequences) -> Tensor:  # [n, ...] -> [N, ...]
        """Return the rows of all tokens."""
        if self.is_split:
            x = gather_from_sequence_parallel_region(x)
        return x if packed.context is None else gather_sequences(x, packed.context)


@dataclass(frozen=True)
class _Part:
    """Tokens of this rank in a sequence of more than K tokens."""

    rows: Tensor  # [m], among the tokens of this rank
    positions: Tensor  # [m], in the sequence
    places: tuple[int, ...]  # [m], the same on the host
    start: int  # of the sequence among all tokens
    length: int


@functools.lru_cache(maxsize=4)
def _parts(
    lengths: tuple[int, ...],
    own: tuple[int, int, int],
    count: int,
    top_k: int,
    device: torch.device,
) -> tuple[_Part, ...]:
    """Return this rank's parts of the long sequences, which all layers of a micro-batch share."""
    rank, size, first = own
    tokens = np.arange(sum(lengths)) if size == 1 else rank_positions(lengths, rank, size)
    tokens = tokens[first : first + count]
    parts: list[_Part] = []
    start = 0
    for length in lengths:
        rows = np.flatnonzero((tokens >= start) & (tokens < start + length))
        if length > top_k and len(rows):
            positions = tokens[rows] - start
            own_rows, at = (torch.from_numpy(x).to(device) for x in (rows, positions))
            parts.append(_Part(own_rows, at, tuple(positions.tolist()), start, length))
        start += length
    return tuple(parts)


def choose_keys(
    query: Tensor,  # [n, j, i]
    weights: Tensor,  # [n, j]
    keys: Tensor,  # [N, i]
    lengths: Sequence[int],
    own: tuple[int, int, int],
    indexer: Indexer,
) -> Tensor:  # [n, K]
    """Return the positions of the K keys with the highest scores of each token of this rank.

    `own` is as of `DsaIndexer._own_tokens`. A token that sees fewer keys gets others, too.
    """
    choice = torch.zeros(len(query), indexer.top_k, dtype=torch.int32, device=query.device)
    for part in _parts(tuple(lengths), own, len(query), indexer.top_k, query.device):
        own_keys = keys[part.start : part.start + part.length].float()
        for block in _blocks(part, indexer.num_heads):
            rows = part.rows[block]
            seen = max(part.places[block]) + 1
            total = index_scores(query[rows], weights[rows], own_keys[:seen])
            later = torch.arange(seen, device=query.device) > part.positions[block][:, None]
            total.masked_fill_(later, -torch.inf)
            # Equal scores are chosen as in a complete row.
            row = F.pad(total, (0, part.length - seen), value=-torch.inf)
            choice[rows] = row.topk(indexer.top_k).indices.to(torch.int32)
    return choice


def index_scores(
    query: Tensor,  # [m, j, i]
    weights: Tensor,  # [m, j]
    keys: Tensor,  # [L, i]
) -> Tensor:  # [m, L] float32
    """Return the score of every key for each query."""
    products = query.float() @ keys.float().T  # [m, j, L]
    return (weights.unsqueeze(1) @ products.relu_()).squeeze(1)


def _blocks(part: _Part, num_heads: int) -> Iterator[slice]:
    """Yield blocks of tokens whose scores are computed at the same time."""
    size = max(1, _ELEMENTS // (num_heads * part.length))
    for first in range(0, len(part.places), size):
        yield slice(first, first + size)
