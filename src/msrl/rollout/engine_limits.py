"""Limits of vLLM that are known before an engine starts. `--dry-run` runs the same checks."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from msrl.errors import MsrlError
from msrl.models.families import shape_from_config
from msrl.models.hf_config import HfConfig, read_hf_config
from msrl.models.kv_cache import caches_latents
from msrl.models.rope import long_rope_attention
from msrl.models.shape import Attention, DeltaNet, Indexer, LongRopeScaling, Mla, Shape
from msrl.platforms.base import Platform
from msrl.rollout import engine_source
from msrl.rollout.engine import BYTES_PER_ELEMENT, EngineSettings, check_platform, is_eager

HIDDEN_ROUTES = (
    "msrl reads the experts that vLLM chose through a hook in the model runner that vLLM uses on "
    "cpu, and has not been tried on other platforms. Set it to trainer"
)
COMPILED_ROUTES = (
    "compiled layers do not call the hook through which msrl reads the experts that vLLM chose, as "
    "train.router.replay=engine requires. Remove it."
)
_NO_COMPILATION = "TORCHDYNAMO_DISABLE"
# Families whose classes in vLLM do not read the window of each layer.
_WINDOWS_OF_EVEN_LAYERS = ("gpt_oss",)
_ONE_WINDOW = ("qwen2", "qwen2_vl", "qwen2_5_vl", "internvl", "qwen3", "qwen3_moe", "mixtral")
_GATE_LIMIT = 7.0  # of gpt-oss, in vLLM's kernels of `swigluoai`
# Keys that vLLM reads, and transformers does not need, with the defaults of the config classes.
_MIXTURE_KEYS: dict[str, dict[str, int | None]] = {
    "hy_v3": {"first_k_dense_replace": None, "expert_hidden_dim": None},
    "glm4_moe_lite": {"first_k_dense_replace": None},
    "glm_moe_dsa": {"first_k_dense_replace": 3},
    "deepseek_v32": {"first_k_dense_replace": 3},
}
# How vLLM computes the windows of families that it reads in another way than transformers.
_OTHER_WINDOWS = {
    "phi3": "has no windows",
    "cohere": "has windows of one more token",
}
_NOT_GENERATED = "The model can be converted and trained (train-sft), but not used for generation."


def check_limits(
    settings: EngineSettings,
    platform: Platform,
    *,
    read_config: Callable[[Path], HfConfig] = read_hf_config,
) -> None:
    """Check that vLLM can serve a model with these settings on a platform.

    A list of vLLM that is not known, because vLLM is not installed or selects its kernels when it
    starts, is not checked.

    Raises:
        MsrlError: vLLM cannot serve this model with these settings.
    """
    config = read_config(settings.model_dir)
    shape = shape_from_config(config)
    length = model_length(settings, shape)
    check_platform(settings.engine, platform)
    dtype = settings.dtype or shape.dtype
    _check_dtype(settings, dtype)
    if settings.logits_dtype not in (None, dtype) and platform.missing() is None:
        _check_logits_dtype(settings)
    if shape.delta is not None and platform.delta_network_dtype not in (None, dtype):
        raise MsrlError(
            f"model.dtype={dtype}: on {platform.name}, vLLM computes gated delta networks in "
            f"{platform.delta_network_dtype} only. Set model.dtype={platform.delta_network_dtype}."
        )
    if shape.delta is not None:
        _check_prefixes(settings, platform)
    check_model(config, shape, platform)
    _check_length(config, shape, length)
    _check_devices(settings, shape)
    _check_batch(settings, length, platform)
    if settings.records_routes and not platform.shows_routes:
        raise MsrlError(f"train.router.replay=engine: on {platform.name}: {HIDDEN_ROUTES}.")
    if not is_eager(settings.engine, platform):
        _check_compilation(settings, platform)


def check_model(config: HfConfig, shape: Shape, platform: Platform) -> None:
    """Check that vLLM has the model and its kernels on a platform, whatever the settings are.

    Raises:
        MsrlError: vLLM cannot serve this model.
    """
    if shape.indexer is not None:
        _check_indexer(config, shape, shape.indexer, platform)
    _check_attention(config, shape, platform)
    if shape.delta is not None:
        _check_delta_heads(config, shape.delta, platform)
    _check_windows(config, shape)
    if shape.family == "gpt_oss" and shape.gate_limit != _GATE_LIMIT:
        raise MsrlError(
            f"{config.where}: swiglu_limit={shape.gate_limit:g}: vLLM's {shape.architecture} has "
            f"the limit {_GATE_LIMIT:g}. {_NOT_GENERATED}"
        )
    _check_long_rope(config, shape)
    _check_mixture(config, shape)
    if platform.groups_sigmoid_scores:
        _check_scores(config, shape, platform)
    if any(rotary.query_growth for rotary in shape.rotaries):
        raise MsrlError(
            f"{config.where}: llama_4_scaling_beta: vLLM does not scale queries by position. "
            f"{_NOT_GENERATED}"
        )
    if platform.missing() is None:  # else the engine runs elsewhere, with another vLLM
        _check_architecture(config)


def model_length(settings: EngineSettings, shape: Shape) -> int:
    """Return the maximum number of tokens of prompt and response together.

    Raises:
        MsrlError: The configured length exceeds the model's length.
    """
    length = settings.engine.max_model_len or shape.max_position_embeddings
    if length > shape.max_position_embeddings:
        limit = shape.max_position_embeddings
        raise MsrlError(
            f"rollout.engine.max_model_len={length}: the model in {settings.model_dir} supports "
            f"{limit} positions. Set it to {limit} or less."
        )
    return length


def _check_length(config: HfConfig, shape: Shape, length: int) -> None:
    """Check that vLLM computes sequences of `length` tokens as transformers does.

    Raises:
        MsrlError: It has other windows in longer sequences, or rotates short sequences as long
            ones, since its rotation depends on the longest possible sequence.
    """
    limits: list[tuple[int, str, str]] = []
    mixers = [layer.mixer for layer in shape.layers if isinstance(layer.mixer, Attention)]
    windows = [mixer.window for mixer in mixers if mixer.window is not None]
    if shape.family in _OTHER_WINDOWS and windows:
        limits.append((min(windows), "sliding_window", _OTHER_WINDOWS[shape.family]))
    scalings = (rotary for rotary in shape.rotaries if isinstance(rotary.scaling, LongRopeScaling))
    constants = [x.constant_length for x in scalings if x.constant_length is not None]
    if constants:
        key = "original_max_position_embeddings"
        limits.append((min(constants), key, "rotates sequences of any length as longer ones"))
    for limit, key, problem in limits:
        if length > limit:
            raise MsrlError(
                f"{config.where}: {key}={limit}: vLLM's {shape.architecture} {problem}, unlike "
                f"transformers. Set rollout.engine.max_model_len to {limit} or less."
            )


def _check_long_rope(config: HfConfig, shape: Shape) -> None:
    """Check the factor of cosines and sines, which vLLM derives from the two lengths only."""
    for rotary in shape.rotaries:
        scaling, positions = rotary.scaling, shape.max_position_embeddings
        if not isinstance(scaling, LongRopeScaling):
            continue
        factor = long_rope_attention(
            positions / scaling.original_max_position_embeddings,
            scaling.original_max_position_embeddings,
        )
        if not math.isclose(factor, scaling.attention_factor):
            raise MsrlError(
                f"{config.where}: rope_scaling: vLLM multiplies cosines and sines by "
                f"{factor:g} in place of {scaling.attention_factor:g}. {_NOT_GENERATED}"
            )


def _check_dtype(settings: EngineSettings, dtype: str) -> None:
    if dtype not in BYTES_PER_ELEMENT:
        raise MsrlError(
            f"{settings.model_dir}: dtype={dtype}: generation does not support it. Supported: "
            f"{', '.join(BYTES_PER_ELEMENT)}."
        )


def _check_logits_dtype(settings: EngineSettings) -> None:
    if engine_source.sets_logits_dtype() is False:
        raise MsrlError(
            f"model.logits_dtype={settings.logits_dtype}: the installed vLLM computes the output "
            "layer in model.dtype only. Install a release whose LogitsProcessor reads head_dtype, "
            "or remove the key."
        )


def _check_attention(config: HfConfig, shape: Shape, platform: Platform) -> None:
    """Check the size of a head, or of the latent that is cached instead of heads."""
    if shape.mla is not None and caches_latents(shape) and not _is_latent_attention_disabled():
        size = shape.mla.kv_lora_rank + shape.mla.rope_head_dim
        backend = platform.latent_attention_backend
        key = f"kv_lora_rank={shape.mla.kv_lora_rank} + qk_rope_head_dim={shape.mla.rope_head_dim}"
    else:
        size, backend, key = shape.head_dim, platform.attention_backend, _head_key(config, shape)
    supported = engine_source.attention_head_sizes(backend) if backend else None
    if supported is not None and size not in supported:
        raise MsrlError(
            f"{config.where}: {key}: vLLM has no attention kernel for a head size of {size} on "
            f"{platform.name}. Supported: {', '.join(map(str, supported))}."
        )
    if shape.family == "qwen2" and shape.head_dim * shape.num_attention_heads != shape.hidden_size:
        raise MsrlError(
            f"{config.where}: {key}: vLLM's Qwen2 requires hidden_size / num_attention_heads. "
            f"{_NOT_GENERATED}"
        )


def _check_delta_heads(config: HfConfig, delta: DeltaNet, platform: Platform) -> None:
    """Check that vLLM has kernels for the heads of gated delta networks."""
    key, value, sizes = delta.key_head_dim, delta.value_head_dim, platform.delta_head_sizes
    if sizes and (key not in sizes or value != key):
        raise MsrlError(
            f"{config.where}: linear_key_head_dim={key}, linear_value_head_dim={value}: on "
            f"{platform.name}, vLLM computes gated delta networks only if both are "
            f"{' or '.join(map(str, sizes))}. {_NOT_GENERATED}"
        )


def _check_prefixes(settings: EngineSettings, platform: Platform) -> None:
    """Check that vLLM can cache the states of delta networks (its `MambaModelConfig`)."""
    arguments = {**settings.engine.options, **platform.engine_arguments()}
    if settings.engine.prefix_cache and arguments.get("enable_chunked_prefill") is False:
        raise MsrlError(
            "rollout.engine.prefix_cache=true: vLLM caches the states of gated delta networks only "
            f"where it reads prompts in several steps, which it does not on {platform.name}. Set "
            "it to false."
        )


def _check_windows(config: HfConfig, shape: Shape) -> None:
    """Check that vLLM's class gives the same layers a window. vLLM itself checks only some."""
    has_window = [isinstance(x.mixer, Attention) and bool(x.mixer.window) for x in shape.layers]
    if shape.family in _WINDOWS_OF_EVEN_LAYERS:
        differs = any(has_window) and has_window != [n % 2 == 0 for n in range(len(has_window))]
    else:
        differs = shape.family in _ONE_WINDOW and len(set(has_window)) > 1
    if differs:
        layers = "every second layer" if shape.family in _WINDOWS_OF_EVEN_LAYERS else "all layers"
        key = "layer_types" if "layer_types" in config.values else "max_window_layers"
        raise MsrlError(
            f"{config.where}: {key}: vLLM's {shape.architecture} has a window in {layers} or in "
            f"none. {_NOT_GENERATED}"
        )


def _check_mixture(config: HfConfig, shape: Shape) -> None:
    """Check that a config has the keys from which vLLM knows the experts of each layer."""
    keys = _MIXTURE_KEYS.get(shape.family, {})
    if shape.moe is None or not keys:
        return
    dense = shape.mixture_layers.index(True)
    if not all(shape.mixture_layers[dense:]):
        raise MsrlError(
            f"{config.where}: mlp_layer_types: vLLM has experts in all layers after the first "
            f"dense ones. {_NOT_GENERATED}"
        )
    values = {"first_k_dense_replace": dense, "expert_hidden_dim": shape.moe.ffn_hidden_size}
    for key, default in keys.items():
        if config.values.get(key, default) != values[key]:
            raise MsrlError(
                f"{config.where}: {key}: vLLM reads this key, and not the one of transformers 5. "
                f"Set it to {values[key]}."
            )


def _check_scores(config: HfConfig, shape: Shape, platform: Platform) -> None:
    """Check that vLLM can choose experts by their scores."""
    is_sigmoid = shape.moe is not None and shape.moe.score == "sigmoid"
    if shape.moe is not None and shape.moe.expert_bias and not is_sigmoid:
        raise MsrlError(
            f"{config.where}: {shape.architecture}: on {platform.name}, vLLM chooses experts by "
            f"softmax scores without their bias. {_NOT_GENERATED}"
        )
    if is_sigmoid and engine_source.has_ungrouped_scores(shape.architecture):
        raise MsrlError(
            f"{config.where}: {shape.architecture}: on {platform.name}, vLLM chooses experts by "
            f"sigmoid scores only among groups of experts, and this model has none. "
            f"{_NOT_GENERATED}"
        )


def _check_indexer(config: HfConfig, shape: Shape, indexer: Indexer, platform: Platform) -> None:
    """Check that vLLM has kernels of an indexer, and reads its kind as transformers does."""
    if not platform.has_sparse_attention:
        raise MsrlError(
            f"{config.where}: {shape.architecture}: vLLM has no sparse attention on "
            f"{platform.name}, which attends to the keys that an indexer chooses. {_NOT_GENERATED}"
        )
    key = "indexer_rope_interleave"
    if indexer.rotary.interleaved != bool(config.values.get(key)):
        raise MsrlError(
            f"{config.where}: {key}: is missing, so vLLM would rotate the indexer in another way. "
            f"Set it to {str(indexer.rotary.interleaved).lower()}."
        )
    indexers = [x.mixer.indexer for x in shape.layers if isinstance(x.mixer, Mla)]
    has_shared = any(x is not None and x.is_shared for x in indexers)
    keys = ("index_topk_freq", "index_topk_pattern")
    if has_shared and all(config.values.get(key) is None for key in keys):
        raise MsrlError(
            f"{config.where}: indexer_types: vLLM reads {' or '.join(keys)} in its place, and the "
            "file has neither. Add the one that has the same meaning."
        )


def _is_latent_attention_disabled() -> bool:
    """Return True if the user makes vLLM expand the latents to the keys and values of all heads."""
    return os.environ.get("VLLM_MLA_DISABLE", "0").strip() not in ("", "0")


def _head_key(config: HfConfig, shape: Shape) -> str:
    for key in ("head_dim", "kv_channels"):
        if config.values.get(key) == shape.head_dim:
            return f"{key}={shape.head_dim}"
    sizes = f"hidden_size={shape.hidden_size} / num_attention_heads={shape.num_attention_heads}"
    return sizes if shape.mla is None else f"head_dim={shape.head_dim}"


def _check_devices(settings: EngineSettings, shape: Shape) -> None:
    """Check that the heads can be distributed over the devices of an engine."""
    tp, groups = settings.engine.tp, shape.num_query_groups
    if shape.num_attention_heads % tp:
        raise MsrlError(
            f"rollout.engine.tp={tp}: must divide the {shape.num_attention_heads} attention heads "
            f"of {settings.model_dir}. Choose another value."
        )
    if shape.mla is None and groups % tp and tp % groups:
        raise MsrlError(
            f"rollout.engine.tp={tp}: must divide the {groups} KV heads of "
            f"{settings.model_dir}, or be a multiple of them. Choose another value."
        )


def _check_batch(settings: EngineSettings, length: int, platform: Platform) -> None:
    """Check the tokens of a step as vLLM does (`SchedulerConfig.verify_max_model_len`)."""
    engine, limit = settings.engine, settings.engine.max_num_batched_tokens
    if limit is None:
        return
    key = f"rollout.engine.max_num_batched_tokens={limit}"
    arguments = {**engine.options, **platform.engine_arguments()}
    if arguments.get("enable_chunked_prefill") is False and limit < length:
        raise MsrlError(
            f"{key}: must be at least the {length} tokens of the longest sequence, because an "
            f"engine on {platform.name} reads a prompt in one step. Raise it or lower "
            "rollout.engine.max_model_len."
        )
    if limit < engine.max_num_seqs:
        raise MsrlError(
            f"{key}: must be at least rollout.engine.max_num_seqs={engine.max_num_seqs}. Raise it "
            "or lower that key."
        )


def _check_compilation(settings: EngineSettings, platform: Platform) -> None:
    """Check that an engine may capture graphs or compile, and can compile if that is requested."""
    key = "rollout.engine.eager=false"
    if settings.records_routes:
        raise MsrlError(f"{key}: {COMPILED_ROUTES}")
    if settings.engine.eager is None:
        return
    if not platform.is_eager or platform.missing() is not None:
        return
    # As PyTorch chooses it (torch/_inductor/config.py).
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise MsrlError(
            f"{key}: vLLM compiles the model with {compiler}, which is not installed. Install a "
            "C++ compiler (CXX names another one), or remove the key."
        )
    if os.environ.get(_NO_COMPILATION) == "1":
        raise MsrlError(
            f"{key}: {_NO_COMPILATION}=1 disables compilation. Unset the variable or remove the "
            "key."
        )


def _check_architecture(config: HfConfig) -> None:
    """Check that vLLM has the model's class, and that transformers or vLLM has its config class.

    Code that comes with a checkpoint is never run.
    """
    architectures = engine_source.architectures()
    name, model_type = config.architecture(), config.values.get("model_type")
    if architectures is not None and name not in architectures:
        raise MsrlError(f"{config.where}: the installed vLLM has no {name}. {_NOT_GENERATED}")
    config_types = engine_source.config_types()
    if config_types is None or not isinstance(model_type, str) or model_type in config_types:
        return
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise MsrlError(
            f"{config.where}: neither the installed vLLM nor transformers has a config class "
            f"for model_type {model_type}, and code of the checkpoint is not run. {_NOT_GENERATED}"
        )
