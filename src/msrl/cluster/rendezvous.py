"""Rendezvous of a run's ranks: an address of rank 0's node with a reserved port."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

import ray

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


class Rendezvous:
    """Rendezvous that rank 0 creates, and closes when all ranks are connected."""

    def __init__(self, ports: Sequence[int]) -> None:
        host = ray.util.get_node_ip_address()
        self._socket = reserve_port(host, ports)
        self.init_method = f"tcp://{host}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        self._socket.close()
