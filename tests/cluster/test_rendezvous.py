"""Rendezvous of training ranks: the port is reserved as soon as it is chosen."""

from __future__ import annotations

import datetime
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

from msrl.cluster.rendezvous import file_rendezvous, reserve_port

_JOIN = """
import sys
import psutil
from torch import distributed
from msrl.platforms import bind_stores

bind_stores()
bind_stores()
distributed.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
sockets = psutil.Process().net_connections("inet")
print(*{each.laddr.ip for each in sockets if each.status == "LISTEN"})
"""


@pytest.mark.parametrize("host", [pytest.param("127.0.0.1", marks=pytest.mark.full), "127.0.0.2"])
@pytest.mark.slow
def test_a_store_listens_on_the_address_of_the_rendezvous_only(host: str):
    with reserve_port(host) as held:
        address = f"tcp://{host}:{held.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", _JOIN, address],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            check=True,
        )
    assert set(done.stdout.split()) == {"127.0.0.1", host}


def test_ranks_of_one_machine_meet_in_a_file_that_only_their_user_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = Path(file_rendezvous().removeprefix("file://"))
    assert not file.exists() and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert (file.parent / "owner.json").exists(), "the next process removes what a killed one left"


def test_a_named_port_is_not_given_to_others_before_the_ranks_meet_there():
    with reserve_port("127.0.0.1") as held, socket.socket() as other:
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = dist.TCPStore("127.0.0.1", port, 1, True, datetime.timedelta(seconds=60))
        store.set("met", "yes")
        assert store.get("met") == b"yes"
