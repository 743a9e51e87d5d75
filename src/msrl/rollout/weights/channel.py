"""Buckets in memory that processes of one machine share.

A sender has a ring of two buckets in anonymous memory (memfd_create(2)). The kernel frees it when
the last process that maps it has ended, so a killed process leaves nothing in /dev/shm, whose size
does not matter either. Receivers connect to an abstract Unix socket (unix(7)), get a descriptor of
the memory (SCM_RIGHTS), and exchange lines of JSON with the sender: one for each filled bucket, and
one when they have read it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl.rollout.weights.buckets import ALIGNMENT, Bucket, Shard, ShardRows, as_tensor, pack

if TYPE_CHECKING:
    from torch import Tensor

NUM_BUCKETS = 2
_MEMORY_NAME = "msrl-weights"
_END, _READ = {"end": True}, {"read": True}
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


def machine_id() -> str:
    """Return an identifier that processes share if they can use a channel.

    An abstract socket is visible inside one network namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/net').readlink()}"


@dataclass(frozen=True, slots=True)
class ChannelAddress:
    """Address of a channel: the machine and the name of the socket."""

    machine: str
    name: str


class ChannelError(ConnectionError):
    """The process at the other end of a channel ended or does not answer."""


class WeightChannel:
    """Sender's end of a channel.

    Args:
        bucket_bytes: Size of a bucket.
        timeout_s: Longest time to wait for receivers, in seconds.
    """

    def __init__(self, bucket_bytes: int, timeout_s: float) -> None:
        self._timeout_s, self._is_closed = timeout_s, False
        self._bucket_bytes = -(-bucket_bytes // ALIGNMENT) * ALIGNMENT
        self._descriptor = os.memfd_create(_MEMORY_NAME)
        os.ftruncate(self._descriptor, NUM_BUCKETS * self._bucket_bytes)
        memory = mmap.mmap(self._descriptor, NUM_BUCKETS * self._bucket_bytes)
        self._slots = as_tensor(memory).split(self._bucket_bytes)
        self.address = ChannelAddress(machine_id(), f"msrl-weights-{secrets.token_hex(16)}")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self.address.name}")
        self._listener.listen()

    def send(self, shards: Iterable[Shard], version: int, num_receivers: int) -> None:
        """Send the weights of a version; wait until all receivers have read them.

        Raises:
            ChannelError: A receiver ended, or one did not answer in time.
        """
        with ExitStack() as stack:
            receivers = [stack.enter_context(self._accept(version)) for _ in range(num_receivers)]
            count = 0
            for bucket in pack(shards, version, self._free_buckets(receivers)):
                # Receivers map the same memory, so a message only describes the bucket.
                message = _describe(bucket)
                count += 1
                for receiver in receivers:
                    receiver.send(message)
            for receiver in receivers:
                receiver.send(_END)
            # `_free_buckets` has waited for all buckets but the last ones.
            for _ in range(min(count, NUM_BUCKETS)):
                _wait_until_read(receivers)

    def close(self) -> None:
        """Close the socket, and the memory once no receiver maps it."""
        if self._is_closed:
            return
        self._is_closed, self._slots = True, ()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in accept
        self._listener.close()
        os.close(self._descriptor)

    def _accept(self, version: int) -> _Connection:
        """Return the connection of the next receiver of this version.

        Closes connections of other users, and of receivers that waited for an earlier version and
        have ended.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                accepted, _ = self._listener.accept()
            except TimeoutError:
                raise ChannelError(
                    f"weights: no receiver of version {version} within {self._timeout_s:g} s."
                ) from None
            except OSError as error:
                raise ChannelError("weights: the channel was closed.") from error
            connection = _Connection(accepted, self._timeout_s)
            with contextlib.suppress(ChannelError, OSError):
                _check_user(accepted)
                if connection.receive().get("version") == version:
                    socket.send_fds(accepted, [b"\n"], [self._descriptor])
                    return connection
            connection.close()

    def _free_buckets(self, receivers: Iterable[_Connection]) -> Iterator[Tensor]:
        """Yield the buckets in turn, each when all receivers have read its last contents."""
        yield from self._slots
        while True:
            for slot in self._slots:
                _wait_until_read(receivers)
                yield slot


def receive(address: ChannelAddress, version: int, timeout_s: float) -> Iterator[Bucket]:
    """Yield the buckets of a version. A bucket is valid until the next one is requested.

    Raises:
        ChannelError: The sender ended, or did not answer in time.
    """
    client = socket.socket(socket.AF_UNIX)
    with _Connection(client, timeout_s) as connection:
        connection.connect(address.name)
        connection.send({"version": version})
        memory = connection.receive_memory()
        while (message := connection.receive()) != _END:
            chunks = tuple([ShardRows.from_json(chunk) for chunk in message["chunks"]])
            yield Bucket(message["version"], chunks, memory[message["begin"] : message["end"]])
            # The consumer has finished with the bucket: the sender may fill its memory again.
            connection.send(_READ)


def hang_up(address: ChannelAddress, version: int, timeout_s: float = 1.0) -> None:
    """End a send that waits for a lost receiver: connect in its place, and leave immediately.

    Raises:
        ChannelError: The sender does not wait for receivers of this version.
    """
    with _Connection(socket.socket(socket.AF_UNIX), timeout_s) as connection:
        connection.connect(address.name)
        connection.send({"version": version})
        connection.receive_memory()


class _Connection:
    """Lines of JSON over a socket."""

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self._socket, self._timeout_s = connected, timeout_s
        self._socket.settimeout(timeout_s)
        self._received = b""

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def connect(self, name: str) -> None:
        """Connect to an abstract socket of the same user."""
        try:
            self._socket.connect(f"\0{name}")
        except OSError as error:
            raise ChannelError(f"weights: the sender is gone ({error}).") from error
        _check_user(self._socket)

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except TimeoutError:
            raise self._timeout() from None
        except OSError as error:
            raise ChannelError(f"weights: the other process ended ({error}).") from error

    def receive(self) -> dict[str, Any]:
        """Return the next message."""
        while b"\n" not in self._received:
            self._received += self._read(1 << 16)
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def receive_memory(self) -> Tensor:
        """Return the bytes of the buckets, read-only."""
        try:
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        except TimeoutError:
            raise self._timeout() from None
        if not descriptors:
            raise ChannelError("weights: the sender ended before it sent any.")
        try:
            return as_tensor(mmap.mmap(descriptors[0], 0, prot=mmap.PROT_READ))
        finally:
            os.close(descriptors[0])

    def _read(self, limit: int) -> bytes:
        try:
            content = self._socket.recv(limit)
        except TimeoutError:
            raise self._timeout() from None
        except OSError as error:
            raise ChannelError(f"weights: the other process ended ({error}).") from error
        if not content:
            raise ChannelError("weights: the other process ended during the transfer.")
        return content

    def _timeout(self) -> ChannelError:
        return ChannelError(f"weights: no answer within {self._timeout_s:g} s.")


def _describe(bucket: Bucket) -> dict[str, Any]:
    """Return the message about a filled bucket."""
    begin = bucket.content.storage_offset()
    return {
        "version": bucket.version,
        "begin": begin,
        "end": begin + len(bucket.content),
        "chunks": [chunk.to_json() for chunk in bucket.chunks],
    }


def _wait_until_read(receivers: Iterable[_Connection]) -> None:
    """Wait until every receiver has read one more bucket."""
    for receiver in receivers:
        receiver.receive()


def _check_user(connected: socket.socket) -> None:
    """Refuse a process of another user, which file permissions do not keep out."""
    content = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(content)[1] != os.geteuid():
        connected.close()
        raise ChannelError("weights: a process of another user uses the socket.")
