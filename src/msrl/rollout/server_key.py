"""API key of every request to the server, as middleware of vLLM's application (ASGI).

vLLM's own check covers the paths below /v1, /v2 and /inference only, but other paths generate too
(/invocations) or read prompts (/tokenize). Here only /health needs no key.

Source: `vllm/entrypoints/serve/middleware` (vLLM 0.32), `--middleware` of `vllm serve`.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Any]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

VARIABLE = "VLLM_API_KEY"
_OPEN_PATHS = ("/health",)
_BODY = b'{"error": {"message": "The API key is missing or wrong.", "code": 401}}'


class RequireKey:
    """Application that answers 401 to requests without `Authorization: Bearer KEY`."""

    def __init__(self, app: Application) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[VARIABLE]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] in _OPEN_PATHS:
            return True
        values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(values) == 1 and hmac.compare_digest(values[0], self._expected)
