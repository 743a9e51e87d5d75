"""Rendezvous of a run's ranks: an address of rank 0's node with a reserved port."""

from __future__ import annotations

import socket

import ray


def reserve_port(host: str) -> socket.socket:
    """Return a socket that reserves a free port of this node while it is open.

    torch's store can still listen on the port, since it reuses addresses.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


class Rendezvous:
    """Rendezvous that rank 0 creates, and closes when all ranks are connected."""

    def __init__(self) -> None:
        host = ray.util.get_node_ip_address()
        self._socket = reserve_port(host)
        self.init_method = f"tcp://{host}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        self._socket.close()
