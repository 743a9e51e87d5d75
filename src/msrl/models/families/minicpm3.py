"""MiniCPM 3 (transformers' `MiniCPM3ForCausalLM`).

Latent attention with rotated halves of the shared channels and without experts, and the factors of
`minicpm.py`.
"""

from __future__ import annotations

from msrl.models.deepseek import deepseek_shape
from msrl.models.hf_config import HfConfig
from msrl.models.multipliers import with_depth_scale
from msrl.models.shape import Shape

ARCHITECTURES = ("MiniCPM3ForCausalLM",)
_DEFAULTS = {
    "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "max_position_embeddings": 32768, "tie_word_embeddings": True,
}  # fmt: skip


def shape(config: HfConfig) -> Shape:
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    values = {**_DEFAULTS, **config.values}
    if values.get("v_head_dim") is None:
        values["v_head_dim"] = hidden // heads
    config.refuse("head_dim", values["qk_rope_head_dim"])
    decoder = deepseek_shape(
        HfConfig(values, config.where),
        family="minicpm3",
        experts=(),
        norm_eps=1e-5,
        rotary_interleaved=False,
    )
    return with_depth_scale(config, decoder, embedding=12.0, depth=1.4, width=256)
