"""Live tensor bytes of a process at their highest, counted storage by storage.

Every tensor that an operation makes is noted with its storage, which tells when it is freed;
tensors from before are found by a walk over the objects of the process. What a kernel takes for
itself while it runs is not seen.
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
    """A context in which the bytes of live storages are counted; `peak` is their highest sum,
    `at_peak` what they were by their maker.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self._live: dict[int, tuple[str, int]] = {}

    @classmethod
    def now_live(cls) -> int:
        """Bytes of the tensors that are there."""
        found = cls()
        found._note_all()
        return found.now

    def _note_all(self) -> None:
        gc.collect()
        for found in gc.get_objects():
            if isinstance(found, torch.Tensor):
                self._note(found, "before")

    def __enter__(self) -> LiveMemory:
        self._note_all()
        self.peak, self.at_peak = self.now, self._table()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for found in tree_leaves(out):
            if isinstance(found, torch.Tensor):
                self._note(found, f"{func} {tuple(found.shape)}")
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, self._table()
        return out

    def _table(self) -> Counter[str]:
        table: Counter[str] = Counter()
        for name, size in self._live.values():
            table[name] += size
        return table

    def _note(self, tensor: torch.Tensor, name: str) -> None:
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
