"""Prometheus endpoint of a run on the loopback interface (text exposition format 0.0.4).

    msrl_step                           last step
    msrl_metric{name="reward/mean"}     value of each metric of the last step that had it
    msrl_stage_seconds{stage="update"}  seconds of each stage of the last step
    msrl_notes_total                    notes of all steps

Metrics keep their names as labels, so that a new metric needs no change of a dashboard.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from msrl.errors import MsrlError
from msrl.types import StepReport

HOST = "127.0.0.1"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusTracker:
    """Tracker that serves the last values. `port` is the port of its server."""

    def __init__(self, port: int, run: str) -> None:
        """Start the server.

        Raises:
            MsrlError: The port is in use.
        """
        self._run, self._metrics, self._seconds = run, dict[str, float](), dict[str, float]()
        self._step, self._num_notes = 0, 0
        try:
            handler = partial(_MetricsHandler, self.text)
            self._server = ThreadingHTTPServer((HOST, port), handler)
        except OSError as error:
            raise MsrlError(
                f"log.prometheus={port}: cannot listen on {HOST} ({error.strerror}). "
                "Choose another port."
            ) from error
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def log(self, report: StepReport) -> None:
        self._metrics = {**self._metrics, **report.metrics}
        self._seconds = dict(report.seconds)
        self._step, self._num_notes = report.step, self._num_notes + len(report.notes)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def text(self) -> str:
        """Return the page of the endpoint."""
        return exposition(
            self._run, self._step, self._metrics, self._seconds, num_notes=self._num_notes
        )


def exposition(
    run: str,
    step: int,
    metrics: Mapping[str, float],
    seconds: Mapping[str, float],
    *,
    num_notes: int,
) -> str:
    """Return values in Prometheus' text format."""
    label = f'run="{escaped(run)}"'
    lines = [
        "# TYPE msrl_step gauge",
        f"msrl_step{{{label}}} {step}",
        "# TYPE msrl_notes_total counter",
        f"msrl_notes_total{{{label}}} {num_notes}",
        "# TYPE msrl_metric gauge",
    ]
    lines += [
        f'msrl_metric{{{label},name="{escaped(name)}"}} {_number(value)}'
        for name, value in metrics.items()
    ]
    lines.append("# TYPE msrl_stage_seconds gauge")
    lines += [
        f'msrl_stage_seconds{{{label},stage="{escaped(name)}"}} {_number(value)}'
        for name, value in seconds.items()
    ]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    r"""Return the value of a label with \, " and line feeds escaped."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


class _MetricsHandler(BaseHTTPRequestHandler):
    """Handler of `GET /metrics`."""

    def __init__(self, text: Callable[[], str], *args: object) -> None:
        self._text = text
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Send the metrics."""
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        body = self._text().encode()
        self.send_response(200)
        self.send_header("Content-Type", _TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
