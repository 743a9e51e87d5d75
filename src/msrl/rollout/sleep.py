"""Sleep of an engine: the memory that it holds, and the order in which the memory returns.

At level 1, vLLM moves the weights to host memory; at level 2 it discards them. The KV cache is
discarded at both levels. New weights are loaded before the KV cache returns, because both may not
fit while the trainer exports its weights. Source: `LLM.sleep` and `LLM.wake_up` of vLLM 0.23 to
0.32. vLLM itself generates from undefined weights if they are not loaded after level 2.
"""

from __future__ import annotations

from typing import Literal, Protocol

State = Literal["awake", "asleep", "discarded", "no cache", "no weights"]
"""Memory of an engine.

`asleep` and `discarded` have released all memory; `discarded` has lost its weights. `no cache` has
its weights, and `no weights` only the memory for them.
"""


class CanSleep(Protocol):
    """Methods of `vllm.LLM` that release memory and take it again, and call the workers."""

    def sleep(self, level: int = 1) -> object: ...

    def wake_up(self, tags: list[str] | None = None) -> object: ...

    def collective_rpc(self, method: str) -> object: ...


class EngineMemory:
    """Device memory of an engine. At level 0, it is never released."""

    def __init__(self, engine: CanSleep, level: int) -> None:
        self._engine, self._level = engine, level
        self._state: State = "awake"

    def release(self, *, discard_weights: bool = False) -> None:
        """Release the memory. The weights stay in host memory, unless they may be discarded.

        They are discarded at level 2 only.
        """
        level = self._level if discard_weights else min(self._level, 1)
        if level == 0 or self._state in ("asleep", "discarded"):
            return
        self.check_ready()
        self._engine.collective_rpc("keep_parameters")
        self._engine.sleep(level=level)
        self._state = "discarded" if level == 2 else "asleep"

    def take(self, *, before_loading: bool = False) -> None:
        """Take the memory again: all of it, or the weights' memory if new ones are loaded next.

        After discarded weights, the KV cache always waits for new ones.
        """
        if self._state in ("asleep", "discarded"):
            self._engine.wake_up(tags=["weights"])
            self._engine.collective_rpc("restore_parameters")
            self._state = "no weights" if self._state == "discarded" else "no cache"
        if self._state == "no cache" and not before_loading:
            self._take_cache()

    def finish_loading(self) -> None:
        """Take the memory of the KV cache, now that all weights are loaded."""
        if self._state in ("no cache", "no weights"):
            self._take_cache()

    def _take_cache(self) -> None:
        self._engine.wake_up(tags=["kv_cache"])
        self._state = "awake"

    def check_loadable(self) -> None:
        """Check that weights can be loaded.

        Raises:
            RuntimeError: The engine sleeps.
        """
        if self._state in ("asleep", "discarded"):
            raise RuntimeError("The engine sleeps: wake it before its weights are loaded")

    def check_ready(self) -> None:
        """Check that the engine can generate.

        Raises:
            RuntimeError: The engine sleeps, or its weights were discarded and not loaded again.
        """
        if self._state == "no weights":
            raise RuntimeError(
                "The weights of the engine were discarded (rollout.engine.sleep=2): load weights "
                "before generating"
            )
        if self._state != "awake":
            raise RuntimeError(f"The engine cannot generate: its memory is {self._state}")
