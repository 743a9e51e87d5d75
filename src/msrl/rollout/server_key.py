"""Checks of every request to the server, as middleware of vLLM's application (ASGI).

With an API key, every request needs it, except requests for /health. vLLM's own check covers the
paths below /v1, /v2 and /inference only, but other paths generate too (/invocations) or read
prompts (/tokenize). Without a key, the server listens on loopback, and requests must name it: a
page of another site can make a browser send requests there, also under another host name (DNS
rebinding).

Source: `vllm/entrypoints/serve/middleware` (vLLM 0.32), `--middleware` of `vllm serve`.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

VARIABLE = "VLLM_API_KEY"
_OPEN_PATHS = ("/health",)
_LOOPBACK = re.compile(rb"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")
_NO_KEY = b'{"error": {"message": "The API key is missing or wrong.", "code": 401}}'
_NOT_OWN = b'{"error": {"message": "Unknown host name or origin.", "code": 403}}'


class CheckRequest:
    """Application that answers 401 to requests without `Authorization: Bearer KEY`.

    Without a key, it answers 403 to requests under another name than loopback, or of other origins.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        key = os.environ.get(VARIABLE)
        self._expected = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            status, body = (403, _NOT_OWN) if self._expected is None else (401, _NO_KEY)
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            headers = headers if status == 401 else headers[:1]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] in _OPEN_PATHS:
            return True
        if self._expected is None:
            return _is_own(_values(scope, b"host"), _values(scope, b"origin"))
        values = _values(scope, b"authorization")
        return len(values) == 1 and hmac.compare_digest(values[0], self._expected)


def _values(scope: Scope, header: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name.lower() == header]


def _is_own(hosts: list[bytes], origins: list[bytes]) -> bool:
    """Return True for a request to loopback by a program, or by a page of this server."""
    if len(hosts) != 1 or _LOOPBACK.fullmatch(hosts[0]) is None:
        return False
    return all(origin == b"http://" + hosts[0] for origin in origins)
