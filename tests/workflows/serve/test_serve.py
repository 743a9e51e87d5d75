"""`msrl serve`: refusals, cache, command of the server, life of its processes, a real server."""

from __future__ import annotations

import ast
import asyncio
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from http_servers import served_by
from msrl import platforms, temporary
from msrl.checkpoint.adapters.peft import write_peft
from msrl.checkpoint.convert import McoreTarget, write_mcore
from msrl.checkpoint.source import open_weights
from msrl.cli.configuration import load_configuration as load
from msrl.config.schema import Config
from msrl.data.templates.files import load_template, template_names
from msrl.errors import ManyErrors, MsrlError, RunFailedError
from msrl.http_requests import is_healthy, is_loopback
from msrl.models.parallel_layout import ParallelLayout
from msrl.rollout.engine import EngineSettings
from msrl.rollout.server import ServerSettings, server_command, server_environment
from msrl.rollout.server_access import free_port, read_api_key
from msrl.rollout.server_key import CheckRequest
from msrl.workflows.engine import choose_renderer, other_template
from msrl.workflows.serve import model_cache
from msrl.workflows.serve.server import prepare
from msrl.workflows.serve.server_process import run_server
from msrl.workflows.serve.tool_parsers import tool_parser
from served_commands import Server
from support import assert_each_mentions, assert_mentions, checked_plan, mentions, shared_data
from tiny_qwen2 import save_model
from training_runs import (
    children,
    files_in,
    shared_memory,
    wait_for_end,
)

KEY = "correct-horse-battery"
# The chat template of the small model as a template of msrl.
SAME_AS_CHATML = """
user: "<|im_start|>user\\n{{content}}<|im_end|>\\n"
assistant_start: "<|im_start|>assistant\\n"
assistant: "{{content}}<|im_end|>\\n"
special: ["<|im_start|>", "<|im_end|>"]
stop: ["<|im_end|>"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    save_model(path, tied=False, positions=2048)
    return path


@pytest.fixture(scope="module")
def mcore(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run's checkpoints of TP 2 and PP 2."""
    path = tmp_path_factory.mktemp("runs") / "tiny" / "checkpoints"
    write_mcore(open_weights(folder), path, McoreTarget(ParallelLayout(2, 2), vocab_multiple=64))
    return path


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MSRL_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def mistakes(*sets: str) -> list[str]:
    try:
        checked_plan(load(sets=[*sets]), "serve")
    except ManyErrors as error:
        return [line.removeprefix("--set: ") for line in error.messages]
    return []


def test_other_machines_need_a_key_and_this_machine_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    model = f"serve.model={folder}"
    assert not mistakes(model)
    for host in ("0.0.0.0", "fe80::2", "192.0.2.7", "gpu-3"):
        assert_each_mentions(
            mistakes(model, f"serve.host={host}"), (f"serve.host={host}", "API key", "MSRL_API_KEY")
        )
    for host in ("localhost", "127.0.0.9"):
        assert is_loopback(host) and not mistakes(model, f"serve.host={host}")
    assert is_loopback("::1") and not is_loopback("::")
    monkeypatch.setenv("MSRL_API_KEY", KEY)
    assert not mistakes(model, "serve.host=0.0.0.0")


def test_a_key_is_one_word_and_no_message_contains_it(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    file, model = tmp_path / "key", f"serve.model={folder}"
    file.write_text(f"{KEY}\n")
    assert read_api_key(str(file)) == (KEY, str(file))
    monkeypatch.setenv("VLLM_API_KEY", "of-vllm")
    assert read_api_key(None) == ("of-vllm", "VLLM_API_KEY")
    monkeypatch.setenv("MSRL_API_KEY", "of-msrl")
    assert read_api_key(None) == ("of-msrl", "MSRL_API_KEY")
    assert read_api_key(str(file)) == (KEY, str(file))
    for text in ("", "two secret", "sécret"):
        file.write_text(text)
        (line,) = mistakes(model, f"serve.api_key_file={file}")
        assert_mentions(line, "serve.api_key_file=", file, "API key")
        assert "cret" not in line
    for name, keyword in (("gone", "read"), ("/dev/zero", "larger")):
        assert_each_mentions(
            mistakes(model, f"serve.api_key_file={name}"), (f"serve.api_key_file={name}", keyword)
        )


def test_models_and_adapters_that_cannot_be_served_are_named(
    tmp_path: Path, folder: Path, mcore: Path
):
    assert_each_mentions(mistakes(), ("serve.model", "missing"))
    assert_each_mentions(
        mistakes(f"serve.model={mcore.parent}"), ("serve.model", "config.json", "did you mean")
    )
    assert_each_mentions(
        mistakes(f"serve.model={folder}", f"serve.lora=[gone, {folder}, {mcore}, b={mcore}]"),
        ("serve.lora.0=gone", "not found"),
        ("serve.lora.1", "adapter_config.json"),
        ("serve.lora.1", "name"),
    )
    twice = f"serve.lora=[{mcore}, tiny={mcore}]"
    assert_each_mentions(mistakes(f"serve.model={folder}", twice), ("serve.lora.1", "name tiny"))
    same = (f"serve.model={folder}", f"serve.lora=[math={mcore}]", "serve.name=math")
    assert_each_mentions(mistakes(*same), ("serve.lora.0", "name math"))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "gone"}')
    config = Config.model_validate({"serve": {"model": str(adapter), "port": 0}})
    with pytest.raises(MsrlError, match=mentions(adapter, "base model", "--lora")):
        prepare(config)


def test_a_busy_port_and_a_foreign_address_are_refused(folder: Path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(MsrlError, match=mentions(f"serve.port={port}", "in use")):
            prepare(Config.model_validate({"serve": {"model": str(folder), "port": port}}))
    assert free_port("127.0.0.1", port) == port and free_port("localhost", 0) > 0
    with pytest.raises(MsrlError, match=mentions("serve.port=8", "192.0.2.1")):
        free_port("192.0.2.1", 8)


@pytest.mark.slow
def test_the_template_selects_the_parser_of_tool_calls(folder: Path):
    renderers = {}
    for name in template_names():
        try:
            renderers[name] = choose_renderer(folder, name)
        except MsrlError:  # the tokenizer lacks its control tokens
            continue
    parsers = {name: tool_parser(renderer) for name, renderer in renderers.items()}
    assert {name for name, parser in parsers.items() if parser == "hermes"} == {
        name for name in parsers if "<tools>" in str(load_template(name))
    }
    assert {"qwen", "qwen3", "qwen_retool"} <= {name for name in parsers if parsers[name]}
    assert parsers["chatml"] is None and parsers["native"] is None
    for name in ("qwen2.5-0.5b-instruct", "qwen3-4b"):
        assert tool_parser(choose_renderer(shared_data("tokenizers", name), None)) == "hermes"


def test_a_template_other_than_that_of_the_checkpoint_is_reported(folder: Path, tmp_path: Path):
    assert_mentions(other_template(folder, choose_renderer(folder, "qwen")), "qwen", folder)
    assert other_template(folder, choose_renderer(folder, None)) is None
    own = tmp_path / "same.yaml"
    own.write_text(SAME_AS_CHATML)
    assert other_template(folder, choose_renderer(folder, str(own))) is None
    save_model(tmp_path / "plain", tied=False, chat_template=False)
    assert other_template(tmp_path / "plain", choose_renderer(tmp_path / "plain", "qwen")) is None


def server_settings(folder: Path, **changes: Any) -> ServerSettings:
    arguments: dict[str, Any] = {
        "engine": EngineSettings(folder, tokenizer_dir=folder),
        "host": "127.0.0.1",
        "port": 8123,
        "name": "tiny",
        "generation_config": folder / "generation",
    }
    return ServerSettings(**{**arguments, **changes})


def vllm_options() -> set[str]:
    """Return the names of all options of `vllm serve`, from the source of the installed vLLM."""
    spec = __import__("importlib.util").util.find_spec("vllm")
    names: set[str] = set()
    for path in ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py"):
        module = ast.parse(Path(spec.submodule_search_locations[0], path).read_text())
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
                names |= {
                    line.target.id
                    for line in node.body
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
                }
    return names


def test_every_option_of_the_command_is_one_of_vllms(folder: Path, tmp_path: Path):
    settings = server_settings(
        folder,
        chat_template=tmp_path / "chat.jinja",
        tool_parser="hermes",
        adapters={"a": tmp_path / "x", "b": tmp_path / "y"},
        max_lora_rank=12,
    )
    words = server_command(settings, platforms.get("cpu"))
    flags = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    known = vllm_options()
    assert {flag for flag in flags if flag.removeprefix("no_") not in known} == set()
    assert words[:4] == [sys.executable, "-P", "-m", "msrl.rollout.vllm_server"]
    assert words[4:7] == [str(os.getpid()), "--model", str(folder)]
    text = " ".join(words)
    assert f"--lora-modules a={tmp_path}/x b={tmp_path}/y" in text
    assert "--max-lora-rank 16" in text and "--max-loras 2" in text
    assert "--enable-auto-tool-choice --tool-call-parser hermes" in text
    assert "--no-enable-chunked-prefill" in text and "--host 127.0.0.1 --port 8123" in text


def test_only_the_environment_of_the_server_has_the_key(folder: Path):
    settings, platform = server_settings(folder), platforms.get("cpu")
    user = {"MSRL_API_KEY": KEY, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "7"}
    environment = server_environment(settings, platform, user, KEY)
    assert environment["VLLM_API_KEY"] == KEY and "MSRL_API_KEY" not in environment
    assert environment["OMP_NUM_THREADS"] == "7"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment
    assert KEY not in " ".join(server_command(settings, platform))
    without = server_environment(settings, platform, {"VLLM_API_KEY": "old"}, None)
    assert "VLLM_API_KEY" not in without


def test_every_path_but_health_needs_the_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    reached: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope.get("path", scope["type"]))

    async def status(path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> Any:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": kind, "path": path, "headers": headers}
        await CheckRequest(inner)(scope, None, send)  # type: ignore[arg-type]
        return sent[0].get("status", sent[0].get("code")) if sent else None

    def ask(path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> Any:
        return asyncio.run(status(path, *headers, kind=kind))

    right = (b"authorization", f"Bearer {KEY}".encode())
    for path in ("/v1/models", "/invocations", "/tokenize", "/metrics", "/health/x"):
        assert ask(path) == 401 and ask(path, right) is None
    assert ask("/v1/models", (b"Authorization", b"Bearer wrong")) == 401
    assert ask("/v1/models", right, right) == 401
    assert ask("/v1/realtime", kind="websocket") == 1008
    assert ask("/health") is None and ask("", kind="lifespan") is None
    assert reached.count("/health") == 1 and reached.count("/v1/models") == 1


def test_a_server_without_a_key_answers_only_requests_that_name_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    def status(host: str, *origins: str) -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", host.encode()), *((b"origin", each.encode()) for each in origins)]
        scope = {"type": "http", "path": "/v1/completions", "headers": headers}
        asyncio.run(CheckRequest(inner)(scope, None, send))  # type: ignore[arg-type]
        return sent[0]["status"]

    for host in ("127.0.0.1:8000", "localhost:8000", "[::1]:8000", "localhost"):
        assert status(host) == 200 == status(host, f"http://{host}")
        assert status(host, "http://evil.example") == 403 == status(host, "null")
        assert status(host, f"http://{host}", "http://evil.example") == 403
    for host in ("evil.example:8000", "127.0.0.1.evil.example", "localhost:8000@evil.example", ""):
        assert status(host) == 403 == status(host, f"http://{host}")


def test_a_converted_checkpoint_is_reused_until_it_changes_or_is_damaged(
    folder: Path, mcore: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    section = {"model": str(mcore), "port": 0, "cache": str(tmp_path / "cache")}
    config = Config.model_validate({"serve": section})
    first = prepare(config).model
    assert first.name == "tiny" and first.source is not None and not first.folder.exists()
    model_cache.convert(first.source, mcore, first.folder)
    again = prepare(config).model
    assert again.source is None and again.folder == first.folder
    (weights,) = first.folder.glob("*.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    damaged = prepare(config).model
    assert damaged.source is not None and damaged.folder == first.folder
    assert_mentions(capsys.readouterr().err, first.folder, "damaged")
    model_cache.convert(damaged.source, mcore, damaged.folder)
    assert weights.read_bytes() == content
    inode = weights.stat().st_ino
    model_cache.convert(damaged.source, mcore, damaged.folder)  # by a second server
    assert weights.stat().st_ino == inode
    digest = model_cache.checkpoint_digest(mcore)
    path = mcore / "hf" / "generation_config.json"
    before = path.read_text() if path.is_file() else None
    path.write_text('{"eos_token_id": [1, 2]}')
    assert model_cache.checkpoint_digest(mcore) != digest
    path.unlink() if before is None else path.write_text(before)
    assert model_cache.checkpoint_digest(mcore) == digest


STUB = """
    import http.server, os, signal, subprocess, sys, threading
    port = int(sys.argv[1])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("loaded", child.pid, flush=True)
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def log_message(self, *a): print("asked", flush=True)
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def stub(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that returns the command of an HTTP server with a child process."""
    path = tmp_path / "stub.py"
    path.write_text(textwrap.dedent(STUB))
    return lambda *arguments: [sys.executable, str(path), *arguments]


@pytest.mark.parametrize("kind", ["willing", "stubborn"])
def test_an_interrupt_ends_the_server_and_its_children(
    kind: str, stub: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("msrl.workflows.serve.server_process._END_S", 1.0)
    port, pids = free_port("127.0.0.1", 0), set[int]()
    before = set(children(os.getpid()))  # such as a resource tracker of an earlier test

    def interrupt() -> None:
        pids.update(set(children(os.getpid())) - before)
        raise KeyboardInterrupt

    with temporary.owned_folder("msrl-test-") as folder, pytest.raises(KeyboardInterrupt):
        url = f"http://127.0.0.1:{port}"
        run_server(stub(str(port), kind), os.environ, folder, url, interrupt)
    assert len(pids) >= 2
    wait_for_end(pids)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)


def test_a_server_is_asked_without_the_proxy(monkeypatch: pytest.MonkeyPatch):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    nowhere = urllib.request.ProxyHandler({"http": "http://127.0.0.1:9"})
    monkeypatch.setattr(urllib.request, "_opener", urllib.request.build_opener(nowhere))
    with served_by(Handler) as url:
        assert is_healthy(url, 5.0)


@pytest.mark.parametrize(
    ("code", "expected", "fragments"),
    [
        ("raise ValueError('max_model_len is too large')", MsrlError, ("max_model_len", "refuses")),
        ("print('(APIServer pid=7) ValueError: odd'); exit(1)", MsrlError, ("odd",)),
        ("print('no memory left'); exit(9)", RunFailedError, ("code 9", "no memory left")),
        ("import os; os.kill(os.getpid(), 9)", RunFailedError, ("code -9",)),
    ],
)
def test_a_server_that_ends_by_itself_is_explained(
    code: str, expected: type[Exception], fragments: tuple[str, ...]
):
    command = [sys.executable, "-c", code]
    with (
        temporary.owned_folder("msrl-test-") as folder,
        pytest.raises(expected, match=mentions(*fragments)),
    ):
        run_server(command, os.environ, folder, "http://127.0.0.1:9", pytest.fail)


def save_adapter(folder: Path, base: Path, scale: float = 4.0) -> None:
    """Write a random LoRA adapter of all attention projections in PEFT's format."""
    import torch

    from msrl.checkpoint.adapters.merge import Adapter, Delta
    from msrl.models.families import all_rules

    generator = torch.Generator().manual_seed(5)
    deltas = {}
    for rule in all_rules(open_weights(base).shape):
        for name, (rows, *columns) in zip(rule.hf, rule.shapes, strict=True):
            if re.search(r"[qkvo]_proj\.weight$", name):
                a = torch.randn(4, *columns, generator=generator)
                b = torch.randn(rows, 4, generator=generator)
                deltas[name] = Delta(a * 0.2, b * 0.2, scale)
    write_peft(Adapter("test", 16.0, deltas, {}), folder, str(base))


@pytest.fixture(scope="module")
def server(folder: Path, mcore: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server of an mcore checkpoint with an adapter, a template with tools and a key."""
    path = tmp_path_factory.mktemp("server")
    save_adapter(path / "adapter", folder)
    (path / "key").write_text(KEY)
    arguments = ["--cache", str(path / "cache"), "--api-key-file", str(path / "key")]
    arguments += ["--template", "qwen", "--lora", f"tuned={path / 'adapter'}"]
    server = Server(path / "log", str(mcore), *arguments)
    yield server
    if server.command.process.poll() is None:
        server.command.kill()


@pytest.fixture
def client(server: Server) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=server.url, api_key=KEY, max_retries=0, timeout=120)


QUESTION = [{"role": "user", "content": "2+3="}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def greedy_ids(folder: Path, count: int, *, tools: list[Any] | None = None) -> Any:
    """Return the prompt's ids with the template qwen, and transformers' greedy response."""
    import torch
    from transformers import AutoModelForCausalLM

    from msrl.types import Conversation, Message

    renderer = choose_renderer(folder, "qwen")
    extra = {"tools": json.dumps(tools)} if tools else {}
    ids = renderer.prompt(Conversation((Message("user", "2+3="),), extra=extra))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tensor = torch.from_numpy(ids)[None]
    out = model.generate(tensor, max_new_tokens=count, do_sample=False)
    return ids.tolist(), out[0, len(ids) :].tolist()


@pytest.mark.slow
def test_a_served_checkpoint_answers_like_the_model_with_the_template_of_training(
    server: Server, client: Any, folder: Path
):
    """Chat, streaming, completions, token ids, tools, adapters, keys and the end of a server."""
    ids, expected = greedy_ids(folder, 16)
    chat = {"model": "tiny", "messages": QUESTION, "max_tokens": 16, "temperature": 0}
    answer = client.chat.completions.create(**chat, extra_body={"return_token_ids": True})
    assert answer.prompt_token_ids == ids
    assert answer.choices[0].token_ids == expected
    text = answer.choices[0].message.content
    streamed = client.chat.completions.create(**chat, stream=True)
    pieces = [piece.choices[0].delta.content or "" for piece in streamed if piece.choices]
    assert "".join(pieces) == text and len(pieces) > 1  # a busy server joins tokens
    plain = {"prompt": ids, "max_tokens": 16, "temperature": 0, "logprobs": 0}
    completion = client.completions.create(model="tiny", **plain).choices[0]
    assert completion.text == text and len(completion.logprobs.token_logprobs) == len(expected)
    tuned = client.completions.create(model="tuned", **plain).choices[0]
    assert tuned.text != text
    shown = client.chat.completions.create(
        **chat, tools=[TOOL], extra_body={"return_token_ids": True}
    )
    assert shown.prompt_token_ids == greedy_ids(folder, 1, tools=[TOOL])[0]
    assert sorted(model.id for model in client.models.list()) == ["tiny", "tuned"]
    for path in ("/v1/models", "/metrics", "/tokenize"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(server.url.removesuffix("/v1") + path, timeout=60)
    assert subprocess.run(
        ["curl", "-sf", "-H", f"Authorization: Bearer {KEY}", f"{server.url}/models"],
        capture_output=True,
        check=True,
    ).stdout
    pids = server.pids
    commands = b"".join(
        Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids if Path(f"/proc/{pid}").exists()
    )
    assert len(pids) >= 3 and KEY.encode() not in commands
    segments = shared_memory(pids)
    server.command.process.send_signal(signal.SIGTERM)
    assert server.command.wait() == 130
    assert KEY not in server.command.output() and "Traceback" not in server.command.output()
    wait_for_end(pids)
    assert not [path for path in segments if path.exists()]
    assert files_in(server.tmp) == []


@pytest.mark.slow
@pytest.mark.full
def test_a_second_start_reuses_the_conversion_calls_tools_and_kills_leave_nothing(
    mcore: Path, tmp_path: Path
):
    cache = ("--cache", str(tmp_path / "cache"))
    first = Server(tmp_path / "first", str(mcore), *cache)
    started = children(first.command.process.pid)
    segments = shared_memory(started)
    os.kill(next(pid for pid, line in started.items() if "EngineCore" in line), signal.SIGKILL)
    assert first.command.wait() == 1
    assert_mentions(first.command.output(), "engine", "killed", "same command")
    assert "Traceback" not in first.command.output()
    wait_for_end(started)
    assert not [path for path in segments if path.exists()]
    assert files_in(first.tmp) == []
    second = Server(tmp_path / "second", str(mcore), "--template", "qwen", *cache)
    assert "Converted" in first.command.output() and "Converted" not in second.command.output()
    client = pytest.importorskip("openai").OpenAI(base_url=second.url, api_key="none")
    # vLLM reports no call for a response of white space, so it gets room for more.
    chat = {"model": "tiny", "messages": QUESTION, "max_tokens": 96, "temperature": 0}
    choice = {"type": "function", "function": {"name": "add"}}
    forced = client.chat.completions.create(**chat, tools=[TOOL], tool_choice=choice).choices[0]
    assert forced.message.tool_calls, forced
    assert forced.message.tool_calls[0].function.name == "add"
    pids = second.pids
    second.command.process.send_signal(signal.SIGKILL)
    second.command.wait()
    wait_for_end(pids, limit_s=60)


@pytest.mark.slow
@pytest.mark.full
def test_256_clients_at_once_get_the_answers_of_one_after_the_other(folder: Path, tmp_path: Path):
    server = Server(tmp_path / "log", str(folder))
    openai = pytest.importorskip("openai")
    client = openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=300)
    questions = [f"{number}+{number % 7}=" for number in range(256)]

    async def answer(question: str) -> str:
        message = {"role": "user", "content": question}
        options = {"model": folder.name, "max_tokens": 12, "temperature": 0}
        reply = await client.chat.completions.create(messages=[message], **options)
        return reply.choices[0].message.content

    async def answer_all() -> tuple[list[str], list[str]]:
        together = await asyncio.gather(*map(answer, questions))
        return together, [await answer(question) for question in questions[::16]]

    together, alone = asyncio.run(answer_all())
    server.command.process.send_signal(signal.SIGTERM)
    assert server.command.wait() == 130
    assert together[::16] == alone and len(set(together)) > 16


LOST = """
    import subprocess, sys, time
    named = "open('/proc/self/comm', 'w').write('VLLM::Engine'); import time; time.sleep(600)"
    core = subprocess.Popen([sys.executable, "-c", named])
    time.sleep(2.5)
    core.kill()
    core.wait()
    print("(Worker pid=7) ERROR 12-01 [executor.py:1] the worker failed to start")
    print("(Worker pid=7) ERROR 12-01 [executor.py:1]", sys.argv[1])
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("error", "fragments"),
    [
        ("BrokenPipeError: [Errno 32] Broken pipe", ("engine", "killed")),
        ("ValueError: odd", ("code 1", "ValueError: odd")),
    ],
)
def test_the_loss_of_an_engine_that_loads_is_one_message(error: str, fragments: tuple[str, ...]):
    command = [sys.executable, "-c", textwrap.dedent(LOST), error]
    with (
        temporary.owned_folder("msrl-test-") as folder,
        pytest.raises(RunFailedError, match=mentions(*fragments)),
    ):
        run_server(command, os.environ, folder, "http://127.0.0.1:9", pytest.fail)
