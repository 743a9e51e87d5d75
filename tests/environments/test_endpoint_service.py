"""Services of external agents that answer nonsense end their episode with the reason."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import struct
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from msrl.environments.builtin._chat_server import ChatServer
from msrl.environments.builtin.endpoint import Endpoint, environment
from support import mentions
from training_runs import listening_hosts


@contextlib.contextmanager
def service(answer: bytes) -> Iterator[str]:
    """Start a service that sends these bytes to every request; yield its address."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            length = 0
            while (line := self.rfile.readline()).strip():
                name, _, value = line.decode().lower().partition(":")
                length = int(value) if name == "content-length" else length
            self.rfile.read(length)
            self.wfile.write(answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()


def http(body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (size, body)


@pytest.mark.parametrize(
    ("answer", "keyword"),
    [
        (http(b'{"reward": 1%s}' % (b"0" * 400)), "finite"),
        (http(b'{"reward": NaN}'), "finite"),
        (http(b'{"reward": true}'), "finite"),
        (http(b'{"reward": "1"}'), "finite"),
        (http(b"{}", length=50), "early"),
        (http(b"[" * 100_000), "url"),
        (b"nonsense\r\n\r\n", "nonsense"),
        (b"HTTP/1.1 500 Broken\r\nContent-Length: 0\r\n\r\n", "500"),
    ],
)
def test_a_service_without_a_usable_answer_ends_its_episode(answer: bytes, keyword: str) -> None:
    with service(answer) as url:
        agent = environment(url=url)
        with pytest.raises(RuntimeError, match=mentions("agent", keyword)):
            agent.reset({})


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("answer", "opens_thought", "content", "num_calls"),
    [
        (f"<think>{CALL}</think>No.", False, f"<think>{CALL}</think>No.", 0),
        (f"<think>a</think>b {CALL}", False, "<think>a</think>b", 1),
        (f"a {CALL}", True, f"a {CALL}", 0),
        (f"a</think>{CALL}", True, "a</think>", 1),
    ],
)
def test_a_call_in_a_thought_does_not_reach_the_agent(
    answer: str, opens_thought: bool, content: str, num_calls: int
) -> None:
    agent = environment(url="http://127.0.0.1:9")
    assert isinstance(agent, Endpoint)
    agent.opens_thought = opens_thought
    agent._tools = TOOLS
    reply = agent._reply(answer)
    assert (reply["content"], len(reply.get("tool_calls", ()))) == (content, num_calls)


AGENT = """
import json, os, sys, urllib.request

def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    data = json.dumps(body).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, data, headers)
    return json.loads(urllib.request.urlopen(request).read())

def ask(*texts, **body):
    for text in texts:
        messages.append({"role": "user", "content": text})
    (choice,) = post("/chat/completions", {"messages": messages, **body})["choices"]
    messages.append(choice["message"])
    return choice["finish_reason"]

def tool(name):
    return {"type": "function", "function": {"name": name, "parameters": {}}}

messages = []
"""


def program(body: str) -> Endpoint:
    """Return the environment of an agent that runs this code."""
    agent = environment(command=[sys.executable, "-c", f"{AGENT}\n{textwrap.dedent(body)}"])
    assert isinstance(agent, Endpoint)
    return agent


def test_the_finish_reason_tells_that_an_answer_is_truncated() -> None:
    agent = program("ask(ask(ask('a'))) == 'stop' or sys.exit(3)")
    agent.reset({})
    agent.is_truncated = True
    (message,) = agent.step("x").messages
    assert message.content == "length"
    agent.is_truncated = False
    assert agent.step("x").messages[0].content == "stop"
    assert agent.step("x").done


@pytest.mark.sample(1)
@pytest.mark.parametrize("scheme", ["", "Basic ", "Bearer"])
def test_a_key_counts_only_with_its_scheme(scheme: str) -> None:
    server = ChatServer()
    request = urllib.request.Request(
        f"{server.url}/models", headers={"Authorization": f"{scheme}{server.key}"}
    )
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request)
    request.add_header("Authorization", f"bearer {server.key}")
    assert urllib.request.urlopen(request).status == 200
    server.stop()


def test_a_request_without_the_key_is_refused_before_its_body_is_read() -> None:
    server = ChatServer()
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 60000000\r\n\r\n{")
        assert b" 401 " in client.recv(4096)
    assert set().union(*listening_hosts([os.getpid()]).values()) == {"127.0.0.1"}
    server.stop()


def test_a_client_that_disconnects_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    server = ChatServer()
    port = int(server.url.rpartition(":")[2].partition("/")[0])
    body = b'{"messages": [{"role": "user", "content": "x"}]}'
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        reset = struct.pack("ii", 1, 0)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        head = f"Authorization: Bearer {server.key}\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\n{head}".encode() + body)
        request = server.requests.get(timeout=60)
    assert request is not None
    request.answer({"role": "assistant", "content": "y" * 10_000_000})
    server.stop()
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(60)
    assert capfd.readouterr().err == ""


def test_an_agent_may_change_its_tools() -> None:
    agent = program(
        """
        ask("a", tools=[tool("look")])
        ask("b", tools=[tool("look")])
        ask("c", tools=[tool("jump")])
        ask("d")
        """
    )
    agent.reset({})
    assert "tools" not in agent.step("x").info
    changed = agent.step("y")
    assert [tool["function"]["name"] for tool in changed.info["tools"]] == ["jump"]
    assert [entry["content"] for entry in changed.info["history"]] == ["a", "x", "b", "y"]
    assert [message.content for message in changed.messages] == ["c"]
    call = '<tool_call>{"name": "jump", "arguments": {}}</tool_call>'
    assert agent.step(call).info["tools"] == []
    last = agent.step("z")
    assert last.done and last.reward is None


def test_a_reward_counts_for_the_answer_before_it() -> None:
    agent = program(
        """
        ask("a")
        post("/reward", {"reward": 0.5, "success": True})
        ask("b")
        ask("c")
        post("/reward", {"reward": 0.25, "success": False})
        """
    )
    agent.reset({})
    results = [agent.step("x") for _ in range(3)]
    assert [result.reward for result in results] == [0.5, None, -0.25]
    assert [result.info["success"] for result in results] == [True, True, False]
    assert [result.done for result in results] == [False, False, True]


def test_an_agent_reaches_its_endpoint_without_a_proxy() -> None:
    code = "import os, sys; sys.exit(os.environ['NO_PROXY'] != 'internal,127.0.0.1,localhost')"
    agent = environment(command=[sys.executable, "-c", code], env={"NO_PROXY": "internal"})
    with pytest.raises(RuntimeError) as error:
        agent.reset({})
    assert "exit code" not in str(error.value)


def test_an_agent_that_cannot_run_ends_its_episode() -> None:
    agent = environment(command=["true"], env={"A": "null\0byte"})
    with pytest.raises(RuntimeError, match=mentions("agent", "null")):
        agent.reset({})


@pytest.mark.sample(2)
@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 10**400, True, "1", None, [1]])
def test_a_reward_must_be_a_finite_number(reward: Any) -> None:
    server = ChatServer()
    try:
        with pytest.raises(ValueError, match=mentions("reward", "finite")):
            server.set_reward({"reward": reward})
        server.set_reward(json.loads('{"reward": -2, "success": false}'))
        assert (server.reward, server.success) == (-2.0, False)
    finally:
        server.stop()
