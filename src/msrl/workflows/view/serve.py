"""Server of a view on the loopback interface, which updates the view while its runs continue."""

from __future__ import annotations

import hmac
import io
import json
import secrets
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from pydantic import BaseModel, Field

from msrl.errors import MsrlError
from msrl.limits import print_note, whole_number
from msrl.tracking.run import write_notes
from msrl.workflows.view.build import View

HOST = "127.0.0.1"
UPDATE_S = 5.0  # seconds between two updates
_MAX_NOTE_BYTES = 1 << 16


class ViewServer(ThreadingHTTPServer):
    """Server of a view. `token` is in its link; None allows every user of this machine."""

    def __init__(self, port: int, view: View, token: str | None) -> None:
        super().__init__((HOST, port), partial(ViewHandler, directory=str(view.output)))
        self.view, self.token = view, token

    @property
    def link(self) -> str:
        """Address that opens the view."""
        address = f"http://{HOST}:{self.server_address[1]}/"
        return address if self.token is None else f"{address}?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about clients that have disconnected."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Note(BaseModel, strict=True):
    """Tags and note of a run of the view."""

    run: int = Field(ge=0)
    tags: list[str]
    note: str


class ViewHandler(SimpleHTTPRequestHandler):
    """Handler of files of the view, for requests that name this server and have its token.

    Other sites can make a browser send requests to loopback addresses under another host name (DNS
    rebinding), so that Host and Origin are checked. The link with the token sets a cookie, which
    the browser sends with the requests of this server only.
    """

    server: ViewServer
    timeout = 60.0  # seconds without a byte of a request, after which the connection ends

    def send_head(self) -> Any:
        """Send the headers of a file, or refuse the request."""
        token = self.server.token
        try:
            url = urlsplit(self.path)
        except ValueError:  # such as http://[
            return self.send_error(HTTPStatus.BAD_REQUEST)
        query = parse_qs(url.query)
        is_link = token is not None and _is_equal(query.get("token", [""])[-1], token)
        reason = self._refusal(is_link=is_link)
        if reason is not None:
            return self.send_error(HTTPStatus.FORBIDDEN, reason)
        if is_link:
            return self._set_cookie()
        if url.path == "/search":
            return self._search(query)
        if "\0" in unquote(url.path):
            return self.send_error(HTTPStatus.NOT_FOUND)
        return super().send_head()

    def _refusal(self, *, is_link: bool = False) -> str | None:
        """Return why a request is refused before its body is read, or None."""
        own = [f"{name}:{self.server.server_address[1]}" for name in (HOST, "localhost")]
        origin = self.headers.get("Origin")
        if self.headers.get("Host") not in own or (
            origin is not None and origin.removeprefix("http://") not in own
        ):
            return "unknown host name or origin"
        token = self.server.token
        if is_link or token is None or _is_equal(self._cookie(self._cookie_name), token):
            return None
        return "open the link that msrl view has printed"

    @property
    def _cookie_name(self) -> str:
        return f"msrl_view_{self.server.server_address[1]}"

    def _set_cookie(self) -> None:
        """Keep the token in a cookie, and show the page without it in the address."""
        cookie = f"{self._cookie_name}={self.server.token}"
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", "/")
        self.send_header("Set-Cookie", f"{cookie}; Path=/; HttpOnly; SameSite=Strict")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _search(self, query: Mapping[str, Sequence[str]]) -> io.BytesIO | None:
        """Send step and row of each sample of a run that contains a text."""
        run, kind, text = (query.get(name, [""])[-1] for name in ("run", "kind", "text"))
        if self.server.view.texts is None or not text:
            return self.send_error(HTTPStatus.NOT_FOUND)
        start = time.perf_counter()
        hits = [*self.server.view.texts.search(f"{run}/{kind}", text)]
        answer = json.dumps({"seconds": time.perf_counter() - start, "hits": hits}).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        return io.BytesIO(answer)

    def do_POST(self) -> None:
        """Save the tags and the note of a run."""
        length = whole_number(self.headers.get("Content-Length", ""))
        # Other sites can send requests without an origin only to be shown as pages.
        reason = self._refusal() or ("no origin" if not self.headers.get("Origin") else None)
        if reason is not None:
            return self.send_error(HTTPStatus.FORBIDDEN, reason)
        if self.path != "/notes" or length is None or length > _MAX_NOTE_BYTES:
            return self.send_error(HTTPStatus.BAD_REQUEST)
        try:
            note = _Note.model_validate_json(self.rfile.read(length))
            write_notes(self.server.view.runs[note.run], note.tags, note.note)
        except (ValueError, IndexError):
            return self.send_error(HTTPStatus.BAD_REQUEST)
        except OSError as error:
            return self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, error.strerror)
        self.send_response(HTTPStatus.NO_CONTENT)
        return self.end_headers()

    def _cookie(self, name: str) -> str:
        """Return a cookie. SimpleCookie needs quadratic time for backslashes in some versions."""
        pairs = (pair.strip().partition("=") for pair in self.headers.get("Cookie", "").split(";"))
        return next((value for key, _, value in pairs if key == name), "")

    def list_directory(self, path: object) -> None:
        """Refuse to list folders."""
        self.send_error(HTTPStatus.NOT_FOUND)

    def end_headers(self) -> None:
        """Add headers that keep the files from caches, frames and guesses of their type."""
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _is_equal(value: str, token: str) -> bool:
    return hmac.compare_digest(value.encode(errors="replace"), token.encode())


def open_server(view: View, port: int, *, has_token: bool = True) -> ViewServer:
    """Return a server of the view's folder.

    Raises:
        MsrlError: The port is in use.
    """
    token = secrets.token_urlsafe(24) if has_token else None
    try:
        return ViewServer(port, view, token)
    except OSError as error:
        raise MsrlError(
            f"--port={port}: cannot listen on {HOST} ({error.strerror}). Choose another port."
        ) from error


def serve(view: View, port: int, *, has_token: bool = True) -> None:
    """Serve the view and update it until the process is interrupted."""
    with open_server(view, port, has_token=has_token) as server:
        view.update()
        print(server.link, flush=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            _update_forever(view)
        except KeyboardInterrupt:
            server.shutdown()


def _update_forever(view: View) -> None:
    pause = threading.Event()
    while not pause.wait(UPDATE_S):
        try:
            view.update()
        except MsrlError as error:  # a file that the run is writing is complete later
            print_note(str(error))
