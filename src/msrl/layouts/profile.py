"""Profiles of devices: published or measured speeds, each with its source, in a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ValidationError

from msrl.config.sections.base import Bool, Dtype, Fraction, Platform, Positive, Section, Text
from msrl.config.sources import Node, plain, read
from msrl.errors import ManyErrors, MsrlError, nearest, validation_problem
from msrl.platforms import get

_FOLDER = Path(__file__).parent / "profiles"


def _separate_memory(platform: str) -> str:
    if platform == "auto" or get(platform).shares_main_memory:
        raise ValueError("must be a platform whose devices have separate memory")
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


class Profile(Section):
    """Speeds of one device and of its connections. Bandwidths count one direction.

    Devices of a machine have fast links to each other, or, with `linked_devices`, so many
    consecutive devices of several machines. Others reach each other through the network.
    """

    title: Text
    platform: Annotated[Platform, AfterValidator(_separate_memory)]
    is_measured: Bool
    peak_flops: dict[Dtype, Figure]  # FLOP/s
    memory_bytes: Figure
    memory_bytes_per_s: Figure
    linked_devices: Figure | None = None
    link_bytes_per_s: Figure
    network_bytes_per_s: Figure
    host_bytes_per_s: Figure
    kernel_s: Figure
    collective_s: Figure
    efficiency: Efficiencies

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
