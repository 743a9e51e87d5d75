"""ChatGLM2, ChatGLM3 and GLM-4 as first published, with remote code (`ChatGLMModel`).

The network equals `glm.py` with other tensor names. The config keys come from the published
`configuration_chatglm.py`.
"""

from __future__ import annotations

from msrl.models.decoder import check_heads, make_layers
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.names import Names
from msrl.models.shape import Attention, Rotary, Shape

ARCHITECTURES = ("ChatGLMModel", "ChatGLMForConditionalGeneration")
NAMES = Names(
    layer="transformer.encoder.layers.{layer}.",
    embedding="transformer.embedding.word_embeddings.weight",
    qkv=("self_attention.query_key_value",),
    attention_output="self_attention.dense",
    gate_up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    final_norm="transformer.encoder.final_layernorm.weight",
    head="transformer.output_layer.weight",
)
_SUPPORTED_VALUES = {
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "fp32_residual_connection": False,
    "rmsnorm": True,
    "post_layer_norm": True,
    "original_rope": True,
    "interleaved_qkv": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "tie_word_embeddings": False,
    "quantization_bit": 0,
}


def shape(config: HfConfig) -> Shape:
    for key, value in _SUPPORTED_VALUES.items():
        config.refuse(key, value)
    for key in ("pre_seq_len", "quantization_config"):
        config.refuse(key)
    heads, head_dim = config.count("num_attention_heads"), config.count("kv_channels", 128)
    is_grouped = config.flag("multi_query_attention", False)
    theta = 10000.0 * config.positive("rope_ratio", 1.0)
    mixer = Attention(
        num_heads=heads,
        num_groups=config.count("multi_query_group_num", 1) if is_grouped else heads,
        head_dim=head_dim,
        rotary=Rotary(theta, None, head_dim // 2, interleaved=True),
        qkv_bias=config.flag("add_qkv_bias", False),
    )
    ffn = config.count("ffn_hidden_size")
    decoder = Shape(
        family="chatglm",
        architecture=config.architecture(),
        layers=make_layers([mixer] * config.count("num_layers"), ffn),
        hidden_size=config.count("hidden_size"),
        ffn_hidden_size=ffn,
        vocab_size=config.count("padded_vocab_size"),
        max_position_embeddings=config.count("seq_length"),
        norm_eps=config.positive("layernorm_epsilon", 1e-5),
        tie_word_embeddings=False,
        dtype=config.dtype(),
    )
    return check_heads(config, decoder)
