"""Where the ranks of a run meet: an address of rank 0's node, theirs from the moment it is named."""

from __future__ import annotations

import socket

import ray


def held_port(host: str) -> socket.socket:
    """A free port of this node, given to nobody else while the socket is open; torch's store, which reuses addresses, may listen on it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


class Rendezvous:
    """Made by rank 0, which closes it when the ranks have met."""

    def __init__(self) -> None:
        host = ray.util.get_node_ip_address()
        self._held = held_port(host)
        self.init_method = f"tcp://{host}:{self._held.getsockname()[1]}"

    def close(self) -> None:
        self._held.close()
