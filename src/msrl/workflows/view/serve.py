"""Server of a view on the loopback interface, which updates the view while its runs continue."""

from __future__ import annotations

import sys
import threading
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

from msrl.errors import MsrlError
from msrl.limits import printable
from msrl.workflows.view.build import View

HOST = "127.0.0.1"
UPDATE_S = 5.0  # seconds between two updates


class ViewHandler(SimpleHTTPRequestHandler):
    """Handler of files of the view, for requests that name this server only.

    Other sites can make a browser send requests to loopback addresses under another host name (DNS
    rebinding), so that the Host header is checked.
    """

    def send_head(self) -> object:
        """Send the headers of a file; refuse other host names."""
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN, "unknown host name")
            return None
        return super().send_head()

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


def open_server(view: View, port: int) -> ThreadingHTTPServer:
    """Return a server of the view's folder.

    Raises:
        MsrlError: The port is in use.
    """
    handler = partial(ViewHandler, directory=str(view.output))
    try:
        return ThreadingHTTPServer((HOST, port), handler)
    except OSError as error:
        raise MsrlError(
            f"--port={port}: cannot listen on {HOST} ({error.strerror}). Choose another port."
        ) from error


def serve(view: View, port: int) -> None:
    """Serve the view and update it until the process is interrupted."""
    with open_server(view, port) as server:
        view.update()
        print(f"http://{HOST}:{server.server_address[1]}/", flush=True)
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
            print(printable(str(error)), file=sys.stderr, flush=True)
