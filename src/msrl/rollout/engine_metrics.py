"""vLLM's metrics of one engine for Prometheus, on the loopback interface of the engine's machine.

vLLM registers its metrics (`vllm:kv_cache_usage_perc` etc.) in the registry of prometheus_client.
They can be read at any time, also while the engine generates.
"""

from __future__ import annotations

from dataclasses import dataclass

from msrl.errors import MsrlError

_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Endpoint of an engine's metrics. `run` is the label `model_name` of vLLM's series."""

    port: int
    run: str


class MetricsServer:
    """Server of `GET /metrics` in a thread."""

    def __init__(self, metrics: EngineMetrics) -> None:
        """Start the server.

        Raises:
            MsrlError: The port is in use.
        """
        from prometheus_client import start_http_server

        try:
            self._server, self._thread = start_http_server(metrics.port, _HOST)
        except OSError as error:
            raise MsrlError(
                f"log.prometheus: the metrics of an engine need port {metrics.port} of {_HOST} "
                f"({error.strerror}). Engines use the ports after log.prometheus. Choose another "
                "port."
            ) from error
        self.port: int = self._server.server_address[1]

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
