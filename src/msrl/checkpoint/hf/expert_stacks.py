"""Hugging Face tensors in which the experts of a layer lie one behind the other: taken apart where
weights come in, put together where they go out. In between, entry 3 of the tensor NAME is a tensor
of its own, `NAME[3]` (see `models.entries`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from torch import Tensor

from msrl.checkpoint.hf.weight_files import StoredTensor
from msrl.checkpoint.torch_files.reader import TensorSpec
from msrl.models.entries import entry, stack_of


def taken_apart(
    stored: Mapping[str, StoredTensor], stacks: Iterable[str]
) -> dict[str, StoredTensor]:
    """The tensors of a folder with the entries of `stacks` in place of those; each reads its own
    part of the file.
    """
    known = frozenset(stacks)
    found: dict[str, StoredTensor] = {}
    for name, each in stored.items():
        if name in known and each.spec.shape:
            count, *rest = each.spec.shape
            spec = TensorSpec(each.spec.dtype, tuple(rest))
            found |= {
                entry(name, number): StoredTensor(each.file, spec, partial(_read, each, number))
                for number in range(count)
            }
        else:
            found[name] = each
    return found


def _read(stack: StoredTensor, number: int) -> Tensor:
    return stack.read()[number]


def put_together(
    tensors: Iterable[tuple[str, Tensor]], sizes: Mapping[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """`tensors` with stacks in place of their entries, each as soon as its last entry came. Raises
    ValueError for one that did not.
    """
    waiting: dict[str, tuple[Tensor, set[int]]] = {}
    for name, tensor in tensors:
        place = stack_of(name)
        if place is None:
            yield name, tensor
            continue
        stack, number = place
        whole, missing = waiting.setdefault(
            stack, (tensor.new_empty(sizes[stack], *tensor.shape), set(range(sizes[stack])))
        )
        whole[number] = tensor
        missing.discard(number)
        if not missing:
            yield stack, waiting.pop(stack)[0]
    if waiting:
        raise ValueError(
            f"entries did not come: {', '.join(entry(stack, min(missing)) for stack, (_, missing) in waiting.items())}"
        )


def stacked_specs(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Types and shapes of tensors in a file, stacks in place of their entries."""
    sizes = Counter(place[0] for name in specs if (place := stack_of(name)))
    found: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        place = stack_of(name)
        if place is None:
            found[name] = spec
        else:
            found.setdefault(place[0], TensorSpec(spec.dtype, (sizes[place[0]], *spec.shape)))
    return found
