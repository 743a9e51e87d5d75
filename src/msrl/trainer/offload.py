"""What a training rank does not need for a while waits in the machine's memory: optimizer state, gradients, parameters.

A tensor keeps its place in whatever refers to it: only its storage is emptied, and filled again before the next use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

Tensors = Callable[[], Iterable[Tensor]]


class HostMemory:
    """Kinds of tensors that wait on the host when they rest."""

    def __init__(self, kinds: Mapping[str, Tensors], *, forgotten: frozenset[str] = frozenset()) -> None:
        """`kinds` gives the tensors of each kind; those of `forgotten` kinds need not be kept: they come back as zeros."""
        self._kinds, self._forgotten = dict(kinds), forgotten
        self._resting: dict[str, list[tuple[torch.UntypedStorage, Tensor | int]]] = {}

    def rest(self, *kinds: str) -> None:
        """Empty the storages of these kinds (default: all), where they are not empty yet."""
        for kind in kinds or tuple(self._kinds):
            if kind in self._kinds and kind not in self._resting:
                storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self._kinds[kind]() if t.numel()}
                self._resting[kind] = [(storage, self._emptied(storage, keep=kind not in self._forgotten)) for storage in storages.values()]

    def need(self, *kinds: str) -> None:
        """Fill the storages of these kinds (default: all), where they are empty."""
        for kind in kinds or tuple(self._kinds):
            for storage, kept in self._resting.pop(kind, ()):
                storage.resize_(kept if isinstance(kept, int) else len(kept))
                if isinstance(kept, int):
                    _as_bytes(storage).zero_()
                else:
                    _as_bytes(storage).copy_(kept)

    def _emptied(self, storage: torch.UntypedStorage, *, keep: bool) -> Tensor | int:
        """The bytes of a storage on the host, or, if they need not be kept, how many they were."""
        kept: Tensor | int = storage.nbytes()
        if keep:
            is_on_host = storage.device.type == "cpu"
            kept = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=not is_on_host)
            kept.copy_(_as_bytes(storage))
        storage.resize_(0)
        return kept


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
