"""JSON requests over HTTP with retries and one deadline for all attempts.

Refused and broken connections and temporary statuses (408, 425, 429, 500, 502 to 504) are retried
after a pause with exponential backoff and random jitter, or the pause that the server requests in
Retry-After. All other errors are final: other statuses, redirections and answers that are not JSON.

Servers on loopback addresses are reached without a proxy. Only the standard library is imported
because the workers of the pool use this module too.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import random
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from msrl.config.variables import with_environment, without_environment

MAX_PAUSE_S = 30.0
MAX_ANSWER_BYTES = 256 << 20
_MIN_SECRET = 8  # characters of a word in a header that is not shown
RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})


class RemoteError(Exception):
    """A server returned no usable answer; `kind` is "timeout" if the deadline was reached."""

    def __init__(self, message: str, kind: Literal["timeout", "error"]) -> None:
        super().__init__(message)
        self.kind: Literal["timeout", "error"] = kind


@dataclass(frozen=True, slots=True)
class Server:
    """Address and retry policy of a server; `timeout_s` limits all attempts of a request.

    `${env:NAME}` in the address is resolved only for a request. Messages contain it as it is.
    """

    url: str
    timeout_s: float
    retries: int = 5
    backoff_s: float = 0.5
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    def without_secrets(self, text: str) -> str:
        """Return a text that this server sent or caused, without the values of its headers.

        Servers repeat addresses and keys in messages. Short words stay.
        """
        text = without_environment(text, self.url)
        words = {word for value in self.headers.values() for word in value.split()}
        for word in sorted(words, key=len, reverse=True):
            if len(word) >= _MIN_SECRET:
                text = text.replace(word, "...")
        return text

    def error(self, message: str, kind: Literal["timeout", "error"]) -> RemoteError:
        """Return an error with the address and a message."""
        return RemoteError(f"{self.url}: {self.without_secrets(message)}", kind)


class _TemporaryError(Exception):
    """An attempt failed and may be repeated; `pause_s` is the pause that the server requested."""

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Processor that returns responses of every status.

    It follows no redirection because urllib would turn the POST into an empty GET.
    """

    def http_response(
        self, request: urllib.request.Request, response: http.client.HTTPResponse
    ) -> http.client.HTTPResponse:
        return response

    https_response = http_response


_opener = urllib.request.build_opener(_AnyStatus)
_direct = urllib.request.build_opener(_AnyStatus, urllib.request.ProxyHandler({}))
_LOOPBACK = ("127.0.0.1", "localhost")


def _open(request: urllib.request.Request, timeout_s: float) -> http.client.HTTPResponse:
    """Send a request; a server on a loopback address is reached without a proxy."""
    host = urllib.parse.urlsplit(request.full_url).hostname or ""
    opener = _direct if is_loopback(host) else _opener
    return opener.open(request, timeout=timeout_s)


def is_loopback(host: str) -> bool:
    """Return True if only processes of this machine can reach a server on `host`.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, whose address may change
        return False


def is_healthy(url: str, timeout_s: float) -> bool:
    """Return True if the server on this machine at `url` answers requests for its health."""
    try:
        with _direct.open(f"{url}/health", timeout=timeout_s) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):  # not listening yet, or still loading
        return False


def without_loopback_proxy(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with which HTTP clients use no proxy for loopback addresses."""
    lower, upper = variables.get("no_proxy", ""), variables.get("NO_PROXY", "")
    updates = {
        "no_proxy": _with_loopback(lower or upper),
        "NO_PROXY": _with_loopback(upper or lower),
    }
    return {**variables, **updates}


def _with_loopback(hosts: str) -> str:
    """Return a list of hosts with the hosts of loopback; `*`, which is alone, is all hosts."""
    if hosts.strip() == "*":
        return hosts
    listed = [host.strip() for host in hosts.split(",") if host.strip()]
    return ",".join([*listed, *(host for host in _LOOPBACK if host not in listed)])


def post_json(server: Server, payload: object) -> tuple[Any, int]:
    """Post `payload` and return the server's answer and the number of failed attempts before it.

    Raises:
        RemoteError: The server returned no usable answer in time.
    """
    return _request(server, json.dumps(payload).encode())


def get_json(server: Server) -> Any:
    """Return the server's answer to a GET request.

    Raises:
        RemoteError: The server returned no usable answer in time.
    """
    return _request(server, None)[0]


def _request(server: Server, body: bytes | None) -> tuple[Any, int]:
    """Send a body by POST, or a GET without one; return the answer and the number of retries."""
    deadline = time.monotonic() + server.timeout_s
    for attempt in range(server.retries + 1):
        try:
            return _attempt(server, body, deadline), attempt
        except _TemporaryError as error:
            pause_s = _pause_s(server, attempt, error)
            last = f"{attempt + 1} attempts failed; the last error: {error}"
            if time.monotonic() + pause_s >= deadline:
                message = f"no answer within {server.timeout_s:g} s; {last}"
                raise server.error(message, "timeout") from error
            if attempt == server.retries:
                raise server.error(last, "error") from error
        time.sleep(pause_s)
    raise AssertionError("unreachable")


def _pause_s(server: Server, attempt: int, error: _TemporaryError) -> float:
    """Return the seconds to wait after a failed attempt, counted from 0."""
    if error.pause_s is not None:
        return error.pause_s
    return min(MAX_PAUSE_S, server.backoff_s * 2**attempt) * random.uniform(0.5, 1.0)


def _attempt(server: Server, body: bytes | None, deadline: float) -> Any:
    """Send a request once and return the decoded answer.

    Raises:
        _TemporaryError: Another attempt may succeed.
        RemoteError: The error is final.
    """
    headers = {"Content-Type": "application/json", **server.headers}
    method = "GET" if body is None else "POST"
    request = urllib.request.Request(
        with_environment(server.url), data=body, headers=headers, method=method
    )
    try:
        with _open(request, max(0.001, deadline - time.monotonic())) as answer:
            if not 200 <= answer.status < 300:
                raise _status_error(server, answer)
            data = _read(server, answer, deadline)
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        reason = getattr(error, "reason", "") or error or type(error).__name__
        raise _TemporaryError(str(reason)) from error
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise server.error(f"the answer is not JSON: {data[:100]!r}", "error") from error


def _status_error(
    server: Server, answer: http.client.HTTPResponse
) -> _TemporaryError | RemoteError:
    """Return the error for an unsuccessful status, with the beginning of the body if it arrives."""
    text = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        text = answer.read1(300)
    body = text.decode("utf-8", "replace").strip()
    message = f"status {answer.status} {answer.reason}: {body}"
    if answer.status in RETRIED_STATUSES:
        return _TemporaryError(message, _retry_after(answer.headers.get("Retry-After")))
    return server.error(message, "error")


def _read(server: Server, answer: http.client.HTTPResponse, deadline: float) -> bytes:
    """Return the complete body; the deadline also applies to a body that arrives slowly."""
    data = bytearray()
    while chunk := answer.read1(1 << 16):
        data += chunk
        if len(data) > MAX_ANSWER_BYTES:
            limit = f"{MAX_ANSWER_BYTES >> 20} MiB"
            raise server.error(f"the answer is larger than {limit}", "error")
        if time.monotonic() > deadline:
            raise _TemporaryError(f"the answer is incomplete after {len(data)} bytes")
    if answer.length:  # bytes of Content-Length that did not arrive
        raise _TemporaryError(f"the answer ended {answer.length} bytes early")
    return bytes(data)


def _retry_after(value: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None without the header or if it is a date."""
    return float(value) if value is not None and value.strip().isdecimal() else None
