"""Rendezvous of training ranks: the port is reserved as soon as it is chosen."""

from __future__ import annotations

import datetime
import socket

import pytest
import torch.distributed as dist

from msrl.cluster.rendezvous import reserve_port


def test_a_named_port_is_not_given_to_others_before_the_ranks_meet_there():
    with reserve_port("127.0.0.1") as held, socket.socket() as other:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = dist.TCPStore("127.0.0.1", port, 1, True, datetime.timedelta(seconds=60))
        store.set("met", "yes")
        assert store.get("met") == b"yes"
