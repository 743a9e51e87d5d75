"""The proof of a conversion that needs no model: every tensor of the result, read back from disk,
bit for bit as it came in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from msrl.checkpoint.dtypes import cast_to, same_bits
from msrl.checkpoint.hf.pass_through import pass_through_tensors
from msrl.checkpoint.source import Copy, ShardedSource, WeightSource
from msrl.checkpoint.threads import in_parallel
from msrl.errors import MsrlError
from msrl.models.families import all_rules

_AT_ONCE = 1 << 20  # numbers that are compared in double precision at a time


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many Hugging Face tensors (and bytes) were compared, and the names of those that differ.
    """

    num_tensors: int
    num_bytes: int
    different: tuple[str, ...]


def compare(
    source: WeightSource,
    result: WeightSource,
    dtype: torch.dtype | None,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Comparison:
    """Compare all tensors of `result` with those of `source`, cast to `dtype` unless it is None,
    under their Hugging Face names.

    Tensors that are carried through keep their type.
    """
    num_tensors, num_bytes, different = 0, 0, list[str]()
    for rule in all_rules(source.shape):
        kind = cast_to(rule, dtype)
        for name, before, after in zip(
            rule.hf, source.hf_tensors(rule), result.hf_tensors(rule), strict=True
        ):
            if not same_bits(before if kind is None else before.to(kind), after):
                different.append(name)
            num_tensors, num_bytes = num_tensors + 1, num_bytes + after.nbytes
            advance(after.nbytes)
    carried, arrived = (
        pass_through_tensors(side.hf_dir, source.shape) for side in (source, result)
    )
    different += sorted(carried.keys() ^ arrived.keys())
    for name in carried.keys() & arrived.keys():
        if not same_bits(carried[name].read(), arrived[name].read()):
            different.append(name)
        num_tensors, num_bytes = num_tensors + 1, num_bytes + carried[name].spec.num_bytes
        advance(carried[name].spec.num_bytes)
    return Comparison(num_tensors, num_bytes, tuple(different))


def require_equal_copies(
    source: ShardedSource, where: Path, advance: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Raises MsrlError when ranks that should hold a tensor alike do not: each of them computed
    with its own, and one would be taken.

    `advance` is told of the bytes of each copy.
    """
    copies = list(source.copies())
    is_same = in_parallel([partial(_is_same, copy, advance) for copy in copies])
    unlike = [copy for copy, same in zip(copies, is_same, strict=True) if not same]
    if unlike:
        raise MsrlError(
            f"{where}: {len(unlike)} tensors are not alike on the ranks that hold copies of them: {unlike[0].ranks} (up to"
            f" {_apart(unlike[0]):.1e} apart); the ranks drifted apart in training or a file is of another checkpoint; reshard with"
            " --no-verify takes the first rank's, and what it writes can be converted and proven"
        )


def _is_same(copy: Copy, advance: Callable[[int], None]) -> bool:
    found = same_bits(copy.read, copy.other)
    advance(copy.other.nbytes)
    return found


def _apart(copy: Copy) -> float:
    """The largest difference of two numbers; NaN where there is one."""
    if copy.read.shape != copy.other.shape:
        return float("inf")
    pairs = zip(
        copy.read.flatten().split(_AT_ONCE), copy.other.flatten().split(_AT_ONCE), strict=True
    )
    return (
        torch.stack([(one.double() - other.double()).abs().max() for one, other in pairs])
        .max()
        .item()
    )
