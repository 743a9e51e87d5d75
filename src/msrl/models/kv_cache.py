"""Size of the key-value cache."""

from __future__ import annotations

from msrl.models.shape import DeltaNet, Mixer, Mla, Shape


def kv_bytes_per_token(shape: Shape, element_bytes: int, tp: int) -> int:
    """Return the bytes of one device's KV cache per token.

    It caches keys and values of the device's query groups in every layer. With latent attention,
    every device caches the latent and the rotated key (DeepSeek V2, arXiv:2405.04434, section
    2.1.3).
    """
    return sum(_cached_channels(layer.mixer, tp) for layer in shape.layers) * element_bytes


def _cached_channels(mixer: Mixer, tp: int) -> int:
    if isinstance(mixer, DeltaNet):
        return 0  # its state does not grow with the sequence
    if isinstance(mixer, Mla):
        return mixer.kv_lora_rank + mixer.rope_head_dim
    return 2 * max(1, mixer.num_groups // tp) * mixer.head_dim
