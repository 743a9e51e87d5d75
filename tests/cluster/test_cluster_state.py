"""Records of nodes, tokens, and checks before Ray starts; nothing here starts Ray."""

from __future__ import annotations

import http.server
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from msrl import temporary
from msrl.cluster import launch, probe, ray_loss, state
from msrl.cluster.state import NodeRecord, ProcessRecord
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.free_ports import free_port
from msrl.processes import trees
from msrl.workflows import cluster
from support import assert_mentions, mentions


@pytest.fixture(autouse=True)
def separate_state(tmp_path, monkeypatch):
    monkeypatch.setenv("MSRL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)


@pytest.fixture
def bystander():
    """Start a process that msrl did not start."""
    process = subprocess.Popen(["sleep", "120"])
    yield process
    process.kill()
    process.wait()


def node_record(process: ProcessRecord, tmp_path) -> NodeRecord:
    return NodeRecord(
        kind="head",
        address="127.0.0.1:1234",
        host="127.0.0.1",
        resource="device",
        num_devices=2,
        dashboard=None,
        temp_dir=str(tmp_path / "ray"),
        machine=socket.gethostname(),
        boot_id=state.boot_id(),
        processes=(process,),
    )


def save(record: NodeRecord) -> None:
    with state.lock_state() as folder:
        state.save_record(folder / "node-test.json", record)


def start_ticks(pid: int) -> int:
    ticks = temporary.start_ticks(pid)
    assert ticks is not None
    return ticks


def test_a_record_is_read_back_and_is_private(tmp_path):
    record = node_record(ProcessRecord(os.getpid(), start_ticks(os.getpid()), "python"), tmp_path)
    save(record)
    ((path, read),) = state.load_records()
    assert read == record
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert read.alive


def test_down_does_not_end_a_process_that_reuses_a_recorded_pid(bystander, tmp_path):
    save(
        node_record(
            ProcessRecord(bystander.pid, start_ticks(bystander.pid) - 1, "raylet"), tmp_path
        )
    )
    (ended,) = launch.down()
    assert ended.num_ended == 0
    assert bystander.poll() is None
    assert state.load_records() == ()


def test_down_does_not_end_processes_of_an_earlier_boot_and_nodes_of_other_machines(
    bystander, tmp_path
):
    process = ProcessRecord(bystander.pid, start_ticks(bystander.pid), "raylet")
    save(replace(node_record(process, tmp_path), boot_id="another boot"))
    assert [ended.num_ended for ended in launch.down()] == [0]
    save(replace(node_record(process, tmp_path), machine="another machine"))
    assert launch.down() == ()
    assert len(state.load_records()) == 1
    assert bystander.poll() is None


def test_down_ends_a_recorded_process_with_its_children_only(bystander, tmp_path):
    parent = subprocess.Popen(["bash", "-c", "trap '' TERM; sleep 121 & wait; wait"])
    while not (children := trees.descendants(parent.pid)):
        time.sleep(0.05)
    save(node_record(ProcessRecord(parent.pid, start_ticks(parent.pid), "bash"), tmp_path))
    launch_timeout = launch._END_TIMEOUT_S
    try:
        launch._END_TIMEOUT_S = 0.5  # the process ignores SIGTERM, so it is killed
        (ended,) = launch.down()
    finally:
        launch._END_TIMEOUT_S = launch_timeout
    assert ended.num_ended == 2
    assert parent.wait(30) == -9
    assert not state.is_running(children[0])
    assert bystander.poll() is None


def test_an_unreadable_record_is_reported(tmp_path):
    with state.lock_state() as folder:
        (folder / "node-x.json").write_text("{")
    with pytest.raises(MsrlError, match=mentions("node-x.json", "record")):
        state.load_records()


def test_one_command_at_a_time_changes_the_state():
    with (
        state.lock_state(),
        pytest.raises(MsrlError, match=mentions("msrl cluster", "command")),
        state.lock_state(),
    ):
        pass


def test_the_token_is_created_once_and_is_private():
    with state.lock_state():
        path = state.make_token()
        first = path.read_text()
        assert state.make_token().read_text() == first
    assert len(first) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert state.find_token() == path


def test_a_missing_empty_or_readable_token_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(MsrlError, match=mentions("token", "msrl cluster up")):
        state.find_token()
    with state.lock_state():
        path = state.make_token()
    path.chmod(0o640)
    with pytest.raises(MsrlError, match=f"chmod 600 {path}"):
        state.find_token()
    path.write_text("")
    path.chmod(0o600)
    with pytest.raises(MsrlError, match=mentions(path, "empty")):
        state.find_token()


def test_a_token_of_the_environment_takes_precedence(tmp_path, monkeypatch):
    with state.lock_state():
        state.make_token()
    other = tmp_path / "other"
    state.write_private(other, "abc")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(other))
    assert state.find_token() == other
    monkeypatch.setenv("RAY_AUTH_TOKEN", "def")
    assert state.find_token() == "def"
    assert state.token_environment("def") == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "def"}


def test_a_port_in_use_is_reported_with_its_process():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(
            MsrlError, match=mentions(f"--port {port}", "127.0.0.1", f"pid {os.getpid()}")
        ):
            launch.up(port=port, devices=1, platform_resource="device")
    assert state.load_records() == ()


@pytest.mark.parametrize(
    ("arguments", "keywords"),
    [
        ({"host": "203.0.113.7"}, ("203.0.113.7", "address")),
        ({"host": "0.0.0.0"}, ("0.0.0.0", "address")),
        ({"host": "no-such-host.invalid"}, ("no-such-host.invalid", "address")),
        ({"devices": 0}, ("--devices 0",)),
    ],
)
def test_an_impossible_head_is_refused_before_anything_starts(arguments, keywords):
    with pytest.raises(MsrlError, match=mentions(*keywords)):
        launch.up(**{"port": free_port(), "devices": 1, "platform_resource": "device", **arguments})
    assert state.load_records() == ()


@pytest.mark.parametrize(
    "address", ["nowhere", "host:", "host:0", "host:70000", ":6344", "host:port"]
)
def test_an_invalid_address_is_refused_with_an_example(address):
    with pytest.raises(MsrlError, match=r"10\.0\.0\.1:6344"):
        probe.parse_address(address)


def test_names_and_numbers_become_addresses():
    assert str(probe.parse_address("localhost:6344")) == "127.0.0.1:6344"
    assert str(probe.parse_address("[::1]:6344")) == "[::1]:6344"


def test_joining_an_address_that_does_not_answer_ends_in_bounded_time():
    with state.lock_state():
        state.make_token()
    began = time.monotonic()
    with pytest.raises(MsrlError, match=mentions("127.0.0.2", "1 s")):
        launch.join(
            f"127.0.0.2:{free_port()}",
            devices=1,
            platform_resource="device",
            answer_timeout_s=1.0,
        )
    assert time.monotonic() - began < 20


def test_joining_waits_for_the_head_as_long_as_for_machines_and_shows_it(monkeypatch, capsys):
    monkeypatch.setattr(probe, "_NOTE_EVERY_S", 0.0)
    monkeypatch.setattr(probe, "ask", lambda *_, **__: "silent")  # a busy machine needs longer
    with state.lock_state():
        state.make_token()
    address = f"127.0.0.2:{free_port()}"
    config = Config.model_validate({"cluster": {"platform": "cpu", "wait_for_nodes_s": 1.0}})
    with pytest.raises(MsrlError, match=mentions(address, "1 s")):
        cluster.join(config, address=address)
    assert_mentions(capsys.readouterr().err, "Waiting", address, "cluster.wait_for_nodes_s")


def test_a_head_that_starts_later_is_found():
    import grpc

    address = probe.parse_address(f"127.0.0.2:{free_port()}")
    server = grpc.server(ThreadPoolExecutor())
    answer = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    service = {"GetClusterId": answer}
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", service)]
    )
    server.add_insecure_port(str(address))
    timer = threading.Timer(1.0, server.start)
    timer.start()
    try:
        probe.check_answers(address, "token", timeout_s=60.0)
    finally:
        timer.join()
        server.stop(None)


def test_the_loss_of_a_head_or_of_the_own_node_is_noticed(tmp_path, bystander, monkeypatch):
    node = ProcessRecord(bystander.pid, temporary.start_ticks(bystander.pid) or 0, "raylet")
    with socket.create_server(("127.0.0.2", 0)) as listening:
        head = probe.Address("127.0.0.2", listening.getsockname()[1])
        record = replace(node_record(node, tmp_path), address=str(head), host="127.0.0.3")
        save(record)
        watch = ray_loss.ClusterWatch(head, "127.0.0.3")
        other_node = ray_loss.ClusterWatch(head, "127.0.0.4")
        watch(True)
        bystander.kill()
        bystander.wait()
        with pytest.raises(ray_loss.RayLostError, match=mentions(head, "raylet", "join")):
            watch(False)
        other_node(True)
    with pytest.raises(ray_loss.RayLostError, match=mentions(head, "head has ended")):
        other_node(True)
    unreachable = Mock(side_effect=OSError)
    monkeypatch.setattr(ray_loss.socket, "create_connection", unreachable)
    silent = ray_loss.ClusterWatch(head, "127.0.0.4")
    silent(True)
    monkeypatch.setattr(ray_loss, "_SILENCE_S", 0.0)
    with pytest.raises(ray_loss.RayLostError, match=mentions(head, "not answered")):
        silent(True)
    assert unreachable.call_count == 2


def test_joining_a_server_that_is_not_ray_fails_immediately():
    with state.lock_state():
        state.make_token()
    server = http.server.HTTPServer(("127.0.0.2", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(MsrlError, match=mentions("127.0.0.2", "Ray")):
            launch.join(f"127.0.0.2:{server.server_port}", devices=1, platform_resource="device")
    finally:
        server.shutdown()
        server.server_close()


def test_a_head_on_loopback_cannot_be_joined():
    with pytest.raises(MsrlError, match=mentions("127.0.0.1:6344", "loopback")):
        launch.join("127.0.0.1:6344", devices=1, platform_resource="device")


def test_the_gpu_resource_has_its_own_option():
    assert launch.resource_arguments("GPU", 8) == ["--num-gpus=8"]
    assert launch.resource_arguments("NPU", 8) == ['--resources={"NPU": 8}']


def test_a_folder_too_long_for_sockets_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / ("x" * 60)))
    with pytest.raises(MsrlError, match=mentions("RAY_TMPDIR", "sockets")):
        state.make_temp_dir()


def test_the_folder_of_a_killed_run_is_removed_by_the_next_run(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setenv("RAY_TMPDIR", base)
        code = "from msrl.cluster import state; print(state.make_owned_temp_dir())"
        killed = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        assert Path(killed).is_dir()
        current = state.make_owned_temp_dir()
        assert not Path(killed).exists()
        assert state.make_owned_temp_dir() != current
        assert current.is_dir()


def test_the_folder_of_a_run_on_another_machine_remains(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        monkeypatch.setenv("RAY_TMPDIR", base)
        code = "from msrl.cluster import state; print(state.make_owned_temp_dir())"
        other_machine = f"import socket; socket.gethostname = lambda: 'another-machine'; {code}"
        foreign, local = (
            subprocess.run(
                [sys.executable, "-c", c], capture_output=True, text=True, check=True
            ).stdout.strip()
            for c in (other_machine, code)
        )
        state.make_owned_temp_dir()
        assert Path(foreign).is_dir()
        assert not Path(local).exists()


def test_a_new_token_replaces_the_earlier_one(tmp_path, monkeypatch):
    monkeypatch.setenv("MSRL_STATE_DIR", str(tmp_path))
    with state.lock_state():
        first = state.read_token(state.make_token())
        assert state.read_token(state.make_token()) == first
        path = state.make_token(is_new=True)
    second = state.read_token(path)
    assert second != first
    assert len(second) == 64
    assert path.stat().st_mode & 0o777 == 0o600
