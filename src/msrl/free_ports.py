"""Free ports that the kernel gives to no other process before a server listens on them."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 21_000  # Ray's workers use 10002 to 19999, clusters usually 20000 to 20499
_NUM_TRIES = 100


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is currently free on `host`, a numeric address.

    It is below the ephemeral range, from which the kernel chooses the ports of outgoing connections
    and of servers that ask for any port. A port of that range can be in use again before its server
    starts.

    Raises:
        OSError: `host` is not an address of this machine.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        first_ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
        candidates = range(_FIRST, first_ephemeral)
        for port in random.SystemRandom().sample(candidates, min(_NUM_TRIES, len(candidates))):
            with contextlib.suppress(OSError):
                return _listen(host, port)
    return _listen(host, 0)


def _listen(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, port))
        probe.listen(1)
        return int(probe.getsockname()[1])
