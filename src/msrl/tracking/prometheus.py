"""Prometheus endpoints of a run and its engines on loopback, served by prometheus_client.

The endpoint of a run has:

    msrl_step                           last step
    msrl_metric{name="reward/mean"}     value of each metric of the last step that had it
    msrl_stage_seconds{stage="update"}  seconds of each stage of the last step
    msrl_notes_total                    notes of all steps

Metrics keep their names as labels, so that a new metric needs no change of a dashboard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msrl.errors import MsrlError
from msrl.types import StepReport

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

HOST = "127.0.0.1"


class MetricsServer:
    """Server of `GET /metrics` on the loopback interface, in a thread.

    It reads all metrics of this process that are in no other registry.
    """

    def __init__(self, port: int, registry: CollectorRegistry | None = None) -> None:
        """Start the server.

        Raises:
            MsrlError: The port is in use.
        """
        from prometheus_client import REGISTRY, start_http_server

        try:
            self._server, self._thread = start_http_server(port, HOST, registry or REGISTRY)
        except OSError as error:
            raise MsrlError(
                f"log.prometheus: cannot listen on port {port} of {HOST} ({error.strerror}). The "
                "run uses log.prometheus, and its engines the ports after it. Choose another port."
            ) from error
        self.port: int = self._server.server_address[1]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class PrometheusTracker(MetricsServer):
    """Tracker that serves the last values."""

    def __init__(self, port: int, run: str) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        registry = CollectorRegistry()
        self._run = run
        self._step = Gauge("msrl_step", "Last step.", ["run"], registry=registry)
        self._metrics = Gauge("msrl_metric", "Last value.", ["run", "name"], registry=registry)
        self._seconds = Gauge(
            "msrl_stage_seconds", "Seconds of the last step.", ["run", "stage"], registry=registry
        )
        self._notes = Counter("msrl_notes", "Notes of all steps.", ["run"], registry=registry)
        self._notes.labels(run)
        super().__init__(port, registry)

    def log(self, report: StepReport) -> None:
        self._step.labels(self._run).set(report.step)
        self._notes.labels(self._run).inc(len(report.notes))
        for name, value in report.metrics.items():
            self._metrics.labels(self._run, name).set(value)
        self._seconds.clear()
        for stage, value in report.seconds.items():
            self._seconds.labels(self._run, stage).set(value)
