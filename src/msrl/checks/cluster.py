"""Checks of `cluster.tls`."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

from msrl.config.loader import Resolved

_NAMES = ("cert", "key", "ca")


def check_tls(resolved: Resolved) -> Iterator[str]:
    """Check that all files of `cluster.tls` are set, readable and match each other."""
    section = resolved.config.cluster.tls
    files = {name: getattr(section, name) for name in _NAMES}
    if not any(files.values()):
        return
    missing = [name for name, file in files.items() if file is None]
    for name in missing:
        yield f"cluster.tls.{name}: missing. TLS needs cert, key and ca."
    paths = {name: Path(file).expanduser() for name, file in files.items() if file is not None}
    absent = [name for name, path in paths.items() if not path.is_file()]
    for name in absent:
        yield resolved.mistake(f"cluster.tls.{name}", "no such file")
    if missing or absent:
        return
    if stat.S_IMODE(paths["key"].stat().st_mode) & 0o077:
        yield resolved.mistake(
            "cluster.tls.key", f"other users can read this key. Run chmod 600 {paths['key']}"
        )
    yield from _check_contents(resolved, paths)


def _check_contents(resolved: Resolved, paths: dict[str, Path]) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        # An empty password, so that an encrypted key is an error and not a question.
        context.load_cert_chain(paths["cert"], paths["key"], "")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        yield resolved.mistake(
            "cluster.tls.cert", f"not a PEM certificate of the key {paths['key']} ({reason})"
        )
    try:
        context.load_verify_locations(paths["ca"])
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        yield resolved.mistake("cluster.tls.ca", f"not a PEM certificate ({reason})")
