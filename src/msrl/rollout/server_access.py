"""Address and API key of the server: who can reach it, and who may use it. Light to import."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from pathlib import Path

from msrl import free_ports
from msrl.errors import MsrlError

KEY_VARIABLES = ("MSRL_API_KEY", "VLLM_API_KEY")
_MAX_KEY_BYTES = 1 << 16


def read_api_key(path: str | None) -> tuple[str, str] | None:
    """Return the API key and the name of its source: the file, or else a variable.

    Raises:
        MsrlError: The file cannot be read or is too large, or the key is not one word of visible
            ASCII characters.
    """
    if path is not None:
        try:
            with Path(path).open("rb") as file:
                content = file.read(_MAX_KEY_BYTES + 1)  # a device has no end
        except OSError as error:
            raise MsrlError(f"cannot be read: {error.strerror or error}") from error
        if len(content) > _MAX_KEY_BYTES:
            raise MsrlError(f"{path}: is larger than {_MAX_KEY_BYTES >> 10} KiB. Name a key file.")
        text = content.decode(errors="replace")
        return _check_key(text.strip(), path), path
    for name in KEY_VARIABLES:
        if os.environ.get(name):
            return _check_key(os.environ[name], f"${name}"), name
    return None


def _check_key(key: str, where: str) -> str:
    """Return the key, which must be valid in an HTTP header. No message contains it."""
    if key and key.isascii() and all("!" <= character <= "~" for character in key):
        return key
    problem = "is empty" if not key else "has spaces, line breaks or other characters than ASCII"
    raise MsrlError(f"{where}: the API key {problem}. Write one word of visible ASCII characters.")


def free_port(host: str, port: int) -> int:
    """Return a port that a server can listen on: `port`, or any free one if it is 0.

    Raises:
        MsrlError: The port is in use or not permitted, or `host` is not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if port == 0:
            return free_ports.free_port(str(address[0]))
        with closing(socket.socket(family, kind, protocol)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
            return listener.getsockname()[1]
    except socket.gaierror as error:
        raise MsrlError(
            f"serve.host={host}: not an address of this machine ({error.strerror}). Change it."
        ) from error
    except OSError as error:
        raise MsrlError(
            f"serve.port={port}: cannot listen on {host}:{port} ({error.strerror}). "
            "Choose another port, or 0 for a free one."
        ) from error


def server_url(host: str, port: int) -> str:
    """Return the address of the server for clients on this machine.

    >>> server_url("0.0.0.0", 8000), server_url("::1", 80)
    ('http://127.0.0.1:8000', 'http://[::1]:80')
    """
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
