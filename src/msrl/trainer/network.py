"""Network interface of this process's collectives: the one of the route to the rendezvous."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from msrl.platforms.base import Platform

LOOPBACK = "lo"


def select_interface(platform: Platform, init_method: str) -> None:
    """Set the variables of the platform's collectives, unless the user has set them.

    Call this before the process groups are created.

    Args:
        platform: platform of the run.
        init_method: torch's, such as `tcp://10.0.0.1:4711`. For `file://`, all ranks are on this
            machine.
    """
    interface = _interface(init_method)
    if interface is not None:
        for name, value in platform.network_environment(interface).items():
            os.environ.setdefault(name, value)


def _interface(init_method: str) -> str | None:
    """Return the interface of the route to the rendezvous, or None if it is unknown."""
    url = urlsplit(init_method)
    if url.scheme == "file":
        return LOOPBACK
    if url.scheme != "tcp" or not url.hostname or not url.port:
        return None
    own = _own_address(url.hostname, url.port)
    return None if own is None else interface_with(own)


def _own_address(host: str, port: int) -> str | None:
    """Return this machine's address on the route to a host; nothing is sent."""
    try:
        ((family, kind, _, _, address), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_with(address: str) -> str | None:
    """Return the name of the network interface that has an address, or None."""
    import psutil

    if address.startswith("127.") or address == "::1":
        return LOOPBACK
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None
