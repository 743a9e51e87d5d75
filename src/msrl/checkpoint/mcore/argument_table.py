"""Arguments that Megatron-LM and MindSpeed-LLM read from a checkpoint file.

Sources: Megatron-LM core_v0.12.1 and MindSpeed-LLM c77308a1 (master of August 2026), which is built
on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msrl.checkpoint.mcore.names import Naming
from msrl.models.families import num_experts
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.shape import Mla, Moe, Shape


@dataclass(frozen=True, slots=True)
class ArgumentSource:
    """The model and the checkpoint that arguments describe.

    `padded_vocab` is the number of embedding rows over all ranks. `distributed` selects Megatron's
    distributed format.
    """

    shape: Shape
    layout: ParallelLayout
    padded_vocab: int
    naming: Naming
    distributed: bool = False


Value = Callable[[ArgumentSource], object]


def _moe_value(value: Callable[[Moe], object]) -> Value:
    """Return a table value that is None for a model without experts."""
    return lambda source: None if source.shape.moe is None else value(source.shape.moe)


def _mla_value(value: Callable[[Mla], object]) -> Value:
    """Return a table value that is None for a model without latent attention."""
    return lambda source: None if source.shape.mla is None else value(source.shape.mla)


def _num_shared_experts(moe: Moe) -> int | None:
    """Return the number of shared experts, rounded up: readers ignore their weights if it is 0."""
    return -(-moe.shared_ffn_hidden_size // moe.ffn_hidden_size) or None


def _moe_layer_freq(source: ArgumentSource) -> int | list[int] | None:
    """Return which layers have experts: a period after `first_k_dense_replace`, or a list of 0 and
    1.

    MindSpeed-LLM divides by the value if `first_k_dense_replace` is set, so its files hold a period
    if one describes the layers. Megatron-LM does not know `first_k_dense_replace`, so its
    distributed format needs the list.
    """
    moe = source.shape.moe
    if moe is None:
        return None
    first_moe_layer = moe.layers.index(True)
    for period in range(1, len(moe.layers) + 1):
        if not source.distributed and moe.layers == tuple(
            i >= first_moe_layer and i % period == 0 for i in range(len(moe.layers))
        ):
            return period
    return [int(has_experts) for has_experts in moe.layers]


def _virtual_stages(source: ArgumentSource) -> int | None:
    return None if source.layout.vpp is None else source.layout.num_chunks(source.shape.num_layers)


# Comments name the functions that read an argument:
#   mg2hf   MindSpeed-LLM, mindspeed_llm/tasks/checkpoint/convert_mg2hf.py, class Mg2HfConvert
#           (loaded by load_mg_args in model_builder.py)
#   loads+  MindSpeed-LLM, mindspeed_llm/training/checkpointing.py,
#           load_args_from_checkpoint_wrapper (for --use-checkpoint-args)
#   loads   Megatron-LM, megatron/training/checkpointing.py, load_args_from_checkpoint
#           (for --use-checkpoint-args)
#   checks  Megatron-LM, same file, check_checkpoint_args (training and inference without
#           --finetune)
#   resumes Megatron-LM, same file, load_checkpoint
# None keeps the reader's setting: the loads functions skip it.
READ_ARGUMENTS: dict[str, Value] = {
    # Parallel layout
    "tensor_model_parallel_size": lambda s: s.layout.tp,  # mg2hf __init__, loads, checks, resumes
    "pipeline_model_parallel_size": lambda s: s.layout.pp,  # mg2hf __init__, loads, checks, resumes
    "virtual_pipeline_model_parallel_size": _virtual_stages,  # loads
    "num_layers_per_virtual_pipeline_stage": lambda s: s.layout.vpp,  # mg2hf __init__, loads
    "num_layer_list": lambda s: (
        s.layout.text("num_layer_list") if s.layout.num_layer_list else None
    ),  # mg2hf __init__ (as text), loads+
    "expert_model_parallel_size": lambda s: s.layout.ep,  # mg2hf __init__, loads, loads+
    # mg2hf check_etp_conflict: 1, tensor_model_parallel_size or None, and not 1 together with
    # --moe-tp-extend-ep
    "expert_tensor_parallel_size": lambda s: (
        None if s.layout.moe_tp_extend_ep else s.layout.etp_size
    ),
    # Sizes
    "num_layers": lambda s: s.layout.num_positions(
        s.shape.num_layers
    ),  # mg2hf __init__, loads, checks
    "hidden_size": lambda s: s.shape.hidden_size,  # mg2hf set_model_layer_mlp, loads, checks
    "ffn_hidden_size": lambda s: s.shape.ffn_hidden_size,  # loads
    "seq_length": lambda s: s.shape.max_position_embeddings,  # loads
    "max_position_embeddings": lambda s: s.shape.max_position_embeddings,  # loads, checks
    "padded_vocab_size": lambda s: s.padded_vocab,  # loads, checks
    "make_vocab_size_divisible_by": lambda s: 1,  # checks
    # Attention
    "num_attention_heads": lambda s: (
        s.shape.num_attention_heads
    ),  # mg2hf set_model_layer_attn, loads, checks
    "num_key_value_heads": lambda s: (
        s.shape.num_query_groups
    ),  # mg2hf set_model_layer_attn: grouping, in place of num_query_groups
    "num_query_groups": lambda s: s.shape.num_query_groups,  # loads
    "group_query_attention": lambda s: (
        s.shape.num_query_groups != s.shape.num_attention_heads
    ),  # loads
    "kv_channels": lambda s: s.shape.head_dim,  # mg2hf set_model_layer_attn, loads
    "add_qkv_bias": lambda s: s.shape.qkv_bias,  # mg2hf set_model_layer_attn, loads
    "add_bias_linear": lambda s: s.shape.output_bias,  # loads
    # mg2hf set_model_layer_attn, loads+; if set, MindSpeed-LLM's deepseek_spec.py builds the norms
    # of the latents
    "qk_layernorm": lambda s: s.shape.qk_norm or s.shape.mla is not None,
    "multi_latent_attention": lambda s: s.shape.mla is not None,  # loads+
    "q_lora_rank": _mla_value(lambda mla: mla.q_lora_rank),  # mg2hf set_model_layer_attn, loads+
    "kv_lora_rank": _mla_value(lambda mla: mla.kv_lora_rank),  # loads+
    "qk_head_dim": _mla_value(lambda mla: mla.nope_head_dim),  # mg2hf set_model_layer_attn, loads+
    "qk_pos_emb_head_dim": _mla_value(
        lambda mla: mla.rope_head_dim
    ),  # mg2hf set_model_layer_attn, loads+
    "v_head_dim": _mla_value(lambda mla: mla.v_head_dim),  # mg2hf set_model_layer_attn, loads+
    "attention_dropout": lambda s: 0.0,  # loads
    "apply_query_key_layer_scaling": lambda s: False,  # loads
    # Positions
    "position_embedding_type": lambda s: "rope",  # loads
    "add_position_embedding": lambda s: (
        True
    ),  # loads, checks; Megatron-LM's default, beside rope too
    "use_rotary_position_embeddings": lambda s: True,  # loads
    "rotary_base": lambda s: s.shape.rope_theta,  # loads
    "rotary_percent": lambda s: s.shape.rotated_channels / s.shape.head_dim,  # loads
    "rotary_interleaved": lambda s: s.shape.rotary_interleaved,  # loads
    # Feed-forward part, norms and output
    "swiglu": lambda s: s.shape.activation != "quick_gelu",  # loads
    "squared_relu": lambda s: False,  # loads
    "hidden_dropout": lambda s: 0.0,  # loads
    "normalization": lambda s: "RMSNorm",  # loads
    "post_norm": lambda s: s.shape.post_norms,  # mg2hf set_model_layer_norm, loads+
    "untie_embeddings_and_output_weights": lambda s: (
        not s.shape.tie_word_embeddings
    ),  # mg2hf set_model_postprocess, loads
    # Experts
    "num_experts": lambda s: (
        num_experts(s.shape) or None
    ),  # mg2hf __init__ and set_model_layer_mlp, loads, loads+
    "first_k_dense_replace": _moe_value(
        lambda moe: moe.layers.index(True)
    ),  # mg2hf get_first_k_dense_replace, loads+
    "moe_layer_freq": _moe_layer_freq,  # loads, loads+
    "moe_ffn_hidden_size": _moe_value(lambda moe: moe.ffn_hidden_size),  # loads
    "moe_intermediate_size": _moe_value(lambda moe: moe.ffn_hidden_size),  # loads+
    "n_shared_experts": _moe_value(
        _num_shared_experts
    ),  # mg2hf set_model_layer_mlp, which skips shared experts without it; loads+
    "moe_shared_expert_intermediate_size": _moe_value(
        lambda moe: moe.shared_ffn_hidden_size or None
    ),  # loads
    "shared_expert_gate": lambda s: False,  # mg2hf set_model_layer_mlp, loads+
    "moe_router_topk": _moe_value(lambda moe: moe.experts_per_token),  # loads
    "moe_router_pre_softmax": _moe_value(lambda moe: not moe.normalize),  # loads
    "moe_grouped_gemm": lambda s: s.naming.grouped,  # loads
    # The file and the training
    "ckpt_format": lambda s: "torch_dist" if s.distributed else "torch",  # loads
    "no_save_optim": lambda s: True,  # resumes: the file has no optimizer state in Megatron's form
    "no_save_rng": lambda s: True,  # resumes: nor the state of random generators
    "consumed_train_samples": lambda s: 0,  # resumes
    "skipped_train_samples": lambda s: 0,  # resumes
    "consumed_valid_samples": lambda s: 0,  # resumes
    "data_parallel_random_init": lambda s: False,  # checks
    "tokenizer_type": lambda s: (
        None
    ),  # loads, checks: the two systems have other names for a Hugging Face tokenizer
}


def read_arguments(source: ArgumentSource) -> dict[str, Any]:
    """Return the arguments that other systems read from a checkpoint."""
    return {name: value(source) for name, value in READ_ARGUMENTS.items()}
