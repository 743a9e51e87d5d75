"""Offload of optimizer state, gradients and parameters to the machine's memory.

A tensor stays where it is referred to: only its storage is emptied, and filled again before the
next use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

Tensors = Callable[[], Iterable[Tensor]]


class HostMemory:
    """Kinds of tensors that can be offloaded to the host."""

    def __init__(
        self, kinds: Mapping[str, Tensors], *, discarded: frozenset[str] = frozenset()
    ) -> None:
        """Take the tensors of each kind.

        The values of `discarded` kinds are not stored: they come back as zeros.
        """
        self._kinds, self._discarded = dict(kinds), discarded
        self._offloaded: dict[str, list[tuple[torch.UntypedStorage, Tensor | int]]] = {}

    def offload(self, *kinds: str) -> None:
        """Move the storages of these kinds (default: all) to the host."""
        for kind in kinds or tuple(self._kinds):
            if kind in self._kinds and kind not in self._offloaded:
                storages = {
                    t.untyped_storage().data_ptr(): t.untyped_storage()
                    for t in self._kinds[kind]()
                    if t.numel()
                }
                stored = [
                    (storage, _empty(storage, store=kind not in self._discarded))
                    for storage in storages.values()
                ]
                self._offloaded[kind] = stored

    def onload(self, *kinds: str) -> None:
        """Move the storages of these kinds (default: all) back from the host."""
        for kind in kinds or tuple(self._kinds):
            for storage, stored in self._offloaded.pop(kind, ()):
                storage.resize_(stored if isinstance(stored, int) else len(stored))
                if isinstance(stored, int):
                    _as_bytes(storage).zero_()
                else:
                    _as_bytes(storage).copy_(stored)


def _empty(storage: torch.UntypedStorage, *, store: bool) -> Tensor | int:
    """Empty a storage; return its bytes on the host, or their number where they are not stored."""
    stored: Tensor | int = storage.nbytes()
    if store:
        is_on_host = storage.device.type == "cpu"
        stored = torch.empty(
            storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=not is_on_host
        )
        stored.copy_(_as_bytes(storage))
    storage.resize_(0)
    return stored


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
