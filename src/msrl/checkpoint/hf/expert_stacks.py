"""Hugging Face tensors that stack the experts of a layer along the first axis.

They are unstacked on reading and stacked on writing. In between, entry 3 of the tensor NAME is a
separate tensor `NAME[3]` (see `models.entries`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from torch import Tensor

from msrl.checkpoint.hf.weight_files import StoredTensor
from msrl.checkpoint.torch_files.reader import TensorSpec
from msrl.models.entries import entry, split_entry


def unstack(stored: Mapping[str, StoredTensor], stacks: Iterable[str]) -> dict[str, StoredTensor]:
    """Return the tensors of a folder with each stack replaced by its entries.

    Each entry reads only its part of the file.
    """
    known = frozenset(stacks)
    tensors: dict[str, StoredTensor] = {}
    for name, stored_tensor in stored.items():
        if name in known and stored_tensor.spec.shape:
            count, *entry_shape = stored_tensor.spec.shape
            spec = TensorSpec(stored_tensor.spec.dtype, tuple(entry_shape))
            tensors |= {
                entry(name, number): StoredTensor(
                    stored_tensor.file, spec, partial(_read, stored_tensor, number)
                )
                for number in range(count)
            }
        else:
            tensors[name] = stored_tensor
    return tensors


def _read(stack: StoredTensor, number: int) -> Tensor:
    return stack.read()[number]


def stack_experts(
    tensors: Iterable[tuple[str, Tensor]], sizes: Mapping[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """Yield `tensors` with entries replaced by their stack, as soon as the stack is complete.

    Raises:
        ValueError: A stack is incomplete at the end.
    """
    incomplete: dict[str, tuple[Tensor, set[int]]] = {}
    for name, tensor in tensors:
        position = split_entry(name)
        if position is None:
            yield name, tensor
            continue
        stack, number = position
        stack_tensor, missing = incomplete.setdefault(
            stack, (tensor.new_empty(sizes[stack], *tensor.shape), set(range(sizes[stack])))
        )
        stack_tensor[number] = tensor
        missing.discard(number)
        if not missing:
            yield stack, incomplete.pop(stack)[0]
    if incomplete:
        raise ValueError(
            "missing entries: "
            + ", ".join(entry(stack, min(missing)) for stack, (_, missing) in incomplete.items())
        )


def stacked_specs(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return types and shapes of the tensors in a file, with entries replaced by their stack."""
    sizes = Counter(position[0] for name in specs if (position := split_entry(name)))
    tensors: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        position = split_entry(name)
        if position is None:
            tensors[name] = spec
        else:
            tensors.setdefault(
                position[0], TensorSpec(spec.dtype, (sizes[position[0]], *spec.shape))
            )
    return tensors
