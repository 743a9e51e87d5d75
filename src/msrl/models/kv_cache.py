"""Size of vLLM's cache: keys and values of tokens, states of sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass

from msrl.models.shape import Attention, DeltaNet, Mixer, Mla, Shape

_SCALE_BYTES = 4
_STATE_BYTES = 4  # states of delta networks are float32
_MOSTLY_EQUAL = 1.5  # see `cache_blocks`


@dataclass(frozen=True, slots=True)
class CacheBlocks:
    """Blocks of one device's cache.

    Every group of layers has its own blocks for a sequence: one for every `num_tokens` tokens in
    `attention_groups`, and one in `state_groups`. All blocks have `num_bytes`.
    """

    num_bytes: int
    num_tokens: int
    attention_groups: int
    state_groups: int

    def per_sequence(self, length: int) -> int:
        """Return the blocks of a sequence of `length` tokens."""
        return self.attention_groups * -(-length // self.num_tokens) + self.state_groups


def cache_blocks(shape: Shape, element_bytes: int, tp: int, block_tokens: int) -> CacheBlocks:
    """Return the blocks of vLLM's cache for a model.

    Layers of one kind are divided into groups of one size, which is that of the rarest kind, or of
    the most frequent one if the numbers differ by less than half
    (`_get_kv_cache_groups_uniform_page_size` in vllm/v1/core/kv_cache_utils.py of vLLM 0.32). With
    states, blocks have as many tokens as a state needs (`_align_hybrid_block_size` in
    vllm/platforms/interface.py).
    """
    kinds = Counter(_kind(layer.mixer) for layer in shape.layers)
    if len(kinds) == 1:
        size = kv_bytes_per_token(shape, element_bytes, tp) * block_tokens
        return CacheBlocks(size, block_tokens, attention_groups=1, state_groups=0)
    fewest, most = min(kinds.values()), max(kinds.values())
    group = most if most < fewest * _MOSTLY_EQUAL else fewest
    latents = caches_latents(shape)
    channels = max(_cached_channels(layer.mixer, tp, latents) for layer in shape.layers)
    page = channels * element_bytes
    if shape.delta is not None:
        state = _state_bytes(shape.delta, element_bytes, tp)
        block_tokens *= max(1, -(-state // (page * block_tokens)))
    groups = {kind: -(-number // group) for kind, number in kinds.items()}
    states = groups.pop(DeltaNet, 0)
    return CacheBlocks(group * page * block_tokens, block_tokens, sum(groups.values()), states)


def kv_bytes_per_token(shape: Shape, element_bytes: int, tp: int) -> int:
    """Return the bytes of one device's KV cache per token.

    It caches keys and values of the device's query groups in every layer. With latent attention,
    every device caches the latent and the rotated key (DeepSeek V2, arXiv:2405.04434, section
    2.1.3), and the key of the indexer in 8 bits with a float32 scale.
    """
    indexers = (layer.mixer.indexer for layer in shape.layers if isinstance(layer.mixer, Mla))
    own = (indexer for indexer in indexers if indexer is not None and not indexer.is_shared)
    keys = sum(indexer.head_dim + _SCALE_BYTES for indexer in own)
    has_latents = caches_latents(shape)
    channels = sum(_cached_channels(layer.mixer, tp, has_latents) for layer in shape.layers)
    return keys + channels * element_bytes


def state_bytes_per_sequence(shape: Shape, element_bytes: int, tp: int) -> int:
    """Return the bytes of one device's states of delta networks per sequence."""
    mixers = (layer.mixer for layer in shape.layers)
    return sum(_state_bytes(x, element_bytes, tp) for x in mixers if isinstance(x, DeltaNet))


def _state_bytes(delta: DeltaNet, element_bytes: int, tp: int) -> int:
    """Return the bytes of a layer's state: last inputs of the convolution, and matrices of heads.

    They are `gated_delta_net_state_shape` in vllm/model_executor/layers/mamba/mamba_utils.py.
    """
    channels = 2 * delta.key_channels + delta.value_channels
    inputs = channels // tp * (delta.kernel_size - 1) * element_bytes
    return inputs + delta.value_channels // tp * delta.key_head_dim * _STATE_BYTES


def caches_latents(shape: Shape) -> bool:
    """Return False for latent attention whose keys and values vLLM caches for all heads."""
    return shape.family != "minicpm3"


def _cached_channels(mixer: Mixer, tp: int, has_latents: bool) -> int:
    if isinstance(mixer, DeltaNet):
        return 0  # its state does not grow with the sequence
    if isinstance(mixer, Mla) and has_latents:
        return mixer.kv_lora_rank + mixer.rope_head_dim
    return 2 * max(1, mixer.num_groups // tp) * mixer.head_dim


def _kind(mixer: Mixer) -> Hashable:
    """Return what distinguishes the caches of layers."""
    return mixer.window if isinstance(mixer, Attention) else type(mixer)
