"""Waiting for what workers were asked, up to the first failure: of a call, or of a worker that nothing was asked of just then."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from msrl.errors import MsrlError, VerificationError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_AFTERMATH_S = 2.0  # how long an actor's death takes to be known after its peers have noticed
_WATCH_S = 1.0


class WorkerError(Exception):
    """A worker failed: the message holds its own traceback, or how it died."""


class WorkerTimeoutError(MsrlError):
    """Workers have not answered within the time that the user allows; their logs are worth a look."""


class Watch:
    """Whether workers live that have nothing to do while others are waited for. A busy one answers once it is through."""

    def __init__(self, workers: Mapping[tuple[str, int], Any], names: Mapping[str, str]) -> None:
        """`workers` are actors by role and number, more of which may come; `names` has the word for each role in messages."""
        self._workers, self._names = workers, names
        self._asked: dict[str, Any] = {}

    def dead(self) -> dict[str, RayError]:
        """Those that have died, by name; nobody is waited for."""
        for (role, number), actor in self._workers.items():
            name = f"{self._names[role]} {number}"
            if name not in self._asked:
                self._asked[name] = actor.__ray_ready__.remote()
        failures: dict[str, RayError] = {}
        for name, ref in list(self._asked.items()):
            if ray.wait([ref], timeout=0)[0]:
                del self._asked[name]
                try:
                    ray.get(ref)
                except RayActorError as error:
                    failures[name] = error
        return failures


def wait_all(refs: Sequence[Any], *, timeout_s: float, labels: Sequence[str] = (), watch: Watch | None = None) -> list[Any]:
    """The results of `refs`, in order, as soon as all are there; the first failure ends the wait at once.

    `labels` name the refs in messages (`actor 1`). The death of a worker of `watch` ends the wait too. When workers fail together, the one
    that died is named first, since its peers fail in consequence. Raises WorkerError with the worker's traceback; a worker's own MsrlError
    and VerificationError as they are; WorkerTimeoutError when `timeout_s` seconds (cluster.rpc_timeout_s) have passed, naming those that
    have not answered.
    """
    names = {ref: labels[i] if labels else f"call {i}" for i, ref in enumerate(refs)}
    results: dict[Any, Any] = {}
    pending = list(names)
    deadline = time.monotonic() + timeout_s
    while pending:
        left = deadline - time.monotonic()
        ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, min(left, _WATCH_S)))
        if not ready and left > _WATCH_S:
            _check(watch, pending, names)
            continue
        if not ready:
            raise WorkerTimeoutError(
                f"cluster.rpc_timeout_s={timeout_s:g}: no answer in that time from {', '.join(names[ref] for ref in pending)};"
                " raise it if the work takes that long, or look into the worker logs"
            )
        results[ready[0]] = _result(ready[0], pending, names)
    return [results[ref] for ref in refs]


def until_done(refs: Sequence[Any], labels: Sequence[str], interval_s: float) -> Iterator[None]:
    """Comes back every `interval_s` seconds, and once more when all of `refs` are done, be it days. Raises as `wait_all`."""
    names = dict(zip(refs, labels, strict=True))
    pending = list(refs)
    while pending:
        ready, pending = ray.wait(pending, num_returns=1, timeout=interval_s)
        for ref in ready:
            _result(ref, pending, names)
        yield


def _result(ref: Any, pending: Sequence[Any], names: Mapping[Any, str]) -> Any:
    """What a call that is done returned. Raises the cause of its failure, with what failed beside it among the `pending`."""
    try:
        return ray.get(ref)
    except RayError as error:
        raise _cause({names[ref]: error, **_aftermath(pending, names)}) from None


def _check(watch: Watch | None, pending: Sequence[Any], names: Mapping[Any, str]) -> None:
    """Raises WorkerError when a watched worker has died."""
    dead = watch.dead() if watch is not None else {}
    if dead:
        raise _cause({**dead, **_aftermath(pending, names)})


def _aftermath(pending: Sequence[Any], names: Mapping[Any, str]) -> dict[str, RayError]:
    """What else has failed, or does so at once, by name."""
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
    """The one exception that tells why workers failed: a death before a refusal, a refusal before other errors, else the first."""
    name = min(failures, key=lambda n: (not isinstance(failures[n], RayActorError), not isinstance(_own(failures[n]), MsrlError)))
    own = _own(failures[name])
    if isinstance(own, (MsrlError, VerificationError)):
        return own
    others = "".join(f"\nalso failed: {n}: {_short(error)}" for n, error in failures.items() if n != name)
    return WorkerError(f"{name} failed: {_full(failures[name])}{others}")


def _own(error: RayError) -> BaseException | None:
    """The exception that the worker itself raised, if it was one."""
    return error.cause if isinstance(error, RayTaskError) else None


def _full(error: RayError) -> str:
    text = _COLOUR.sub("", str(error))
    return f"\n{text}" if isinstance(error, RayTaskError) else text


def _short(error: RayError) -> str:
    own = _own(error)
    return f"{type(own).__name__}: {own}" if own else _COLOUR.sub("", str(error)).splitlines()[0]
