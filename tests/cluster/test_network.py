"""Network interface of collectives: the one of the route to the rendezvous."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from msrl.platforms import NAMES, get
from msrl.trainer.network import interface_with, select_interface


def own_addresses() -> dict[str, str]:
    """Return the IPv4 addresses of this machine with their interfaces."""
    return {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove the variables, and restore them after the test."""
    for platform in map(get, NAMES):
        for name in platform.network_environment("eth0"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("name", NAMES)
def test_collectives_use_the_interface_of_the_rendezvous(
    name: str, environment: pytest.MonkeyPatch
):
    platform = get(name)
    for address, interface in own_addresses().items():
        for variable in platform.network_environment(interface):
            os.environ.pop(variable, None)
        select_interface(platform, f"tcp://{address}:4711")
        used = {key: os.environ[key] for key in platform.network_environment(interface)}
        assert used == platform.network_environment(interface)
        assert all(value.removeprefix("=") == interface for value in used.values())


def test_ranks_of_one_machine_use_loopback(environment: pytest.MonkeyPatch):
    select_interface(get("cuda"), "file:///tmp/rendezvous")
    variables = get("cuda").network_environment("lo")
    assert {key: os.environ.get(key) for key in variables} == variables
    assert list(variables.values()) == ["lo"], "device links need no interface on one machine"


def test_variables_of_the_user_are_unchanged(environment: pytest.MonkeyPatch):
    (name,) = get("cpu").network_environment("lo")
    environment.setenv(name, "mine")
    select_interface(get("cpu"), "tcp://127.0.0.1:4711")
    assert os.environ[name] == "mine"


@pytest.mark.parametrize("method", ["env://", "tcp://no-such-host.invalid:1", "tcp://"])
def test_an_unknown_route_sets_nothing(method: str, environment: pytest.MonkeyPatch):
    select_interface(get("cpu"), method)
    assert not set(get("cpu").network_environment("lo")) & set(os.environ)


def test_loopback_of_debians_host_names_is_one_interface():
    assert interface_with("127.0.1.1") == interface_with("127.0.0.1") == "lo"
    assert interface_with("203.0.113.1") is None


_GROUPS = """
import contextlib, datetime, sys
from pathlib import Path
import torch
from torch import distributed
from msrl.platforms import share_gloo_devices

share_gloo_devices()
share_gloo_devices()
distributed.init_process_group(
    "gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1,
    timeout=datetime.timedelta(seconds=77),
)
group = [distributed.new_group([0]) for _ in range(5)][-1]
own = distributed.ProcessGroupGloo._Options()
own._devices = [distributed.ProcessGroupGloo.create_device(interface="lo")]
distributed.ProcessGroupGloo(distributed.HashStore(), 0, 1, own)
values = torch.ones(2)
distributed.all_reduce(values, group=group)
timeouts = [
    int(each._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    for each in (distributed.group.WORLD, group)
]
names = []
for task in Path("/proc/self/task").iterdir():
    with contextlib.suppress(OSError):  # a thread of another library has ended
        names.append(task.joinpath("comm").read_text().strip())
print(names.count("gloo_tcp_loop"), timeouts, values.tolist())
"""


@pytest.mark.slow
def test_gloo_groups_share_one_device_and_keep_their_options(tmp_path: Path):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", _GROUPS, tmp_path / "store"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "2 [77, 1800] [1.0, 1.0]", "one shared device, one of the caller"
