"""Rendezvous of a run's ranks: a file on one machine, else an address of rank 0's machine."""

from __future__ import annotations

import errno
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ray

from msrl import temporary
from msrl.errors import MsrlError


def reserve_port(host: str, ports: Sequence[int] = (0,)) -> socket.socket:
    """Return a socket that reserves a free one of these ports of this node while it is open.

    By default, the kernel chooses one. torch's store can still listen on the port, since it reuses
    addresses.

    Raises:
        MsrlError: All of the ports are in use.
    """
    for port in ports:
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reserved.bind((host, port))
        except OSError as error:
            reserved.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return reserved
    raise MsrlError(
        f"cluster.ports: ports {ports[0]} to {ports[-1]} of {host} are in use, which the "
        "rendezvous of the ranks needs. Change the range."
    )


def file_rendezvous() -> str:
    """Return torch's `init_method` for ranks of this machine: a file that only its user can read.

    The file stays while this process runs, since the ranks create groups at any time.
    """
    folder = temporary.claim(Path(tempfile.mkdtemp(prefix="msrl-ranks-")))
    return f"file://{folder / 'rendezvous'}"


class Rendezvous:
    """Reserved address that rank 0 creates, and closes when all ranks are connected."""

    def __init__(self, ports: Sequence[int]) -> None:
        host = ray.util.get_node_ip_address()
        self._socket = reserve_port(host, ports)
        self.init_method = f"tcp://{host}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        self._socket.close()
