"""Granite 3, mixtures of experts, and Granite 4 without Mamba layers.

Granite's factors (`multipliers.py`). Files stack the experts of a layer in two tensors
(transformers' `GraniteMoeForCausalLM`, `GraniteMoeSharedForCausalLM`). Granite 4
(`GraniteMoeHybridForCausalLM`) has a shared expert in every layer and may have no others.
"""

from __future__ import annotations

from typing import cast

from msrl.models.decoder import decoder_shape, with_attention
from msrl.models.hf_config import HfConfig
from msrl.models.layer_rules.decoder import decoder_rules
from msrl.models.layer_rules.names import LLAMA, ExpertNames, Names
from msrl.models.mixture import aux_loss_coef, layer_experts
from msrl.models.multipliers import with_multipliers
from msrl.models.rules import Rules
from msrl.models.shape import Moe, Shape

_HYBRID = "GraniteMoeHybridForCausalLM"
ARCHITECTURES = ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", _HYBRID)
_PACKED = ("input_linear", "output_linear")
_DENSE = Names(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
_EXPERTS = ExpertNames(
    router="block_sparse_moe.router.layer",
    shared="shared_mlp.",
    shared_packed=_PACKED,
    stack="block_sparse_moe.",
    stacked=("input_linear.weight", "output_linear.weight"),
)


def shape(config: HfConfig) -> Shape:
    config.refuse("attention_bias", False)
    config.refuse("normalization_function", "rmsnorm")
    is_hybrid = config.architecture() == _HYBRID
    if is_hybrid:
        _refuse_mamba(config)
    shared = config.values.get("shared_intermediate_size", 1024 if is_hybrid else 0)
    shared_ffn = config.count("shared_intermediate_size", 1024) if shared else 0
    has_experts = not is_hybrid or config.values.get("num_local_experts", 8) != 0
    num_layers = config.count("num_hidden_layers")
    moe = _moe(config, shared_ffn) if has_experts else None
    values = config.values if has_experts else {**config.values, "intermediate_size": shared_ffn}
    decoder = decoder_shape(
        HfConfig(values, config.where),
        family="granite_moe",
        num_key_value_heads=config.count("num_attention_heads"),
        max_position_embeddings=2048,
        experts=layer_experts(config, moe, (True,) * num_layers) if moe else (),
    )
    config.refuse("position_embedding_type", "rope", "nope")
    kind = config.values.get("position_embedding_type")
    rotates = kind == "rope" if is_hybrid else kind != "nope"
    return with_multipliers(config, with_attention(decoder, rotates=rotates))


def _refuse_mamba(config: HfConfig) -> None:
    listed = config.values.get("layer_types") or config.values.get("layers_block_type")
    kinds = cast("list[object]", listed) if isinstance(listed, list) else []
    if not kinds or any(kind not in ("attention", "full_attention") for kind in kinds):
        config.fail("layer_types", "has Mamba layers, which are not supported")
    if len(kinds) != config.count("num_hidden_layers"):
        config.fail("layer_types", "must have one entry for each layer")


def _moe(config: HfConfig, shared_ffn: int) -> Moe:
    return Moe(
        num_experts=config.count("num_local_experts", 8),
        experts_per_token=config.count("num_experts_per_tok", 2),
        ffn_hidden_size=config.count("intermediate_size"),
        shared_ffn_hidden_size=shared_ffn,
        aux_loss_coef=aux_loss_coef(config),
    )


def rules(shape: Shape) -> Rules:
    return decoder_rules(shape, LLAMA if shape.moe else _DENSE, _EXPERTS)
