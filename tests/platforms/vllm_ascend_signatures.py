"""Signatures of vLLM 0.23.0 and vllm-ascend 0.23.0 that msrl's adapter relies on, and later ones.

They were read from the wheels. Both need torch 2.10 and thus cannot be imported beside the torch of
the tests. `test_vllm_ascend.py` compares them with unpacked wheels, if MSRL_ASCEND_WHEELS names a
folder with them. `LATER` is what the main branch of vllm-ascend has in their place.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Files of methods and functions, and their parameters
FUNCTIONS = {
    "vllm/entrypoints/llm.py": {
        "LLM.sleep": "self, level=1, mode='abort'",
        "LLM.wake_up": "self, tags=None",
        "LLM.collective_rpc": "self, method, timeout=None, args=(), kwargs=None",
        "LLM.generate": "self, prompts, sampling_params=None, *, use_tqdm=True, lora_request=None, "
        "priority=None, tokenization_kwargs=None, mm_processor_kwargs=None",
        "LLM.reset_prefix_cache": "self, reset_running_requests=False, reset_connector=False",
        "LLM.get_tokenizer": "self",
    },
    "vllm/v1/engine/llm_engine.py": {
        "LLMEngine.add_request": "self, request_id, prompt, params, arrival_time=None, "
        "lora_request=None, tokenization_kwargs=None, trace_headers=None, priority=0, "
        "prompt_text=None",
        "LLMEngine.step": "self",
        "LLMEngine.abort_request": "self, request_ids, internal=False",
        "LLMEngine.has_unfinished_requests": "self",
    },
    "vllm/v1/worker/gpu_model_runner.py": {
        "GPUModelRunner.reload_weights": "self, weights_iterator=None, weights_path=None, "
        "is_checkpoint_format=True",
    },
    "vllm_ascend/worker/model_runner_v1.py": {"NPUModelRunner.get_model": "self"},
    "vllm_ascend/worker/worker.py": {
        "NPUWorker.sleep": "self, level=1",
        "NPUWorker.wake_up": "self, tags=None",
        "NPUWorker.init_weight_transfer_engine": "self, init_info",
        "NPUWorker.start_weight_update": "self, is_checkpoint_format=True",
        "NPUWorker.update_weights": "self, update_info",
        "NPUWorker.finish_weight_update": "self",
    },
    "vllm_ascend/distributed/weight_transfer/hccl_engine.py": {
        "HCCLWeightTransferEngine.trainer_init": "init_info",
        "HCCLWeightTransferEngine.trainer_send_weights": "iterator, trainer_args",
    },
}
# vllm-ascend after its pull requests 12876 (life cycle of an update) and 16960 (trainer's side)
LATER = {
    "NPUWorker.start_weight_update": "self",
    "HCCLTrainerWeightTransferEngine.trainer_init": "init_info, *, client, source=None",
}
LATER_FIELDS = {
    "HCCLTrainerInitInfo": "rank master_address master_port world_size packed "
    "packed_buffer_size_bytes packed_num_buffers",
}
# Files of data classes, and the fields that msrl sets
FIELDS = {
    "vllm_ascend/distributed/weight_transfer/hccl_engine.py": {
        "HCCLTrainerSendWeightsArgs": "group packed packed_buffer_size_bytes packed_num_buffers",
        "HCCLWeightTransferInitInfo": "master_address master_port rank_offset world_size",
        "HCCLWeightTransferUpdateInfo": "names dtype_names shapes packed packed_buffer_size_bytes "
        "packed_num_buffers",
    },
    "vllm/engine/arg_utils.py": {
        "EngineArgs": "additional_config async_scheduling block_size disable_log_stats "
        "distributed_executor_backend dtype enable_expert_parallel enable_prefix_caching "
        "enable_sleep_mode enforce_eager gpu_memory_utilization kv_cache_memory_bytes load_format "
        "logprobs_mode max_model_len max_num_batched_tokens max_num_seqs model seed "
        "served_model_name tensor_parallel_size tokenizer use_tqdm_on_load weight_transfer_config "
        "worker_extension_cls",
    },
    "vllm/sampling_params.py": {
        "SamplingParams": "detokenize flat_logprobs ignore_eos logprobs max_tokens min_p "
        "output_kind prompt_logprobs seed stop stop_token_ids temperature top_k top_p",
    },
}


def parameters(name: str) -> str:
    """Return the parameters of a function."""
    return next(functions[name] for functions in FUNCTIONS.values() if name in functions)


def fields(name: str) -> set[str]:
    """Return the fields of a data class."""
    return set(next(classes[name] for classes in FIELDS.values() if name in classes).split())


def recorder(
    calls: list[tuple[str, Any]], name: str, result: Any = None, signature: str | None = None
) -> Callable[..., Any]:
    """Return a function that binds its arguments to the signature of `name` and records them.

    The signature is that of 0.23 unless another one is passed.
    """
    function = eval(f"lambda {signature or parameters(name)}: None")  # a constant of this file
    bound_signature = inspect.signature(function)

    def record(*args: Any, **kwargs: Any) -> Any:
        own = (None, *args) if "self" in bound_signature.parameters else args
        bound = dict(bound_signature.bind(*own, **kwargs).arguments)
        calls.append((name.rpartition(".")[2], {k: v for k, v in bound.items() if k != "self"}))
        return result

    return record


def read_parameters(root: Path, path: str, name: str) -> str:
    """Return the parameters of a function in an unpacked wheel."""
    arguments = _node(root / path, name).args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    for argument in every:
        argument.annotation = None
    return ast.unparse(arguments)


def read_fields(root: Path, path: str, name: str) -> set[str]:
    """Return the fields of a data class in an unpacked wheel."""
    body = _node(root / path, name).body
    targets = [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _node(path: Path, name: str) -> Any:
    node: Any = ast.parse(path.read_text())
    for attribute in name.split("."):
        node = [child for child in node.body if getattr(child, "name", None) == attribute][-1]
    return node
