"""Arguments of vLLM's engines: the values that msrl sets, and the names of all.

The names come from the class `EngineArgs` in `vllm/engine/arg_utils.py` (vLLM 0.23 to 0.32). It is
parsed and not imported, so that a configuration is checked without loading vLLM.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

from msrl.errors import nearest
from msrl.models.shape import Shape
from msrl.platforms.base import Platform
from msrl.rollout.engine import (
    EngineSettings,
    is_eager,
    kv_cache_bytes,
    sleep_level,
)
from msrl.rollout.engine_limits import model_length
from msrl.rollout.engine_source import statements
from msrl.vision.settings import has_vision, names_normalization, read_vision_settings

_FILE = "engine/arg_utils.py"
_DEFAULT_BATCH = 8192  # tokens of a step by default, on devices


Value = Callable[[EngineSettings, Shape, Platform], Any]


def _kv_cache_bytes(settings: EngineSettings, shape: Shape, platform: Platform) -> int | None:
    if not platform.shares_main_memory:
        return settings.engine.kv_cache_bytes
    import psutil

    dtype, length = settings.dtype or shape.dtype, model_length(settings, shape)
    available = int(psutil.virtual_memory().available)  # without swapping
    return kv_cache_bytes(shape, settings, dtype, length, available)


def _image_limit(settings: EngineSettings) -> dict[str, int] | None:
    if not has_vision(settings.model_dir):
        return None
    return {"image": settings.images.max_images if settings.images else 0, "video": 0}


def _normalizes_on_device(settings: EngineSettings) -> bool | None:
    """Return False if vLLM must not normalize pixels, None for its default.

    It reads mean and deviation from the processor's file and has no defaults for them. Its random
    weights replace them too, and no weight update restores them.
    """
    is_known = "mm_device_do_normalize" in (engine_argument_names() or ())
    if settings.images is None or not is_known:
        return None
    if settings.random_weights or not names_normalization(settings.model_dir):
        return False
    return None


def _batch_of_image(settings: EngineSettings, shape: Shape, platform: Platform) -> int | None:
    """Return the tokens of a step that an image may need, None for vLLM's default.

    vLLM knows the largest image of the model's processor, but not that of other limits. Its class
    of InternVL does not count the tiles of an image.
    """
    images, length = settings.images, model_length(settings, shape)
    if images is None:
        return None
    largest = images.vision.max_tokens
    known = 0 if images.vision.tile else read_vision_settings(settings.model_dir).max_tokens
    if largest <= known:
        return None
    is_chunked = platform.engine_arguments().get("enable_chunked_prefill", True)
    return max(_DEFAULT_BATCH, min(largest, length) if is_chunked else length)


# Arguments that msrl sets: the key that controls each and its value. "": no key does. None instead
# of a key: `rollout.engine.options` may replace it. None as value: vLLM's default or the platform's
# argument applies.
_ARGUMENTS: dict[str, tuple[str | None, Value]] = {
    "model": ("model.path", lambda s, *_: str(s.model_dir)),
    "tokenizer": ("model.tokenizer", lambda s, *_: str(s.tokenizer_dir or s.model_dir)),
    "dtype": ("model.dtype", lambda s, shape, _: s.dtype or shape.dtype),
    "seed": ("rollout.sampling.seed", lambda s, *_: s.seed),
    "tensor_parallel_size": ("rollout.engine.tp", lambda s, *_: s.engine.tp),
    "data_parallel_size": ("rollout.engine.dp", lambda *_: None),  # each is an engine of its own
    "enable_expert_parallel": ("rollout.engine.ep", lambda s, *_: s.engine.ep > 1 or None),
    "hf_overrides": (
        None,
        # ModelConfig.head_dtype of vLLM reads it.
        lambda s, *_: s.logits_dtype and {"head_dtype": s.logits_dtype},
    ),
    "max_model_len": ("rollout.engine.max_model_len", lambda s, shape, _: model_length(s, shape)),
    "max_num_seqs": ("rollout.engine.max_num_seqs", lambda s, *_: s.engine.max_num_seqs),
    "max_num_batched_tokens": (
        "rollout.engine.max_num_batched_tokens",
        lambda s, shape, p: s.engine.max_num_batched_tokens or _batch_of_image(s, shape, p),
    ),
    "enforce_eager": ("rollout.engine.eager", lambda s, _, platform: is_eager(s.engine, platform)),
    "enable_prefix_caching": ("rollout.engine.prefix_cache", lambda s, *_: s.engine.prefix_cache),
    "gpu_memory_utilization": (
        "rollout.engine.memory_fraction",
        lambda s, *_: s.engine.memory_fraction,
    ),
    "kv_cache_memory_bytes": ("rollout.engine.kv_cache_bytes", _kv_cache_bytes),
    # As in transformers and the trainer. vLLM's default is the model's dtype.
    "mamba_ssm_cache_dtype": (None, lambda _, shape, *__: "float32" if shape.delta else None),
    "enable_sleep_mode": ("rollout.engine.sleep", lambda *_: None),
    "load_format": ("", lambda s, *_: "dummy" if s.random_weights else "auto"),
    "logprobs_mode": ("", lambda *_: "processed_logprobs"),
    "worker_extension_cls": ("", lambda *_: "msrl.rollout.vllm_weights.WeightReceiver"),
    # Inside a Ray actor, vLLM's default is Ray.
    "distributed_executor_backend": ("", lambda s, *_: "mp" if s.engine.tp > 1 else None),
    "use_tqdm_on_load": ("", lambda s, *_: s.verbose),
    "disable_log_stats": ("log.prometheus", lambda s, *_: s.metrics is None),
    "served_model_name": (None, lambda s, *_: s.metrics and s.metrics.run),  # label of all metrics
    "weight_transfer_config": (
        "rollout.weights.transfer",
        lambda s, _, p: s.weight_backend and {"backend": p.weight_engine(s.weight_backend).name},
    ),
    # Without images, vLLM loads neither the vision tower nor a processor.
    "limit_mm_per_prompt": ("", lambda s, *_: _image_limit(s)),
    "mm_processor_cache_gb": ("", lambda s, *_: None if s.images is None else 0),
    "mm_device_do_normalize": ("", lambda s, *_: _normalizes_on_device(s)),
    "skip_mm_profiling": ("", lambda s, _, p: (s.images and p.shares_main_memory) or None),
    # A step must return the tokens that it samples: with asynchronous scheduling, tokens of old
    # weights would arrive after an update, and finished requests would run once more.
    "async_scheduling": (None, lambda s, *_: False if s.is_stepped or s.records_routes else None),
}
SET_BY_MSRL = {name: key for name, (key, _) in _ARGUMENTS.items() if key is not None}

_PIXELS = "the engine must read the images that are trained"
_DRAFTS = "vLLM 0.32 samples wrongly with drafts on CPU, and has not been tried elsewhere"
# Arguments that contradict what msrl guarantees, with the reason.
REFUSED = {
    "trust_remote_code": "code of a checkpoint is never run",
    "pipeline_parallel_size": "an engine has no pipeline stages in this version",
    "hf_overrides": "the engine must run the model that is trained (model.logits_dtype sets the "
    "dtype of its output layer)",
    "mm_processor_kwargs": _PIXELS,
    "language_model_only": _PIXELS,
    "mm_encoder_only": _PIXELS,
    "enable_mm_embeds": _PIXELS,
    "video_pruning_rate": _PIXELS,
    "skip_tokenizer_init": "responses are decoded with the tokenizer",
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _DRAFTS),
    "runner": "the engine generates",
    "convert": "the engine generates",
}


# Arguments that change neither the weights of an engine nor what it computes with them: its blocks,
# its schedule, its processes and the kernels of the same functions.
HARMLESS = frozenset(
    {
        "aggregate_engine_logging",
        "async_scheduling",
        "attention_backend",
        "block_size",
        "cpu_distributed_timeout_seconds",
        "cudagraph_capture_sizes",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "distributed_timeout_seconds",
        "enable_chunked_prefill",
        "log_level",
        "long_prefill_token_threshold",
        "max_cudagraph_capture_size",
        "max_num_scheduled_tokens",
        "num_gpu_blocks_override",
        "numa_bind",
        "numa_bind_cpus",
        "numa_bind_nodes",
        "prefix_caching_hash_algo",
        "safetensors_load_strategy",
        "scheduler_reserve_full_isl",
        "served_model_name",
        "watermark",
    }
)


def option_problem(name: str, *, weights_change: bool) -> str | None:
    """Return why an engine argument cannot be an option, and what to do; None if it can.

    Args:
        name: Name of the argument.
        weights_change: The engine receives new weights during the run.
    """
    if name in SET_BY_MSRL:
        remedy = f"Use {SET_BY_MSRL[name]}" if SET_BY_MSRL[name] else "Remove it"
        return f"msrl sets this engine argument. {remedy}."
    if name in REFUSED:
        return f"not supported, because {REFUSED[name]}. Remove it."
    known = engine_argument_names()
    if known is not None and name not in known:
        hint = nearest(name, known - SET_BY_MSRL.keys() - REFUSED.keys())
        return f"the installed vLLM has no such engine argument; {hint}"
    if weights_change and name not in HARMLESS:
        return "not tried with weights that change during the run. Remove it."
    return None


def engine_arguments(settings: EngineSettings, shape: Shape, platform: Platform) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`; the platform's arguments take precedence."""
    values = {name: value(settings, shape, platform) for name, (_, value) in _ARGUMENTS.items()}
    arguments = {name: value for name, value in values.items() if value is not None}
    arguments |= settings.engine.options
    # A user may request graphs of weights that change; the engine then checks their addresses.
    is_default = settings.engine.eager is None
    arguments |= platform.engine_arguments(weights_change=settings.random_weights and is_default)
    if not sleep_level(settings.engine, platform):
        arguments.pop("enable_sleep_mode", None)  # its allocator has a cost
    return arguments


@functools.cache
def engine_argument_names() -> frozenset[str] | None:
    """Return the names of all engine arguments, or None if vLLM is not installed.

    Raises:
        RuntimeError: The source of vLLM has no class EngineArgs.
    """
    nodes = statements(_FILE)
    if nodes is None:
        return None
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            return frozenset(_public_fields(node))
    raise RuntimeError(f"vllm/{_FILE}: no class EngineArgs, which vLLM 0.23 to 0.32 have")


def _public_fields(node: ast.ClassDef) -> list[str]:
    names = [
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]
    return [name for name in names if not name.startswith("_")]
