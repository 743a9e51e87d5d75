"""Checks of addresses and ports before Ray is started or connected to.

They fail fast where Ray itself would retry for a long time. The probe calls GetClusterId of Ray's
node service with the token as bearer, which is also the first call of a Ray client.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msrl.cluster.state import TlsFiles
from msrl.errors import MsrlError
from msrl.limits import whole_number

Answer = Literal["ok", "wrong token", "not ray", "silent"]
LOOPBACK = "127.0.0.1"
_NOTE_EVERY_S = 4.0


@dataclass(frozen=True, slots=True)
class Address:
    """Numeric host and port of a cluster's head."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse `HOST:PORT` and resolve the host.

    Raises:
        MsrlError: The text has another form, or the host has no address.
    """
    host, colon, port = text.rpartition(":")
    number = whole_number(port)
    if not colon or not host or number is None or not 0 < number < 65536:
        raise MsrlError(
            f"{text!r}: not the address of a cluster. Pass HOST:PORT, for example 10.0.0.1:6344."
        )
    return Address(resolve(host.strip("[]")), number)


def resolve(host: str) -> str:
    """Return the numeric address of a host name.

    Raises:
        MsrlError: The host name has no address.
    """
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise MsrlError(
            f"{host}: this host name has no address ({error}). Pass a name or address that "
            "this machine can resolve."
        ) from error
    return str(min(addresses, key=lambda info: info[0] != socket.AF_INET)[4][0])


def is_own_loopback(host: str) -> bool:
    """Return True if Ray treats the address as this machine only.

    It does so for 127.0.0.1 and ::1, but not for the other addresses of 127.0.0.0/8.
    """
    return host in (LOOPBACK, "::1")


def is_wildcard(host: str) -> bool:
    """Return True for the addresses that listen on all interfaces, `0.0.0.0` and `::`."""
    return ipaddress.ip_address(host).is_unspecified


def check_port_free(host: str, port: int, *, flag: str) -> None:
    """Check that a server can listen on `host:port`.

    Raises:
        MsrlError: The port is in use, or the address does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Ignore lingering connections, but not listeners.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise MsrlError(_bind_message(error, host, port, flag)) from error


def _bind_message(error: OSError, host: str, port: int, flag: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"{flag} {port}: the port is already taken on {host}{_listener(port)}. Choose another "
            f"{flag} or end that process."
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host}: not an address of this machine. Choose one that `hostname -I` lists."
    return f"{flag} {port}: cannot listen on {host}:{port}: {error.strerror}"


def _listener(port: int) -> str:
    """Return ` by python (pid 7)` for the process that listens on the port.

    The result is empty if this user cannot see the process.
    """
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if (
                connection.status == psutil.CONN_LISTEN
                and connection.laddr[1:] == (port,)
                and connection.pid
            ):
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""


def local_host_towards(address: Address) -> str:
    """Return this machine's address as the head sees it: the source address of the route to it.

    Nothing is sent.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address.host, address.port))
        except OSError as error:
            raise MsrlError(
                f"{address}: there is no route to this host ({error.strerror}). Check the "
                "address and the network."
            ) from error
        return str(probe.getsockname()[0])


def ask(address: Address, token: str, *, timeout_s: float, tls: TlsFiles | None = None) -> Answer:
    """Return how the server at `address` answers a Ray client with this token."""
    import grpc

    # Proxies of the environment are meant for the web, not for the cluster; Ray disables them as
    # well.
    options = [("grpc.enable_http_proxy", 0)]
    if tls is None:
        channel = grpc.insecure_channel(str(address), options=options)
    else:
        ca, key, cert = (Path(file).read_bytes() for file in (tls.ca, tls.key, tls.cert))
        credentials = grpc.ssl_channel_credentials(ca, key, cert)
        channel = grpc.secure_channel(str(address), credentials, options=options)
    call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
    try:
        call(b"", timeout=timeout_s, metadata=(("authorization", f"Bearer {token}"),))
    except grpc.RpcError as error:
        return _answer(error)
    finally:
        channel.close()
    return "ok"


def _tls_hint(tls: TlsFiles | None) -> str:
    """Return what may be wrong with TLS if a server does not answer."""
    if tls is None:
        return "A cluster that uses TLS answers only with cluster.tls."
    return (
        f"It must use TLS, with certificates of {tls.ca} that name its address, "
        "as cluster.tls of this machine does."
    )


def _answer(error: object) -> Answer:
    import grpc

    assert isinstance(error, grpc.Call)
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return "wrong token"
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return "not ray" if "HTTP" in (error.details() or "") else "silent"
    return "not ray"


def check_answers(
    address: Address,
    token: str,
    *,
    timeout_s: float,
    tls: TlsFiles | None = None,
    note: Callable[[float], None] | None = None,
) -> None:
    """Wait until a Ray head that accepts the token answers, for at most `timeout_s` seconds.

    `note` is called every few seconds with the remaining time.

    Raises:
        MsrlError: There is no answer, the server is not Ray, or the token is refused.
    """
    deadline = time.monotonic() + timeout_s
    call_timeout_s = max(1.0, min(5.0, timeout_s))
    noted = time.monotonic()
    answer = ask(address, token, timeout_s=call_timeout_s, tls=tls)
    while answer == "silent" and (remaining_s := deadline - time.monotonic()) > 0:
        if note is not None and time.monotonic() - noted >= _NOTE_EVERY_S:
            noted = time.monotonic()
            note(remaining_s)
        time.sleep(min(1.0, remaining_s))
        answer = ask(address, token, timeout_s=call_timeout_s, tls=tls)
    if answer == "silent":
        raise MsrlError(
            f"{address}: no cluster answered within {timeout_s:g} s. Check that it was started "
            "with `msrl cluster up --host` and"
            f" this address, and that no firewall blocks the connection. {_tls_hint(tls)}"
        )
    if answer == "not ray":
        raise MsrlError(
            f"{address}: the server there is not a Ray cluster. Check the port that `msrl "
            "cluster up` printed."
        )
    if answer == "wrong token":
        raise MsrlError(
            f"{address}: the cluster refuses this token. Copy the head machine's token file "
            "again (`msrl cluster up` prints its path),"
            " and check that RAY_AUTH_TOKEN and RAY_AUTH_TOKEN_PATH do not refer to an old one."
        )
