"""Recording of the experts that vLLM's routers choose while it generates, in its worker.

vLLM 0.32 returns them itself (`enable_return_routed_experts`), but only from its second model
runner, which needs a Triton back end and therefore does not run on CPU. Here the routers call a
hook (`BaseRouter.set_capture_fn`, vllm/model_executor/layers/fused_moe/router/base_router.py), and
the first model runner says which tokens a step has computed (`GPUModelRunner.execute_model`,
vllm/v1/worker/gpu_model_runner.py). Nothing here imports vllm.

Letters: n tokens of a step, T tokens of a request, L mixture layers of the model, k experts per
token.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl.errors import MsrlError
from msrl.rollout.route_store import ComputedTokens, RouteStore
from msrl.types import Routes

if TYPE_CHECKING:
    from torch import Tensor

ROUTES_KEY = "msrl_routes"  # in the `extra_args` of vLLM's sampling parameters
_DTYPES = {1: np.dtype(np.uint8), 2: np.dtype(np.int16)}  # by the bytes of an expert's number
_FULL_ATTENTION = "FullAttentionSpec"  # of vllm/v1/kv_cache_interface.py
_RUNNER = ("execute_model", "requests", "input_batch", "kv_cache_config")


class StepRecorder:
    """Hooks in the routers and the runner of a vLLM worker that fill a `RouteStore`.

    Args:
        runner: vLLM's model runner.
        num_layers: Number of the mixture layers of the model.
        number_bytes: Bytes of an expert's number.

    Raises:
        MsrlError: vLLM computes this model in a way that hides the choice of experts.
    """

    def __init__(self, runner: Any, num_layers: int, number_bytes: int) -> None:
        if any(not hasattr(runner, name) for name in _RUNNER):
            raise _refusal(f"{type(runner).__qualname__} is not vLLM's first model runner")
        self._runner, self._dtype = runner, _DTYPES[number_bytes]
        self._group, block_tokens = _full_attention(runner.kv_cache_config)
        self.store = RouteStore(block_tokens)
        self._experts = dict[int, Routes]()  # [n, k] of the present step by layer of the model
        routers = _routers(runner.get_model())
        if len(routers) != num_layers:
            reason = f"{len(routers)} of {num_layers} mixture layers have a router with a hook"
            raise _refusal(reason)
        for layer, router in routers.items():
            router.set_capture_fn(functools.partial(self._capture, layer))
        self._execute = runner.execute_model
        runner.execute_model = self._run

    def _capture(self, layer: int, experts: Tensor) -> None:  # [n, k]
        """Keep the choice of a router. vLLM calls this in a forward pass."""
        self._experts[layer] = experts.cpu().numpy().astype(self._dtype)

    def _run(self, scheduled: Any, *arguments: Any, **options: Any) -> Any:
        """Execute the model and store the routes of the step.

        The runner first copies the blocks of the KV cache that requests share up to a token in
        their middle.
        """
        self._experts.clear()
        copies = getattr(scheduled, "kv_cache_block_copies", None) or ()
        self.store.copy_blocks([(copy.src_block_id, copy.dst_block_id) for copy in copies])
        output = self._execute(scheduled, *arguments, **options)
        num_tokens = scheduled.total_num_scheduled_tokens
        if num_tokens:
            # vLLM may pad a pass: later rows are no tokens.
            by_layer = [self._experts[layer][:num_tokens] for layer in sorted(self._experts)]
            self.store.add_step(self._tokens(scheduled), np.stack(by_layer, 1))
        return output

    def _tokens(self, scheduled: Any) -> list[ComputedTokens]:
        """Return the tokens of each request in the order of the forward pass."""
        # After the pass: GPUModelRunner._update_states has ordered the batch before it, and counts
        # the tokens of this step only in the next one.
        batch, tokens = self._runner.input_batch, list[ComputedTokens]()
        for index, name in enumerate(batch.req_ids):
            request = self._runner.requests[name]
            extra = getattr(request.sampling_params, "extra_args", None) or {}
            start, count = batch.num_computed_tokens_cpu[index], scheduled.num_scheduled_tokens
            blocks = request.block_ids[self._group]
            tokens.append(ComputedTokens(extra.get(ROUTES_KEY), int(start), count[name], blocks))
        return tokens


class RouteRecorder:
    """Methods that vLLM adds to its worker with `WeightReceiver`; `self` is that worker."""

    model_runner: Any
    rank: int
    _step_recorder: StepRecorder

    def record_routes(self, num_layers: int, number_bytes: int) -> None:
        """Record the experts of every token from now on, in the first of the engine's processes.

        All of them choose the same experts.
        """
        if self.rank == 0:
            self._step_recorder = StepRecorder(self.model_runner, num_layers, number_bytes)

    def take_routes(self, keys: Sequence[str]) -> list[Routes]:  # [T, L, k] each
        """Return the routes of finished requests, and forget them."""
        return self._step_recorder.store.take(keys) if self.rank == 0 else []

    def drop_routes(self, keys: Sequence[str]) -> None:
        """Forget the routes of aborted requests."""
        if self.rank == 0:
            self._step_recorder.store.drop(keys)


def _routers(model: Any) -> dict[int, Any]:
    """Return the routers of a model that compute a choice of experts, by layer."""
    routers = dict[int, Any]()
    for module in model.modules():
        router = getattr(module, "router", None)
        if not hasattr(router, "set_capture_fn") or not hasattr(module, "layer_id"):
            continue
        if module._quant_method.is_monolithic:
            kernel = type(module._quant_method).__name__
            raise _refusal(f"its kernel {kernel} routes and computes in one operation")
        routers[module.layer_id] = router
    return routers


def _full_attention(config: Any) -> tuple[int, int]:
    """Return number and block size of a KV cache group that keeps a block for every token."""
    for number, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        layers = list(getattr(spec, "kv_cache_specs", {0: spec}).values())
        if all(_FULL_ATTENTION in _class_names(layer) for layer in layers):
            return number, spec.block_size
    raise _refusal("its KV cache has blocks for the tokens of a window only")


def _class_names(value: Any) -> set[str]:
    return {base.__name__ for base in type(value).__mro__}


def _refusal(reason: str) -> MsrlError:
    return MsrlError(
        f"train.router.replay=engine: vLLM does not show the experts of this model: {reason}. Set "
        "it to trainer."
    )
