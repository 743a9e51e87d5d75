"""Size of the key-value cache."""

from __future__ import annotations

from msrl.models.shape import DeltaNet, Mixer, Mla, Shape

_SCALE_BYTES = 4


def kv_bytes_per_token(shape: Shape, element_bytes: int, tp: int) -> int:
    """Return the bytes of one device's KV cache per token.

    It caches keys and values of the device's query groups in every layer. With latent attention,
    every device caches the latent and the rotated key (DeepSeek V2, arXiv:2405.04434, section
    2.1.3), and the key of the indexer in 8 bits with a float32 scale.
    """
    indexers = (layer.mixer.indexer for layer in shape.layers if isinstance(layer.mixer, Mla))
    own = (indexer for indexer in indexers if indexer is not None and not indexer.is_shared)
    keys = sum(indexer.head_dim + _SCALE_BYTES for indexer in own)
    return keys + sum(_cached_channels(layer.mixer, tp) for layer in shape.layers) * element_bytes


def _cached_channels(mixer: Mixer, tp: int) -> int:
    if isinstance(mixer, DeltaNet):
        return 0  # its state does not grow with the sequence
    if isinstance(mixer, Mla):
        return mixer.kv_lora_rank + mixer.rope_head_dim
    return 2 * max(1, mixer.num_groups // tp) * mixer.head_dim
