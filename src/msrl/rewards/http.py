"""JSON to a server and back, with retries and one deadline for all of it. Only the standard library: the pool's workers use it too.

Tried again are refused and broken connections and the statuses that say "later" (408, 425, 429, 500, 502 to 504), after a pause that
doubles and is spread at random, or that the server asks for (Retry-After). What a server means otherwise (other statuses, redirections, no
JSON) is final.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_PAUSE_S = 30.0
MAX_ANSWER_BYTES = 256 << 20
LATER = frozenset({408, 425, 429, 500, 502, 503, 504})


class RemoteError(Exception):
    """A server gave no usable answer; `kind` is "timeout" when the deadline ended the attempts."""

    def __init__(self, message: str, kind: Literal["timeout", "error"]) -> None:
        super().__init__(message)
        self.kind: Literal["timeout", "error"] = kind


@dataclass(frozen=True, slots=True)
class Server:
    """Where to post, and how persistently. `timeout_s` is for one post with all its attempts."""

    url: str
    timeout_s: float
    retries: int = 5
    backoff_s: float = 0.5
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


class _LaterError(Exception):
    """An attempt failed in a way that may pass; `pause_s` is what the server asked for."""

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """An answer is an answer whatever its status; a redirection is not followed, since a POST would arrive as an empty GET."""

    def http_response(self, request: urllib.request.Request, response: http.client.HTTPResponse) -> http.client.HTTPResponse:
        return response

    https_response = http_response


_opener = urllib.request.build_opener(_AnyStatus)


def post_json(server: Server, payload: object) -> tuple[Any, int]:
    """The server's answer to `payload`, and how many attempts failed before. Raises RemoteError."""
    deadline = time.monotonic() + server.timeout_s
    body = json.dumps(payload).encode()
    for attempt in range(server.retries + 1):
        try:
            return _attempt(server, body, deadline), attempt
        except _LaterError as error:
            pause = min(MAX_PAUSE_S, server.backoff_s * 2**attempt) * random.uniform(0.5, 1.0)
            pause = pause if error.pause_s is None else error.pause_s
            if time.monotonic() + pause >= deadline:
                told = f"{server.url}: no answer within {server.timeout_s:g} s, {attempt + 1} attempts; the last: {error}"
                raise RemoteError(told, "timeout") from error
            if attempt == server.retries:
                raise RemoteError(f"{server.url}: {attempt + 1} attempts failed; the last: {error}", "error") from error
        time.sleep(pause)
    raise AssertionError("unreachable")


def _attempt(server: Server, body: bytes, deadline: float) -> Any:
    """One post. Raises _LaterError where another attempt may help, RemoteError where none does."""
    headers = {"Content-Type": "application/json", **server.headers}
    request = urllib.request.Request(server.url, data=body, headers=headers, method="POST")
    try:
        with _opener.open(request, timeout=max(0.001, deadline - time.monotonic())) as answer:
            if not 200 <= answer.status < 300:
                raise _refusal(server, answer)
            data = _read(answer, deadline)
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        raise _LaterError(str(getattr(error, "reason", "") or error or type(error).__name__)) from error
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RemoteError(f"{server.url}: the answer is no JSON: {data[:100]!r}", "error") from error


def _refusal(server: Server, answer: http.client.HTTPResponse) -> _LaterError | RemoteError:
    """What a status other than success means, with the beginning of the text that comes with it, if that arrives."""
    text = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        text = answer.read1(300)
    told = f"status {answer.status} {answer.reason}: {text.decode('utf-8', 'replace').strip()}"
    if answer.status in LATER:
        return _LaterError(told, _retry_after(answer.headers.get("Retry-After")))
    return RemoteError(f"{server.url}: {told}", "error")


def _read(answer: http.client.HTTPResponse, deadline: float) -> bytes:
    """The whole answer, however slowly it drips, up to the deadline."""
    data = bytearray()
    while chunk := answer.read1(1 << 16):
        data += chunk
        if time.monotonic() > deadline or len(data) > MAX_ANSWER_BYTES:
            raise _LaterError(f"the answer is not complete after {len(data)} bytes")
    if answer.length:  # what Content-Length promised beyond that
        raise _LaterError(f"the answer ended {answer.length} bytes early")
    return bytes(data)


def _retry_after(value: str | None) -> float | None:
    """Seconds that a server asked to wait; None where it did not, or gave a date."""
    return float(value) if value is not None and value.strip().isdecimal() else None
