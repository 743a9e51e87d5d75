"""Comparison of the weights that engines received with those that the training ranks sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msrl.errors import VerificationError
from msrl.rollout.weights.digest import Digests, add_digests, differences


def check_digests(sent: Iterable[Digests], received: Mapping[int, Sequence[Digests]]) -> None:
    """Compare digests of a version.

    Args:
        sent: The part of each sender.
        received: The digests by engine, one of each of its processes.

    Raises:
        VerificationError: A tensor differs. The message names the first one.
    """
    expected = add_digests(sent)
    for engine, tables in received.items():
        for actual in tables:
            names = differences(expected, actual)
            if names:
                raise VerificationError(
                    f"weights: {names[0]} of rollout engine {engine} differs from that of the "
                    f"training ranks ({len(names)} of {len(expected)} tensors differ)."
                )
