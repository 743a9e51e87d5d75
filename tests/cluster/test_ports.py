"""Ports of a machine: the range of `cluster.ports`, its checks, and the arguments of Ray."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from msrl.cluster import launch
from msrl.cluster.ports import Ports
from msrl.cluster.rendezvous import reserve_port
from msrl.config.loader import load
from msrl.errors import MsrlError
from msrl.free_ports import free_port
from msrl.rollout import server_access
from msrl.workflows import doctor
from support import mentions


@pytest.mark.parametrize("text", ["20000", "20000:20499", "a-b", "-20000", "20000-"])
def test_a_text_that_is_no_range_is_refused(text: str):
    with pytest.raises(MsrlError, match=mentions(f"cluster.ports={text}", "FIRST-LAST")):
        Ports.parse(text)


@pytest.mark.parametrize(
    ("text", "keyword"),
    [("80-1080", "1024"), ("65000-65536", "65535"), ("20000-20098", "100"), ("300-200", "1024")],
)
def test_a_range_that_a_machine_cannot_use_is_refused(text: str, keyword: str):
    with pytest.raises(MsrlError, match=mentions(f"cluster.ports={text}", keyword)):
        Ports.parse(text)


def test_the_ports_of_a_range_do_not_overlap():
    ports = Ports.parse("20000-20099")
    arguments = dict(item[2:].split("=") for item in ports.ray_arguments(is_head=True))
    lowest, highest = int(arguments.pop("min-worker-port")), int(arguments.pop("max-worker-port"))
    fixed = sorted(map(int, arguments.values()))
    assert fixed == list(range(20000, 20007)) == list(ports.services)
    assert (lowest, highest) == (20007, 20067)
    assert (ports.engine, ports.rendezvous) == (20068, range(20084, 20100))


@pytest.mark.slow
def test_ray_knows_the_options_of_all_ports():
    from ray.scripts.scripts import start

    options = {option for parameter in start.params for option in parameter.opts}
    for is_head in (True, False):
        arguments = Ports.parse("20000-20099").ray_arguments(is_head=is_head)
        assert {argument.split("=")[0] for argument in arguments} <= options


def test_free_ports_are_below_the_range_of_the_kernel():
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = (free_port(), server_access.free_port("localhost", 0))
    assert all(20_000 <= port < first_ephemeral for port in ports)


def test_the_rendezvous_takes_the_first_free_port_and_names_a_range_in_use():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        with reserve_port("127.0.0.1", (port, 0)) as reserved:
            assert reserved.getsockname()[1] != port
        with pytest.raises(MsrlError, match=mentions("cluster.ports", port, "in use")):
            reserve_port("127.0.0.1", (port,))


def test_a_head_is_refused_if_a_port_of_the_range_is_in_use(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "recorded_nodes", lambda: ())
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setattr(Ports, "services", property(lambda _: range(port, port + 1)))
        with pytest.raises(MsrlError, match=mentions("cluster.ports", port)):
            launch.check_up(
                host="127.0.0.1",
                port=free_port(),
                dashboard_host="127.0.0.1",
                dashboard_port=free_port(),
                devices=1,
                ports=Ports(20000, 20099),
            )


def test_doctor_reports_the_ports_of_the_range_and_of_the_kernel(tmp_path: Path):
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    file = tmp_path / "run.yaml"
    file.write_text(f"cluster: {{ports: {low}-{high}}}\n")
    findings = list(doctor._configured_ports(load([str(file)])))
    assert (findings[0].level, findings[1].level) == ("ok", "note")
    assert f"{low}-{high}" in findings[0].text
    assert findings[1].what == f"cluster.ports {low}-{high}"
