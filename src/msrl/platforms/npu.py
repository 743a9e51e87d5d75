"""NPU platform: Ascend NPUs with torch_npu and MindSpeed.

MindSpeed's adaptor patches torch and Megatron when it is imported, so it is imported first. It
parses `sys.argv` as its command line, so `sys.argv` is replaced during the import (MindSpeed
core_r0.16.0, mindspeed/megatron_adaptor.py and args_utils.py).
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from msrl.errors import MsrlError
from msrl.limits import whole_number
from msrl.platforms import _npu_stack
from msrl.platforms.base import (
    COMMON_STACK,
    DevicePlatform,
    Diagnosis,
    Role,
    VariableOverride,
    VarlenAttention,
    WeightEngine,
    is_installed,
)

if TYPE_CHECKING:
    import torch

_REQUIREMENTS = {
    "torch": "torch 2.10.0",
    "torch_npu": "torch_npu 2.10.0.post4",
    "megatron.core": "Megatron-LM core_r0.16.0",
    "mindspeed": "MindSpeed core_r0.16.0",
}

# FLOP/s of dense bfloat16 products of one device (for 910_93 one of the two dies of a card). They
# are not from a data sheet, but the numbers that open-source trainers use.
_PEAKS = {"Ascend910B": 354e12, "Ascend910_93": 354e12}


def peak_flops(name: str) -> float | None:
    """Return the peak FLOP/s of the device `name`, or None if it is not in the table."""
    return next((peak for model, peak in _PEAKS.items() if name.startswith(model)), None)


# Port ranges of HCCL (CANN's documentation of HCCL_IF_BASE_PORT and HCCL_HOST_SOCKET_PORT_RANGE).
_BASE_PORT = "HCCL_IF_BASE_PORT"
_DEFAULT_BASE_PORT = 60000
_PORTS_PER_ROLE = 64  # more than processes on one machine
_DEVICE_PORT_OFFSET = 2 * _PORTS_PER_ROLE
_FIRST_PORT, _LAST_PORT = 1024, 65535
_MIN_CONNECT_S, _MAX_CONNECT_S = 120, 7200  # limits of HCCL_CONNECT_TIMEOUT
# HCCL must give up before torch_npu's watchdog does, or it cannot log the cause
# (ProcessGroupHCCL.cpp warns about it).
_EXEC_SHARE = 0.9

_ALLOCATOR = "PYTORCH_NPU_ALLOC_CONF"
_SEGMENTS = "expandable_segments"
_NZ = "VLLM_ASCEND_ENABLE_NZ"
_TASK_QUEUE = "TASK_QUEUE_ENABLE"
_SLEEP = "the memory pool of an engine that sleeps does not support expandable segments"
_PLAIN_LAYOUT = "weights can only be updated in the plain layout"
_CAPTURE = "torch_npu captures no graphs with 2"


def _base_port(variables: Mapping[str, str]) -> int:
    """Return the first host port of the trainers."""
    text = variables.get(_BASE_PORT, str(_DEFAULT_BASE_PORT))
    last = _LAST_PORT - 2 * _DEVICE_PORT_OFFSET + 1
    number = whole_number(text)
    if number is None or not _FIRST_PORT <= number <= last:
        raise MsrlError(
            f"cluster.env.{_BASE_PORT}={text}: not a port from {_FIRST_PORT} to {last}. The "
            f"{2 * _DEVICE_PORT_OFFSET} ports from it are used."
        )
    return number


_MASK_SIZE = 2048  # of the compressed causal mask that the sparse modes use
# Sparse modes of npu_fusion_attention. Both align the last query and the last key of a sequence.
_RIGHT_DOWN_CAUSAL = 3
_BAND = 4


@functools.cache
def _causal_mask(device: torch.device) -> torch.Tensor:
    """Return the mask of excluded keys, [2048, 2048] bool. It is the same for all lengths."""
    import torch

    return torch.ones((_MASK_SIZE, _MASK_SIZE), dtype=torch.bool, device=device).triu(1)


def fusion_attention(
    query: torch.Tensor,  # [Q, h, d]
    key: torch.Tensor,  # [K, g, d]
    value: torch.Tensor,  # [K, g, d]
    query_ends: tuple[int, ...],
    key_ends: tuple[int, ...],
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Compute `VarlenAttention` with `torch_npu.npu_fusion_attention`.

    Source: hiascend.com, API list of the PyTorch extension.
    """
    torch_npu = importlib.import_module("torch_npu")
    sparsity = {"sparse_mode": _RIGHT_DOWN_CAUSAL}
    if window is not None:
        sparsity = {"sparse_mode": _BAND, "pre_tockens": window - 1, "next_tockens": 0}
    outputs = torch_npu.npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1],
        input_layout="TND",
        atten_mask=_causal_mask(query.device),
        scale=scale,
        actual_seq_qlen=list(query_ends),
        actual_seq_kvlen=list(key_ends),
        **sparsity,
    )
    return outputs[0]


_MAX_MATRICES = 128  # of npu_grouped_matmul, if each expert has its own tensor
_MAX_WIDTH = 65535  # of the last dimension of its operands
_ONE_OUTPUT = 3  # split_item: one tensor of tokens and one of results
_ALONG_TOKENS = 0  # group_type: the groups divide the tokens


class NpuPlatform(DevicePlatform):
    """Ascend NPUs."""

    name = "npu"
    # vLLM, vllm-ascend, Megatron and MindSpeed are built from source.
    stack: ClassVar[Mapping[str, str]] = {
        "torch": "==2.10.0",
        "torch-npu": "==2.10.0.post4",
        "transformers": ">=5.5.4,<5.11",
        "vllm": "==0.23.0",
        **COMMON_STACK,
    }
    libraries = ("torch_npu", "transformers", "ray", "megatron.core", "vllm")
    collective_backend = "hccl"
    # They fix the order of additions in collectives (HCCL and LCCL) and in matrix products (verl,
    # docs/ascend_tutorial, precision alignment).
    deterministic_environment: ClassVar[Mapping[str, str]] = {
        "HCCL_DETERMINISTIC": "true",
        "LCCL_DETERMINISTIC": "1",
        "CLOSE_MATMUL_K_SHIFT": "1",
        "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
    }
    ray_resource = "NPU"
    visible_devices_variable = "ASCEND_RT_VISIBLE_DEVICES"
    # HCCL does not support float64 (torch_npu, ProcessGroupHCCL, data types of AllReduce).
    reduction_dtype = "float32"
    checks_addresses = True

    # vllm-ascend 0.23 (distributed/weight_transfer). Its engine for shared devices, npu_ipc, needs
    # calls that msrl does not make.
    weight_engines: ClassVar[Mapping[str, WeightEngine]] = {
        "nccl": WeightEngine("hccl", "vllm_ascend.distributed.weight_transfer.hccl_engine", "HCCL")
    }

    def network_environment(self, interface: str) -> Mapping[str, str]:
        common = super().network_environment(interface)
        # "=" selects this name only, not all names that begin with it.
        return common if interface == "lo" else {**common, "HCCL_SOCKET_IFNAME": f"={interface}"}

    def missing(self) -> str | None:
        absent = [release for module, release in _REQUIREMENTS.items() if not is_installed(module)]
        if absent:
            hint = "See docs/installation.md for Ascend NPUs (CANN 9.1)"
            return f"not installed: {', '.join(absent)}. {hint}"
        if not (os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")):
            hint = "Run: source /usr/local/Ascend/ascend-toolkit/set_env.sh"
            return f"the environment variables of CANN are not set. {hint}"
        return None

    def diagnose(self) -> list[Diagnosis]:
        return _npu_stack.diagnose(_npu_stack.read_facts())

    def module(self) -> Any:
        return importlib.import_module("torch_npu").npu

    def peak_flops(self, dtype: str) -> float | None:
        if dtype != "bfloat16" or self.missing() is not None:
            return None
        return peak_flops(self.module().get_device_name(0))

    def prepare(self) -> None:
        missing = self.missing()
        if missing:
            raise MsrlError(f"cluster.platform=npu: {missing}")
        arguments, sys.argv = sys.argv, sys.argv[:1]
        try:
            # torch_npu's transfer_to_npu adds a filter that prints the warnings of all packages.
            with warnings.catch_warnings():
                importlib.import_module("torch_npu")
                importlib.import_module("mindspeed.megatron_adaptor")
        except ImportError as error:
            raise MsrlError(
                f"cluster.platform=npu: {error}. Install matching releases of torch_npu, CANN and "
                "MindSpeed (see docs/installation.md)."
            ) from error
        finally:
            sys.argv = arguments

    def worker_environment(
        self, num_local_ranks: int, *, spans_machines: bool = False
    ) -> Mapping[str, str]:
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TASK_QUEUE_ENABLE": "2"}

    def collective_environment(
        self, role: Role, *, timeout_s: float, variables: Mapping[str, str]
    ) -> Mapping[str, str]:
        # Two processes on one device need separate port ranges. The ranges take precedence over
        # HCCL_IF_BASE_PORT (CANN 8.5, HCCL_HOST_SOCKET_PORT_RANGE), so they start there.
        host = _base_port(variables) + (_PORTS_PER_ROLE if role == "engine" else 0)
        device = host + _DEVICE_PORT_OFFSET
        connect_s = min(max(timeout_s, _MIN_CONNECT_S), _MAX_CONNECT_S)
        return {
            "HCCL_HOST_SOCKET_PORT_RANGE": f"{host}-{host + _PORTS_PER_ROLE - 1}",
            "HCCL_NPU_SOCKET_PORT_RANGE": f"{device}-{device + _PORTS_PER_ROLE - 1}",
            "HCCL_CONNECT_TIMEOUT": str(math.ceil(connect_s)),
            "HCCL_EXEC_TIMEOUT": str(max(1, int(_EXEC_SHARE * timeout_s))),
        }

    def engine_environment(
        self, num_local_devices: int = 1, *, is_eager: bool = True
    ) -> Mapping[str, str]:
        # Weights can only be loaded again in the plain layout (vllm-ascend issues 4960 and 10014).
        return {"VLLM_ASCEND_ENABLE_NZ": "0"}

    def engine_overrides(self, environment: Mapping[str, str]) -> tuple[VariableOverride, ...]:
        overrides: list[VariableOverride] = []
        allocator = environment.get(_ALLOCATOR, "")
        settings = [text for text in allocator.split(",") if text.strip()]
        supported = [text for text in settings if text.partition(":")[0].strip() != _SEGMENTS]
        if supported != settings:
            overrides.append(VariableOverride(_ALLOCATOR, ",".join(supported), _SLEEP))
        if environment.get(_NZ, "0") != "0":
            overrides.append(VariableOverride(_NZ, "0", _PLAIN_LAYOUT))
        if environment.get(_TASK_QUEUE) == "2":
            overrides.append(VariableOverride(_TASK_QUEUE, "1", _CAPTURE))
        return tuple(overrides)

    def engine_arguments(self, *, weights_change: bool = False) -> Mapping[str, Any]:
        # Captured graphs keep the addresses of weights, which a reload of vllm-ascend can replace
        # (issue 16322), so they are captured on request only, and the addresses are checked.
        eager = {"enforce_eager": True} if weights_change else {}
        return {"enable_sleep_mode": True, **eager}

    def grouped_product(
        self, x: torch.Tensor, matrices: Sequence[torch.Tensor], counts: Sequence[int]
    ) -> torch.Tensor | None:
        # Source: hiascend.com, API list of the PyTorch extension, `npu_grouped_matmul`. Separate
        # matrices need 16-bit types. MindSpeed's TEGroupedLinear makes the same call.
        import torch

        widths = (x.shape[1], matrices[0].shape[1])
        is_supported = len(matrices) <= _MAX_MATRICES and max(widths) <= _MAX_WIDTH
        if x.dtype != torch.bfloat16 or not len(x) or not is_supported:
            return None
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int64, device=x.device)
        (output,) = importlib.import_module("torch_npu").npu_grouped_matmul(
            [x],
            list(matrices),
            group_list=ends,
            split_item=_ONE_OUTPUT,
            group_type=_ALONG_TOKENS,
        )
        return output

    def varlen_attention(self, dtype: torch.dtype, head_dim: int) -> VarlenAttention | str:
        if head_dim % 16 or head_dim > 512:
            return f"npu_fusion_attention supports head dimensions 16, 32, ... 512, not {head_dim}"
        return fusion_attention

    def count_of_updates(self, updates: int) -> int | torch.Tensor:
        import torch

        # The type of MindSpeed's count. MindSpeed moves it to the device.
        return torch.tensor(updates, dtype=torch.int64)

    def profiler(self, trace: Path) -> AbstractContextManager[Any]:
        """Return torch_npu's profiler, which writes a folder for MindStudio Insight."""
        profiler = importlib.import_module("torch_npu.profiler")
        kinds = profiler.ProfilerActivity
        return profiler.profile(
            activities=[kinds.CPU, kinds.NPU],
            record_shapes=True,
            on_trace_ready=profiler.tensorboard_trace_handler(str(trace)),
        )


PLATFORM = NpuPlatform()
AUTO_ORDER = 0
