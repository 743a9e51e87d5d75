"""InternLM 2 and 2.5 (remote code, `InternLM2ForCausalLM`).

Llama's network with q, k and v in one tensor, ordered by query group.
"""

from __future__ import annotations

from msrl.models.decoder import decoder_shape
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import Names
from msrl.models.shape import Shape

ARCHITECTURES = ("InternLM2ForCausalLM",)
NAMES = Names(
    embedding="model.tok_embeddings.weight",
    input_norm="attention_norm",
    qkv=("attention.wqkv",),
    qkv_by_group=True,
    attention_output="attention.wo",
    mlp_norm="ffn_norm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    head="output.weight",
)


def shape(config: HfConfig) -> Shape:
    config.refuse("bias", False)
    config.refuse("tie_word_embeddings", False)
    heads = config.count("num_attention_heads")
    return decoder_shape(
        config,
        family="internlm2",
        num_key_value_heads=heads,
        max_position_embeddings=2048,
    )
