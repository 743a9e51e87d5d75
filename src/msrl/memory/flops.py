"""Arithmetic that training on a batch takes, for the share of a device's peak that a step reaches (MFU, arXiv:2204.02311, appendix B).

Counted is what the mathematics asks for, whatever an implementation does: matrix products at 2 operations per weight and token, the
experts that a token goes to, causal attention over the pairs that see each other in each sequence, logits where a token is learnt. What is
made again in the backward pass is not counted. Norms, activations, rotations and softmax are left out, as in the source.
"""

from __future__ import annotations

from collections.abc import Sequence

from msrl.models.shape import Mla, Shape


def training_flops(shape: Shape, lengths: Sequence[int], num_trained: int, *, weight_gradients: bool = True) -> int:
    """Operations of a forward and a backward pass over sequences of these lengths.

    The backward pass takes each product twice: for its inputs' gradient and for its weights'; `weight_gradients` False leaves the latter
    out, as where only adapters are trained (theirs are left out too). Attention, which has no weights, takes it twice in any case.
    """
    products = sum(lengths) * sum(_layer_weights(shape, layer) for layer in range(shape.num_layers)) + num_trained * _head_weights(shape)
    return 2 * products * (3 if weight_gradients else 2) + 3 * sum(_attention(shape, layer, lengths) for layer in range(shape.num_layers))


def _layer_weights(shape: Shape, layer: int) -> int:
    """Weights of a layer that one token is multiplied with."""
    attention = _projections(shape) if shape.mla is None else _latent_projections(shape, shape.mla)
    if shape.moe is None or not shape.moe.layers[layer]:
        return attention + 3 * shape.hidden_size * shape.ffn_hidden_size
    moe = shape.moe
    active = moe.experts_per_token * moe.ffn_hidden_size + moe.shared_ffn_hidden_size
    return attention + shape.hidden_size * moe.num_experts + 3 * shape.hidden_size * active


def _projections(shape: Shape) -> int:
    heads = 2 * shape.num_attention_heads + 2 * shape.num_query_groups  # queries and what they gather; keys and values
    return shape.hidden_size * heads * shape.head_dim


def _latent_projections(shape: Shape, mla: Mla) -> int:
    heads, query_dim = shape.num_attention_heads, mla.nope_head_dim + mla.rope_head_dim
    queries = heads * query_dim
    from_latent = 0 if mla.q_lora_rank is None else mla.q_lora_rank * queries
    down = shape.hidden_size * ((mla.q_lora_rank or queries) + mla.kv_lora_rank + mla.rope_head_dim)
    up = mla.kv_lora_rank * heads * (mla.nope_head_dim + mla.v_head_dim)
    return down + from_latent + up + heads * mla.v_head_dim * shape.hidden_size


def _head_weights(shape: Shape) -> int:
    return shape.hidden_size * shape.num_outputs


def _attention(shape: Shape, layer: int, lengths: Sequence[int]) -> int:
    """Scores and weighted sums of a layer over the pairs of positions that see each other."""
    window = shape.attention.layer_window(layer)
    pairs = sum(_visible_pairs(length, window) for length in lengths)
    channels = 2 * shape.head_dim if shape.mla is None else shape.mla.nope_head_dim + shape.mla.rope_head_dim + shape.mla.v_head_dim
    return 2 * pairs * shape.num_attention_heads * channels


def _visible_pairs(length: int, window: int | None) -> int:
    """Pairs (query, key) of a causal sequence, each query with at most `window` keys.

    >>> _visible_pairs(4, None), _visible_pairs(4, 2)
    (10, 7)
    """
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window
