"""gpt-oss (transformers' `GptOssForCausalLM`, arXiv:2508.10925).

Every layer has experts, every second one a window, and every attention has sinks. There are biases
everywhere except in the output layer. The gate is clamped: quick_gelu(gate) * (up + 1).

One Hugging Face tensor contains all experts of a layer, [experts, inputs, outputs], with
alternating columns of gate and up. Megatron's names of the sinks and biases come from its local
layer spec.
"""

from __future__ import annotations

from dataclasses import replace

from msrl.models.decoder import alternating_window, decoder_shape, with_attention
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.attention import attention_rules
from msrl.models.layer_rules.decoder import model_rules
from msrl.models.layer_rules.names import LLAMA
from msrl.models.mixture import aux_loss_coef, layer_experts
from msrl.models.rules import GateUp, Packed, Replicated, Rule, Rules, Sharded
from msrl.models.shape import Attention, Moe, Shape

ARCHITECTURES = ("GptOssForCausalLM",)
_HF, _MCORE = "model.layers.{layer}.", "decoder.layers.{layer}."
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def shape(config: HfConfig) -> Shape:
    config.refuse("attention_bias", True)
    config.refuse("swiglu_alpha", 1.702)
    if config.values.get("rope_scaling") is None and config.values.get("rope_parameters") is None:
        # The default of the config class.
        config = HfConfig({**config.values, "rope_scaling": _YARN}, config.where)
    moe = Moe(
        num_experts=config.count("num_local_experts", 128),
        experts_per_token=config.count("num_experts_per_tok", 4),
        ffn_hidden_size=config.count("intermediate_size", 2880),
        biases=True,
        aux_loss_coef=aux_loss_coef(config),
    )
    decoder = decoder_shape(
        config,
        family="gpt_oss",
        qkv_bias=True,
        head_dim=64,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        norm_eps=1e-5,
        rope_theta=150000.0,
        windows=alternating_window(config, 128),
        experts=layer_experts(config, moe, (True,) * config.count("num_hidden_layers")),
        quantization="mxfp4",
    )
    limit = config.positive("swiglu_limit", 7.0)
    return replace(
        with_attention(decoder, sinks=True, output_bias=True),
        activation="quick_gelu",
        gate_offset=1.0,
        gate_limit=limit,
    )


def rules(shape: Shape) -> Rules:
    hidden, moe, attention = shape.hidden_size, shape.moe, shape.attention
    assert moe is not None
    assert isinstance(attention, Attention)
    layer = (
        *attention_rules(attention, hidden),
        _rule(
            "self_attention.core_attention.softmax_offset",
            "self_attn.sinks",
            Sharded(0),
            (attention.num_heads,),
        ),
        _rule(
            "pre_mlp_layernorm.weight", "post_attention_layernorm.weight", Replicated(), (hidden,)
        ),
        _rule("mlp.router.weight", "mlp.router.weight", Replicated(), (moe.num_experts, hidden)),
        _rule("mlp.router.bias", "mlp.router.bias", Replicated(), (moe.num_experts,)),
        *(
            rule
            for number in range(moe.num_experts)
            for rule in _expert(number, hidden, moe.ffn_hidden_size)
        ),
    )
    return model_rules(shape, LLAMA, (layer,) * shape.num_layers)


def _expert(number: int, hidden: int, ffn: int) -> tuple[Rule, ...]:
    mcore, hf, half = "mlp.experts.local_experts.{expert}.linear_", "mlp.experts.", (ffn, ffn)
    return (
        _rule(
            f"{mcore}fc1.weight",
            f"{hf}gate_up_proj",
            Packed(GateUp(), half, True, transposed=True),
            (hidden, 2 * ffn),
            number,
        ),
        _rule(
            f"{mcore}fc1.bias",
            f"{hf}gate_up_proj_bias",
            Packed(GateUp(), half, True),
            (2 * ffn,),
            number,
        ),
        _rule(
            f"{mcore}fc2.weight",
            f"{hf}down_proj",
            Packed(Sharded(1), (hidden,), transposed=True),
            (ffn, hidden),
            number,
        ),
        _rule(f"{mcore}fc2.bias", f"{hf}down_proj_bias", Replicated(), (hidden,), number),
    )


def _rule(
    mcore: str,
    hf: str,
    layout: Replicated | Sharded | Packed,
    size: tuple[int, ...],
    expert: int | None = None,
) -> Rule:
    entry = "" if expert is None else "[{expert}]"
    return Rule(f"{_MCORE}{mcore}", (f"{_HF}{hf}{entry}",), layout, (size,), expert)
