"""Assembly of Hugging Face tensors from the shards of all training ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from msrl.checkpoint.tensor_layouts import pieces
from msrl.errors import VerificationError
from msrl.models.entries import split_entry, stack_sizes
from msrl.models.families import all_rules
from msrl.models.rules import Replicated, Rule
from msrl.models.shape import Shape
from msrl.rollout.weights.buckets import Bucket, ShardRows

if TYPE_CHECKING:
    from torch import Tensor


class WeightTransferError(VerificationError):
    """Weights of a version are incomplete, or differ from the weights of the training ranks."""


class Assembler:
    """Hugging Face tensors that are complete in part.

    Args:
        shape: Shape of the model.
        memory: Tensors of an earlier version by name, whose memory is overwritten. Memory that was
            used before spares the kernel from providing and clearing new pages.
    """

    def __init__(self, shape: Shape, memory: Mapping[str, Tensor] | None = None) -> None:
        self._memory = memory or {}
        self._rules: Mapping[str, Rule] = {rule.mcore: rule for rule in all_rules(shape)}
        self._stacks = stack_sizes(shape)
        self._tensors = dict[str, "Tensor"]()  # of Hugging Face files
        self._missing_rows = dict[str, int]()  # of all shards, by their name
        self._complete_entries = Counter[str]()  # of stacks

    def assemble(self, buckets: Iterable[Bucket], version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and tensors as soon as they are complete.

        Raises:
            WeightTransferError: A tensor is of another version or incomplete.
        """
        for bucket in buckets:
            for chunk in bucket.chunks:
                if bucket.version != version:
                    raise WeightTransferError(
                        f"weights: {chunk.name} is of version {bucket.version}, but version "
                        f"{version} is expected."
                    )
                yield from self.add(chunk, chunk.rows(bucket.content))
        self.check_complete(version)

    def check_complete(self, version: int) -> None:
        """Raise WeightTransferError if parts of tensors are missing."""
        incomplete = [*self._missing_rows, *self._complete_entries]
        if incomplete:
            raise WeightTransferError(
                f"weights: {len(incomplete)} tensors of version {version} are incomplete, the "
                f"first is {incomplete[0]}."
            )

    def add(self, chunk: ShardRows, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Copy rows of a shard into its tensors, on their device; yield those that are complete."""
        rule = self._rules.get(chunk.name) or _complete_tensor(chunk)
        self._copy(rule, chunk, rows)
        total = chunk.shape[0] * chunk.count
        missing = self._missing_rows.get(chunk.name, total) - len(rows)
        self._missing_rows[chunk.name] = missing
        if missing == 0:
            del self._missing_rows[chunk.name]
            for name in rule.hf:
                yield from self._finished_file(name)

    def _copy(self, rule: Rule, chunk: ShardRows, rows: Tensor) -> None:
        tensors = [
            self._tensor(name, shape, rows)
            for name, shape in zip(rule.hf, rule.shapes, strict=True)
        ]
        padded = chunk.shape[0] * chunk.count
        begin = 0
        for piece in pieces(rule.layout, tensors, chunk.index, chunk.count, padded):
            first, last = max(begin, chunk.begin), min(begin + len(piece), chunk.end)
            if first < last:
                source = rows[first - chunk.begin : last - chunk.begin]
                piece[first - begin : last - begin].copy_(source)
            begin += len(piece)

    def _tensor(self, name: str, shape: tuple[int, ...], rows: Tensor) -> Tensor:
        """Return the memory of a tensor, or of an entry of a stack: on the device of `rows`."""
        file_name, number = split_entry(name) or (name, None)
        if file_name not in self._tensors:
            stack = () if number is None else (self._stacks[file_name],)
            target, used = (*stack, *shape), self._memory.get(file_name)
            if used is None or (used.shape, used.dtype) != (target, rows.dtype):
                used = rows.new_empty(target)
            self._tensors[file_name] = used
        tensor = self._tensors[file_name]
        return tensor if number is None else tensor[number]

    def _finished_file(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensor of a file if all of it has arrived."""
        file_name, number = split_entry(name) or (name, None)
        if number is not None:
            self._complete_entries[file_name] += 1
            if self._complete_entries[file_name] < self._stacks[file_name]:
                return
            del self._complete_entries[file_name]
        yield file_name, self._tensors.pop(file_name)


def _complete_tensor(chunk: ShardRows) -> Rule:
    """Return the rule of a tensor that is sent under its Hugging Face name."""
    return Rule(chunk.name, (chunk.name,), Replicated(), (chunk.shape,))
