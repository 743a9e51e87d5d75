"""How new weights reach vLLM's workers: in this process as they are, to processes of their own through files in shared memory.

vLLM finds `WeightReceiver` by its name and makes it a part of its worker; nothing here imports vllm.
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

BUCKET_BYTES = 1 << 30  # of a file


class WeightReceiver:
    """Methods that vLLM adds to its worker (`worker_extension_cls`); `self` is that worker."""

    model_runner: Any

    def receive_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load Hugging Face weights in place and prepare them as at the start."""
        _unpack_experts(self.model_runner.get_model())
        self.model_runner.reload_weights(weights_iterator=tensors)
        _repack_tied_head(self.model_runner.get_model())

    def receive_weight_files(self, folder: str, expected: Sequence[str]) -> None:
        """The same from the safetensors files in `folder`."""
        self.receive_weights(checked_weights(read_files(Path(folder)), frozenset(expected)))


def _unpack_experts(model: Any) -> None:
    """On CPU experts are packed when their kernel is made; a reload that finds one takes plain weights for packed: make it anew."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and next(module.parameters()).device.type == "cpu":
            method.moe_kernel = None


def _repack_tied_head(model: Any) -> None:
    """On CPU the output layer multiplies by a packed copy of its weight, which a reload leaves as it was when the embedding is tied."""
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear") and head.weight.numel():
        head.quant_method.process_weights_after_loading(head)


def shared_memory(num_bytes: int) -> str | None:
    """A folder in memory where there is one with so much room (containers give it 64 MB); the ordinary temporary folder otherwise."""
    folder = Path("/dev/shm")
    return str(folder) if folder.is_dir() and os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > num_bytes else None


def write_files(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Weights as safetensors files of about 1 GiB each."""
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
