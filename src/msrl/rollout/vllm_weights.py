"""Transfer of new weights to vLLM's workers.

Weights are passed directly inside this process, or through files in shared memory to other
processes. vLLM imports `WeightReceiver` by its name and adds it to the bases of its worker class;
nothing here imports vllm.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl.rollout.engine import checked_weights

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 1 << 30  # per file


class WeightReceiver:
    """Methods that vLLM adds to its worker (`worker_extension_cls`); `self` is that worker."""

    model_runner: Any

    def receive_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load Hugging Face weights in place and post-process them as at startup."""
        _unpack_experts(self.model_runner.get_model())
        self.model_runner.reload_weights(weights_iterator=tensors)
        _repack_tied_head(self.model_runner.get_model())

    def receive_weight_files(self, folder: str, expected: Sequence[str]) -> None:
        """Load the weights from the safetensors files in `folder`."""
        self.receive_weights(checked_weights(read_files(Path(folder)), frozenset(expected)))


def _unpack_experts(model: Any) -> None:
    """Discard the CPU kernel of experts, so that a reload creates it anew.

    The kernel's creation packs the experts' weights. A reload with an existing kernel would treat
    unpacked weights as packed.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if (
            getattr(method, "moe_kernel", None) is not None
            and next(module.parameters()).device.type == "cpu"
        ):
            method.moe_kernel = None


def _repack_tied_head(model: Any) -> None:
    """Repack the output layer's weight on CPU if the embedding is tied.

    The CPU layer multiplies by a packed copy of its weight, which a reload does not update in that
    case.
    """
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear") and head.weight.numel():
        head.quant_method.process_weights_after_loading(head)


def shared_memory(num_bytes: int) -> str | None:
    """Return a folder in memory with at least `num_bytes` free, or None if there is none.

    Containers often have only 64 MB of shared memory. Callers then use the temporary folder.
    """
    folder = Path("/dev/shm")
    return (
        str(folder)
        if folder.is_dir()
        and os.access(folder, os.W_OK)
        and shutil.disk_usage(folder).free > num_bytes
        else None
    )


def write_files(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write weights as safetensors files of about 1 GiB each."""
    from safetensors.torch import save_file

    bucket: dict[str, Tensor] = {}
    size, count = 0, 0
    for name, tensor in tensors:
        bucket[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
        if size >= BUCKET_BYTES:
            save_file(bucket, folder / f"{count:05d}.safetensors")
            bucket, size, count = {}, 0, count + 1
    if bucket:
        save_file(bucket, folder / f"{count:05d}.safetensors")


def read_files(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dictionary)
                yield name, file.get_tensor(name)
