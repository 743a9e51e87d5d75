"""`cluster.tls`: checks of the certificates, and a real cluster on loopback that requires them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from certificates import make_authority, make_certificate
from cluster_folders import cluster_folders
from msrl.cli.configuration import load_configuration as load
from msrl.cluster import launch, probe, state
from msrl.cluster.state import NodeRecord, TlsFiles
from msrl.errors import ManyErrors
from msrl.free_ports import free_port
from support import assert_each_mentions

RESOURCE = "msrl_device"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    folder = tmp_path_factory.mktemp("tls")
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    make_authority(folder)
    cert, key = make_certificate(folder, "head")
    return TlsFiles(str(cert), str(key), str(folder / "ca.pem"))


def mistakes(**tls: str) -> list[str]:
    sets = [f"cluster.tls.{name}={value}" for name, value in tls.items()]
    with pytest.raises(ManyErrors) as caught:
        load([], sets, command="cluster")
    return list(caught.value.messages)


@pytest.mark.slow
def test_certificates_are_checked_before_ray_starts(
    files: TlsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    valid = {"cert": files.cert, "key": files.key, "ca": files.ca}
    load([], [f"cluster.tls.{name}={value}" for name, value in valid.items()], command="cluster")
    assert_each_mentions(
        mistakes(cert=files.cert),
        ("cluster.tls.key", "missing"),
        ("cluster.tls.ca", "missing"),
    )
    assert_each_mentions(
        mistakes(**{**valid, "ca": "gone.pem"}), ("cluster.tls.ca=gone.pem", "no such")
    )
    shared, text = Path("shared.key"), Path("text")
    shutil.copy(files.key, shared)
    shared.chmod(0o644)
    text.write_text("no certificate")
    assert_each_mentions(
        mistakes(cert=files.cert, key=str(shared), ca=str(text)),
        ("cluster.tls.key", shared, "chmod 600"),
        ("cluster.tls.ca=text", "PEM"),
    )
    make_authority(tmp_path / "other")
    _, other = make_certificate(tmp_path / "other", "machine")
    assert_each_mentions(
        mistakes(**{**valid, "key": str(other)}), ("cluster.tls.cert", other, "PEM")
    )


def test_a_run_on_one_machine_has_no_use_for_certificates(files: TlsFiles):
    sets = [f"cluster.tls.{name}={getattr(files, name)}" for name in ("cert", "key", "ca")]
    with pytest.raises(ManyErrors) as caught:
        load([], sets, command="train-sft")
    lines = [line for line in caught.value.messages if "cluster.tls" in line]
    assert_each_mentions(lines, ("cluster.tls", "cluster.address"))


def test_a_record_keeps_the_paths_of_the_certificates(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MSRL_STATE_DIR", str(tmp_path))
    files = TlsFiles("/a/cert", "/a/key", "/a/ca")
    record = NodeRecord(
        "head", "10.0.0.1:6344", "10.0.0.1", RESOURCE, 1, None, "/tmp/x", "here", "boot", (), files
    )
    with state.lock_state() as folder:
        state.save_record(folder / "node-a.json", record)
    assert [loaded for _, loaded in state.load_records()] == [record]
    assert state.tls_environment(None) == {"RAY_USE_TLS": "0"}


@pytest.fixture(scope="module")
def head(files: TlsFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeRecord]:
    """Start a head on loopback with TLS, as `msrl cluster up` does."""
    ports = {"port": free_port(), "dashboard_port": free_port()}
    with cluster_folders(tmp_path_factory.mktemp("state")):
        yield launch.up(**ports, devices=1, platform_resource=RESOURCE, tls=files)


@pytest.mark.full
@pytest.mark.slow
def test_all_connections_to_a_cluster_with_tls_need_a_certificate_of_its_authority(
    head: NodeRecord, files: TlsFiles, tmp_path: Path
):
    address = probe.parse_address(head.address)
    token = state.read_token(state.find_token())
    assert probe.ask(address, token, timeout_s=5.0, tls=files) == "ok"
    assert probe.ask(address, "0" * 64, timeout_s=5.0, tls=files) == "wrong token"
    assert probe.ask(address, token, timeout_s=5.0) == "silent"
    authority = make_authority(tmp_path)
    cert, key = make_certificate(tmp_path, "stranger")
    stranger = TlsFiles(str(cert), str(key), files.ca)
    assert probe.ask(address, token, timeout_s=5.0, tls=stranger) == "silent"
    trusting = grpc.secure_channel(
        head.address, grpc.ssl_channel_credentials(authority.read_bytes())
    )
    with pytest.raises(grpc.FutureTimeoutError):
        grpc.channel_ready_future(trusting).result(timeout=5.0)


@pytest.mark.slow
def test_a_run_uses_a_cluster_with_tls_and_status_finds_the_certificates(
    head: NodeRecord, files: TlsFiles
):
    import ray

    from msrl.cluster.session import ray_session
    from msrl.workflows.cluster import status

    with ray_session(head.address, num_devices=1, resource_name=RESOURCE, tls=files) as session:
        assert [node.alive for node in session.nodes()] == [True]

        @ray.remote(resources={RESOURCE: 1}, num_cpus=0)
        def uses_tls() -> str | None:
            import os

            return os.environ.get("RAY_USE_TLS")

        assert ray.get(uses_tls.remote(), timeout=60) == "1"
    shown = status()
    assert [node.alive for node in shown.nodes] == [True] and head.tls == files
