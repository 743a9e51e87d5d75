"""Sockets of the commands: no other machine can reach one.

Every `Command` of the tests is looked at while it runs (`training_runs.py`), so each kind of run is
covered by the tests that start it: SFT, GRPO in every mode, roles, distillation, `generate`,
`serve`. Here are the kinds that other tests run in their own process, and a check of the look.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from test_preference_training import preprocess, settings
from tiny_qwen2 import save_model
from training_runs import Command, write_config
from view_runs import make_run

LISTENING = """
import socket, time
listening = socket.socket({family}, {kind})
listening.bind(("{host}", 0))
if {kind} == socket.SOCK_STREAM:
    listening.listen()
time.sleep(600)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["socket.SOCK_STREAM", "socket.SOCK_DGRAM"])
@pytest.mark.parametrize(
    ("family", "host"), [("socket.AF_INET", "0.0.0.0"), ("socket.AF_INET6", "::")]
)
def test_a_command_that_listens_beyond_loopback_fails(
    family: str, host: str, kind: str, tmp_path: Path
):
    code = LISTENING.format(family=family, host=host, kind=kind)
    command = Command(log=tmp_path / "log", program=["-c", code])
    try:
        with pytest.raises(AssertionError, match=f"listens on .*{host}"):
            command.wait()
    finally:
        command.kill()


@pytest.mark.slow
def test_a_server_of_pages_listens_on_loopback(tmp_path: Path):
    run = make_run(tmp_path / "run")
    command = Command("view", str(run), "--serve", log=tmp_path / "log")
    try:
        command.when(lambda: bool(command.listening))
    finally:
        command.kill()
    assert set().union(*command.listening.values()) == {"127.0.0.1"}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("command", ["train-dpo", "train-rm"])
def test_preference_training_on_two_ranks_listens_on_loopback(command: str, tmp_path: Path):
    save_model(tmp_path / "model", tied=False, positions=256)
    pairs = [{"prompt": f"{i}=", "chosen": f"{i}", "rejected": "no"} for i in range(16)]
    preprocess(tmp_path, "pairs", pairs, "pairs")
    cluster = {"devices_per_node": 2}
    file = write_config(tmp_path / "run.yaml", settings(tmp_path, "run", cluster=cluster))
    running = Command(command, "-c", str(file), log=tmp_path / "log")
    assert running.wait() == 0, running.output()
    assert set().union(*running.listening.values()) == {"127.0.0.1"}
