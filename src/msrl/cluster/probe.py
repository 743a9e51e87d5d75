"""Addresses and ports, looked at before Ray is started or asked: quick answers where Ray itself would try for long.

The probe calls GetClusterId of Ray's node service with the token as bearer, the first call that a Ray client makes too.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from dataclasses import dataclass
from typing import Literal

from msrl.errors import MsrlError

Answer = Literal["ok", "wrong token", "not ray", "silent"]
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Address:
    """The host (a number, as resolved) and port of a cluster's head."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """`HOST:PORT` with the host resolved. Raises MsrlError when it is none, or the host has no address."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise MsrlError(f"{text!r} is not the address of a cluster; give HOST:PORT, for example 10.0.0.1:6344")
    return Address(resolve(host.strip("[]")), int(port))


def resolve(host: str) -> str:
    """The numeric address of a host name. Raises MsrlError when there is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise MsrlError(f"{host}: this host name has no address ({error}); give a name or number that this machine can resolve") from error
    return str(min(found, key=lambda info: info[0] != socket.AF_INET)[4][0])


def is_own_loopback(host: str) -> bool:
    """Whether Ray takes the address for this machine only (it does so for 127.0.0.1 and ::1, not for the rest of 127.0.0.0/8)."""
    return host in (LOOPBACK, "::1")


def is_wildcard(host: str) -> bool:
    """Whether the address stands for all interfaces."""
    return ipaddress.ip_address(host).is_unspecified


def check_port_free(host: str, port: int, *, flag: str) -> None:
    """Raise MsrlError when nothing can listen on `host:port`: the port is taken, or the address is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger do not matter, listeners do
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise MsrlError(_bind_message(error, host, port, flag)) from error


def _bind_message(error: OSError, host: str, port: int, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{flag} {port}: the port is taken on {host}{_holder(port)}; give another {flag} or end that process"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine; give one of its own (`hostname -I` lists them)"
    return f"{flag} {port}: cannot listen on {host}:{port}: {error.strerror}"


def _holder(port: int) -> str:
    """Which process listens on the port, as far as this user may know: ` by python (pid 7)`, or nothing."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""


def free_port() -> int:
    """A port that is free now on loopback."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def local_host_towards(address: Address) -> str:
    """This machine's address as the head sees it: the source address of the route there (nothing is sent)."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address.host, address.port))
        except OSError as error:
            raise MsrlError(f"{address}: no route leads there ({error.strerror}); check the address and the network") from error
        return str(probe.getsockname()[0])


def ask(address: Address, token: str, *, timeout_s: float) -> Answer:
    """What answers at `address` to a Ray client with this token."""
    import grpc

    # Proxies of the environment are for the web, not for the cluster; Ray switches them off as well.
    channel = grpc.insecure_channel(str(address), options=[("grpc.enable_http_proxy", 0)])
    call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
    try:
        call(b"", timeout=timeout_s, metadata=(("authorization", f"Bearer {token}"),))
    except grpc.RpcError as error:
        return _answer(error)
    finally:
        channel.close()
    return "ok"


def _answer(error: object) -> Answer:
    import grpc

    assert isinstance(error, grpc.Call)
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return "wrong token"
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return "not ray" if "HTTP" in (error.details() or "") else "silent"
    return "not ray"


def check_answers(address: Address, token: str, *, timeout_s: float) -> None:
    """Return when a Ray that takes the token answers; one that is silent is asked again until `timeout_s` has passed.

    Raises MsrlError that says which of these it is: silent, not Ray, or another token.
    """
    deadline = time.monotonic() + timeout_s
    while (answer := ask(address, token, timeout_s=max(1.0, min(5.0, timeout_s)))) == "silent" and time.monotonic() < deadline:
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
    if answer == "silent":
        raise MsrlError(
            f"{address}: no cluster answers there (tried for {timeout_s:g} s); check that `msrl cluster up` runs on that machine with"
            " --host set to this address, and that no firewall is between"
        )
    if answer == "not ray":
        raise MsrlError(f"{address}: something answers there, but it is not a Ray cluster; check the port that `msrl cluster up` printed")
    if answer == "wrong token":
        raise MsrlError(
            f"{address}: the cluster refuses this token; copy the token file of the head machine again (`msrl cluster up` names it),"
            " and look whether RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH is set to an old one"
        )
