"""Network interface of collectives: that of the route to the rendezvous."""

from __future__ import annotations

import os
import socket

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
