"""Floating-point operations of a training step, for model FLOPs utilization (MFU).

Source: arXiv:2204.02311, appendix B. The count depends on the model only, not on its
implementation: 2 operations per weight and token in matrix products, the experts that each token is
routed to, causal attention over the visible pairs of each sequence, and logits at trained tokens.
It excludes recomputation in the backward pass and, like the source, norms, activations, rotary
embeddings and softmax.
"""

from __future__ import annotations

from collections.abc import Sequence

from msrl.models.shape import Mla, Shape


def training_flops(
    shape: Shape, lengths: Sequence[int], num_trained: int, *, weight_gradients: bool = True
) -> int:
    """Return the operations of a forward and a backward pass over sequences of `lengths` tokens.

    The backward pass computes each product twice: for the gradients of the inputs and of the
    weights. `weight_gradients=False` excludes the latter, for LoRA (gradients of adapters are
    excluded too). Attention has no weights, so its backward pass always counts twice.
    """
    layers = range(shape.num_layers)
    products = sum(lengths) * sum(_layer_weights(shape, layer) for layer in layers)
    products += num_trained * _head_weights(shape)
    attention = sum(_attention(shape, layer, lengths) for layer in layers)
    return 2 * products * (3 if weight_gradients else 2) + 3 * attention


def _layer_weights(shape: Shape, layer: int) -> int:
    """Return the number of weights of a layer that are multiplied with one token."""
    attention = _projections(shape) if shape.mla is None else _latent_projections(shape, shape.mla)
    if shape.moe is None or not shape.moe.layers[layer]:
        return attention + 3 * shape.hidden_size * shape.ffn_hidden_size
    moe = shape.moe
    active = moe.experts_per_token * moe.ffn_hidden_size + moe.shared_ffn_hidden_size
    return attention + shape.hidden_size * moe.num_experts + 3 * shape.hidden_size * active


def _projections(shape: Shape) -> int:
    """Return the number of weights of an attention layer's projections."""
    # Queries and attention outputs, then keys and values.
    heads = 2 * shape.num_attention_heads + 2 * shape.num_query_groups
    return shape.hidden_size * heads * shape.head_dim


def _latent_projections(shape: Shape, mla: Mla) -> int:
    """Return the number of weights of the projections of multi-head latent attention."""
    heads, query_dim = shape.num_attention_heads, mla.nope_head_dim + mla.rope_head_dim
    queries = heads * query_dim
    from_latent = 0 if mla.q_lora_rank is None else mla.q_lora_rank * queries
    down = shape.hidden_size * ((mla.q_lora_rank or queries) + mla.kv_lora_rank + mla.rope_head_dim)
    up = mla.kv_lora_rank * heads * (mla.nope_head_dim + mla.v_head_dim)
    return down + from_latent + up + heads * mla.v_head_dim * shape.hidden_size


def _head_weights(shape: Shape) -> int:
    """Return the number of weights of the output layer."""
    return shape.hidden_size * shape.num_outputs


def _attention(shape: Shape, layer: int, lengths: Sequence[int]) -> int:
    """Return the operations of attention scores and weighted sums over visible pairs."""
    window = shape.attention.layer_window(layer)
    pairs = sum(_visible_pairs(length, window) for length in lengths)
    channels = (
        2 * shape.head_dim
        if shape.mla is None
        else shape.mla.nope_head_dim + shape.mla.rope_head_dim + shape.mla.v_head_dim
    )
    return 2 * pairs * shape.num_attention_heads * channels


def _visible_pairs(length: int, window: int | None) -> int:
    """Return the (query, key) pairs of a causal sequence with at most `window` keys per query.

    >>> _visible_pairs(4, None), _visible_pairs(4, 2)
    (10, 7)
    """
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window
