"""Values from `${env:NAME}` are used, but neither written nor printed nor sent to trackers."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from msrl.cli.configuration import load_configuration as load
from msrl.config.secrets import recorded, redacted
from msrl.errors import MsrlError
from msrl.rewards.remote import Item, Remote
from msrl.types import StepReport
from msrl.workflows.training.run_log import RunLog
from support import mentions
from test_cli import msrl

SECRET = "sk-0123456789abcdef"
TEXT = """\
run: {name: "${env:RUN}", seed: "${env:SEED}"}
data: {train: "${env:FOLDER}/data"}
model: {path: "${data.train}"}
cluster: {env: {API_KEY: "${env:SECRET}", COPY: "key ${cluster.env.API_KEY}", PIN: "${env:PIN}"}}
reward:
  sources:
    - url: http://127.0.0.1:1/score?key=${env:SECRET}
      options: {headers: {Authorization: "Bearer ${cluster.env.API_KEY}"}}
    - {function: "reward.py:score", options: {key: "${env:SECRET}", pin: "${env:PIN}"}}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a configuration that uses secrets wherever text is allowed."""
    monkeypatch.chdir(tmp_path)
    values = {"SECRET": SECRET, "RUN": "secret-run", "FOLDER": "/folder", "SEED": "7"}
    for name, value in (values | {"PIN": "90210777"}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "a.yaml").write_text(TEXT)
    return "a.yaml"


def test_a_configuration_is_written_with_references_and_used_with_values(file: str):
    config = load([file]).config
    assert config.cluster.env == {"API_KEY": SECRET, "COPY": f"key {SECRET}", "PIN": "90210777"}
    assert (config.run.name, config.run.seed, config.model.path) == (
        "secret-run",
        7,
        "/folder/data",
    )
    assert config.reward.sources[1].options == {"key": SECRET, "pin": 90210777}
    text = yaml.safe_dump(recorded(config))
    assert SECRET not in text
    assert "90210777" not in text
    assert (recorded(config)["run"]["name"], recorded(config)["run"]["seed"]) == ("${env:RUN}", 7)
    assert recorded(config)["cluster"]["env"]["COPY"] == "key ${env:SECRET}"
    assert recorded(config)["model"]["path"] == "${env:FOLDER}/data"


def test_a_written_configuration_loads_as_the_same_one(file: str):
    config = load([file], ["run.dir='$${literal}'"]).config
    assert config.run.dir == "${literal}"
    Path("written.yaml").write_text(yaml.safe_dump(recorded(config)))
    again = load(["written.yaml"]).config
    assert again.model_dump() == config.model_dump()
    assert recorded(again) == recorded(config)


def test_a_url_and_headers_hold_the_reference_until_a_request(file: str):
    source = load([file]).config.reward.sources[0]
    assert source.url == "http://127.0.0.1:1/score?key=${env:SECRET}"
    assert source.options == {"headers": {"Authorization": "Bearer ${env:SECRET}"}}


def test_a_reward_server_receives_the_secret_and_messages_do_not(file: str):
    received: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.headers["Authorization"]))
            self.send_error(400)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/score?key=${{env:SECRET}}"
    client = Remote(url, 5.0, retries=0, headers={"Authorization": "Bearer ${env:SECRET}"})
    (result,) = client.score([Item("p", "r", "a", {})])
    server.shutdown()
    assert received == [(f"/score?key={SECRET}", f"Bearer {SECRET}")]
    assert result.score is None
    assert SECRET not in result.detail
    assert "${env:SECRET}" in result.detail


@pytest.mark.parametrize("address", ["ftp://x", "http://a b/", "http://ä/", "http://a/\n"])
def test_an_address_that_cannot_be_requested_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ADDRESS", address)
    reason = Remote.refusal("${env:ADDRESS}")
    assert reason is not None
    assert address not in reason


def test_the_run_folder_contains_no_secret(file: str, tmp_path: Path):
    config = load([file], ["log.trackers=[tensorboard]"]).config
    note = f"reward/error: 1 scored as wrong; first at prompt 0: status 401: bad key {SECRET}"
    with RunLog(config, num_steps=1, start_step=0, curves=("train/loss",)) as log:
        log.log(StepReport(1, {"train/loss": 1.0}, {"step": 1.0}, (note,)))
        log.finish({})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "metrics.jsonl", "report.md"} <= {path.name for path in files}
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
    (row,) = (tmp_path / "runs" / "secret-run" / "metrics.jsonl").read_text().splitlines()
    assert "${env:SECRET}" in json.loads(row)["notes"][0]


def test_printed_configurations_contain_no_secret(file: str, capfd: pytest.CaptureFixture[str]):
    assert msrl("config", "show", "-c", file) == 0
    assert msrl("config", "show", "-c", file, "--json") == 0
    assert msrl("train-grpo", "-c", file, "--dry-run") == 2
    assert msrl("config", "validate", "-c", file) == 2
    captured = capfd.readouterr()
    assert SECRET not in captured.out + captured.err
    assert "${env:SECRET}" in captured.out


def test_an_error_about_a_value_from_the_environment_shows_the_reference(file: str):
    with pytest.raises(MsrlError, match=mentions("train.steps=${env:SECRET}", "number")) as caught:
        load([file], ["train.steps=${env:SECRET}"])
    assert SECRET not in str(caught.value)


def test_short_values_are_not_replaced_in_texts(file: str):
    text = f"7 secret-run {SECRET}"
    assert redacted(text, load([file]).config) == "7 ${env:RUN} ${env:SECRET}"
