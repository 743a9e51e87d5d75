"""Peak bytes of live tensors of a process, counted by storage.

Each tensor that an operation creates is tracked until its storage is freed. Existing tensors are
collected from the objects of the process. Temporary memory inside of kernels is not counted.
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
    """Context that tracks the bytes of live storages.

    `peak` is their highest sum, `at_peak` the bytes by operation at that time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self._live: dict[int, tuple[str, int]] = {}

    @classmethod
    def live_bytes(cls) -> int:
        """Return the bytes of all live tensors."""
        memory = cls()
        memory._track_all()
        return memory.now

    def _track_all(self) -> None:
        gc.collect()
        for tensor in gc.get_objects():
            if isinstance(tensor, torch.Tensor):
                self._track(tensor, "before")

    def __enter__(self) -> LiveMemory:
        self._track_all()
        self.peak, self.at_peak = self.now, self._table()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._track(tensor, f"{func} {tuple(tensor.shape)}")
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, self._table()
        return out

    def _table(self) -> Counter[str]:
        table: Counter[str] = Counter()
        for name, size in self._live.values():
            table[name] += size
        return table

    def _track(self, tensor: torch.Tensor, name: str) -> None:
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
