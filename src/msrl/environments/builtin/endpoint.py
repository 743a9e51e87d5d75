"""External agents: a program that talks to an OpenAI-compatible endpoint of its episode.

Every episode has an endpoint on the loopback address with its own key. A program is started with
OPENAI_BASE_URL, OPENAI_API_KEY and MSRL_ROW, the row as JSON; a service gets a POST request with
{base_url, api_key, row}. Each of its requests for a chat completion is a turn. Messages after the
last answer are appended to the tokens; any other change of the conversation, or of the tools,
starts a new training sequence. It samples with the settings of the training. The episode ends
with the program, or with the reply of the service, which may be {"reward": ...}.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any

from msrl.data.rows.turns import ToolCall
from msrl.environments.base import Environment, StepResult
from msrl.environments.builtin._chat_server import (
    MAX_BODY_BYTES,
    MODEL,
    ChatRequest,
    ChatServer,
    text_content,
)
from msrl.environments.tools import LostError, read_answer
from msrl.errors import MsrlError
from msrl.http_requests import without_loopback_proxy
from msrl.types import JsonObject, Message, Role

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_MAX_ROW_BYTES = 100_000  # of an environment variable


class Endpoint(Environment):
    """Environment of one episode of an external agent."""

    def __init__(self, command: Sequence[str], url: str, env: Mapping[str, str]) -> None:
        self._command, self._url, self._env = tuple(command), url, dict(env)
        self._server: ChatServer | None = None
        self._program: subprocess.Popen[bytes] | None = None
        self._problem = ""
        self._was_killed = False
        self._request: ChatRequest | None = None
        self._tools: list[JsonObject] = []  # of the last request
        self._rewarded: float | None = None  # sum of the rewards of the turns
        self._seen: list[JsonObject] = []  # messages of the last request
        self._answers: dict[str, str] = {}  # texts of the policy by the message of the reply

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Start the agent and return the messages of its first request."""
        self._server = ChatServer()
        threading.Thread(target=self._run_agent, args=(dict(row),), daemon=True).start()
        request = self._next_request()
        if request is None:
            raise self._failure(f"the agent ended before its first request. {self._problem}")
        self._tools = _tools(request.body)
        return self._restore_answers(self._seen)

    def external_tools(self) -> list[JsonObject]:
        """Return the tools of the last request, which the agent runs itself."""
        return self._tools

    def step(self, answer: str) -> StepResult:
        """Answer the request of the agent, and wait for the next one or its end."""
        assert self._request is not None and self._server is not None
        reply = self._reply(answer)
        self._answers[_key(reply)] = answer
        expected = [*self._seen, reply]
        self._request.answer(reply, is_truncated=self.is_truncated)
        request = self._next_request()
        if request is None and self._problem:
            raise self._failure(self._problem)
        reward, success = self._new_reward(), self._server.success
        info: JsonObject = {} if success is None else {"success": success}
        if request is None:
            return StepResult([], reward, True, info)
        tools = _tools(request.body)
        new = _continuation(expected, self._seen) if tools == self._tools else None
        if new is not None:
            return StepResult([_message(entry) for entry in new], reward, info=info)
        self._tools = tools
        history = self._restore_answers(self._seen[:-1])
        info["history"] = [{"role": entry.role, "content": entry.content} for entry in history]
        info["tools"] = tools
        return StepResult(self._restore_answers(self._seen[-1:]), reward, info=info)

    def close(self) -> None:
        """End the program."""
        if self._program is not None and self._program.poll() is None:
            self._program.kill()

    def _next_request(self) -> ChatRequest | None:
        assert self._server is not None
        self._request = self._server.requests.get()
        if self._request is not None:
            self._seen = [_entry(message) for message in self._request.body["messages"]]
        return self._request

    def _new_reward(self) -> float | None:
        """Return what the last reward adds to earlier turns' rewards; None without a new one."""
        assert self._server is not None
        reward, before = self._server.reward, self._rewarded
        if reward is None or reward == before:
            return None
        self._rewarded = reward
        return reward - (before or 0.0)

    def _reply(self, answer: str) -> JsonObject:
        """Return the message for the agent, with the calls of the answer if it has tools."""
        if not self._tools:
            return {"role": "assistant", "content": answer}
        thought, parsed, rest = read_answer(self, answer, self._tools)
        calls = [call for call in parsed.calls if isinstance(call, ToolCall)]
        if not calls or len(calls) < len(parsed.calls):  # a malformed call stays text
            return {"role": "assistant", "content": answer}
        first = len(self._seen)
        entries = [_call_entry(call, f"{first:04d}{n:05d}") for n, call in enumerate(calls)]
        content = f"{thought}{parsed.content}{rest}"
        return {"role": "assistant", "content": content, "tool_calls": entries}

    def _restore_answers(self, entries: Sequence[JsonObject]) -> list[Message]:
        """Return messages, in which answers of the policy have the text that it sampled."""
        messages: list[Message] = []
        for entry in entries:
            text = self._answers.get(_key(entry)) if entry["role"] == "assistant" else None
            messages.append(_message(entry) if text is None else Message("assistant", text))
        return messages

    def _run_agent(self, row: JsonObject) -> None:
        """Run the agent until it ends, for whatever reason."""
        assert self._server is not None
        try:
            if self._command:
                self._run_program(row)
            else:
                self._run_service(row)
        except Exception as error:  # nobody else reports what ends this thread
            self._problem = f"the agent failed: {type(error).__name__}: {error}"
        finally:
            self._server.end()

    def _run_program(self, row: JsonObject) -> None:
        """Run the program until it ends."""
        assert self._server is not None
        text = json.dumps(row, default=str)
        variables = {
            **self._env,
            "OPENAI_BASE_URL": self._server.url,
            "OPENAI_API_KEY": self._server.key,
            "OPENAI_MODEL": MODEL,
            "MSRL_ROW": text if len(text) <= _MAX_ROW_BYTES else "",
        }
        try:
            self._program = subprocess.Popen(
                self._command,
                env=without_loopback_proxy({**os.environ, **variables}),
                stdin=subprocess.PIPE,
            )
            self._program.communicate(text.encode())
            code = self._program.returncode
            self._was_killed = code in (-signal.SIGKILL, -signal.SIGTERM)
            if code:
                self._problem = f"the agent ended with exit code {code}"
        except OSError as error:
            self._problem = f"the agent cannot be started: {error}"

    def _failure(self, problem: str) -> Exception:
        return LostError(problem) if self._was_killed else RuntimeError(problem)

    def _run_service(self, row: JsonObject) -> None:
        """Call the service and wait for its reply."""
        server = self._server
        assert server is not None
        body = {"base_url": server.url, "api_key": server.key, "model": MODEL, "row": row}
        data = json.dumps(body, default=str).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, data, headers)
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request) as reply:
                data = reply.read(MAX_BODY_BYTES + 1)
            if len(data) > MAX_BODY_BYTES:
                raise ValueError(f"the reply is longer than {MAX_BODY_BYTES} bytes")
            if reply.length:  # bytes of Content-Length that did not arrive
                raise ValueError(f"the reply ended {reply.length} bytes early")
            value = json.loads(data or b"{}")
            if isinstance(value, dict) and value.get("reward") is not None:
                server.set_reward(value)
        except (OSError, ValueError, RecursionError, HTTPException) as error:
            reason = str(error) or type(error).__name__
            self._problem = f"environment.options.url={self._url}: {reason}"


def environment(
    *, command: list[str] | None = None, url: str = "", env: dict[str, str] | None = None
) -> Environment:
    """Return a new environment.

    Args:
        command: Program of the agent, with its arguments.
        url: Address of a service of agents, instead of a program.
        env: Environment variables of the program.
    """
    if bool(command) == bool(url):
        raise MsrlError("environment.options: endpoint needs either command or url")
    if url and not url.startswith(("http://", "https://")):
        raise MsrlError(f"environment.options.url={url}: must begin with http:// or https://")
    return Endpoint(command or (), url, env or {})


def _tools(body: Mapping[str, Any]) -> list[JsonObject]:
    """Return the tools of a request in OpenAI's form."""
    tools = body.get("tools") or []
    return [entry for entry in tools if isinstance(entry, dict) and "function" in entry]


def _entry(message: Mapping[str, Any]) -> JsonObject:
    """Return the parts of a message that matter for a comparison."""
    entry: JsonObject = {"role": message["role"], "content": text_content(message)}
    for key in ("tool_calls", "tool_call_id", "name"):
        if message.get(key):
            entry[key] = message[key]
    return entry


def _key(entry: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal replies; clients may add fields to calls."""
    calls = [_call_key(call) for call in entry.get("tool_calls") or ()]
    return json.dumps([entry["content"], calls], default=str)


def _call_key(call: Any) -> list[Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return [repr(call)]
    return [call.get("id"), function.get("name"), function.get("arguments")]


def _continuation(
    expected: Sequence[JsonObject], entries: Sequence[JsonObject]
) -> list[JsonObject] | None:
    """Return the messages after the expected ones, or None if these were changed."""
    count = len(expected)
    if len(entries) <= count or not all(map(_is_same, expected, entries)):
        return None
    new = list(entries[count:])
    return None if any(entry["role"] == "assistant" for entry in new) else new


def _is_same(expected: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    return expected["role"] == entry["role"] and _key(expected) == _key(entry)


def _message(entry: JsonObject) -> Message:
    role = _ROLES.get(entry["role"])
    if role is None:
        raise ValueError(f"messages: unknown role {entry['role']!r}")
    content = entry["content"]
    if len(entry) == 2:
        return Message(role, content)
    if role == "assistant":  # calls that the policy did not make
        calls = [json.dumps(call, default=str) for call in entry.get("tool_calls") or ()]
        return Message(role, "\n".join([content, *calls]))
    return Message(role, content, entry)


def _call_entry(call: ToolCall, identity: str) -> JsonObject:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}
