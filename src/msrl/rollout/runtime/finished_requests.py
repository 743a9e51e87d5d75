"""Progress of a call of `vllm.LLM.generate`, in finished requests (vLLM 0.23 to 0.32)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def progress_class(on_finished: Callable[[int], object]) -> Callable[..., Any]:
    """Return the argument `use_tqdm` that makes vLLM call `on_finished` instead of drawing a bar.

    vLLM calls it like `tqdm`: with the inputs while it adds requests (`maybe_tqdm`), and with their
    number while the engine runs (`OfflineInferenceMixin._run_engine`).
    """

    def create(inputs: Iterable[Any] | None = None, **_: object) -> Any:
        return _FinishedRequests(on_finished) if inputs is None else inputs

    return create


class _FinishedRequests:
    """Part of `tqdm` that vLLM uses while the engine runs."""

    def __init__(self, on_finished: Callable[[int], object]) -> None:
        self._on_finished, self._start = on_finished, time.perf_counter()
        self.n, self.postfix = 0, ""

    @property
    def format_dict(self) -> Mapping[str, float]:
        """Return the elapsed seconds, by which vLLM divides."""
        return {"elapsed": max(time.perf_counter() - self._start, 1e-9)}

    def update(self, count: int) -> None:
        self.n += count
        self._on_finished(count)

    def refresh(self) -> None:
        """Do nothing: the caller of the engine shows the progress."""

    def close(self) -> None:
        """Do nothing: the caller of the engine shows the progress."""
