"""NVIDIA GPUs: Megatron and vLLM as they are."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from msrl.errors import MsrlError
from msrl.platforms.base import COMMON_STACK, Platform, VarlenAttention

if TYPE_CHECKING:
    import torch

# Dense bfloat16 with float32 sums, operations per second, by NVIDIA's data sheets (half of what they give with sparsity). The first name
# that a device's contains counts.
_PEAKS = (
    ("B200", 2250e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835.5e12),
    ("H100", 989.4e12),
    ("H200 NVL", 835.5e12),
    ("H200", 989.4e12),
    ("H800", 989.4e12),
    ("H20", 148e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362.05e12),
    ("L40", 181.05e12),
    ("L20", 119.5e12),
    ("L4", 121e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
)


def peak_flops(name: str) -> float | None:
    """The peak of a device of that name; None where the table does not have it."""
    return next((peak for part, peak in _PEAKS if re.search(rf"\b{part}\b", name)), None)


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_ends: tuple[int, ...], key_ends: tuple[int, ...],
    scale: float, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """torch's own flash attention over sequences of any lengths (`torch.nn.attention.varlen`); see `VarlenAttention`."""
    from torch.nn.attention import varlen

    def longest(ends: tuple[int, ...]) -> int:
        return max(end - start for start, end in zip((0, *ends), ends, strict=False))

    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]}
    if "enable_gqa" not in _accepted(varlen.varlen_attn):  # which came later than windows
        grouped = {}
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    found = varlen.varlen_attn(
        query, key, value, _bounds(query_ends, query.device), _bounds(key_ends, query.device), longest(query_ends), longest(key_ends),
        scale=scale, window_size=(-1 if window is None else window - 1, 0),  # keys before the query's own, and behind it
        **grouped,
    )  # fmt: skip
    return cast("torch.Tensor", found)


@functools.lru_cache(maxsize=16)
def _bounds(ends: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Where sequences begin and the last ends. Kept, since every layer asks, and a copy to the device waits for all that it has to do."""
    import torch

    return torch.tensor((0, *ends), dtype=torch.int32, device=device)


@functools.cache
def _has_varlen_attention() -> bool:
    """Whether this torch has it, with scales and windows: the first one had neither."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention import varlen

    return {"scale", "window_size"} <= _accepted(varlen.varlen_attn)


@functools.cache
def _accepted(function: Callable[..., Any]) -> frozenset[str]:
    """The names of its parameters."""
    return frozenset(inspect.signature(function).parameters)


class CudaPlatform(Platform):
    name = "cuda"
    stack: ClassVar[Mapping[str, str]] = {
        "torch": "==2.13.0",
        "megatron-core": "==0.16.1",
        "transformers": ">=5.16.1,<5.20",
        "vllm": "==0.32.0",
        **COMMON_STACK,
    }
    collective_backend = "nccl"
    deterministic_environment: ClassVar[Mapping[str, str]] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
    ray_resource = "GPU"
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"
    overlap_communication = True

    def missing(self) -> str | None:
        if importlib.util.find_spec("torch") is None:
            return "PyTorch is not installed; run: pip install 'msrl[cuda]'"
        import torch

        if torch.version.cuda is None:
            return "this PyTorch was built without CUDA; run: pip install 'msrl[cuda]'"
        return None if torch.cuda.is_available() else "no CUDA device answers; look at nvidia-smi"

    def device_count(self) -> int:
        import torch

        return torch.cuda.device_count()

    def memory_bytes(self) -> int | None:
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory) if self.device_count() else None

    def peak_flops(self, dtype: str) -> float | None:
        if dtype != "bfloat16" or self.missing() is not None:
            return None
        import torch

        return peak_flops(torch.cuda.get_device_name())

    def prepare(self) -> None:
        missing = self.missing()
        if missing is None and importlib.util.find_spec("megatron") is None:  # which generating needs not
            missing = "Megatron is not installed; run: pip install 'msrl[cuda]'"
        if missing:
            raise MsrlError(f"cluster.platform=cuda: {missing}")

    def device(self, local_rank: int) -> torch.device:
        import torch

        index = local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def worker_environment(self, num_local_ranks: int, *, spans_machines: bool = False) -> Mapping[str, str]:
        # Megatron's overlap of tensor-parallel communication relies on the order of a single hardware queue.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

    def engine_arguments(self) -> Mapping[str, Any]:
        return {"enable_sleep_mode": True}

    def varlen_attention(self, dtype: torch.dtype, head_dim: int) -> VarlenAttention | str:
        import torch

        if dtype not in (torch.bfloat16, torch.float16):
            return f"flash attention has no {str(dtype).removeprefix('torch.')}"
        if head_dim % 8 or head_dim > 256:
            return f"flash attention has heads of 8, 16, ... 256 channels, not {head_dim}"
        if not _has_varlen_attention():
            return f"torch {torch.__version__} has no varlen_attn with scales and windows"
        if torch.cuda.get_device_capability() < (8, 0):
            return f"flash attention needs compute capability 8.0, and this is a {torch.cuda.get_device_name()}"
        return flash_attention

    def random_state(self) -> torch.Tensor | None:
        import torch

        return torch.cuda.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        import torch

        torch.cuda.set_rng_state(state)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()


PLATFORM = CudaPlatform()
