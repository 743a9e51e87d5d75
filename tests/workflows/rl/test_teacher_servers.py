"""Teachers on servers: the client, its advantages, checks, and a real server in a training."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from http_servers import served_by
from msrl.cli.configuration import load_configuration as load
from msrl.config.secrets import recorded
from msrl.config.sections.algo import TeacherConfig
from msrl.data.tokenizer import open_tokenizer
from msrl.errors import MsrlError
from msrl.plan.run_plan import resolve
from msrl.rollout.teacher_server import TeacherServer
from msrl.tracking.rollouts import read_records
from msrl.trainer.objective.losses import Outputs, PolicyLoss, teacher_weight
from msrl.types import Completion, Prompt, Reward, RolloutGroup, ScoredGroup
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.teacher_servers import (
    TeacherAnswer,
    TeacherServers,
    connect,
    teacher_advantages,
    token_texts,
)
from msrl.workflows.rl.update.updater import Updater
from support import assert_mentions, mentions
from test_cli import msrl
from test_grpo_update import Ranks, all_advantages
from test_serve import Server
from tiny_qwen2 import make_tokenizer, save_model
from training_runs import metrics, succeed, write_rows
from transformers_logprobs import token_logprobs

KEY = "algo.distill.teachers.0.url"
SECRET = "correct-horse-battery"
Answer = Callable[[str, Any], tuple[int, object]]  # (path, payload) -> status and body


@contextlib.contextmanager
def serve(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Start an HTTP server; yield its base URL and the received requests."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            payload = json.loads(self.rfile.read(size)) if size else None
            token = self.headers.get("Authorization")
            requests.append({"path": self.path, "payload": payload, "token": token})
            status, body = answer(self.path, payload)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *_: object) -> None:
            pass

    with served_by(Handler) as url:
        yield f"{url}/v1", requests


def models(*names: str, max_model_len: int = 100) -> object:
    return {"data": [{"id": name, "max_model_len": max_model_len} for name in names]}


def completion(entries: object) -> object:
    return {"choices": [{"prompt_logprobs": entries}]}


def entries(token_ids: list[int], text: str | None = None) -> list[Any]:
    """Return log-probabilities of -0.1 times the id, as vLLM does."""
    named = [{str(i): {"logprob": -0.1 * i, "decoded_token": text}} for i in token_ids]
    return [None, *named[1:]]


def plain_answer(path: str, payload: Any) -> tuple[int, object]:
    if path.endswith("/models"):
        return 200, models("big")
    return 200, completion(entries(payload["prompt"]))


def make_server(url: str, **section: Any) -> TeacherServer:
    section = {"timeout_s": 5.0, "retries": 0, **section}
    return TeacherServer(TeacherConfig(url=url, **section), KEY, "big")


# --- mathematics ---


def test_the_expected_policy_gradient_is_minus_that_of_the_reverse_divergence() -> None:
    """Sum over all tokens of a vocabulary of p(token) times the gradient of its policy loss."""
    torch.manual_seed(0)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, dtype=torch.float64).log_softmax(-1)
    (logits.softmax(-1) @ (logits.log_softmax(-1) - teacher)).backward()
    assert logits.grad is not None
    policy = logits.detach().log_softmax(-1).numpy().astype(np.float32)
    # One sequence per token of the vocabulary, with one response token behind a prompt token.
    rows = [np.array([0.0, value], np.float32) for value in policy]
    answers = {n: np.array([0.0, float(q)], np.float32) for n, q in enumerate(teacher)}
    advantages = teacher_advantages(rows, [TeacherAnswer(1.0, answers)])
    leaf = logits.detach().clone().requires_grad_()
    outputs = Outputs(leaf.log_softmax(-1), torch.arange(7))
    fields = {
        "advantages": torch.tensor([row[1] for row in advantages], dtype=torch.float64),
        "weights": logits.detach().softmax(-1),  # the probability that the token is sampled
    }
    loss, _ = PolicyLoss(1.0, needs_entropy=False)(outputs, fields, 7.0)
    loss.backward()
    torch.testing.assert_close(leaf.grad, logits.grad, atol=1e-6, rtol=1e-5)


def test_weights_of_teachers_add_up_and_sequences_without_one_have_no_advantage() -> None:
    policy = [np.array([0.0, -1.0, -2.0], np.float32), np.array([0.0, -1.0], np.float32)]
    answers = [
        TeacherAnswer(0.5, {0: np.array([0.0, -3.0, -1.0], np.float32)}),
        TeacherAnswer(2.0, {0: np.array([0.0, -2.0, -2.5], np.float32)}),
    ]
    first, second = teacher_advantages(policy, answers)
    assert first.tolist() == [0.0, -3.0, -0.5]
    assert second.tolist() == [0.0, 0.0]


# --- client ---


def test_the_client_sends_token_ids_and_reads_their_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEACHER_KEY", SECRET)
    with serve(plain_answer) as (url, requests):
        server = make_server(f"{url}/", api_key="${env:TEACHER_KEY}")
        values = server.logprobs(np.array([7, 3, 20]))
        server.connect(99)
    np.testing.assert_allclose(values, [0.0, -0.3, -2.0], rtol=1e-6)
    first, second = requests
    assert first["path"] == "/v1/completions" and second["path"] == "/v1/models"
    assert first["payload"]["prompt"] == [7, 3, 20] and first["payload"]["model"] == "big"
    assert {request["token"] for request in requests} == {f"Bearer {SECRET}"}


def test_temporary_errors_are_retried_within_the_limit() -> None:
    statuses = iter((503, 429))

    def answer(path: str, payload: Any) -> tuple[int, object]:
        status = next(statuses, 200)
        return status, completion(entries(payload["prompt"]))

    with serve(answer) as (url, requests):
        make_server(url, retries=2).logprobs(np.array([1, 2]))
    assert len(requests) == 3


@pytest.mark.parametrize(
    ("answer", "fragment"),
    [
        ((200, completion(entries([1, 2]))), "3 tokens"),
        ((200, completion(entries([1, 2, 4]))), "token 3"),
        ((200, completion([None, {"2": {"logprob": "NaN"}}, {"3": {"logprob": 0.0}}])), "token 2"),
        ((200, {"choices": [{"text": "a"}]}), "prompt_logprobs"),
        ((200, []), "prompt_logprobs"),
        ((400, {"error": "too long"}), "too long"),
        ((503, {"error": "busy"}), "busy"),
    ],
)
def test_an_unusable_answer_is_an_error_with_the_address(
    answer: tuple[int, object], fragment: str
) -> None:
    with (
        serve(lambda *_: answer) as (url, _),
        pytest.raises(MsrlError, match=mentions(KEY, url, fragment)),
    ):
        make_server(url).logprobs(np.array([1, 2, 3]))


def test_a_server_that_is_absent_is_an_error_with_the_address() -> None:
    with pytest.raises(MsrlError, match=mentions(KEY, "http://127.0.0.1:9/v1", "refused")):
        make_server("http://127.0.0.1:9/v1").connect(10)


def test_the_model_of_the_server_must_be_known_and_long_enough() -> None:
    with serve(lambda *_: (200, models("a", "b"))) as (url, _):
        with pytest.raises(MsrlError, match=mentions(url, "served_name", "a, b")):
            make_server(url).connect(10)
        with pytest.raises(MsrlError, match=mentions(url, "served_name", "c")):
            make_server(url, served_name="c").connect(10)
        assert make_server(url, served_name="b").connect(99).name == "b"
        with pytest.raises(MsrlError, match=mentions(url, "100", "max_model_len")):
            make_server(url, served_name="b").connect(100)
    with (
        serve(lambda *_: (200, {"object": "error"})) as (url, _),
        pytest.raises(MsrlError, match=mentions(url, "models")),
    ):
        make_server(url).connect(10)


def test_a_server_with_other_tokens_is_refused(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = open_tokenizer(tmp_path)
    texts = token_texts(tokenizer, 1000)
    assert len(texts) == 256 and min(texts) == 0 and max(texts) == tokenizer.vocab_size - 1

    def answer_with(text: Callable[[int], str | None]) -> Answer:
        def answer(path: str, payload: Any) -> tuple[int, object]:
            if path.endswith("/models"):
                return 200, models("big", max_model_len=2000)
            ids = payload["prompt"]
            rows = [{str(i): {"logprob": -1.0, "decoded_token": text(i)}} for i in ids]
            return 200, completion([None, *rows[1:]])

        return answer

    def notes(text: Callable[[int], str | None]) -> str:
        with serve(answer_with(text)) as (url, _):
            return connect([TeacherConfig(url=url)], tokenizer, 1000).notes[0]

    assert_mentions(notes(lambda i: f" {texts[i]}"), "big", "policy")
    assert_mentions(notes(lambda _: None), "warning", KEY, "tokenizer")
    with pytest.raises(MsrlError, match=mentions(KEY, "tokenizer", "token 72")):
        notes(lambda i: "other" if i == 72 else texts[i])


# --- a step ---


def group(index: int, tag: str, *rewards: float) -> ScoredGroup:
    """Return a group whose responses are the tokens 1, 2 and 3."""
    answer = Completion(np.array([1, 2, 3]), np.full(3, -1.0, np.float32), "stop", 0, "")
    prompt = Prompt(index, np.array([7, 8]), extra={"tag": tag})
    totals = tuple(Reward(total, {}) for total in rewards)
    return ScoredGroup(RolloutGroup(prompt, (answer,) * len(rewards)), totals)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a configuration with a model and data."""
    folder = tmp_path_factory.mktemp("servers")
    save_model(folder / "student", tied=False)
    preprocess(folder, 4)
    settings = {
        "model": {"path": str(folder / "student"), "dtype": "float32"},
        "data": {"train": str(folder / "rl")},
        "rollout": {
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "max_prompt_tokens": 128,
            "max_response_tokens": 64,
        },
        "reward": {"sources": [{"verifier": "acc"}]},
        "train": {"steps": 3},
    }
    (folder / "rl.yaml").write_text(yaml.safe_dump(settings))
    return folder / "rl.yaml"


def preprocess(folder: Path, num_rows: int) -> None:
    """Write prompts for the model in the folder `student`."""
    questions = [{"question": f"What is {i} + {i}?", "answer": str(i)} for i in range(num_rows)]
    source = str(write_rows(folder / "rl.jsonl", questions))
    arguments = ["--input", source, "--tokenizer", str(folder / "student"), "--template", "qwen"]
    columns = '{"prompt": "question", "response": "answer"}'
    arguments += ["--handler", "r1", "--map-keys", columns]
    assert msrl("preprocess", *arguments, "--output-prefix", str(folder / "rl")) == 0


def plan_step(file: Path, url: str, command: str, *sets: str) -> tuple[list[Any], dict[str, float]]:
    """Return the advantages of a step's samples and its metrics."""
    from msrl.config.loader import load as read

    teachers = f"algo.distill.teachers=[{{url: '{url}', weight: 0.5, tags: [math]}}]"
    config = resolve(read([str(file)], [teachers, *sets]).config, command).config
    servers = TeacherServers([make_server(url, weight=0.5, tags=("math",))])
    ranks: Any = Ranks()
    has_rewards = command == "train-grpo"
    updater = Updater(config, ranks, 3, {}, servers, has_rewards=has_rewards)
    clock = Clock()
    prepared = updater.prepare([group(0, "math", 1.0, 0.0), group(1, "code", 1.0, 0.0)], clock)
    assert "teachers" in clock.seconds
    return all_advantages(prepared), dict(prepared.metrics)


# Teacher: -0.1, -0.2 and -0.3; policy: -1. Weight 0.5.
TAUGHT = [0.45, 0.4, 0.35]


def test_train_grpo_adds_the_advantages_of_teachers_to_those_of_rewards(config_file: Path) -> None:
    sets = ("algo.distill.coef=2.0", "algo.advantage.estimator=rloo", "algo.advantage.clip=1.85")
    with serve(plain_answer) as (url, requests):
        advantages, report = plan_step(config_file, url, "train-grpo", *sets)
    expected = [
        np.minimum(1.0 + 2 * np.array(TAUGHT), 1.85),
        -1.0 + 2 * np.array(TAUGHT),
        [1.0] * 3,
        [-1.0] * 3,
    ]
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)
    assert report["distill_kl"] == pytest.approx(-sum(TAUGHT) / 6, rel=1e-5)
    assert len(requests) == 2 and requests[0]["payload"]["prompt"] == [7, 8, 1, 2, 3]


def test_train_distill_has_no_advantages_of_rewards(config_file: Path) -> None:
    with serve(plain_answer) as (url, _):
        advantages, _ = plan_step(config_file, url, "train-distill")
    np.testing.assert_allclose(advantages, [TAUGHT, TAUGHT, [0.0] * 3, [0.0] * 3], rtol=1e-5)


def test_the_weights_by_tag_are_those_of_the_teachers_on_the_ranks(config_file: Path) -> None:
    first = TeacherConfig(url="http://a/v1", tags=("math",), weight=5.0)
    second = TeacherConfig(model="self", tags=("code",), weight=2.0)
    config = load([str(config_file)]).config
    distill = config.algo.distill.model_copy(update={"teachers": (first, second)})
    algo = config.algo.model_copy(update={"distill": distill})
    ranks: Any = Ranks()
    updater = Updater(config.model_copy(update={"algo": algo}), ranks, 3, {}, has_rewards=True)
    prepared = updater.prepare([group(0, "math", 1.0, 0.0), group(1, "code", 1.0, 0.0)], Clock())
    weights = [row.tolist() for row in prepared.sequences.fields[teacher_weight(0)]]
    assert [max(row) for row in weights] == [0.0, 0.0, 2.0, 2.0]


@pytest.mark.full
@pytest.mark.slow
def test_an_interrupted_program_does_not_wait_for_running_requests(tmp_path: Path) -> None:
    """Run a program that ends while a server does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        start = time.monotonic()
        subprocess.run([sys.executable, "-c", INTERRUPTED, url], check=True, timeout=60)
        assert time.monotonic() - start < 30


INTERRUPTED = """
import sys
import numpy as np
from msrl.algorithms.packing import Sequences
from msrl.config.sections.algo import TeacherConfig
from msrl.rollout.teacher_server import TeacherServer
from msrl.workflows.rl.teacher_servers import _start_requests

class Rows:
    token_ids = (np.arange(4),)

section = TeacherConfig(url=sys.argv[1], timeout_s=60.0)
requests = _start_requests(TeacherServer(section, "url"), Rows(), [0])
while not requests[0].running():
    pass
"""


def test_a_failed_request_ends_the_step(config_file: Path) -> None:
    with (
        serve(lambda *_: (400, {"error": "too long"})) as (url, _),
        pytest.raises(MsrlError, match=mentions(KEY, url, "too long")),
    ):
        plan_step(config_file, url, "train-distill")


# --- configuration ---


@pytest.fixture
def check(config_file: Path) -> Callable[..., Any]:
    def checked(*sets: str, teachers: str = "{url: 'http://a/v1'}", command: str = "train-grpo"):
        return load(
            [str(config_file)], [f"algo.distill.teachers=[{teachers}]", *sets], command=command
        )

    return checked


def test_a_key_is_only_the_name_of_a_variable_and_is_never_written(
    check: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", SECRET)
    secret = "{url: 'http://a/${env:TEACHER_KEY}/v1', api_key: '${env:TEACHER_KEY}'}"
    resolved = check(teachers=secret)
    teacher = resolved.config.algo.distill.teachers[0]
    assert teacher.api_key == "${env:TEACHER_KEY}"
    assert SECRET not in json.dumps(recorded(resolved.config)) + repr(resolved.config)
    with pytest.raises(
        MsrlError, match=mentions("algo.distill.teachers.0.api_key", "env")
    ) as error:
        check(teachers=f"{{url: 'http://a/v1', api_key: {SECRET}}}")
    assert SECRET not in str(error.value)
    for more, sets in (("", ("algo.policy_loss=gmpo",)), (", unknown: 1", ()), ("]", ())):
        key = f"[{SECRET}{more}" if more == "]" else f"{SECRET}{more}"
        with pytest.raises(MsrlError) as error:
            check(*sets, teachers=f"{{url: 'http://a/v1', api_key: {key}}}")
        assert SECRET not in str(error.value)
    monkeypatch.setenv("TEACHER_KEY", "two\nlines")
    with pytest.raises(MsrlError, match=mentions("algo.distill.teachers.0.api_key", "line")):
        check(teachers=secret)
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(MsrlError, match=mentions("TEACHER_KEY", "not set")):
        check(teachers=secret)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("teachers", "sets", "fragments"),
    [
        ("{weight: 1.0}", (), ("algo.distill.teachers.0", "model", "url")),
        ("{model: x, url: 'http://a'}", (), ("algo.distill.teachers.0", "model", "url")),
        ("{url: 'host:8000'}", (), ("algo.distill.teachers.0.url", "host:8000", "http")),
        ("{url: 'http://a/v1?key=b'}", (), ("algo.distill.teachers.0.url", "query")),
        ("{model: self, api_key: x}", (), ("algo.distill.teachers.0.api_key", "url")),
        ("{model: self, timeout_s: 3.0}", (), ("algo.distill.teachers.0.timeout_s", "url")),
        (
            "{url: 'http://a'}, {url: 'http://a', tags: [b]}",
            (),
            ("algo.distill.teachers.1.url", "duplicate"),
        ),
        (
            "{url: 'http://a'}",
            ("rollout.sampling.temperature=0.7",),
            ("rollout.sampling.temperature", 0.7, "url"),
        ),
        (
            "{url: 'http://a'}",
            ("algo.distill.divergence=forward_kl",),
            ("algo.distill.divergence", "forward_kl", "server"),
        ),
        ("{url: 'http://a'}", ("algo.sft.coef=0.1",), ("algo.sft.coef", 0.1, "url")),
        (
            "{url: 'http://a'}",
            ("algo.rl_coef=0.0", "algo.entropy_coef=0.1"),
            ("algo.rl_coef", 0.0, "url"),
        ),
        (
            "{url: 'http://a'}",
            ("algo.policy_loss=gmpo",),
            ("algo.distill.teachers", "url", "one advantage"),
        ),
        ("{url: 'http://a'}", ("algo.distill.top_k=5",), ("algo.distill.top_k", "advantage")),
    ],
)
def test_settings_that_contradict_a_server_are_refused(
    check: Callable[..., Any], teachers: str, sets: tuple[str, ...], fragments: tuple[object, ...]
) -> None:
    with pytest.raises(MsrlError, match=mentions(*fragments)):
        check(*sets, teachers=teachers)


def test_train_distill_with_a_server_trains_with_the_policy_loss_only(
    check: Callable[..., Any],
) -> None:
    sets = ("algo.advantage.clip=5.0", "algo.rl_coef=1.0")
    plan = resolve(check(*sets, command="train-distill").config, "train-distill")
    assert plan.config.algo.rl_coef == 1.0 and not plan.teachers
    both = check(
        "algo.distill.divergence=forward_kl", teachers="{url: 'http://a'}, {model: self}"
    ).config
    assert [teacher.model for teacher in both.algo.distill.on_ranks] == ["self"]
    with pytest.raises(MsrlError, match=mentions("algo.clip.high", "train-grpo")):
        check("algo.clip.high=0.3", command="train-distill")


# --- a real server ---


@pytest.mark.slow
@pytest.mark.full
def test_a_served_teacher_has_the_log_probabilities_of_its_model_and_trains_a_student(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("TEACHER_KEY", SECRET)
    for seed, name in enumerate(("student", "teacher")):
        save_model(tmp_path / name, tied=False, seed=seed)
    stranger = make_tokenizer()
    stranger.add_tokens(["<other>"])
    (tmp_path / "key").write_text(SECRET)
    arguments = [str(tmp_path / "teacher"), "--template", "qwen"]
    server = Server(tmp_path / "log", *arguments, "--api-key-file", str(tmp_path / "key"))
    try:
        section = TeacherConfig(url=server.url, api_key="${env:TEACHER_KEY}")
        tokenizer = open_tokenizer(tmp_path / "student")
        assert_mentions(connect([section], tokenizer, 128).notes[0], "policy")
        client = TeacherServer(section, KEY).connect(128)
        ids = np.random.default_rng(0).integers(3, 250, 40)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32)
        np.testing.assert_allclose(client.logprobs(ids), all_logprobs(model, ids), atol=1e-3)
        _refuses_other_tokens(client, stranger)
        _trains(tmp_path, server.url)
    finally:
        server.command.kill()


def _refuses_other_tokens(client: TeacherServer, stranger: Any) -> None:
    texts = {i: stranger.decode([i]) for i in range(3, 100)}
    texts[50] = "other"
    with pytest.raises(MsrlError, match=mentions("tokenizer", "token 50")):
        client.compare_tokens(texts)
    beyond = stranger.convert_tokens_to_ids("<other>") + 1000
    with pytest.raises(MsrlError, match=mentions(KEY, "vocabulary")):
        client.compare_tokens({5: "a", beyond: "<other>"})


def _trains(folder: Path, url: str) -> None:
    """Run steps of train-distill, and compare the advantages with transformers'."""
    from transformers import AutoModelForCausalLM

    preprocess(folder, 16)
    config = {
        "run": {"dir": str(folder / "runs"), "name": "distill"},
        "model": {"path": str(folder / "student"), "dtype": "float32"},
        "data": {"train": str(folder / "rl")},
        "cluster": {"platform": "cpu", "rpc_timeout_s": 300.0},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "max_prompt_tokens": 128,
            "max_response_tokens": 16,
            "engine": {"dp": 1},
        },
        "algo": {"distill": {"teachers": [{"url": url, "api_key": "${env:TEACHER_KEY}"}]}},
        "train": {"steps": 2, "micro_batch": 4, "optimizer": {"lr": 1e-3}},
        "log": {"trackers": [], "rollouts": "parquet"},
    }
    (folder / "distill.yaml").write_text(yaml.safe_dump(config))
    succeed("train-distill", "-c", str(folder / "distill.yaml"), log=folder / "train.log")
    run = folder / "runs" / "distill"
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        for name in ("student", "teacher")
    )
    records = read_records(run / "rollouts" / "step_000001.parquet")
    expected = [
        (all_logprobs(teacher, r.token_ids) - all_logprobs(student, r.token_ids))[r.is_sampled]
        for r in records
    ]
    actual = [record.advantages[record.is_sampled] for record in records]
    np.testing.assert_allclose(np.concatenate(actual), np.concatenate(expected), atol=2e-3)
    first, second = metrics(run)
    assert first["train/distill_kl"] == pytest.approx(-np.concatenate(expected).mean(), abs=2e-3)
    assert second["train/distill_kl"] > 0 and first["train/grad_norm"] > 0
    for path in (*run.glob("*.yaml"), run / "log.txt", folder / "train.log"):
        assert SECRET not in path.read_text()


def all_logprobs(model: Any, token_ids: np.ndarray) -> np.ndarray:  # [T] -> [T]
    """Return the log-probability of every token; 0 for the first."""
    return np.concatenate(([0.0], token_logprobs(model, token_ids)))
