"""Small configs of dense families that differ from Llama by a few parts (see `families.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199, "max_position_embeddings": 512,
}  # fmt: skip
COMMON = {
    **SIZES,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Family:
    """One row. `reference` is `transformers`, or a forward pass in `reference_models.py` for remote
    code.
    """

    config: dict[str, Any]
    source: str
    reference: str = "transformers"

    @property
    def architecture(self) -> str:
        return self.config["architectures"][0]


SMOLLM3 = {
    **COMMON, "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3",
    "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-6,
    "rope_theta": 5e6, "rope_scaling": None, "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0], "layer_types": ["full_attention"] * 4,
    "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SMOLLM3_WINDOWS = {
    **{key: x for key, x in SMOLLM3.items() if key not in ("no_rope_layers", "layer_types")},
    "tie_word_embeddings": False, "no_rope_layer_interval": 2, "use_sliding_window": True,
    "sliding_window": 8,
}  # fmt: skip
OLMO2 = {
    **COMMON, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "rms_norm_eps": 1e-6,
    "attention_bias": False, "rope_theta": 5e5, "rope_scaling": None, "pad_token_id": 1,
}  # fmt: skip
OLMO3 = {
    **OLMO2, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": 8,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836,
    "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 16},
}  # fmt: skip
OLMO3_BY_TYPE = {
    **{key: x for key, x in OLMO3.items() if not key.startswith("rope_")},
    "rope_parameters": {
        "full_attention": {**OLMO3["rope_scaling"], "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    },
}  # fmt: skip
PHI3 = {
    **COMMON, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rms_norm_eps": 1e-5,
    "num_key_value_heads": 4, "attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    "rope_theta": 1e4, "rope_scaling": None, "original_max_position_embeddings": 512,
    "sliding_window": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PHI4_MINI = {
    **PHI3, "tie_word_embeddings": True, "num_key_value_heads": 2, "partial_rotary_factor": 0.75,
    "sliding_window": 262144, "original_max_position_embeddings": 24,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.0, 1.1, 1.2, 1.4, 1.5],
    "long_factor": [1.0, 1.1, 1.7, 3.0, 9.0, 31.0]},
}  # fmt: skip
GRANITE = {
    **COMMON, "architectures": ["GraniteForCausalLM"], "model_type": "granite",
    "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-5,
    "rope_theta": 1e7, "rope_scaling": None, "attention_multiplier": 0.1,
    "embedding_multiplier": 12.0, "logits_scaling": 2.0, "residual_multiplier": 0.22,
}  # fmt: skip
GRANITE4 = {
    **GRANITE, "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
    "layer_types": ["attention"] * 4, "num_local_experts": 0, "num_experts_per_tok": 0,
    "shared_intermediate_size": 96, "position_embedding_type": "rope",
    "normalization_function": "rmsnorm", "mamba_n_heads": 8, "mamba_d_head": 16,
}  # fmt: skip
ERNIE = {
    **COMMON, "architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "head_dim": 32,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "use_bias": False,
}  # fmt: skip
HUNYUAN = {
    **COMMON, "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense",
    "tie_word_embeddings": True, "head_dim": 32, "attention_head_dim": 32, "rms_norm_eps": 1e-5,
    "attention_bias": False, "mlp_bias": False, "use_cla": False, "use_qk_norm": True,
    "rope_theta": 1e4, "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1,
    "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0, "type": "dynamic"},
}  # fmt: skip
EXAONE4 = {
    **COMMON, "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "head_dim": 32,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 8,
    "sliding_window_pattern": "LLLG",
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}  # fmt: skip
EXAONE4_SMALL = {
    **EXAONE4, "tie_word_embeddings": True, "sliding_window": None,
    "sliding_window_pattern": None, "layer_types": ["full_attention"] * 4,
}  # fmt: skip
COHERE2 = {
    **COMMON, "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "head_dim": 16,
    "tie_word_embeddings": True, "attention_bias": False, "layer_norm_eps": 1e-5,
    "logit_scale": 0.5, "rope_theta": 5e4, "rotary_pct": 1.0, "sliding_window": 8,
    "sliding_window_pattern": 4, "position_embedding_type": "rope_gptj", "use_embedding_sharing":
    True, "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True,
}  # fmt: skip
COHERE = {
    **{key: x for key, x in COHERE2.items() if "sliding" not in key and key != "head_dim"},
    "architectures": ["CohereForCausalLM"], "model_type": "cohere", "rope_theta": 8e6,
    "use_qk_norm": False,
}  # fmt: skip
MINICPM4 = {
    **COMMON, "architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm",
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "scale_emb": 12, "scale_depth": 1.4,
    "dim_model_base": 32, "mup_denominator": 32,
    "rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 512,
    "long_factor": [0.99, 1.0, 1.1, 1.3, 2.0, 4.9, 14.0, 29.0],
    "short_factor": [0.99, 1.0, 1.1, 1.3, 2.0, 4.9, 14.0, 29.0]},
}  # fmt: skip
MINICPM3 = {
    **COMMON, "architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3",
    "tie_word_embeddings": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "q_lora_rank": 40, "kv_lora_rank": 32,
    "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32,
    "rope_scaling": {**MINICPM4["rope_scaling"], "original_max_position_embeddings": 24,
    "short_factor": [1.0] * 8, "factor": 512 / 24},
}  # fmt: skip
MIMO = {
    **COMMON, "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "head_dim": 32,
    "attention_bias": True, "rms_norm_eps": 1e-5, "rope_theta": 64e4, "sliding_window": 512,
    "max_window_layers": 4, "use_sliding_window": False, "use_mrope": False,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
GRANITE_MOE = {
    **GRANITE, "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe",
    "intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 3,
    "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
GRANITE_SHARED = {
    **GRANITE_MOE, "architectures": ["GraniteMoeSharedForCausalLM"],
    "model_type": "granitemoeshared", "shared_intermediate_size": 80, "tie_word_embeddings": False,
}  # fmt: skip
GRANITE4_MOE = {
    **GRANITE4, **{key: GRANITE_MOE[key] for key in ("intermediate_size", "num_local_experts",
    "num_experts_per_tok", "router_aux_loss_coef")}, "position_embedding_type": "nope",
}  # fmt: skip
ERNIE_MOE = {
    **ERNIE, "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe",
    "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 48, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 1,
    "moe_use_aux_free": True,
}  # fmt: skip
HUNYUAN_MOE = {
    **HUNYUAN, "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe",
    "intermediate_size": 48, "moe_intermediate_size": [48] * 4, "num_experts": 8,
    "moe_topk": [3] * 4, "num_shared_expert": [1] * 4, "norm_topk_prob": True,
    "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0,
}  # fmt: skip
LLAMA_LIKE = {
    "smollm 3": Family(SMOLLM3, "SmolLM3-3B's config.json"),
    "smollm 3 windows": Family(SMOLLM3_WINDOWS, "the defaults of transformers' SmolLM3Config, "
    "with its window switched on"),
    "olmo 2": Family(OLMO2, "OLMo-2-1124-7B's config.json"),
    "olmo 3": Family(OLMO3, "Olmo-3-7B-Instruct's config.json"),
    "olmo 3, transformers 5": Family(OLMO3_BY_TYPE, "Olmo-3-7B-Instruct's config.json, as "
    "transformers 5.19 saves it"),
    "phi 3": Family(PHI3, "Phi-3-mini-4k-instruct's config.json"),
    "phi 4 mini": Family(PHI4_MINI, "Phi-4-mini-instruct's config.json"),
    "granite 3": Family(GRANITE, "granite-3.3-8b-instruct's config.json"),
    "granite 4": Family(GRANITE4, "granite-4.0-1b's config.json"),
    "ernie 4.5": Family(ERNIE, "ERNIE-4.5-0.3B-PT's config.json"),
    "hunyuan v1": Family(HUNYUAN, "Hunyuan-7B-Instruct's config.json"),
    "exaone 4": Family(EXAONE4, "EXAONE-4.0-32B's config.json"),
    "exaone 4 small": Family(EXAONE4_SMALL, "EXAONE-4.0-1.2B's config.json"),
    "cohere": Family(COHERE, "c4ai-command-r-v01's config.json"),
    "cohere 2": Family(COHERE2, "c4ai-command-r7b-12-2024's config.json"),
    "minicpm 3": Family(MINICPM3, "MiniCPM3-4B.config.json"),
    "minicpm 4": Family(MINICPM4, "MiniCPM4.config.json", "minicpm"),
    "mimo": Family(MIMO, "aic/XiaomiMiMo--MiMo-7B-Base_config.json", "mimo"),
}  # fmt: skip
