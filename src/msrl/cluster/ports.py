"""Ports of one machine: for Ray, vLLM and torch's rendezvous, from one range.

FIRST + 0 ... FIRST + 5   services of Ray's node, see `SERVICES`
FIRST + 6                 Ray's client server, on the head
FIRST + 7 ... LAST - 32   workers of Ray
LAST - 31 ... LAST - 16   processes of an engine with several devices, on this machine only
LAST - 15 ... LAST        rendezvous of the training ranks, on the machine of rank 0
"""

from __future__ import annotations

from dataclasses import dataclass

from msrl.errors import MsrlError
from msrl.limits import whole_number

# Options of `ray start` for the fixed ports of a node, in the order of the ports.
SERVICES = (
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
)
_HEAD_SERVICE = "ray-client-server-port"
_NUM_RENDEZVOUS = _NUM_ENGINE = 16
_MIN_PORTS = 100


@dataclass(frozen=True, slots=True)
class Ports:
    """Range of ports, both ends included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Ports:
        """Return the range of `cluster.ports`, written as FIRST-LAST.

        Raises:
            MsrlError: The text has another form, or the range is too small.
        """
        first, dash, last = text.partition("-")
        bounds = whole_number(first.strip()), whole_number(last.strip())
        if not dash or bounds[0] is None or bounds[1] is None:
            raise MsrlError(
                f"cluster.ports={text}: not a range. Write FIRST-LAST, for example 20000-20499."
            )
        ports = cls(bounds[0], bounds[1])
        if ports.first < 1024 or ports.last > 65535:
            raise MsrlError(f"cluster.ports={text}: ports are from 1024 to 65535. Change it.")
        if ports.last - ports.first + 1 < _MIN_PORTS:
            raise MsrlError(
                f"cluster.ports={text}: a machine needs at least {_MIN_PORTS} ports. Extend it."
            )
        return ports

    @property
    def services(self) -> range:
        """Fixed ports of Ray's node and head."""
        return range(self.first, self.first + len(SERVICES) + 1)

    @property
    def rendezvous(self) -> range:
        """Ports of which the rendezvous of a training takes one."""
        return range(self.last - _NUM_RENDEZVOUS + 1, self.last + 1)

    @property
    def engine(self) -> int:
        """First port of an engine with several devices."""
        return self.rendezvous.start - _NUM_ENGINE

    def ray_arguments(self, *, is_head: bool) -> list[str]:
        """Return the arguments of `ray start`."""
        names = (*SERVICES, _HEAD_SERVICE) if is_head else SERVICES
        fixed = [f"--{name}={port}" for name, port in zip(names, self.services, strict=False)]
        workers = range(self.services.stop, self.engine)
        return [*fixed, f"--min-worker-port={workers[0]}", f"--max-worker-port={workers[-1]}"]
