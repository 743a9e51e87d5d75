"""Profiles of devices: published or measured speeds, each with its source, in a YAML file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError

from msrl.config.sections.base import Bool, Dtype, Fraction, Platform, Positive, Section, Text
from msrl.config.sources import Node, plain, read
from msrl.errors import ManyErrors, MsrlError, nearest, validation_problem

_FOLDER = Path(__file__).parent / "profiles"


def _kind_of_device(platform: str) -> str:
    if platform == "auto":
        raise ValueError("must be the platform of the devices, such as cuda")
    return platform


class Figure(Section):
    """A number and the document or the measurement that it is from."""

    value: Positive
    source: Text


class Share(Section):
    """A share of a figure that is reached, and the document or the measurement it is from."""

    value: Fraction
    source: Text


class Efficiencies(Section):
    """Shares of the figures of a profile that a training reaches."""

    products: Share  # of peak_flops
    experts: Share  # of peak_flops
    attention: Share  # of peak_flops
    memory: Share  # of memory_bytes_per_s
    links: Share  # of link_bytes_per_s
    network: Share  # of network_bytes_per_s


Points = Annotated[tuple[tuple[Positive, Positive], ...], Field(min_length=1)]
Rows = Annotated[tuple[tuple[Positive, Positive, Positive], ...], Field(min_length=1)]


class Speeds(Section):
    """Measured speeds by size. Speeds between two sizes are interpolated."""

    products: dict[Dtype, Rows]  # tokens, width of a square matrix, FLOP/s
    attention: Points  # tokens of a sequence, FLOP/s
    gather: Rows | None = None  # ranks, bytes in total, bytes/s: all-gather and reduce-scatter
    exchange: Rows | None = None  # ranks, bytes of a rank, bytes/s: all-to-all
    send: Rows | None = None  # ranks, bytes, bytes/s: to the next rank
    engine: Points | None = None  # running sequences, seconds of a token of each

    def products_of(self, dtype: str) -> Rows | None:
        """Return the speeds of products in a dtype, if they were measured."""
        return next((rows for name, rows in self.products.items() if name == dtype), None)


class Profile(Section):
    """Speeds of one device and of its connections. Bandwidths count one direction.

    Devices of a machine have fast links to each other, or, with `linked_devices`, so many
    consecutive devices of several machines. Others reach each other through the network, whose
    speed one machine cannot measure.

    A measured profile has speeds by size, which replace the peaks and bandwidths. `pass_s` and
    `update_s` are the seconds of a micro-batch and of an update beside their layers.
    """

    title: Text
    platform: Annotated[Platform, AfterValidator(_kind_of_device)]
    is_measured: Bool
    peak_flops: dict[Dtype, Figure]  # FLOP/s
    memory_bytes: Figure
    memory_bytes_per_s: Figure
    linked_devices: Figure | None = None
    link_bytes_per_s: Figure
    network_bytes_per_s: Figure | None = None
    host_bytes_per_s: Figure
    kernel_s: Figure
    collective_s: Figure
    engine_step_s: Figure
    pass_s: Figure | None = None
    update_s: Figure | None = None
    efficiency: Efficiencies
    speeds: Speeds | None = None

    @property
    def reached_links(self) -> float:
        """Bytes per second that a collective reaches between linked devices."""
        return self.link_bytes_per_s.value * self.efficiency.links.value

    @property
    def reached_network(self) -> float:
        """Bytes per second that a collective reaches between machines, if there are several."""
        speed = self.network_bytes_per_s or self.link_bytes_per_s
        return speed.value * self.efficiency.network.value

    def flops(self, dtype: str) -> float:
        """Return the peak FLOP/s of a dtype.

        Raises:
            MsrlError: The profile has no figure for the dtype.
        """
        figure = next((x for name, x in self.peak_flops.items() if name == dtype), None)
        if figure is None:
            known = ", ".join(self.peak_flops)
            raise MsrlError(
                f"model.dtype={dtype}: the profile {self.title} has no peak_flops for it. Set "
                f"model.dtype to {known}, or add the number to a profile of your own."
            )
        return figure.value


def interpolate(points: Iterable[tuple[float, float]], x: float) -> float:
    """Return the value at `x` between the nearest points, on logarithmic scales.

    Beyond the first or the last point, it is that of this point.

    >>> interpolate([(1, 10), (4, 40)], 2), interpolate([(1, 10), (4, 40)], 9)
    (20.0, 40)
    """
    ordered = sorted(points)
    above = next((number for number, point in enumerate(ordered) if point[0] >= x), None)
    if above is None:
        return ordered[-1][1]
    if above == 0:
        return ordered[0][1]
    (x0, y0), (x1, y1) = ordered[above - 1 : above + 1]
    share = math.log(x / x0) / math.log(x1 / x0)
    return y0 * (y1 / y0) ** share


def interpolate_rows(rows: Rows, x: float, y: float) -> float:
    """Return the value at two sizes: first between equal first sizes, then between these."""
    firsts = {row[0] for row in rows}
    return interpolate(
        [(first, interpolate([row[1:] for row in rows if row[0] == first], y)) for first in firsts],
        x,
    )


def profile_names() -> tuple[str, ...]:
    """Return the names of the packaged profiles, sorted."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.yaml")))


def read_profile(name: str) -> Profile:
    """Return a packaged profile by its name, or the profile in a YAML file.

    Raises:
        MsrlError: There is no such profile or file.
        ManyErrors: One message for each invalid key of the file.
    """
    if name in profile_names():
        return _checked(read(_FOLDER / f"{name}.yaml"))
    if not name.endswith((".yaml", ".yml")):
        raise MsrlError(
            f"--profile={name}: neither a YAML file nor the name of a profile; "
            f"{nearest(name, profile_names())}"
        )
    if not Path(name).is_file():
        raise MsrlError(f"--profile={name}: this file does not exist")
    return _checked(read(Path(name)))


def _checked(tree: Node) -> Profile:
    try:
        return Profile.model_validate(plain(tree))
    except ValidationError as error:
        file = tree.origin.name
        raise ManyErrors(
            [
                f"{file}: {'.'.join(map(str, details['loc']))}: {validation_problem(details)}"
                for details in error.errors(include_url=False)
            ]
        ) from None
