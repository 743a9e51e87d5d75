"""Listening addresses of torch's stores, through which the processes of a group find each other."""

from __future__ import annotations

import functools
import importlib
import socket
from typing import Any


@functools.cache
def bind_stores() -> None:
    """Let every TCPStore of an `init_method` listen on the address of that method only.

    PyTorch listens on all interfaces, without authentication: every machine of the
    network could read, change and fill the store.
    """
    from torch import distributed

    if not distributed.is_available():
        return
    # The attribute `rendezvous` of torch.distributed is a function.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    store_class = rendezvous.TCPStore

    def bound_store(*, host_name: str, port: int, is_master: bool, **options: Any) -> Any:
        if is_master:
            options |= {"master_listen_fd": _listen(host_name, port)}
        return store_class(host_name=host_name, port=port, is_master=is_master, **options)

    # `_create_c10d_store` of this module creates the stores of `tcp://` and `env://`.
    rendezvous.TCPStore = bound_store


def _listen(host: str, port: int) -> int:
    """Return the descriptor of a socket that listens on an address of this machine."""
    ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    )
    with socket.socket(family, kind, protocol) as listening:
        # A socket that reserves the port may still be bound to it.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
        return listening.detach()
