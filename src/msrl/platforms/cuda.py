"""NVIDIA GPUs: Megatron and vLLM as they are."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from msrl.errors import MsrlError
from msrl.platforms.base import COMMON_STACK, Platform

if TYPE_CHECKING:
    import torch


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

    def prepare(self) -> None:
        missing = self.missing()
        if missing:
            raise MsrlError(f"cluster.platform=cuda: {missing}")

    def device(self, local_rank: int) -> torch.device:
        import torch

        index = local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def worker_environment(self, num_local_ranks: int) -> Mapping[str, str]:
        # Megatron's overlap of tensor-parallel communication relies on the order of a single hardware queue.
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

    def engine_arguments(self) -> Mapping[str, Any]:
        return {"enable_sleep_mode": True}

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()


PLATFORM = CudaPlatform()
