"""Names of vLLM's engine arguments, read from the source of the installed vLLM.

The source is the class `EngineArgs` in `vllm/engine/arg_utils.py` (vLLM 0.23 to 0.32). It is parsed
and not imported, so that a configuration is checked without loading vLLM.
"""

from __future__ import annotations

import ast
import functools

from msrl.rollout.engine_source import statements

_FILE = "engine/arg_utils.py"

# Arguments that msrl sets, with the key that controls them; "" if no key does.
SET_BY_MSRL = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "dtype": "model.dtype",
    "seed": "rollout.sampling.seed",
    "tensor_parallel_size": "rollout.engine.tp",
    "data_parallel_size": "rollout.engine.dp",
    "enable_expert_parallel": "rollout.engine.ep",
    "max_model_len": "rollout.engine.max_model_len",
    "max_num_seqs": "rollout.engine.max_num_seqs",
    "max_num_batched_tokens": "rollout.engine.max_num_batched_tokens",
    "enforce_eager": "rollout.engine.eager",
    "enable_prefix_caching": "rollout.engine.prefix_cache",
    "gpu_memory_utilization": "rollout.engine.memory_fraction",
    "kv_cache_memory_bytes": "rollout.engine.kv_cache_bytes",
    "enable_sleep_mode": "rollout.engine.sleep",
    "load_format": "",
    "logprobs_mode": "",
    "worker_extension_cls": "",
    "distributed_executor_backend": "",
    "use_tqdm_on_load": "",
    "disable_log_stats": "log.prometheus",
}

# Arguments that contradict what msrl guarantees, with the reason.
REFUSED = {
    "trust_remote_code": "code of a checkpoint is never run",
    "pipeline_parallel_size": "an engine has no pipeline stages in this version",
    "hf_overrides": "the engine must run the model that is trained",
    "skip_tokenizer_init": "responses are decoded with the tokenizer",
    "runner": "the engine generates",
    "convert": "the engine generates",
}


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
