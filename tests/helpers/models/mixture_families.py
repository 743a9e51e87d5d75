"""Small models of the mixture-of-experts families, in the format of `families.py`.

They cover experts, groups, shared experts and latent attention.
"""

from __future__ import annotations

from families import COMMON, DELTA, QWEN2, QWEN3_5, QWEN3_5_VL, QWEN3_VL, Family
from llama_like import ERNIE_MOE, GRANITE4_MOE, GRANITE_MOE, GRANITE_SHARED, HUNYUAN_MOE

_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}
QWEN3_MOE = {
    **QWEN2,
    **_EXPERTS,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "attention_bias": False,
    "sliding_window": None,
    "num_experts": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MIXTRAL = {
    **COMMON,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {
    **COMMON,
    **_EXPERTS,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "routed_scaling_factor": 1.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 16,
    },
}
DEEPSEEK_V2 = {
    **DEEPSEEK,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "norm_topk_prob": False,
    "scoring_func": "softmax",
}
DEEPSEEK_V3 = {
    **DEEPSEEK,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "scoring_func": "sigmoid",
    "q_lora_rank": 40,
    "topk_method": "noaux_tc",
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "rope_scaling": {**DEEPSEEK["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
}
QWEN2_MOE = {
    **QWEN2,
    **_EXPERTS,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "num_key_value_heads": 4,
    "sliding_window": None,
    "norm_topk_prob": False,
    "num_experts": 8,
    "shared_expert_intermediate_size": 80,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GLM45_AIR = {
    **COMMON,
    **_EXPERTS,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "head_dim": 32,
    "attention_bias": True,
    "use_qk_norm": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
}
QWEN3_NEXT = {
    **COMMON,
    **DELTA,
    **_EXPERTS,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "full_attention_interval": 2,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "num_experts": 8,
    "shared_expert_intermediate_size": 80,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
QWEN3_5_MOE = {
    **QWEN3_5_VL,
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": {
        **{
            key: value
            for key, value in QWEN3_NEXT.items()
            if key
            not in (
                "architectures",
                "torch_dtype",
                "rope_theta",
                "partial_rotary_factor",
                "norm_topk_prob",
                "decoder_sparse_step",
                "intermediate_size",
            )
        },
        "model_type": "qwen3_5_moe_text",
        "rope_parameters": QWEN3_5["rope_parameters"],
    },
    "vision_config": {**QWEN3_5_VL["vision_config"], "model_type": "qwen3_5_moe_vision"},
}
QWEN3_5_MOE_TEXT = {
    **QWEN3_5_MOE["text_config"],
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "torch_dtype": "float32",
}
QWEN3_VL_MOE = {
    **QWEN3_VL,
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "tie_word_embeddings": False,
    "text_config": {
        **QWEN3_VL["text_config"],
        **_EXPERTS,
        "model_type": "qwen3_vl_moe_text",
        "tie_word_embeddings": False,
        "num_experts": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
    "vision_config": {**QWEN3_VL["vision_config"], "model_type": "qwen3_vl_moe"},
}
GLM47_FLASH = {
    **DEEPSEEK_V3,
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
DEEPSEEK_V32 = {
    **DEEPSEEK_V3,
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": 8,
    "index_head_dim": 24,
    "index_n_heads": 8,
}
GLM5 = {
    **{key: value for key, value in DEEPSEEK_V32.items() if not key.startswith("rope_")},
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "rms_norm_eps": 1e-5,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 16,
    "first_k_dense_replace": 3,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "index_n_heads": 7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
MINIMAX_M2 = {
    **COMMON,
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e6,
    "rotary_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 48,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "use_mtp": False,
}
HY_V3 = {
    **COMMON,
    "architectures": ["HYV3ForCausalLM"],
    "model_type": "hy_v3",
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 11158840.0,
    "attention_bias": False,
    "mlp_bias": False,
    "qk_norm": True,
    "route_norm": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 48,
    "expert_hidden_dim": 48,
    "router_scaling_factor": 2.826,
    "first_k_dense_replace": 1,
}
LING_V2 = {
    **COMMON,
    "architectures": ["BailingMoeV2ForCausalLM"],
    "model_type": "bailing_moe",
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 600000,
    "partial_rotary_factor": 0.5,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "use_qk_norm": True,
    "embedding_dropout": 0.0,
    "output_dropout": 0.0,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "router_dtype": "fp32",
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
GPT_OSS = {
    **COMMON,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 32,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "sliding_window": 8,
    "swiglu_limit": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
}
MIXTURES = {
    "qwen3 moe": Family(QWEN3_MOE, "aic/Qwen--Qwen3-30B-A3B_config.json"),
    "qwen3 moe, every second layer": Family(
        {**QWEN3_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False},
        "aic/Qwen--Qwen3-30B-A3B_config.json, with the keys for dense layers set",
    ),
    "qwen2 moe": Family(
        QWEN2_MOE, "the defaults of transformers' Qwen2MoeConfig, those of Qwen1.5-MoE-A2.7B"
    ),
    "glm 4.5": Family(
        {
            **GLM45_AIR,
            "use_qk_norm": True,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
        },
        "zai-org/GLM-4.5's config.json",
    ),
    "glm 4.5 air": Family(
        GLM45_AIR, "the defaults of transformers' Glm4MoeConfig, those of GLM-4.5-Air"
    ),
    "qwen3-next": Family(
        QWEN3_NEXT, "the defaults of transformers' Qwen3NextConfig, those of Qwen3-Next-80B-A3B"
    ),
    "qwen3.5 moe": Family(
        QWEN3_5_MOE_TEXT, "aic/Qwen--Qwen3.5-35B-A3B_config.json, its text_config"
    ),
    "qwen3.5 moe, language model": Family(QWEN3_5_MOE, "aic/Qwen--Qwen3.5-35B-A3B_config.json"),
    "qwen3-vl moe": Family(
        QWEN3_VL_MOE, "aic/Qwen--Qwen3-VL-30B-A3B-Instruct_config.json, with one dense layer"
    ),
    "glm 4.7 flash": Family(
        GLM47_FLASH, "the defaults of transformers' Glm4MoeLiteConfig, those of GLM-4.7-Flash"
    ),
    "minimax m2": Family(MINIMAX_M2, "aic/MiniMaxAI--MiniMax-M2.5_config.json"),
    "hunyuan 3": Family(HY_V3, "the defaults of transformers' HYV3Config, those of Hy3-preview"),
    "ling 2": Family(LING_V2, "Ling-mini-2.0's config.json", "bailing_moe_v2"),
    "mixtral": Family(MIXTRAL, "aic/mistralai--Mixtral-8x22B-v0.1_config.json"),
    "deepseek v2 lite": Family(
        {
            **DEEPSEEK_V2,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
        "DeepSeek-V2-Lite.config.json",
    ),
    "deepseek v2": Family(
        {
            **DEEPSEEK_V2,
            "q_lora_rank": 40,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
        },
        "DeepSeek-V2-Lite.config.json, with the latent queries and groups of V2 "
        "(arXiv:2405.04434, section 3.1.2)",
    ),
    "deepseek v3": Family(DEEPSEEK_V3, "aic/deepseek-ai--DeepSeek-V3_config.json"),
    "deepseek v3.2": Family(DEEPSEEK_V32, "aic/deepseek-ai--DeepSeek-V3.2_config.json"),
    "glm 5": Family(GLM5, "aic/zai-org--GLM-5_config.json"),
    "glm 5.2": Family(
        {
            **GLM5,
            "indexer_types": ["full", "shared", "full", "shared"],
            "index_topk_pattern": "FSFS",
            "moe_router_dtype": "float32",
        },
        "aic/zai-org--GLM-5.2_config.json",
    ),
    "gpt-oss": Family(
        GPT_OSS, "aic/openai--gpt-oss-20b_config.json, with a clamp low enough to have an effect"
    ),
    "granite 3 moe": Family(GRANITE_MOE, "granite-3.1-1b-a400m.config.json"),
    "granite 3 moe, shared": Family(
        GRANITE_SHARED, "the defaults of transformers' GraniteMoeSharedConfig"
    ),
    "granite 4 moe": Family(
        GRANITE4_MOE, "granite-4.0-h-tiny's config.json, with attention in every layer"
    ),
    "ernie 4.5 moe": Family(ERNIE_MOE, "ERNIE-4.5-21B-A3B-PT's config.json"),
    "hunyuan v1 moe": Family(HUNYUAN_MOE, "Hunyuan-A13B-Instruct's config.json"),
    "kimi k2": Family(
        {**DEEPSEEK_V3, "n_group": 1, "topk_group": 1},
        "aic/moonshotai--Kimi-K2-Instruct_config.json",
    ),
}
