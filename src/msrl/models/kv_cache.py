"""How much of a key-value cache a token takes."""

from __future__ import annotations

from msrl.models.shape import Shape


def kv_bytes_per_token(shape: Shape, element_bytes: int, tp: int) -> int:
    """Bytes that the KV cache of one device takes for one token: keys and values of its query groups in every layer.

    Of latent attention the latent and the rotated key are kept, on every device (DeepSeek V2, arXiv:2405.04434, section 2.1.3).
    """
    if shape.mla is not None:
        return shape.num_layers * (shape.mla.kv_lora_rank + shape.mla.rope_head_dim) * element_bytes
    groups = max(1, shape.num_query_groups // tp)
    return 2 * shape.num_layers * groups * shape.head_dim * element_bytes
