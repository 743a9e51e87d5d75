"""Bitwise comparison of a conversion's result, read back from disk, with its source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from msrl.checkpoint.dtypes import cast_to, same_bits
from msrl.checkpoint.hf.pass_through import pass_through_tensors
from msrl.checkpoint.source import ShardedSource, TensorCopy, WeightSource
from msrl.checkpoint.threads import in_parallel
from msrl.errors import MsrlError
from msrl.models.families import all_rules

_AT_ONCE = 1 << 20  # elements compared in double precision at a time


@dataclass(frozen=True, slots=True)
class Comparison:
    """Number of compared Hugging Face tensors and bytes, and the names of tensors that differ."""

    num_tensors: int
    num_bytes: int
    different: tuple[str, ...]


def compare(
    source: WeightSource,
    result: WeightSource,
    dtype: torch.dtype | None,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Comparison:
    """Compare the Hugging Face tensors of `result` with the tensors of `source`, cast to `dtype`.

    `dtype` None means no cast. Pass-through tensors keep their dtype.
    """
    num_tensors, num_bytes, different = 0, 0, list[str]()
    for rule in all_rules(source.shape):
        target_dtype = cast_to(rule, dtype)
        for name, before, after in zip(
            rule.hf, source.hf_tensors(rule), result.hf_tensors(rule), strict=True
        ):
            if not same_bits(before if target_dtype is None else before.to(target_dtype), after):
                different.append(name)
            num_tensors, num_bytes = num_tensors + 1, num_bytes + after.nbytes
            advance(after.nbytes)
    before, after = (pass_through_tensors(side.hf_dir, source.shape) for side in (source, result))
    different += sorted(before.keys() ^ after.keys())
    for name in before.keys() & after.keys():
        if not same_bits(before[name].read(), after[name].read()):
            different.append(name)
        num_tensors, num_bytes = num_tensors + 1, num_bytes + before[name].spec.num_bytes
        advance(before[name].spec.num_bytes)
    return Comparison(num_tensors, num_bytes, tuple(different))


def require_equal_copies(
    source: ShardedSource, where: Path, advance: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Check that ranks that hold the same tensor have equal copies.

    A conversion would use one copy, although each rank computed with its own. `advance` is called
    with the size of each copy.

    Raises:
        MsrlError: Copies differ.
    """
    _, unequal = find_unequal_copies(source, advance)
    if unequal:
        raise MsrlError(
            f"{where}: {len(unequal)} tensors differ between ranks that hold copies of them: "
            f"{unequal[0].ranks} (by up to {_largest_difference(unequal[0]):.1e}). The ranks "
            "diverged in training, or a file belongs to another checkpoint. To use the copies of "
            "the first rank, run reshard with --no-verify."
        )


def find_unequal_copies(
    source: ShardedSource, advance: Callable[[int], None] = lambda num_bytes: None
) -> tuple[int, list[TensorCopy]]:
    """Return the number of copies, and those that differ from the tensor that is read.

    `advance` is called with the size of each copy.
    """
    copies = list(source.copies())
    is_equal = in_parallel([partial(_is_equal, copy, advance) for copy in copies])
    return len(copies), [copy for copy, same in zip(copies, is_equal, strict=True) if not same]


def _is_equal(copy: TensorCopy, advance: Callable[[int], None]) -> bool:
    is_same = same_bits(copy.read, copy.other)
    advance(copy.other.nbytes)
    return is_same


def _largest_difference(copy: TensorCopy) -> float:
    """Return the largest difference of two elements; NaN if there is one."""
    if copy.read.shape != copy.other.shape:
        return float("inf")
    pairs = zip(
        copy.read.flatten().split(_AT_ONCE), copy.other.flatten().split(_AT_ONCE), strict=True
    )
    differences = [(a.double() - b.double()).abs().max() for a, b in pairs]
    return torch.stack(differences).max().item()
