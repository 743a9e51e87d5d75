"""Certificates for tests of `cluster.tls`, and the authority that signs them."""

from __future__ import annotations

import subprocess
from pathlib import Path

_NAMES = "subjectAltName=IP:127.0.0.1,DNS:localhost"


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def make_authority(folder: Path, name: str = "ca") -> Path:
    """Write `NAME.pem` and `NAME.key` of a certificate authority, and return the certificate."""
    folder.mkdir(parents=True, exist_ok=True)
    _openssl(
        folder, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
        "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem",
    )  # fmt: skip
    return folder / f"{name}.pem"


def make_certificate(folder: Path, name: str, authority: str = "ca") -> tuple[Path, Path]:
    """Return certificate and private key of a machine on loopback, signed by `authority`."""
    request, names = folder / f"{name}.csr", folder / f"{name}.names"
    names.write_text(_NAMES)
    _openssl(
        folder, "req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}",
        "-keyout", f"{name}.key", "-out", str(request),
    )  # fmt: skip
    _openssl(
        folder, "x509", "-req", "-in", str(request), "-days", "2", "-CA", f"{authority}.pem",
        "-CAkey", f"{authority}.key", "-CAcreateserial", "-extfile", str(names),
        "-out", f"{name}.pem",
    )  # fmt: skip
    (folder / f"{name}.key").chmod(0o600)
    return folder / f"{name}.pem", folder / f"{name}.key"
