"""Heartbeats of Ray actors: a thread of each worker counts in the cluster's key-value store.

A worker whose count stays the same is silent: its process is stopped or hangs in native code, or
its machine does not respond. Ray itself notices only processes that have ended.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import time
from typing import Any

from ray.experimental import internal_kv

_NAMESPACE = b"msrl_heartbeats"
_BEATS_PER_LIMIT = 20
_MAX_INTERVAL_S = 15.0


class ActorHeartbeats:
    """Heartbeats of the workers of one role, with the time after which a worker is silent."""

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._interval_s = min(_MAX_INTERVAL_S, silence_s / _BEATS_PER_LIMIT)
        self._keys: dict[Any, bytes] = {}
        self._counts: dict[Any, bytes] = {}
        self._quiet_s: dict[Any, float] = {}
        self._polled_at = time.monotonic()

    def begin(self, actor: Any) -> None:
        """Start the heartbeats of an actor. It must not have other calls yet."""
        key = f"{os.getpid()}-{secrets.token_hex(8)}".encode()
        self._keys[actor] = key
        actor.__ray_call__.remote(_start_thread, key, self._interval_s)

    def end(self, actor: Any) -> None:
        """Forget an actor that has ended."""
        key = self._keys.pop(actor, None)
        if key is not None:
            internal_kv._internal_kv_del(key, namespace=_NAMESPACE)

    def silent_actors(self) -> list[Any]:
        """Return the actors that have been silent for `silence_s` seconds.

        Only the time in which this process asks for the heartbeats counts, so that a pause of the
        whole machine is no silence. An actor that has not started yet is not silent.
        """
        now = time.monotonic()
        elapsed_s = now - self._polled_at
        if elapsed_s < self._interval_s:
            return []
        self._polled_at = now
        for actor, key in self._keys.items():
            count = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
            if count is None or count != self._counts.get(actor):
                self._quiet_s[actor] = 0.0
            else:
                self._quiet_s[actor] += min(elapsed_s, 2 * self._interval_s)
            self._counts[actor] = count or b""
        return [actor for actor in self._keys if self._quiet_s[actor] >= self.silence_s]


def _start_thread(_: object, key: bytes, interval_s: float) -> None:
    """Start the heartbeats of this process; runs in the actor."""
    threading.Thread(target=_count, args=(key, interval_s), daemon=True).start()


def _count(key: bytes, interval_s: float) -> None:
    for number in itertools.count():
        with contextlib.suppress(Exception):  # Ray is shutting down, or its head is busy
            internal_kv._internal_kv_put(
                key, str(number).encode(), overwrite=True, namespace=_NAMESPACE
            )
        time.sleep(interval_s)
