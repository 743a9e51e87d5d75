"""Size of the key-value cache."""

from __future__ import annotations

from msrl.models.shape import Shape


def kv_bytes_per_token(shape: Shape, element_bytes: int, tp: int) -> int:
    """Return the bytes of one device's KV cache per token.

    It caches keys and values of the device's query groups in every layer. With latent attention,
    every device caches the latent and the rotated key (DeepSeek V2, arXiv:2405.04434, section
    2.1.3).
    """
    if shape.mla is not None:
        return shape.num_layers * (shape.mla.kv_lora_rank + shape.mla.rope_head_dim) * element_bytes
    groups = max(1, shape.num_query_groups // tp)
    return 2 * shape.num_layers * groups * shape.head_dim * element_bytes
