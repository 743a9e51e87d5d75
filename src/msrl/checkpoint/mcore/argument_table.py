"""Arguments that Megatron-LM and MindSpeed-LLM read from a checkpoint file.

Sources: Megatron-LM core_v0.12.1 and MindSpeed-LLM c77308a1 (master of August 2026), which is built
on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msrl.checkpoint.mcore.names import Naming
from msrl.models.families import num_experts
from msrl.models.megatron import normalization
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.shape import (
    Attention,
    LinearRopeScaling,
    Llama3RopeScaling,
    Mla,
    Moe,
    Shape,
    YarnRopeScaling,
)


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
    """Return the layers with experts: a period, or a list of 0 and 1.

    The period begins after `first_k_dense_replace`.

    MindSpeed-LLM divides by the value if `first_k_dense_replace` is set, so its files hold a period
    if one describes the layers. Megatron-LM does not know `first_k_dense_replace`, so its
    distributed format needs the list.
    """
    layers = source.shape.mixture_layers
    if not any(layers):
        return None
    first_moe_layer = layers.index(True)
    for period in range(1, len(layers) + 1):
        if not source.distributed and layers == tuple(
            i >= first_moe_layer and i % period == 0 for i in range(len(layers))
        ):
            return period
    return [int(has_experts) for has_experts in layers]


def _attention_interval(source: ArgumentSource) -> int | None:
    """Return n if every n-th layer has attention and the others are delta networks, else None."""
    has_attention = [isinstance(layer.mixer, Attention) for layer in source.shape.layers]
    if source.shape.delta is None:
        return None
    interval = has_attention.index(True) + 1
    numbers = range(1, len(has_attention) + 1)
    return interval if has_attention == [n % interval == 0 for n in numbers] else None


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
    "full_attention_interval": _attention_interval,  # mg2hf set_model_layer_attn, of Qwen3-Next
    "attention_dropout": lambda s: 0.0,  # loads
    "apply_query_key_layer_scaling": lambda s: False,  # loads
    # Positions
    "position_embedding_type": lambda s: "rope" if s.shape.rotates else "none",  # loads
    "add_position_embedding": lambda s: (
        True
    ),  # loads, checks; Megatron-LM's default, beside rope too
    "use_rotary_position_embeddings": lambda s: True,  # loads
    "rotary_base": lambda s: s.shape.rotary.theta,  # loads
    "rotary_percent": lambda s: s.shape.rotary.channels / s.shape.head_dim,  # loads
    "rotary_interleaved": lambda s: s.shape.rotary.interleaved,  # loads
    # Feed-forward part, norms and output
    "swiglu": lambda s: s.shape.activation != "quick_gelu",  # loads
    "squared_relu": lambda s: False,  # loads
    "hidden_dropout": lambda s: 0.0,  # loads
    "normalization": lambda s: normalization(s.shape),  # loads
    "post_norm": lambda s: s.shape.post_norms,  # mg2hf set_model_layer_norm, loads+
    "untie_embeddings_and_output_weights": lambda s: (
        not s.shape.tie_word_embeddings
    ),  # mg2hf set_model_postprocess, loads
    # Experts
    "num_experts": lambda s: (
        num_experts(s.shape) or None
    ),  # mg2hf __init__ and set_model_layer_mlp, loads, loads+
    "first_k_dense_replace": lambda s: (
        s.shape.mixture_layers.index(True) if s.shape.moe else None
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
    "shared_expert_gate": lambda s: (
        s.shape.moe is not None and s.shape.moe.shared_gate
    ),  # mg2hf set_model_layer_mlp, loads+
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


NO_COUNTERPART = object()
"""Expected value of an argument that does not apply to a model, so that any value is accepted."""

Arguments = Mapping[str, object]
Expected = Callable[[Shape, Arguments], object]


@dataclass(frozen=True, slots=True)
class ComparedArgument:
    """An argument with a counterpart in config.json.

    `expected` returns the value that agrees with the config, or `NO_COUNTERPART`; it also receives
    the recorded arguments, because one may depend on another. `default` is the default of
    Megatron's parser.
    """

    key: str  # of config.json
    expected: Expected
    default: object = None


def _always(value: Callable[[Shape], object]) -> Expected:
    return lambda shape, recorded: value(shape)


def _with_experts(value: Callable[[Moe], object]) -> Expected:
    return lambda shape, recorded: NO_COUNTERPART if shape.moe is None else value(shape.moe)


def _with_latents(value: Callable[[Mla], object]) -> Expected:
    return lambda shape, recorded: NO_COUNTERPART if shape.mla is None else value(shape.mla)


def _without_latents(value: Callable[[Shape], object]) -> Expected:
    """Return an expectation for arguments that latent attention ignores."""
    return lambda shape, recorded: NO_COUNTERPART if shape.mla is not None else value(shape)


def _if_set(value: Callable[[Shape], float | None]) -> Expected:
    """Return an expectation for a number that only some models have."""

    def expected(shape: Shape, recorded: Arguments) -> object:
        number = value(shape)
        return NO_COUNTERPART if number is None else number

    return expected


def _softcap(shape: Shape) -> float | None:
    return shape.attention.softcap if isinstance(shape.attention, Attention) else None


def _query_groups(shape: Shape, recorded: Arguments) -> object:
    """Return the number of query groups, which Megatron reads with --group-query-attention."""
    return shape.num_query_groups if recorded.get("group_query_attention") else NO_COUNTERPART


def _is_interleaved(shape: Shape, recorded: Arguments) -> object:
    """Return True if rotated channels are interleaved.

    MindSpeed-LLM interleaves them with --use-glm-rope, and latent attention has another argument.
    """
    if shape.mla is not None or recorded.get("use_glm_rope"):
        return NO_COUNTERPART
    return shape.rotary.interleaved


def _normalized_weights(shape: Shape, recorded: Arguments) -> object:
    """Return True if the weights of the selected experts are normalized.

    Without `norm_topk_prob`, a softmax over the selected experts normalizes them too.
    """
    if shape.moe is None or not recorded.get("norm_topk_prob"):
        return NO_COUNTERPART
    return shape.moe.normalize


def _scaling_type(shape: Shape) -> str | None:
    scaling = shape.rotary.scaling
    if isinstance(scaling, Llama3RopeScaling):
        return "llama3"
    return "yarn" if isinstance(scaling, YarnRopeScaling) else None


def _scaling_factor(shape: Shape, recorded: Arguments) -> object:
    """Return the RoPE scaling factor. Megatron's default is not used unless a type is set."""
    scaling = shape.rotary.scaling
    if isinstance(scaling, Llama3RopeScaling | YarnRopeScaling) and (
        recorded.get("rope_scaling_type") or recorded.get("use_rope_scaling")
    ):
        return scaling.factor
    return NO_COUNTERPART


def _uses_rope_scaling(shape: Shape, recorded: Arguments) -> object:
    """Return True if Llama 3's scaling is used, as Megatron's flag means.

    MindSpeed-LLM has `rope_scaling_type` instead.
    """
    if not recorded.get("use_rope_scaling"):
        return NO_COUNTERPART
    return isinstance(shape.rotary.scaling, Llama3RopeScaling)


def _interpolation_factor(shape: Shape) -> float:
    scaling = shape.rotary.scaling
    return scaling.factor if isinstance(scaling, LinearRopeScaling) else 1.0


# Arguments of training runs that a model does not fix (lengths, dropout, vocabulary padding) and
# switches that the tensors of a file show (biases, norms of q and k, tied embeddings) are absent.
# MindSpeed-LLM's converter records keys of config.json, such as rope_theta, under their own names.
COMPARED_ARGUMENTS: dict[str, ComparedArgument] = {
    "hidden_size": ComparedArgument("hidden_size", _always(lambda s: s.hidden_size)),
    "num_attention_heads": ComparedArgument(
        "num_attention_heads", _always(lambda s: s.num_attention_heads)
    ),
    "num_key_value_heads": ComparedArgument(
        "num_key_value_heads", _without_latents(lambda s: s.num_query_groups)
    ),
    "num_query_groups": ComparedArgument("num_key_value_heads", _query_groups),
    "kv_channels": ComparedArgument("head_dim", _without_latents(lambda s: s.head_dim)),
    "multi_latent_attention": ComparedArgument(
        "kv_lora_rank", _always(lambda s: s.mla is not None), default=False
    ),
    "q_lora_rank": ComparedArgument("q_lora_rank", _with_latents(lambda m: m.q_lora_rank)),
    "kv_lora_rank": ComparedArgument("kv_lora_rank", _with_latents(lambda m: m.kv_lora_rank)),
    "qk_head_dim": ComparedArgument("qk_nope_head_dim", _with_latents(lambda m: m.nope_head_dim)),
    "qk_pos_emb_head_dim": ComparedArgument(
        "qk_rope_head_dim", _with_latents(lambda m: m.rope_head_dim)
    ),
    "v_head_dim": ComparedArgument("v_head_dim", _with_latents(lambda m: m.v_head_dim)),
    # msrl wrote False for latent attention before it wrote MindSpeed-LLM's True.
    "qk_layernorm": ComparedArgument(
        "q_norm", _without_latents(lambda s: s.qk_norm), default=False
    ),
    "norm_epsilon": ComparedArgument("rms_norm_eps", _always(lambda s: s.norm_eps), default=1e-5),
    "rms_norm_eps": ComparedArgument("rms_norm_eps", _always(lambda s: s.norm_eps)),
    "normalization": ComparedArgument("normalization", _always(normalization), default="LayerNorm"),
    "post_norm": ComparedArgument("post_norm", _always(lambda s: s.post_norms), default=False),
    "position_embedding_type": ComparedArgument(
        "position_embedding_type",
        _always(lambda s: ("rope", "yarn", "mrope") if s.rotates else "none"),
        default="learned_absolute",
    ),
    "rotary_base": ComparedArgument("rope_theta", _always(lambda s: s.rotary.theta), default=10000),
    "rope_theta": ComparedArgument("rope_theta", _always(lambda s: s.rotary.theta)),
    "rotary_percent": ComparedArgument(
        "partial_rotary_factor",
        _without_latents(lambda s: s.rotary.channels / s.head_dim),
        default=1.0,
    ),
    "rotary_interleaved": ComparedArgument("rotary_interleaved", _is_interleaved, default=False),
    "rotary_seq_len_interpolation_factor": ComparedArgument(
        "rope_scaling.factor", _always(_interpolation_factor)
    ),
    "use_rope_scaling": ComparedArgument("rope_scaling", _uses_rope_scaling, default=False),
    "rope_scaling_type": ComparedArgument("rope_scaling.rope_type", _always(_scaling_type)),
    "rope_scaling_factor": ComparedArgument("rope_scaling.factor", _scaling_factor, default=8.0),
    "attn_logit_softcapping": ComparedArgument("attn_logit_softcapping", _if_set(_softcap)),
    "output_logit_softcapping": ComparedArgument(
        "final_logit_softcapping", _if_set(lambda s: s.logit_softcap)
    ),
    "final_logit_softcapping": ComparedArgument(
        "final_logit_softcapping", _if_set(lambda s: s.logit_softcap)
    ),
    "num_experts": ComparedArgument("num_experts", _always(num_experts)),
    "moe_router_topk": ComparedArgument(
        "num_experts_per_tok", _with_experts(lambda m: m.experts_per_token), default=2
    ),
    "num_experts_per_tok": ComparedArgument(
        "num_experts_per_tok", _with_experts(lambda m: m.experts_per_token)
    ),
    "moe_router_score_function": ComparedArgument(
        "scoring_func", _with_experts(lambda m: m.score), default="softmax"
    ),
    "moe_router_topk_scaling_factor": ComparedArgument(
        "routed_scaling_factor", _with_experts(lambda m: m.scaling_factor)
    ),
    "moe_router_num_groups": ComparedArgument("n_group", _with_experts(lambda m: m.num_groups)),
    "moe_router_group_topk": ComparedArgument(
        "topk_group", _with_experts(lambda m: m.num_chosen_groups)
    ),
    "norm_topk_prob": ComparedArgument("norm_topk_prob", _normalized_weights, default=False),
}


@dataclass(frozen=True, slots=True)
class Contradiction:
    """An argument of a file and the value of config.json that it contradicts."""

    argument: str
    recorded: object
    key: str
    expected: object


def contradictions(arguments: Arguments, shape: Shape) -> Iterator[Contradiction]:
    """Yield the arguments of a file that contradict the model's config.

    Arguments that are absent or None are not recorded.
    """
    has_defaults = _has_parser_defaults(arguments)
    for name, compared in COMPARED_ARGUMENTS.items():
        recorded = arguments.get(name)
        if name not in arguments or (recorded is None and name != "rope_scaling_type"):
            continue
        if has_defaults and _agrees(recorded, compared.default):
            continue
        expected = compared.expected(shape, arguments)
        if expected is not NO_COUNTERPART and not _agrees(recorded, expected):
            yield Contradiction(name, recorded, compared.key, expected)


def _has_parser_defaults(arguments: Arguments) -> bool:
    """Return True for arguments of MindSpeed-LLM's first converter.

    It has a separate command line parser and fills in only some arguments of the model. Source:
    `get_sys_argv` in tasks/checkpoint/models.py of MindSpeed-LLM 2.0.0.
    """
    return arguments.get("mock_data") is True and arguments.get("perform_initialization") is False


def _agrees(recorded: object, expected: object) -> bool:
    if isinstance(expected, tuple):
        return recorded in expected
    if isinstance(recorded, int | float) and isinstance(expected, int | float):
        return math.isclose(recorded, expected, rel_tol=1e-6)
    return recorded == expected
