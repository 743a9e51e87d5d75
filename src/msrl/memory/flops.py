"""Floating-point operations of a training step, for model FLOPs utilization (MFU).

Source: arXiv:2204.02311, appendix B. The count depends on the model only, not on its
implementation: 2 operations per weight and token in matrix products, the experts that each token is
routed to, causal attention over the visible pairs of each sequence, and logits at trained tokens.
An indexer counts where it decides, in sequences of more tokens than it chooses, without a backward
pass; their attention counts the chosen pairs. It excludes recomputation in the backward pass, the
loss of indexers and, like the source, norms, activations, rotary embeddings and softmax. The vision
tower counts once per different image of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from msrl.models.shape import Attention, DeltaNet, Dense, Layer, Mixer, Mla, Shape
from msrl.models.vision.tensors import tower_names
from msrl.models.vision.tower import TrainedParts, Vision
from msrl.types import Grid


def training_flops(
    shape: Shape, lengths: Sequence[int], num_trained: int, *, weight_gradients: bool = True
) -> int:
    """Return the operations of a forward and a backward pass over sequences of `lengths` tokens.

    The backward pass computes each product twice: for the gradients of the inputs and of the
    weights. `weight_gradients=False` excludes the latter, for LoRA (gradients of adapters are
    excluded too). Attention has no weights, so its backward pass always counts twice.
    """
    layers = shape.layers
    products = sum(lengths) * sum(sum(layer_weights(shape, layer)) for layer in layers)
    products += num_trained * head_weights(shape)
    attention = sum(attention_flops(layer.mixer, lengths) for layer in layers)
    indexers = sum(_indexer(layer.mixer, shape.hidden_size, lengths) for layer in layers)
    return 2 * products * (3 if weight_gradients else 2) + 3 * attention + indexers


def tower_flops(vision: Vision, grids: Sequence[Grid], trained: TrainedParts) -> int:
    """Return the operations of a vision tower over images of these grids.

    Without training there is only a forward pass. A trained tower has the gradients of inputs and
    weights, the patches excluded, a trained projector also those of its inputs, which its norm
    needs.
    """
    patches = sum(map(math.prod, grids))
    features = patches // vision.merge_size**2
    hidden = vision.hidden_size
    num_linears = len(tower_names(vision.kind).feed_forward)
    block = 4 * hidden**2 + num_linears * hidden * vision.ffn_hidden_size
    pairs = sum(_tower_pairs(vision, grid) for grid in grids)
    embedding = 2 * patches * vision.patch_elements * hidden
    blocks = 2 * patches * vision.depth * block + 4 * pairs * hidden
    merger = vision.projector_size * (vision.merged_size + vision.out_hidden_size)
    projector = 2 * features * merger * (1 + len(vision.deepstack))
    if trained.projector:
        projector *= 3
    elif trained.tower:
        projector *= 2
    if not trained.tower:
        return embedding + blocks + projector
    return 2 * embedding + 3 * blocks + projector


def _tower_pairs(vision: Vision, grid: Grid) -> int:
    """Return the pairs of patches that attend to each other in all layers, for one image."""
    tiles, rows, columns = grid
    everywhere = tiles * (rows * columns) ** 2
    if vision.window is None:
        return vision.depth * everywhere
    side = vision.window * vision.merge_size
    within = sum(
        (min(side, rows - row) * min(side, columns - column)) ** 2
        for row in range(0, rows, side)
        for column in range(0, columns, side)
    )
    num_full = len(vision.full_layers)
    return num_full * everywhere + (vision.depth - num_full) * within


class LayerWeights(NamedTuple):
    """Numbers of weights of a layer that are multiplied with one token.

    `feed_forward` includes the router and shared experts, `experts` the routed ones.
    """

    mixer: int
    feed_forward: int
    experts: int


def layer_weights(shape: Shape, layer: Layer) -> LayerWeights:
    """Return the numbers of weights of a layer that are multiplied with one token."""
    mixer, block, hidden = layer.mixer, layer.feed_forward, shape.hidden_size
    if isinstance(mixer, Mla):
        mixing = _latent_projections(mixer, hidden)
    elif isinstance(mixer, DeltaNet):
        mixing = _delta_weights(mixer, hidden)
    else:
        mixing = _projections(mixer, hidden)
    if isinstance(block, Dense):
        return LayerWeights(mixing, 3 * hidden * block.hidden_size, 0)
    shared = hidden * (block.num_experts + 3 * block.shared_ffn_hidden_size)
    routed = 3 * hidden * block.experts_per_token * block.ffn_hidden_size
    return LayerWeights(mixing, shared, routed)


def _projections(attention: Attention, hidden: int) -> int:
    """Return the number of weights of an attention layer's projections."""
    # Queries and attention outputs, then keys and values.
    heads = 2 * attention.num_heads + 2 * attention.num_groups
    return hidden * heads * attention.head_dim


def _delta_weights(delta: DeltaNet, hidden: int) -> int:
    """Return the number of weights of the projections and the convolution of a delta network."""
    mixed = 2 * delta.key_channels + delta.value_channels
    projected = mixed + delta.value_channels + 2 * delta.num_value_heads
    return hidden * (projected + delta.value_channels) + mixed * delta.kernel_size


def _latent_projections(mla: Mla, hidden: int) -> int:
    """Return the number of weights of the projections of multi-head latent attention."""
    heads, queries = mla.num_heads, mla.num_heads * mla.head_dim
    from_latent = 0 if mla.q_lora_rank is None else mla.q_lora_rank * queries
    down = hidden * ((mla.q_lora_rank or queries) + mla.kv_lora_rank + mla.rope_head_dim)
    up = mla.kv_lora_rank * heads * (mla.nope_head_dim + mla.v_head_dim)
    return down + from_latent + up + heads * mla.v_head_dim * hidden


def _indexer(mixer: Mixer, hidden: int, lengths: Sequence[int]) -> int:
    """Return the operations of the projections and scores of an indexer, forward only."""
    if not isinstance(mixer, Mla) or not mixer.has_indexer_weights:
        return 0
    indexer, latent = mixer.indexer, mixer.q_lora_rank
    assert indexer is not None and latent is not None
    heads, width = indexer.num_heads, indexer.head_dim
    weights = heads * width * latent + hidden * (width + heads)
    longer = [length for length in lengths if length > indexer.top_k]
    pairs = sum(_visible_pairs(length, None) for length in longer)
    return 2 * (sum(longer) * weights + pairs * heads * (width + 1))


def head_weights(shape: Shape) -> int:
    """Return the number of weights of the output layer."""
    return shape.hidden_size * shape.num_outputs


def attention_flops(mixer: Mixer, lengths: Sequence[int]) -> int:
    """Return the operations of attention scores and weighted sums over visible pairs.

    A delta network multiplies its state with key and query of each token, and adds a product to it.
    """
    if isinstance(mixer, DeltaNet):
        state = mixer.num_value_heads * mixer.key_head_dim * mixer.value_head_dim
        return 2 * 3 * sum(lengths) * state
    if isinstance(mixer, Mla):
        most, value_width = mixer.indexer and mixer.indexer.top_k, mixer.v_head_dim
    else:
        most, value_width = mixer.window, mixer.head_dim
    pairs = sum(_visible_pairs(length, most) for length in lengths)
    return 2 * pairs * mixer.num_heads * (mixer.head_dim + value_width)


def _visible_pairs(length: int, window: int | None) -> int:
    """Return the (query, key) pairs of a causal sequence with at most `window` keys per query.

    >>> _visible_pairs(4, None), _visible_pairs(4, 2)
    (10, 7)
    """
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window
