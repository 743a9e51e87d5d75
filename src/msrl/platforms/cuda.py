"""CUDA platform: NVIDIA GPUs with unmodified Megatron and vLLM."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, cast

from msrl.errors import MsrlError
from msrl.platforms.base import (
    COMMON_STACK,
    MEGATRON_CORE,
    DeltaRule,
    DevicePlatform,
    VarlenAttention,
    is_installed,
)

if TYPE_CHECKING:
    import torch

# FLOP/s of dense bfloat16 products with float32 accumulation from NVIDIA's data sheets (half of the
# numbers with sparsity). The first entry whose name is in the name of the device is used.
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


# Bytes that the rows of operands of `grouped_mm` must be a multiple of (torch 2.13).
_ROW_ALIGNMENT = 16


def peak_flops(name: str) -> float | None:
    """Return the peak FLOP/s of the device `name`, or None if it is not in the table."""
    return next((peak for model, peak in _PEAKS if re.search(rf"\b{model}\b", name)), None)


def flash_attention(
    query: torch.Tensor,  # [Q, h, d]
    key: torch.Tensor,  # [K, g, d]
    value: torch.Tensor,  # [K, g, d]
    query_ends: tuple[int, ...],
    key_ends: tuple[int, ...],
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Compute `VarlenAttention` with torch's flash attention (`torch.nn.attention.varlen`)."""
    from torch.nn.attention import varlen

    options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]}
    if "enable_gqa" not in _parameter_names(varlen.varlen_attn):  # added later than `window_size`
        options = {}
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    output = varlen.varlen_attn(
        query,
        key,
        value,
        _bounds(query_ends, query.device),
        _bounds(key_ends, query.device),
        _max_length(query_ends),
        _max_length(key_ends),
        scale=scale,
        # Numbers of keys before and after the position of the query.
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    return cast("torch.Tensor", output)


def chunked_delta_rule(
    query: torch.Tensor,  # [N, g, k]
    key: torch.Tensor,  # [N, g, k]
    value: torch.Tensor,  # [N, g, r, v]
    strength: torch.Tensor,  # [N, g, r]
    log_decay: torch.Tensor,  # [N, g, r]
    ends: tuple[int, ...],
) -> torch.Tensor:
    """Compute `DeltaRule` with flash-linear-attention (`fla.ops.gated_delta_rule`, 0.3 and later).

    It reads one batch of as many heads of queries and keys as of values.
    """
    operator = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    ratio = value.shape[2]
    output, _ = operator(
        q=query.repeat_interleave(ratio, 1)[None],
        k=key.repeat_interleave(ratio, 1)[None],
        v=value.flatten(1, 2)[None],
        g=log_decay.flatten(1)[None],
        beta=strength.flatten(1)[None],
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=_bounds(ends, query.device).long(),
    )
    return output[0].unflatten(1, (-1, ratio))


def _max_length(ends: tuple[int, ...]) -> int:
    return max(end - start for start, end in pairwise((0, *ends)))


@functools.lru_cache(maxsize=16)
def _bounds(ends: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the starts of the sequences and the end of the last one.

    The result is cached: every layer needs it, and a copy to the device waits for all queued work.
    """
    import torch

    return torch.tensor((0, *ends), dtype=torch.int32, device=device)


@functools.cache
def _has_varlen_attention() -> bool:
    """Return True if `varlen_attn` supports scales and windows. Its first version did not."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention import varlen

    return {"scale", "window_size"} <= _parameter_names(varlen.varlen_attn)


@functools.cache
def _parameter_names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


class CudaPlatform(DevicePlatform):
    """NVIDIA GPUs."""

    name = "cuda"
    stack: ClassVar[Mapping[str, str]] = {
        "torch": "==2.13.0",
        "megatron-core": MEGATRON_CORE,
        "transformers": ">=5.16.1,<5.20",
        "vllm": "==0.32.0",
        **COMMON_STACK,
    }
    collective_backend = "nccl"
    deterministic_environment: ClassVar[Mapping[str, str]] = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
    }
    ray_resource = "GPU"
    visible_devices_variable = "CUDA_VISIBLE_DEVICES"

    def network_environment(self, interface: str) -> Mapping[str, str]:
        common = super().network_environment(interface)
        # "=" selects this name only, not all names that begin with it.
        return common if interface == "lo" else {**common, "NCCL_SOCKET_IFNAME": f"={interface}"}

    def missing(self) -> str | None:
        if not is_installed("torch"):
            return "PyTorch is not installed. Run: pip install 'msrl[cuda]'"
        import torch

        if torch.version.cuda is None:
            return "the installed PyTorch has no CUDA support. Run: pip install 'msrl[cuda]'"
        return None if torch.cuda.is_available() else "no CUDA device is available. See nvidia-smi"

    def module(self) -> Any:
        import torch

        return torch.cuda

    def peak_flops(self, dtype: str) -> float | None:
        if dtype != "bfloat16" or self.missing() is not None:
            return None
        import torch

        return peak_flops(torch.cuda.get_device_name())

    def prepare(self) -> None:
        missing = self.missing()
        # Not in `missing`, because generation does not need Megatron.
        if missing is None and not is_installed("megatron.core"):
            missing = "Megatron is not installed. Run: pip install 'msrl[cuda]'"
        if missing:
            raise MsrlError(f"cluster.platform=cuda: {missing}")

    def worker_environment(
        self, num_local_ranks: int, *, spans_machines: bool = False
    ) -> Mapping[str, str]:
        # Megatron's overlap of tensor-parallel communication needs a single hardware queue.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

    def engine_arguments(self, *, weights_change: bool = False) -> Mapping[str, Any]:
        return {"enable_sleep_mode": True}

    def grouped_product(
        self, x: torch.Tensor, matrices: Sequence[torch.Tensor], counts: Sequence[int]
    ) -> torch.Tensor | None:
        import torch
        from torch.nn import functional

        widths = (x.shape[1], matrices[0].shape[1])
        is_aligned = not any(width * x.element_size() % _ROW_ALIGNMENT for width in widths)
        # Versions of torch before 2.10 have no `grouped_mm`.
        if x.dtype != torch.bfloat16 or not is_aligned or not hasattr(functional, "grouped_mm"):
            return None
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=x.device)
        return functional.grouped_mm(x, torch.stack(list(matrices)), offs=ends)

    def varlen_attention(self, dtype: torch.dtype, head_dim: int) -> VarlenAttention | str:
        import torch

        if dtype not in (torch.bfloat16, torch.float16):
            return f"flash attention does not support {str(dtype).removeprefix('torch.')}"
        if head_dim % 8 or head_dim > 256:
            return f"flash attention supports head dimensions 8, 16, ... 256, not {head_dim}"
        if not _has_varlen_attention():
            return f"torch {torch.__version__} has no varlen_attn with scales and windows"
        if torch.cuda.get_device_capability() < (8, 0):
            device = torch.cuda.get_device_name()
            return f"flash attention needs compute capability 8.0, which {device} does not have"
        return flash_attention

    def delta_rule(self, dtype: torch.dtype, key_head_dim: int) -> DeltaRule | None:
        import torch

        # Triton chooses its kernels by measuring them, so two runs may differ in the last bits.
        is_exact = torch.are_deterministic_algorithms_enabled()
        is_supported = dtype in (torch.bfloat16, torch.float16) and key_head_dim <= 256
        return chunked_delta_rule if is_supported and not is_exact and is_installed("fla") else None


PLATFORM = CudaPlatform()
AUTO_ORDER = 1
