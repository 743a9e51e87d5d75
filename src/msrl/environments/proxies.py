"""Proxy variables of processes that run environments and agents: loopback needs no proxy."""

from __future__ import annotations

from collections.abc import Mapping

_LOOPBACK = ("127.0.0.1", "localhost")


def without_loopback_proxy(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with which HTTP clients use no proxy for loopback addresses."""
    lower, upper = variables.get("no_proxy", ""), variables.get("NO_PROXY", "")
    updates = {"no_proxy": _add_loopback(lower or upper), "NO_PROXY": _add_loopback(upper or lower)}
    return {**variables, **updates}


def _add_loopback(hosts: str) -> str:
    """Return a list of hosts with the hosts of loopback; `*`, which is alone, is all hosts."""
    if hosts.strip() == "*":
        return hosts
    listed = [host.strip() for host in hosts.split(",") if host.strip()]
    return ",".join([*listed, *(host for host in _LOOPBACK if host not in listed)])
