"""Trainings whose reward is a judge behind a real HTTP server, which talks nonsense and fails."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Literal

import pytest

from http_servers import served_by
from support import assert_mentions
from tiny_qwen2 import save_model
from training_runs import Command, rows, succeed, write_config, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.full]
STEPS, SAMPLES = 3, 16
NONSENSE = "As a language model, I like this answer."


@dataclass
class JudgeServer:
    """Behavior of the judge: `good` from 0 to 10, or one that fails.

    While it is `good`, it answers every fourth request of the first step with nonsense, and it
    dies in the last step.
    """

    run: Path
    behavior: Literal["good", "slow"] = "good"
    dies_in: int | None = STEPS
    lock: Any = field(default_factory=threading.Lock)
    requests: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def answer(self, payload: Any) -> bytes | None:
        """Return the body of the answer to a request; None to close the connection."""
        with self.lock:
            self.requests += 1
            is_fourth = self.requests % 4 == 0
        step = len(rows(self.run)) + 1 if (self.run / "metrics.jsonl").exists() else 1
        if step == self.dies_in:
            return None
        if self.behavior == "slow":
            self.over.wait(60)
        answer = json.loads(payload["messages"][1]["content"])["answer"]
        vote = json.dumps({"length": len(answer) % 11})
        text = NONSENSE if step == 1 and is_fourth else vote
        message = {"message": {"role": "assistant", "content": text}}
        return json.dumps({"choices": [message]}).encode()


def handler(judge: JudgeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = judge.answer(payload)
            if body is None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            with contextlib.suppress(OSError):  # the run did not wait
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def settings(folder: Path, url: str) -> dict[str, Any]:
    options = {
        "model": "judge",
        "criteria": {"length": "The answer has the right length."},
        "response_format": "none",
        "retries": 1,
        "backoff_s": 0.0,
        "cache": str(folder / "votes.jsonl"),
    }
    return {
        "run": {"name": "judged", "dir": str(folder / "runs"), "seed": 5},
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl")},
        "preprocess": {"handler": "gsm8k"},
        "cluster": {"platform": "cpu"},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_prompt_tokens": 200,
            "max_response_tokens": 8,
            "engine": {"max_num_seqs": 16},
        },
        "reward": {"sources": [{"judge": f"{url}/v1", "timeout_s": 3.0, "options": options}]},
        "train": {"steps": STEPS, "micro_batch": 4, "optimizer": {"lr": 1e-4}},
        "checkpoint": {"every_steps": 1},
    }


def fail(folder: Path, *arguments: str) -> str:
    """Run train-grpo, which must end with exit code 2 and one error, and return the error."""
    command = Command("train-grpo", "-c", str(folder / "run.yaml"), *arguments, log=folder / "log")
    assert command.wait() == 2, command.output()
    assert "Traceback" not in command.output()
    *_, last = command.output().splitlines()
    assert command.output().count("reward.sources[0].judge=") == 1, command.output()
    return last


def test_a_judge_that_talks_nonsense_dies_or_is_slow_loses_nothing(tmp_path: Path) -> None:
    """One run: it ends when the judge dies, ends again when it is slow, and then completes."""
    (tmp_path / "model").mkdir()
    save_model(tmp_path / "model", tied=True)
    problems = [{"question": f"{i}+{i}=", "answer": f"#### {2 * i}"} for i in range(16)]
    write_rows(tmp_path / "train.jsonl", problems)
    run = tmp_path / "runs" / "judged"
    judge = JudgeServer(run)
    with served_by(handler(judge)) as url:
        write_config(tmp_path / "run.yaml", settings(tmp_path, url))
        line = fail(tmp_path)
        assert_mentions(line, f"judge={url}/v1", "of step 3 failed")
        assert [row["step"] for row in rows(run)] == [1, 2]
        first, second = (row["metrics"] for row in rows(run))
        undecided = first["reward/undecided"]
        assert 0 < undecided < 0.5
        assert first["reward/failed/judge/error"] == undecided * SAMPLES
        assert "reward/undecided" not in second
        # An undecided response has no score: not even 0.
        scores = [record["scores"] for record in _records(run, 1)]
        assert scores.count({}) == undecided * SAMPLES
        rounding = (run / "rounding.json").read_text()

        judge.behavior = "slow"
        judge.dies_in = None
        assert_mentions(fail(tmp_path, "--resume", "auto"), f"judge={url}/v1", "timeout")
        judge.over.set()
        assert [row["step"] for row in rows(run)] == [1, 2]

        judge.behavior = "good"
        config, log = str(tmp_path / "run.yaml"), tmp_path / "last.log"
        output = succeed("train-grpo", "-c", config, "--resume", "auto", log=log)
    assert re.search("resum", output, re.IGNORECASE)
    assert [row["step"] for row in rows(run)] == [1, 2, 3]
    assert rows(run)[2]["metrics"]["reward/judge/requests"] > 0
    assert (run / "rounding.json").read_text() == rounding
    assert json.loads(rounding)["num_tokens"] > 0


def _records(run: Path, step: int) -> list[dict[str, Any]]:
    lines = (run / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
