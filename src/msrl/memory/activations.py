"""Bytes that a pass leaves on a rank for its backward pass, from sizes alone: what the layers of `trainer/` keep for their derivatives.

Counted tensor by tensor, as the layers save them (`trainer/layers.py`, `trainer/attention.py`, Megatron's linear layers and experts);
tests hold the sums to the live tensors of real ranks. Letters: N tokens of a micro-batch (n of them on this rank, s of them where
sequence parallelism cuts the norms), M of them learnt, c channels, q and k channels of all query and of all key heads, f channels of a
feed-forward part, E experts of which a token has t, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from msrl.models.shape import Mla, Moe, Shape

_WIDE = 4  # bytes of a float32
_MASK_BLOCK = 512  # queries whose mask exists at once (`trainer/attention.py`)
LINEARS = ("linear_qkv", "linear_q_up_proj", "linear_kv_up_proj", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True, slots=True)
class Pass:
    """One micro-batch: its tokens, those that are learnt, its longest sequence, whether sequences of several lengths are packed into it."""

    num_tokens: int
    num_trained: int
    longest: int
    is_packed: bool
    element_bytes: int  # of weights and activations
    attention_bytes: int | None = None  # of what the core attention computes with, where it is wider

    @property
    def core_bytes(self) -> int:
        """Of a number that the core attention computes with."""
        return max(self.element_bytes, self.attention_bytes or 0)


@dataclass(frozen=True, slots=True)
class Spread:
    """Over how many ranks a pass is spread: tensor-parallel ones, those of an expert, those that share the tokens of a sequence."""

    tp: int = 1
    etp: int = 1
    cp: int = 1
    sp: bool = False


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What is made again in the backward pass; `parts` are those of `selective`."""

    granularity: Literal["none", "full", "selective"] = "none"
    method: Literal["uniform", "block"] = "uniform"
    layers: int = 1
    parts: tuple[str, ...] = ()


class LayerBytes(NamedTuple):
    """What a layer keeps: its input, the attention around its core, the core itself, the feed-forward part behind its norm."""

    input: int
    attention: int
    core: int
    core_inputs: int  # what is kept in place of the core where that is made again
    feed_forward: int

    @property
    def whole(self) -> int:
        return self.input + self.attention + self.core + self.feed_forward


def layer_bytes(shape: Shape, layer: int, batch: Pass, spread: Spread, kept_inputs: frozenset[str] = frozenset(LINEARS)) -> LayerBytes:
    """What layer number `layer` keeps of a pass. `kept_inputs` names the linear layers that keep theirs: those that are trained."""
    element, tokens = batch.element_bytes, batch.num_tokens // spread.cp
    norm_tokens = tokens // spread.tp if spread.sp else tokens
    row = norm_tokens * shape.hidden_size * element
    scales = norm_tokens * _WIDE
    is_mixture = shape.moe is not None and shape.moe.layers[layer]
    # Inputs of the two norms; outputs of the norms, which are inputs of the first matrices.
    attention = row + 2 * scales + row * ("linear_qkv" in kept_inputs)
    if shape.post_norms:
        attention += 2 * (row + scales)
    behind_norm = row * ("linear_fc1" in kept_inputs)
    if shape.mla is not None:
        latent, core = _latent_attention(shape, shape.mla, batch, spread, norm_tokens, kept_inputs)
        attention, inputs = attention + latent, 0
    else:
        core, inputs = _core_attention(shape, layer, batch, spread, "linear_proj" in kept_inputs)
    if is_mixture and shape.moe is not None:
        forward = _mixture(shape, shape.moe, batch, spread, norm_tokens, kept_inputs)
    else:
        forward = _feed_forward(shape, shape.ffn_hidden_size, tokens, element, "linear_fc2" in kept_inputs) // spread.tp
    return LayerBytes(row, attention + behind_norm, core, inputs, forward)


def _core_attention(shape: Shape, layer: int, batch: Pass, spread: Spread, keeps_output: bool) -> tuple[int, int]:
    """(all that is kept from the projection of queries, keys and values to the output's, what is kept where it is made again)."""
    element, wide, tokens = batch.element_bytes, batch.core_bytes, batch.num_tokens // spread.cp
    heads = shape.num_attention_heads // spread.tp
    q = tokens * heads * shape.head_dim
    kv = tokens * max(shape.num_query_groups // spread.tp, 1) * shape.head_dim
    projected = (q + 2 * kv) * element
    copied_query = q * element if shape.heads_per_group > 1 else 0  # the heads of a group lie beside its keys
    is_shared, window = spread.cp > 1, shape.attention.layer_window(layer)
    is_windowed = window is not None and window < batch.longest
    is_copied = wide > element or batch.is_packed or is_shared or is_windowed
    are_values_new = is_shared or wide > element  # else they are a part of what was projected
    kept = projected if not are_values_new or shape.qk_norm else 0
    kept += copied_query if shape.qk_norm else 0
    kept += (q + (2 * kv * spread.cp if are_values_new else kv)) * wide  # as they are multiplied
    kept += q * (wide + element * (is_copied and keeps_output)) + tokens * heads * _WIDE  # the outcome, and its normalisers
    kept += _masks(batch, spread, window if is_windowed else None)
    return kept, projected + copied_query + q * element * keeps_output


def _masks(batch: Pass, spread: Spread, window: int | None) -> int:
    """Masks are kept where the causal one does not do: behind windows, and where queries start late in their sequence."""
    if window is not None:
        return batch.num_tokens // spread.cp * (window + _MASK_BLOCK) * batch.core_bytes
    if spread.cp == 1:
        return 0
    pieces = 2 * spread.cp
    return batch.num_tokens * batch.longest * (pieces + 1) // pieces**2 * batch.core_bytes


def _latent_attention(
    shape: Shape, mla: Mla, batch: Pass, spread: Spread, norm_tokens: int, kept_inputs: frozenset[str]
) -> tuple[int, int]:
    """(the latents with their norms, queries, keys, values and the outcome)."""
    element, tokens, heads = batch.element_bytes, batch.num_tokens // spread.cp, shape.num_attention_heads // spread.tp
    query_dim = mla.nope_head_dim + mla.rope_head_dim
    first = mla.q_lora_rank or shape.num_attention_heads * query_dim
    down = first + mla.kv_lora_rank + mla.rope_head_dim
    normed = (mla.q_lora_rank or 0) * ("linear_q_up_proj" in kept_inputs) + mla.kv_lora_rank * ("linear_kv_up_proj" in kept_inputs)
    latents = norm_tokens * ((down + normed) * element + 2 * _WIDE)
    # Queries, keys, values and outcome as wide as they, the outcome as it goes on.
    per_head = 4 * query_dim * batch.core_bytes + mla.v_head_dim * element * ("linear_proj" in kept_inputs)
    core = tokens * heads * (per_head + _WIDE)
    if spread.cp > 1:
        core += tokens * heads * (spread.cp - 1) * (query_dim + mla.v_head_dim) * batch.core_bytes
    return latents, core + _masks(batch, spread, None)


def _feed_forward(shape: Shape, ffn: int, tokens: int, element: int, keeps_output: bool = True) -> int:
    """Gate and up side by side, what comes out, and for gates without a derivative of our own the activated gate."""
    activated = 0 if shape.activation == "silu" else 1
    return tokens * ffn * (2 + activated + keeps_output) * element


def _mixture(shape: Shape, moe: Moe, batch: Pass, spread: Spread, norm_tokens: int, kept_inputs: frozenset[str]) -> int:
    """Router, routed tokens and experts; every rank is taken to get its share of the tokens."""
    element, tokens = batch.element_bytes, batch.num_tokens // spread.cp
    router = norm_tokens * moe.num_experts * (5 * _WIDE + 2) + (norm_tokens * shape.hidden_size * _WIDE if element < _WIDE else 0)
    routed = tokens * moe.experts_per_token * spread.etp // spread.tp
    # Megatron's expert keeps gate and up, the activated gate, their product, and that times the token's weight.
    inner = 4 + ("linear_fc2" in kept_inputs) + (2 if moe_is_clamped(shape) else 0)
    inputs = shape.hidden_size * ("linear_fc1" in kept_inputs)
    experts = routed * (inputs + inner * moe.ffn_hidden_size // spread.etp) * element
    shared = tokens * moe.shared_ffn_hidden_size * (3 + ("linear_fc2" in kept_inputs)) * element // spread.tp
    return router + experts + shared


def moe_is_clamped(shape: Shape) -> bool:
    """Whether the gates of the model's experts are held within limits, which takes copies."""
    return shape.gate_limit is not None


def kept_bytes(layers: list[LayerBytes], recomputed: Recomputed, mixtures: tuple[bool, ...]) -> tuple[int, int]:
    """(bytes that a stage of these layers keeps of a pass, bytes that exist besides while its largest part is made again)."""
    if recomputed.granularity == "full":
        return _of_full(layers, recomputed)
    kept, again = 0, 0
    for layer, is_mixture in zip(layers, mixtures, strict=True):
        parts = {"core_attn": layer.core - layer.core_inputs, "moe" if is_mixture else "mlp": layer.feed_forward}
        saved = {name: size for name, size in parts.items() if recomputed.granularity == "selective" and name in recomputed.parts}
        kept += layer.whole - sum(saved.values())
        again = max(again, *saved.values()) if saved else again
    return kept, again


def _of_full(layers: list[LayerBytes], recomputed: Recomputed) -> tuple[int, int]:
    size = recomputed.layers
    if recomputed.method == "block":
        again = layers[:size]
        kept = sum(layer.input for layer in again) + sum(layer.whole for layer in layers[size:])
        return kept, max((layer.whole - layer.input for layer in again), default=0)
    units = [layers[start : start + size] for start in range(0, len(layers), size)]
    largest = max((sum(layer.whole for layer in unit) - unit[0].input for unit in units), default=0)
    return sum(unit[0].input for unit in units), largest


def head_bytes(
    shape: Shape, batch: Pass, spread: Spread, chunk: int | None, temporary_elements: int = 0, *, is_trained: bool = True
) -> int:
    """Logits with what else exists while their gradient is made: hidden states and theirs, the output weight's if it is trained, rows in
    float32.

    `chunk`: positions whose logits exist at once. `temporary_elements`: of the rows that are worked on at once.
    """
    element, learnt = batch.element_bytes, batch.num_trained // spread.cp
    columns = -(-shape.vocab_size // spread.tp)
    rows = learnt if chunk is None else min(chunk, learnt)
    logits = rows * columns * element
    hidden = 2 * learnt * shape.hidden_size * element
    weight = columns * shape.hidden_size * (element if chunk is None else _WIDE) * is_trained
    if shape.normalized_head:
        weight += columns * shape.hidden_size * element
    gradients = hidden + weight + 2 * min(temporary_elements, rows * columns) * _WIDE
    if shape.logit_softcap is None:
        return logits + gradients
    return max(3 * logits, 2 * logits + gradients)  # while they are capped, and while their gradient is made
