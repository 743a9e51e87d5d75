"""Waiting for results of workers until the first failure, of a call or of an idle worker."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from msrl.cluster import ray_loss
from msrl.cluster.heartbeats import ActorHeartbeats
from msrl.errors import MsrlError, ProcessFailedError, VerificationError

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_AFTERMATH_S = 2.0  # time until Ray reports an actor's death after its peers have failed
_WATCH_S = 1.0


class WorkerError(ProcessFailedError):
    """A worker failed; the message contains its traceback, or the cause of its death.

    `workers` are the names of the workers that died, `training rank 1` for example, or if none
    died, of all that failed: the peers of a dead worker fail in consequence.
    """

    def __init__(self, message: str, workers: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.workers = frozenset(workers)


class WorkerTimeoutError(WorkerError):
    """Workers have not answered within the configured time; their logs may show the reason."""


class SilentWorkerError(RayError):
    """A worker sent no heartbeat within the configured time."""

    def __init__(self, silence_s: float) -> None:
        super().__init__(
            f"no heartbeat for {silence_s:g} s, which follows from cluster.rpc_timeout_s. Its "
            "process hangs or is stopped, or its machine does not respond"
        )


_DEATHS = (RayActorError, SilentWorkerError)


class Watch:
    """Watch for the death of workers, including those that have no call pending.

    A busy worker answers after its current call.
    """

    def __init__(
        self,
        workers: Mapping[tuple[str, int], Any],
        names: Mapping[str, str],
        heartbeats: ActorHeartbeats | None = None,
    ) -> None:
        """Create a watch of `workers`, actors by role and number, to which more may be added.

        `names` maps each role to watch to its name in messages. Actors without a heartbeat in
        `heartbeats` count as dead.
        """
        self._workers, self._names, self._heartbeats = workers, names, heartbeats
        self._pings: dict[Any, Any] = {}  # by actor: a worker that was restarted is another actor

    def dead(self) -> dict[str, RayError]:
        """Return the workers that have died, by name, without waiting for any."""
        pings: dict[Any, Any] = {}
        failures: dict[str, RayError] = {}
        for (role, number), actor in self._present():
            if role not in self._names:
                continue
            ref = self._pings.get(actor) or actor.__ray_ready__.remote()
            if not ray.wait([ref], timeout=0)[0]:
                pings[actor] = ref
                continue
            try:
                ray.get(ref)
            except RayActorError as error:
                failures[f"{self._names[role]} {number}"] = error
        self._pings = pings
        return {**self._silent_workers(), **failures}

    def _present(self) -> list[tuple[tuple[str, int], Any]]:
        """Return the present workers. Another thread may restart some of them during this call."""
        return list(self._workers.items())

    def _silent_workers(self) -> dict[str, RayError]:
        """Return the workers without heartbeats, by name."""
        if self._heartbeats is None:
            return {}
        names = {
            actor: f"{self._names[role]} {number}"
            for (role, number), actor in self._present()
            if role in self._names
        }
        silent = [names[actor] for actor in self._heartbeats.silent_actors() if actor in names]
        return dict.fromkeys(silent, SilentWorkerError(self._heartbeats.silence_s))


def wait_all(
    refs: Sequence[Any], *, timeout_s: float, labels: Sequence[str] = (), watch: Watch | None = None
) -> list[Any]:
    """Return the results of `refs` in order, and stop waiting at the first failure.

    `labels` name the refs in messages (`actor 1`). The death of a worker of `watch` ends the wait
    too. If workers fail together, the one that died is reported first, since its peers fail in
    consequence.

    Raises:
        WorkerError: A worker failed; the message contains its traceback.
        RayLostError: Ray itself was lost.
        MsrlError: A worker raised it; the same for VerificationError.
        WorkerTimeoutError: `timeout_s` seconds (cluster.rpc_timeout_s) have passed. The message
            lists the workers that have not answered.
    """
    names = {ref: labels[i] if labels else f"call {i}" for i, ref in enumerate(refs)}
    results: dict[Any, Any] = {}
    pending = list(names)
    deadline = time.monotonic() + timeout_s
    while pending:
        ray_loss.check()
        remaining_s = deadline - time.monotonic()
        ready, pending = ray.wait(
            pending, num_returns=1, timeout=max(0.0, min(remaining_s, _WATCH_S))
        )
        if not ready and remaining_s > _WATCH_S:
            _check_watch(watch, pending, names)
            continue
        if not ready:
            late = [names[ref] for ref in pending]
            raise WorkerTimeoutError(
                f"cluster.rpc_timeout_s={timeout_s:g}: no answer in that time from "
                f"{', '.join(late)}."
                " Raise it if the work takes that long, else look into the worker logs.",
                late,
            )
        results[ready[0]] = _result(ready[0], pending, names)
    return [results[ref] for ref in refs]


def _result(ref: Any, pending: Sequence[Any], names: Mapping[Any, str]) -> Any:
    """Return the result of a finished call, or raise the cause of its failure.

    Failures among the `pending` calls are taken into account.
    """
    try:
        return ray.get(ref)
    except RayError as error:
        ray_loss.check(has_failed=True)
        raise _cause({names[ref]: error, **_aftermath(pending, names)}) from None


def _check_watch(watch: Watch | None, pending: Sequence[Any], names: Mapping[Any, str]) -> None:
    """Raise WorkerError if a watched worker has died."""
    dead = watch.dead() if watch is not None else {}
    if dead:
        raise _cause({**dead, **_aftermath(pending, names)})


def _aftermath(pending: Sequence[Any], names: Mapping[Any, str]) -> dict[str, RayError]:
    """Return the other calls that have failed or fail shortly after, by name."""
    failures: dict[str, RayError] = {}
    if not pending:
        return failures
    failed, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_AFTERMATH_S)
    for ref in failed:
        try:
            ray.get(ref)
        except RayError as error:
            failures[names[ref]] = error
    return failures


def _cause(failures: Mapping[str, RayError]) -> Exception:
    """Return the exception that explains why workers failed.

    A death takes precedence over an MsrlError, and that over other errors; otherwise the first
    failure counts.
    """
    name = min(
        failures,
        key=lambda n: (
            not isinstance(failures[n], _DEATHS),
            not isinstance(_worker_exception(failures[n]), MsrlError),
        ),
    )
    cause = _worker_exception(failures[name])
    if isinstance(cause, (MsrlError, VerificationError)):
        return cause
    also_failed = "".join(
        f"\nalso failed: {n}: {_short(error)}" for n, error in failures.items() if n != name
    )
    dead = [n for n, error in failures.items() if isinstance(error, _DEATHS)]
    text = f"{name} failed: {_full(failures[name])}{also_failed}"
    return WorkerError(text, dead or failures)


def _worker_exception(error: RayError) -> BaseException | None:
    """Return the exception that the worker itself raised, if any."""
    return error.cause if isinstance(error, RayTaskError) else None


def _full(error: RayError) -> str:
    """Return what a worker raised, in one line, and its traceback; or how the worker died."""
    text = _COLOR.sub("", str(error))
    return f"{_short(error)}\n{text}" if isinstance(error, RayTaskError) else text


def _short(error: RayError) -> str:
    cause = _worker_exception(error)
    text = str(error) if cause is None else f"{type(cause).__name__}: {cause}"
    # Messages of gloo contain the byte 0.
    return next(iter(_COLOR.sub("", text).replace("\0", "").splitlines()), "")
