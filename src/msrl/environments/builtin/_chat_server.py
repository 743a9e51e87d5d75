"""OpenAI-compatible server of one episode, on the loopback address with a key of the episode.

`POST /v1/chat/completions` waits for the answer of the policy, also as a stream of one chunk.
`POST /v1/reward` takes {"reward": number, "success": true or false}. `GET /v1/models` lists the
policy. Format: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "policy"
MAX_BODY_BYTES = 64 << 20
_REFUSED_S, _REFUSED_BYTES = 1.0, 1 << 16


class ChatRequest:
    """Request for an answer. The thread of its connection waits until it is answered."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body = body
        self._reply: queue.SimpleQueue[tuple[Mapping[str, Any], str]] = queue.SimpleQueue()

    def answer(self, message: Mapping[str, Any], *, is_truncated: bool = False) -> None:
        """Answer with a message of the role assistant, which may have ended at a limit."""
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        self._reply.put((message, "length" if is_truncated else reason))

    def wait(self) -> tuple[Mapping[str, Any], str]:
        """Return the message and its finish reason when they are there."""
        return self._reply.get()


class ChatServer:
    """Server of one episode. Requests arrive in `requests`, in their order."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        self.requests: queue.SimpleQueue[ChatRequest | None] = queue.SimpleQueue()
        self.reward: float | None = None
        self.success: bool | None = None
        self._http = _Server(("127.0.0.1", 0), _Handler)
        self._http.daemon_threads = True
        self._http.episode = self  # pyright: ignore[reportAttributeAccessIssue]
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Base URL for clients of OpenAI's API."""
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def set_reward(self, values: Mapping[str, Any]) -> None:
        """Set the reward and the success of the episode.

        Raises:
            ValueError: The reward is not a finite number.
        """
        reward, success = values.get("reward"), values.get("success")
        if (
            isinstance(reward, bool)
            or not isinstance(reward, int | float)
            # The comparison also refuses NaN and integers that are too large for a float.
            or not abs(reward) <= sys.float_info.max
        ):
            raise ValueError("reward: must be a finite number")
        self.reward = float(reward)
        self.success = success if isinstance(success, bool) else None

    def end(self) -> None:
        """Tell the reader of `requests` that no further one comes."""
        self.requests.put(None)

    def stop(self) -> None:
        """Stop the server."""
        self._http.shutdown()
        self._http.server_close()


class _BadRequestError(Exception):
    """A request that the server does not answer."""


class _Server(ThreadingHTTPServer):
    """Server that prints nothing about clients that have disconnected."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Connection of a client."""

    protocol_version = "HTTP/1.1"

    @property
    def _episode(self) -> ChatServer:
        return self.server.episode  # pyright: ignore[reportAttributeAccessIssue]

    def do_GET(self) -> None:
        if not self._has_key():
            return self._error(401, "invalid API key")
        if self.path != "/v1/models":
            return self._error(404, f"unknown path {self.path}")
        entry = {"id": MODEL, "object": "model", "created": 0, "owned_by": "msrl"}
        return self._send({"object": "list", "data": [entry]})

    def do_POST(self) -> None:
        if not self._has_key():
            return self._refuse()
        try:
            body = self._body()
            if self.path == "/v1/chat/completions":
                return self._complete(body)
            if self.path == "/v1/reward":
                return self._take_reward(body)
            return self._error(404, f"unknown path {self.path}")
        except _BadRequestError as error:
            return self._error(400, str(error))

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line per request."""

    def _has_key(self) -> bool:
        scheme, _, key = self.headers.get("Authorization", "").partition(" ")
        is_equal = hmac.compare_digest(key.encode(), self._episode.key.encode())
        return is_equal and scheme.lower() == "bearer"

    def _refuse(self) -> None:
        """Answer before the body is read, and close the connection when the client has read it."""
        self._error(401, "invalid API key")
        self.connection.settimeout(_REFUSED_S)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.recv(_REFUSED_BYTES)  # unread bytes would reset the connection

    def _body(self) -> dict[str, Any]:
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            raise _BadRequestError("the request needs a Content-Length") from None
        if not 0 <= length <= MAX_BODY_BYTES:
            raise _BadRequestError(f"the request is longer than {MAX_BODY_BYTES} bytes")
        try:
            body = json.loads(self.rfile.read(length))
        except (ValueError, RecursionError) as error:
            raise _BadRequestError(f"the request is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise _BadRequestError("the request must be a JSON object")
        return body

    def _complete(self, body: dict[str, Any]) -> None:
        """Answer a request for a chat completion."""
        check_messages(body)
        if body.get("n") not in (None, 1):
            raise _BadRequestError("n: only one answer per request")
        request = ChatRequest(body)
        self._episode.requests.put(request)
        message, reason = request.wait()
        if body.get("stream"):
            return self._stream(message, reason)
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        return self._send({**_head("chat.completion"), "choices": [choice]})

    def _stream(self, message: Mapping[str, Any], reason: str) -> None:
        """Send a message as one chunk of a stream, and the end."""
        calls = [{"index": n, **call} for n, call in enumerate(message.get("tool_calls") or ())]
        delta = {**message, "tool_calls": calls} if calls else message
        head = _head("chat.completion.chunk")
        chunks = [
            {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        ]
        lines = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        self._write(200, "text/event-stream", f"{lines}data: [DONE]\n\n".encode())

    def _take_reward(self, body: dict[str, Any]) -> None:
        try:
            self._episode.set_reward(body)
        except ValueError as error:
            raise _BadRequestError(str(error)) from None
        self._send({"ok": True})

    def _error(self, status: int, text: str) -> None:
        self.close_connection = True
        error = {"message": text, "type": "invalid_request_error", "code": status}
        self._write(status, "application/json", json.dumps({"error": error}).encode())

    def _send(self, value: object) -> None:
        self._write(200, "application/json", json.dumps(value).encode())

    def _write(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def check_messages(body: Mapping[str, Any]) -> None:
    """Check that a request has messages with text.

    Raises:
        _BadRequestError: It has not.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _BadRequestError("messages: must be a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _BadRequestError("messages: each needs a role and content")
        text_content(message)


def text_content(message: Mapping[str, Any]) -> str:
    """Return the content of a message as text.

    Raises:
        _BadRequestError: It has other content than text.
    """
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [None]
    texts = [block.get("text") if isinstance(block, dict) else None for block in blocks]
    if not all(isinstance(text, str) for text in texts):
        raise _BadRequestError("messages: content must be text or a list of text blocks")
    return "".join(map(str, texts))


def _head(kind: str) -> dict[str, Any]:
    identity = f"chatcmpl-{secrets.token_hex(12)}"
    return {"id": identity, "object": kind, "created": int(time.time()), "model": MODEL}
