"""Remote sandboxes and reward servers on real HTTP servers that answer, fail, stall and lie."""

import contextlib
import fcntl
import http.client
import json
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler

import numpy as np
import pytest

from http_servers import served_by
from msrl import http_requests
from msrl.errors import ManyErrors, MsrlError
from msrl.http_requests import RemoteError, Server, post_json
from msrl.rewards.remote import Item, Remote, address_refusal
from msrl.rewards.score import Scorer, Source
from msrl.rewards.sources import mistakes
from msrl.rewards.verifiers import code
from msrl.types import Completion, Image, PlacedImage, Prompt, RolloutGroup
from reward_groups import group, totals
from support import assert_each_mentions, assert_mentions, mentions, wait_until


@contextlib.contextmanager
def serve(answer):
    """Start a server on a free port and yield its URL and the received payloads.

    `answer(number, payload)` returns (status, headers, body bytes).
    """
    payloads, lock = [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                payloads.append(payload)
                number = len(payloads)
            status, headers, body = answer(
                number, {**payload, "path": self.path, "token": self.headers.get("Authorization")}
            )
            with contextlib.suppress(OSError):
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    with served_by(Handler) as url:
        yield url, payloads


def json_answer(value, status=200, **headers):
    return status, headers, json.dumps(value).encode()


def quick(url, timeout_s=10.0, **options):
    return Server(url, timeout_s, **{"backoff_s": 0.01, **options})


def test_an_attempt_that_may_succeed_is_retried():
    with serve(lambda n, _: json_answer({"n": n}, 200 if n > 3 else [500, 503, 429][n - 1])) as (
        url,
        payloads,
    ):
        assert post_json(quick(url), {"a": 1}) == ({"n": 4}, 3)
        assert payloads == [{"a": 1}] * 4


def test_a_server_on_this_machine_is_reached_without_the_proxy(monkeypatch):
    nowhere = urllib.request.ProxyHandler({"http": "http://127.0.0.1:9"})
    opener = urllib.request.build_opener(http_requests._AnyStatus, nowhere)
    monkeypatch.setattr(http_requests, "_opener", opener)
    with serve(lambda n, _: json_answer(n)) as (url, _):
        assert post_json(quick(url, retries=0), {}) == (1, 0)
        by_name = url.replace("127.0.0.1", "localhost")
        assert post_json(quick(by_name, retries=0), {}) == (2, 0)


def test_a_server_may_set_the_time_to_wait():
    with serve(lambda n, _: json_answer(n, 429 if n == 1 else 200, **{"Retry-After": "1"})) as (
        url,
        _,
    ):
        start = time.monotonic()
        assert post_json(quick(url), {}) == (2, 1)
        assert time.monotonic() - start >= 1.0


@pytest.mark.parametrize(
    ("answer", "fragments"),
    [
        (
            lambda n, _: json_answer("no such user", 401),
            ("status 401 Unauthorized", "no such user"),
        ),
        (lambda n, _: json_answer({}, 302, Location="http://127.0.0.1:1/"), ("status 302",)),
        (lambda n, _: (200, {}, b"<html>"), ("JSON", "b'<html>'")),
    ],
)
def test_permanent_errors_are_not_retried(answer, fragments):
    with serve(answer) as (url, payloads):
        with pytest.raises(RemoteError, match=url) as caught:
            post_json(quick(url), {})
        assert_mentions(caught.value, *fragments)
        assert (caught.value.kind, len(payloads)) == ("error", 1)


def test_an_answer_beyond_the_limit_is_not_requested_again(monkeypatch):
    monkeypatch.setattr(http_requests, "MAX_ANSWER_BYTES", 1 << 20)
    with serve(lambda n, _: json_answer("x" * (2 << 20))) as (url, payloads):
        with pytest.raises(RemoteError, match=mentions(url, "larger than 1 MiB")) as caught:
            post_json(quick(url), {})
        assert (caught.value.kind, len(payloads)) == ("error", 1)


@pytest.mark.parametrize(
    ("answer", "attempts"),
    [
        (lambda n, _: json_answer(n, 500), 3),
        (lambda n, _: (200, {"Content-Length": "100"}, b"short"), 3),
    ],
)
def test_the_number_of_attempts_is_limited(answer, attempts):
    with serve(answer) as (url, payloads):
        with pytest.raises(RemoteError, match=mentions(f"{attempts} attempts")) as caught:
            post_json(quick(url, retries=attempts - 1), {})
        assert (caught.value.kind, len(payloads)) == ("error", attempts)


def read_request(connection):
    with connection.makefile("rb") as stream:
        stream.readline()
        stream.read(int(http.client.parse_headers(stream)["Content-Length"]))


def wait_for_delivery(connection):
    """Wait until the peer's kernel has received all that was sent (tcp(7), SIOCOUTQ)."""
    wait_until(lambda: not any(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))))


@contextlib.contextmanager
def reset_after(answer):
    """Start a server that sends these bytes and resets the connection; yield its URL.

    Overloaded proxies behave like this.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    read_request(connection)
                    connection.sendall(answer)
                    wait_for_delivery(connection)  # the answer arrives, then the reset
                    connection.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    ("answer", "fragments"),
    [
        (b"HTTP/1.1 503 Full\r\nContent-Length: 100\r\n\r\nbus", ("2 attempts", "status 503 Full")),
        (
            b"HTTP/1.1 500 Oh\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            ("2 attempts", "status 500 Oh"),
        ),
        (b"HTTP/1.1 429 Slow\r\nRetry-After: \xb2\r\n\r\n", ("2 attempts", "status 429 Slow")),
        (b"HTTP/1.1 404 No\r\nContent-Length: 100\r\n\r\n", ("status 404 No",)),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000, ("JSON", "b'[[[")),
    ],
)
def test_a_refusal_whose_text_does_not_arrive_is_reported_like_any_other(answer, fragments):
    with reset_after(answer) as url, pytest.raises(RemoteError) as caught:
        post_json(quick(url, retries=1), {})
    assert_mentions(caught.value, *fragments)


SECRET = "s3cr3t-t0ken"


@pytest.mark.parametrize("status", [200, 401, 503])
def test_secrets_that_a_server_repeats_are_in_no_message(monkeypatch, status):
    monkeypatch.setenv("MSRL_TEST_TOKEN", SECRET)

    def answer(number, payload):
        return status, {}, f"no access with {payload['token']} to {payload['path']}".encode()

    with serve(answer) as (url, _):
        address = url + "/${env:MSRL_TEST_TOKEN}"
        headers = {"Authorization": f"Bearer {SECRET}"}
        with pytest.raises(RemoteError, match=mentions("no access")) as caught:
            post_json(quick(address, retries=1, headers=headers), {})
        assert SECRET not in str(caught.value)
    with serve(lambda n, payload: json_answer({"error": payload["token"]})) as (url, _):
        headers = {"Authorization": "Bearer ${env:MSRL_TEST_TOKEN}"}
        (result,) = Remote(url, 5.0, headers=headers).score([Item("a", "b")])
        assert "expected" in result.detail and SECRET not in result.detail


@pytest.mark.parametrize(
    "url",
    [
        "http://user:${env:MSRL_TEST_TOKEN}@host/v1",
        "http://${env:MSRL_TEST_TOKEN}@host",
        "http://host:${env:MSRL_TEST_TOKEN}/v1",
        "http://host:99999",
        "http://[::1",
        "http://",
    ],
)
def test_an_address_that_http_cannot_use_is_refused_without_its_secrets(monkeypatch, url):
    monkeypatch.setenv("MSRL_TEST_TOKEN", SECRET)
    reason = address_refusal(url)
    assert reason is not None and SECRET not in reason


def test_a_server_that_is_down_or_stalls_ends_with_the_deadline():
    given_up = threading.Event()

    def stall(n, _):
        given_up.wait(60)
        return json_answer(n)

    with serve(stall) as (url, _):
        start = time.monotonic()
        with pytest.raises(RemoteError, match=mentions("0.4 s", "attempts")):
            post_json(quick(url, timeout_s=0.4), {})
        assert time.monotonic() - start < 20
        given_up.set()
    with pytest.raises(RemoteError, match="Connection refused") as caught:
        post_json(quick(url, timeout_s=0.3, retries=100), {})
    assert caught.value.kind == "timeout"


def fusion(number, payload):
    """Run the program and return the answer of SandboxFusion's /run_code."""
    assert payload["path"] == "/run_code"
    assert payload["language"] == "python"
    done = subprocess.run(
        [sys.executable, "-I", "-c", payload["code"]],
        input=payload["stdin"],
        capture_output=True,
        text=True,
        check=False,
    )
    result = {
        "status": "Finished",
        "return_code": done.returncode,
        "stdout": done.stdout,
        "stderr": done.stderr,
        "execution_time": 0.1,
    }
    return json_answer(
        {
            "status": "Success" if done.returncode == 0 else "Failed",
            "message": "",
            "compile_result": None,
            "run_result": result,
        }
    )


def test_code_is_scored_by_a_remote_sandbox():
    answer = json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]})
    with serve(fusion) as (url, payloads):
        assert (
            code.score("```python\nprint(sum(map(int, input().split())))\n```", answer, url=url)
            == 1.0
        )
        assert code.score("```python\nprint(3)\n```", answer, url=url, partial=True) == 0.5
        assert code.score("```python\nraise SystemExit(1)\n```", answer, url=url) == 0.0
        assert (payloads[0]["run_timeout"], payloads[0]["memory_limit_MB"], len(payloads)) == (
            4.0,
            512,
            5,
        )
    with (
        serve(lambda n, _: json_answer({"status": "SandboxError", "message": "full"})) as (url, _),
        pytest.raises(RemoteError, match="full"),
    ):
        code.score("```python\nprint(3)\n```", answer, url=url)


def lengths(number, payload):
    """Return the length of each response as its reward."""
    return json_answer({"rewards": [len(response) for response in payload["responses"]]})


def test_a_server_scores_in_batches_beside_the_verifiers():
    with serve(lengths) as (url, payloads):
        sources = [
            Source(verifier="exact_match"),
            Source(
                url=url, weight=0.5, options={"batch": 2, "headers": {"Authorization": "Bearer x"}}
            ),
        ]
        with Scorer(sources, 1, prompt_text=lambda _: "Q: ") as scorer:
            scores = scorer.score([group("4", "333", answer="4", grade="a"), group("22", index=1)])
    assert totals(scores) == [[1.5, 1.5], [1.0]]
    assert scores.groups[0].rewards[0].scores == {"exact_match": 1.0, "remote": 1.0}
    assert scores.failures == {}
    by_size = sorted(payloads, key=lambda p: -len(p["responses"]))
    assert by_size[0] == {
        "queries": ["Q: 4", "Q: 333"],
        "prompts": ["Q: ", "Q: "],
        "responses": ["4", "333"],
        "references": ["4", "4"],
        "extra": [{"grade": "a"}, {"grade": "a"}],
    }
    assert by_size[1]["responses"] == ["22"]


def test_a_query_has_the_token_that_ended_the_response():
    texts = {1: "Q: ", 2: "4", 3: "<|im_end|>"}
    prompt = Prompt(0, np.array([1]))
    completions = tuple(
        Completion(np.array(ids), np.zeros(len(ids), np.float32), reason, 0, "4")
        for ids, reason in (([2, 3], "stop"), ([2], "length"))
    )

    def decode(ids):
        return "".join(texts[number] for number in ids.tolist())

    with (
        serve(lengths) as (url, payloads),
        Scorer([Source(url=url)], 1, prompt_text=decode) as scorer,
    ):
        scorer.score([RolloutGroup(prompt, completions)])
    assert payloads[0]["queries"] == ["Q: 4<|im_end|>", "Q: 4"]
    assert payloads[0]["responses"] == ["4", "4"]


def test_a_prompt_has_one_token_for_each_image_on_a_server():
    grid = (1, 4, 4)  # 4 tokens
    images = tuple(PlacedImage(start, Image("a", grid, b"")) for start in (1, 6))
    prompt = Prompt(0, np.array([5, 6, 6, 6, 6, 5, 6, 6, 6, 6]), images=images)
    rollouts = [RolloutGroup(prompt, group("x").completions)]

    def decode(token_ids):
        return " ".join(map(str, token_ids))

    with (
        serve(lengths) as (url, payloads),
        Scorer([Source(url=url)], 1, prompt_text=decode) as scorer,
    ):
        scorer.score(rollouts)
    assert payloads[0]["prompts"] == ["5 6 5 6"]


def test_a_prompt_can_come_from_a_column_and_a_token_goes_along(monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "x")
    tokens = []

    def answer(number, payload):
        tokens.append(payload["token"])
        return lengths(number, payload)

    with serve(answer) as (url, payloads):
        options = {
            "prompt_column": "question",
            "headers": {"Authorization": "Bearer ${env:REWARD_TOKEN}"},
        }
        with Scorer([Source(url=url, options=options)], 1) as scorer:
            scorer.score([group("a", question="why?")])
            with pytest.raises(MsrlError, match=mentions("prompt_column=question", "column")):
                scorer.score([group("a")])
    assert (payloads[0]["prompts"], tokens) == (["why?"], ["Bearer x"])


@pytest.mark.parametrize(
    ("answer", "fragments"),
    [
        (
            lambda n, _: json_answer({"rewards": [1.0]}),
            ("error", "prompt 7", '{"rewards": [2 numbers]}'),
        ),
        (lambda n, _: json_answer([1.0, 2.0]), ("prompt 7", "[1.0, 2.0]")),
        (lambda n, _: json_answer({"rewards": [1.0, None]}), ("None", "reward")),
        (lambda n, _: (200, {}, b'{"rewards": [1.0, NaN]}'), ("nan", "reward")),
        (lambda n, _: json_answer({"rewards": [1.0, 10**400]}), ("prompt 7", "reward", "finite")),
        (lambda n, _: json_answer({}, 404), ("status 404",)),
    ],
)
def test_a_server_that_fails_ends_the_run_and_is_reported(answer, fragments):
    with (
        serve(answer) as (url, _),
        Scorer([Source(url=url)], 1) as scorer,
        pytest.raises(MsrlError, match=mentions(*fragments)),
    ):
        scorer.score([group("a", "b", index=7)])


def test_a_server_that_is_down_leaves_its_part_undecided_when_so_configured():
    options = {"batch": 1, "retries": 1, "backoff_s": 0.01}
    source = {"on_failure": "undecided", "options": options, "timeout_s": 5.0}
    with serve(lambda n, p: json_answer({}, 500) if "b" in p["responses"] else lengths(n, p)) as (
        url,
        payloads,
    ):
        with Scorer([Source(url=url, **source), Source(verifier="exact_match")], 1) as scorer:
            scores = scorer.score([group("a", "b", "ccc")])
        assert len(payloads) == 4
    assert totals(scores) == [[1.0, 2.0, 3.0]]
    assert scores.failures == {"remote/error": 1}
    assert_mentions(scores.notes[0], "remote/error: 1 ", "undecided", "prompt 0", "http://")
    with Scorer(
        [Source(url="http://127.0.0.1:9/", **source), Source(verifier="exact_match")], 1
    ) as scorer:
        scores = scorer.score([group("4", "b")])
    assert (totals(scores), scores.failures) == ([[0.0, 0.0]], {"remote/error": 2})
    assert not any(scores.groups[0].is_decided)


def test_repeated_requests_are_counted():
    busy = serve(lambda n, p: json_answer({}, 503) if n < 3 else lengths(n, p))
    with busy as (url, _), Scorer([Source(url=url, options={"backoff_s": 0.01})], 1) as scorer:
        assert scorer.score([group("a")]).failures == {"remote/retried": 2}
        assert scorer.score([group("a")]).failures == {}


def test_problems_of_a_server_or_a_model_are_reported_before_the_run(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    messages = [
        message
        for _, _, message in mistakes(
            [
                Source(url="localhost:1"),
                Source(url="http://a", name="b", options={"batch": 0}),
                Source(model="nowhere"),
                Source(model=str(tmp_path), name="c"),
                Source(url="http://a", name="d", options={"bach": 1, "retries": "x"}),
                Source(
                    url="http://a", name="e", options={"headers": {"Authorization": "Bearer x\n"}}
                ),
                Source(
                    url="http://a",
                    name="f",
                    options={"headers": {"Authorization": "${env:MSRL_NO_SUCH_TOKEN}"}},
                ),
            ]
        )
    ]
    assert_each_mentions(
        messages,
        ("http://", "https://"),
        ("options.batch", "concurrency", "retries", "backoff_s"),
        ("config.json", "Hugging Face", "megatron"),
        ("Qwen2ForCausalLM", "scalar head"),
        ("option", "'batch'"),
        ("integer",),
        ("options.headers.Authorization", "line feed"),
        ("options.headers", "MSRL_NO_SUCH_TOKEN"),
    )
    with pytest.raises(ManyErrors, match=mentions("reward.sources[0].url=localhost:1: ", "http")):
        Scorer([Source(url="localhost:1")], 1)
