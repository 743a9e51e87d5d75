"""Peak bytes of live tensors in a process, counted per storage.

The storage of every tensor that an operation creates is recorded until it is freed. Existing
tensors are found among the objects of the process. Workspace of kernels is not counted.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Context that counts the bytes of live storages.

    `peak` is the maximum of their sum, and `at_peak` the bytes at that time by operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self._live: dict[int, tuple[str, int]] = {}

    @classmethod
    def live_bytes(cls) -> int:
        """Return the bytes of all live tensors."""
        memory = cls()
        memory._record_existing()
        return memory.now

    def _record_existing(self) -> None:
        gc.collect()
        for each in gc.get_objects():
            if isinstance(each, torch.Tensor):
                self._record(each, "existing")

    def __enter__(self) -> LiveMemory:
        self._record_existing()
        self.peak, self.at_peak = self.now, self._table()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._record(leaf, f"{func} {tuple(leaf.shape)}")
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, self._table()
        return out

    def _table(self) -> Counter[str]:
        table: Counter[str] = Counter()
        for name, size in self._live.values():
            table[name] += size
        return table

    def _record(self, tensor: torch.Tensor, name: str) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        key = storage._cdata
        if key in self._live or storage.device.type != "cpu":
            return
        self._live[key] = (name, storage.nbytes())
        self.now += storage.nbytes()
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._live.pop(key)[1]
