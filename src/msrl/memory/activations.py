"""Bytes of the activations that a rank saves for the backward pass, computed from sizes.

The count follows the tensors that the layers save (`layers.py` and `attention.py` of
`trainer/model`, Megatron's linear layers and experts). Tests compare the sums with the live tensors
of real ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from msrl.config.sections.train import RecomputeConfig
from msrl.models.shape import Attention, DeltaNet, Dense, Layer, Mla, Moe, Shape

_FP32_BYTES = _INT32_BYTES = 4
_DELTA_CHUNK = 64  # tokens (`trainer/model/mixers/gated_delta.py`)
_MASK_BLOCK = 512  # queries per block of the attention mask (`trainer/model/attention.py`)
INDEXER = "wq_b"  # projection of the queries of an indexer, if a loss trains it
LINEARS = (
    "linear_qkv",
    "linear_qkvz",
    "linear_q_up_proj",
    "linear_kv_up_proj",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
)
_FIRST = ("linear_qkv", "linear_qkvz")


@dataclass(frozen=True, slots=True)
class Pass:
    """One micro-batch.

    `num_tokens` counts all tokens, `num_trained` those with loss mask 1. `longest` is the length of
    the longest sequence, and `is_packed` is True if the micro-batch packs sequences.
    """

    num_tokens: int
    num_trained: int
    longest: int
    is_packed: bool
    element_bytes: int  # per element of weights and activations
    attention_bytes: int | None = None  # per element in the core attention, if larger
    logits_bytes: int | None = None  # per element in the output layer, if larger

    @property
    def head_bytes(self) -> int:
        """Bytes per element in the product of the output layer."""
        return max(self.element_bytes, self.logits_bytes or 0)

    @property
    def core_bytes(self) -> int:
        """Bytes per element in the core attention."""
        return max(self.element_bytes, self.attention_bytes or 0)


@dataclass(frozen=True, slots=True)
class Spread:
    """Parallel sizes of a pass: tensor, expert-tensor and context, and sequence parallelism.

    `head_ranks` context-parallel ranks exchange tokens for heads. With `gathers_keys`, every rank
    gathers all keys and values instead.
    """

    tp: int = 1
    etp: int = 1
    cp: int = 1
    sp: bool = False
    gathers_keys: bool = False
    head_ranks: int = 1

    @property
    def ring_size(self) -> int:
        """Number of ranks that keys and values travel around."""
        return 1 if self.gathers_keys else self.cp // self.head_ranks


class LayerBytes(NamedTuple):
    """Saved bytes of a layer: input, attention without its core, core attention, feed-forward."""

    input: int
    attention: int
    core: int
    core_inputs: int  # saved instead of `core` if the core attention is recomputed
    feed_forward: int
    temporary: int = 0  # of the backward pass, if it is more than the gradients

    @property
    def total(self) -> int:
        return self.input + self.attention + self.core + self.feed_forward


def layer_bytes(
    shape: Shape,
    layer: Layer,
    batch: Pass,
    spread: Spread,
    saved_inputs: frozenset[str] = frozenset(LINEARS),
    *,
    is_grouped: bool = True,
) -> LayerBytes:
    """Return the bytes that a layer saves of a pass.

    `saved_inputs` names the linear layers that save their inputs, which are those that are trained.
    `is_grouped` is True if the products of experts are grouped, which is so without adapters.
    """
    element, tokens = batch.element_bytes, batch.num_tokens // spread.cp
    norm_tokens = tokens // spread.tp if spread.sp else tokens
    row = norm_tokens * shape.hidden_size * element
    scales = norm_tokens * _FP32_BYTES
    mixer, block, temporary = layer.mixer, layer.feed_forward, 0
    # Inputs of the two norms; outputs of the norms, which are inputs of the first linear layers.
    first = row * (not saved_inputs.isdisjoint(_FIRST))
    attention = row + 2 * scales + first
    if not shape.pre_norms:
        attention = row
    elif shape.parallel_blocks:
        attention = 2 * scales + first  # mean and deviation of one norm
    if shape.post_norms:
        attention += 2 * (row + scales)
    has_own_input = shape.pre_norms and not shape.parallel_blocks
    normed = row * ("linear_fc1" in saved_inputs and has_own_input)
    if isinstance(mixer, Mla):
        latent, core = _latent_attention(mixer, batch, spread, norm_tokens, saved_inputs)
        attention, inputs = attention + latent, 0
    elif isinstance(mixer, DeltaNet):
        core, inputs = _delta_core(mixer, batch, spread, "linear_proj" in saved_inputs), 0
        temporary = _delta_chunks(mixer, batch, spread)
    else:
        core, inputs = _core_attention(mixer, batch, spread, "linear_proj" in saved_inputs)
    if isinstance(block, Dense):
        saves_product = "linear_fc2" in saved_inputs
        forward = _feed_forward(shape, block.hidden_size, tokens, element, saves_product)
        forward //= spread.tp
    else:
        inner = _inner_tensors(shape, is_grouped=is_grouped)
        forward = _mixture(shape, block, batch, spread, norm_tokens, saved_inputs, inner)
    return LayerBytes(row, attention + normed, core, inputs, forward, temporary)


def _core_attention(
    attention: Attention, batch: Pass, spread: Spread, saves_output: bool
) -> tuple[int, int]:
    """Return (bytes saved from the QKV to the output projection, the same with recomputation)."""
    element, core = batch.element_bytes, batch.core_bytes
    tokens, heads = batch.num_tokens // spread.cp, attention.num_heads // spread.tp
    q = tokens * heads * attention.head_dim
    kv = tokens * key_heads(attention, spread) * attention.head_dim
    projected_keys = tokens * max(attention.num_groups // spread.tp, 1) * attention.head_dim
    projected = (q + 2 * projected_keys) * element
    # The projection interleaves the query heads of a group with its keys, so groups need a copy.
    copied_query = q * element if attention.heads_per_group > 1 else 0
    window, has_norms = attention.window, attention.qk_norm is not None
    is_windowed = window is not None and window < batch.longest
    is_received = spread.gathers_keys or spread.head_ranks > 1
    # Without a ring, attention pieces are concatenated and windows are computed in blocks.
    has_pieces = spread.ring_size == 1 and (batch.is_packed or is_windowed)
    is_copied = core > element or is_received or has_pieces
    has_new_values = is_received or core > element  # else values are views of the projection
    saved = projected if not has_new_values or has_norms else 0
    saved += copied_query if has_norms else 0
    num_gathered = spread.cp if spread.gathers_keys else 1
    # Operands of the products.
    saved += (q + (2 * kv * num_gathered if has_new_values else kv)) * core
    output_bytes = core if spread.ring_size == 1 else _FP32_BYTES
    saved += q * (output_bytes + element * (is_copied and saves_output))  # output
    saved += tokens * heads * _FP32_BYTES  # softmax normalizers
    saved += _masks(batch, spread, window if is_windowed else None)
    return saved, projected + copied_query + q * element * saves_output


def _delta_core(delta: DeltaNet, batch: Pass, spread: Spread, saves_output: bool) -> int:
    """Return the bytes that a gated delta network saves, besides its input.

    These are the inputs of the convolution, the gate (in one tensor with them if the projections
    are fused), the output before its norm, and the input of the output projection.
    """
    mixed, values = 2 * delta.key_channels + delta.value_channels, delta.value_channels
    gate = mixed + values if delta.is_fused else values
    channels = mixed + 2 * delta.num_value_heads + gate + values + values * saves_output
    return batch.num_tokens // spread.cp * channels // spread.tp * batch.element_bytes


def _delta_chunks(delta: DeltaNet, batch: Pass, spread: Spread) -> int:
    """Return the bytes of the chunks of a delta network that its backward pass computes again.

    They are float32: q, k and v around the convolution, and of every value head the pairs of a
    chunk, the solutions and the states, with gradients.
    """
    mixed = 2 * delta.key_channels + delta.value_channels
    state = delta.key_head_dim * delta.value_head_dim // _DELTA_CHUNK
    head = 5 * _DELTA_CHUNK + 4 * (delta.key_head_dim + delta.value_head_dim) + 2 * state
    channels = 4 * mixed + delta.num_value_heads * head
    return batch.num_tokens // spread.cp * channels // spread.tp * _FP32_BYTES


def key_heads(mixer: Attention | Mla, spread: Spread) -> int:
    """Return the key and value heads of a rank, repeated where more ranks exchange heads."""
    return max(mixer.num_groups // spread.tp, spread.head_ranks)


def _masks(batch: Pass, spread: Spread, window: int | None) -> int:
    """Return the bytes of attention masks, which windows and gathered keys need."""
    if spread.ring_size > 1:
        return 0  # computed again in the backward pass
    if window is not None:
        return batch.num_tokens // spread.cp * (window + _MASK_BLOCK) * batch.core_bytes
    if not spread.gathers_keys:
        return 0
    num_chunks = 2 * spread.cp
    return batch.num_tokens * batch.longest * (num_chunks + 1) // num_chunks**2 * batch.core_bytes


def _latent_attention(
    mla: Mla,
    batch: Pass,
    spread: Spread,
    norm_tokens: int,
    saved_inputs: frozenset[str],
) -> tuple[int, int]:
    """Return (bytes of the latents and their norms, bytes of queries, keys, values and output)."""
    element, core_bytes = batch.element_bytes, batch.core_bytes
    tokens, heads = batch.num_tokens // spread.cp, mla.num_heads // spread.tp
    query_dim = mla.head_dim
    first = mla.q_lora_rank or mla.num_heads * query_dim
    down = first + mla.kv_lora_rank + mla.rope_head_dim
    normed = (mla.q_lora_rank or 0) * ("linear_q_up_proj" in saved_inputs)
    normed += mla.kv_lora_rank * ("linear_kv_up_proj" in saved_inputs)
    latents = norm_tokens * ((down + normed) * element + 2 * _FP32_BYTES)
    # Queries, keys, values and output, all padded to the query dimension, then the unpadded output.
    per_head = 4 * query_dim * core_bytes
    if spread.ring_size > 1:  # without padding
        per_head = (2 * query_dim + mla.v_head_dim) * core_bytes + mla.v_head_dim * _FP32_BYTES
    chosen = 0
    if mla.indexer is not None and batch.longest > mla.indexer.top_k:
        # Outputs and normalizers of blocks of queries are computed again in the backward pass.
        per_head = 3 * query_dim * core_bytes
        if mla.has_indexer_weights:
            chosen = batch.num_tokens * mla.indexer.top_k * _INT32_BYTES
    if mla.indexer is not None and mla.has_indexer_weights and INDEXER in saved_inputs:
        # Queries of the indexer, and the target of its loss.
        width = min(mla.indexer.top_k, batch.longest)
        queries = mla.indexer.num_heads * mla.indexer.head_dim
        chosen += norm_tokens * (queries * element + width * _FP32_BYTES)
    per_head += mla.v_head_dim * element * ("linear_proj" in saved_inputs)
    core = tokens * heads * (per_head + _FP32_BYTES)
    if spread.gathers_keys:
        core += tokens * heads * (spread.cp - 1) * (query_dim + mla.v_head_dim) * core_bytes
    return latents, core + chosen + _masks(batch, spread, None)


def _feed_forward(
    shape: Shape, ffn: int, tokens: int, element: int, saves_output: bool = True
) -> int:
    """Return the bytes of gate and up, of the output, and of a saved activated gate.

    The fused SiLU does not save the activated gate.
    """
    activated = 0 if shape.activation == "silu" else 1
    return tokens * ffn * (2 + activated + saves_output) * element


def _mixture(
    shape: Shape,
    moe: Moe,
    batch: Pass,
    spread: Spread,
    norm_tokens: int,
    saved_inputs: frozenset[str],
    inner: int,
) -> int:
    """Return the bytes of router, routed tokens and experts, with balanced routing over ranks.

    `inner` is the number of tensors in an expert between its linear layers.
    """
    element, tokens = batch.element_bytes, batch.num_tokens // spread.cp
    saves_product = "linear_fc2" in saved_inputs
    router = norm_tokens * moe.num_experts * (5 * _FP32_BYTES + 2)
    if element < _FP32_BYTES:  # the router input in float32
        router += norm_tokens * shape.hidden_size * _FP32_BYTES
    routed = tokens * moe.experts_per_token * spread.etp // spread.tp
    inner += saves_product  # times the router weight
    inputs = shape.hidden_size * ("linear_fc1" in saved_inputs)
    experts = routed * (inputs + inner * moe.ffn_hidden_size // spread.etp) * element
    shared = tokens * moe.shared_ffn_hidden_size * (3 + saves_product) * element // spread.tp
    return router + experts + shared


def _inner_tensors(shape: Shape, *, is_grouped: bool) -> int:
    """Return the number of saved tensors between the linear layers of an expert.

    These are gate and up; without a fused activation, also the activated gate and the product.
    """
    clamped = 2 if moe_is_clamped(shape) else 0
    is_fused = is_grouped and shape.activation == "silu" and not clamped
    return 2 if is_fused else 4 + clamped


def moe_is_clamped(shape: Shape) -> bool:
    """Return True if the gates of the experts are clamped, which saves copies."""
    return shape.gate_limit is not None


def saved_bytes(
    layers: list[LayerBytes], recomputed: RecomputeConfig, mixtures: tuple[bool, ...]
) -> tuple[int, int]:
    """Return (bytes that a stage with these layers saves, peak bytes of recomputation)."""
    if recomputed.granularity == "full":
        return _saved_with_full_recompute(layers, recomputed)
    recomputed_modules = recomputed.modules if recomputed.granularity == "selective" else ()
    total, peak = 0, 0
    for layer, is_mixture in zip(layers, mixtures, strict=True):
        sizes = {
            "core_attn": layer.core - layer.core_inputs,
            "moe" if is_mixture else "mlp": layer.feed_forward,
        }
        freed = [size for name, size in sizes.items() if name in recomputed_modules]
        total += layer.total - sum(freed)
        peak = max(peak, *freed) if freed else peak
    return total, peak


def _saved_with_full_recompute(
    layers: list[LayerBytes], recomputed: RecomputeConfig
) -> tuple[int, int]:
    size = recomputed.layers
    if recomputed.method == "block":
        block = layers[:size]
        saved = sum(layer.input for layer in block) + sum(layer.total for layer in layers[size:])
        return saved, max((layer.total - layer.input for layer in block), default=0)
    units = [layers[start : start + size] for start in range(0, len(layers), size)]
    peak = 0
    for unit in units:
        peak = max(peak, sum(layer.total for layer in unit) - unit[0].input)
    return sum(unit[0].input for unit in units), peak


def head_bytes(
    shape: Shape,
    batch: Pass,
    spread: Spread,
    chunk: int | None,
    temporary_elements: int = 0,
    *,
    is_trained: bool = True,
) -> int:
    """Return the peak bytes of the output layer: logits and everything that their gradient needs.

    This includes hidden states, their gradient, the weight gradient if the layer is trained, and
    temporary float32 rows. `chunk` is the number of positions whose logits exist at the same time,
    `temporary_elements` the number of elements that are processed at the same time.
    """
    element, trained = batch.head_bytes, batch.num_trained // spread.cp
    columns = -(-shape.vocab_size // spread.tp)
    rows = trained if chunk is None else min(chunk, trained)
    logits = rows * columns * element
    hidden = 2 * trained * shape.hidden_size * element
    weight = columns * shape.hidden_size * (element if chunk is None else _FP32_BYTES) * is_trained
    if shape.normalized_head:
        weight += columns * shape.hidden_size * batch.element_bytes
    if element > batch.element_bytes:  # copies of the weight and of the hidden states
        weight += columns * shape.hidden_size * element
        hidden += trained * shape.hidden_size * batch.element_bytes
    gradients = hidden + weight + 2 * min(temporary_elements, rows * columns) * _FP32_BYTES
    if shape.logit_softcap is None:
        return logits + gradients
    # Peak during the softcap, or during the computation of the gradient.
    return max(3 * logits, 2 * logits + gradients)
