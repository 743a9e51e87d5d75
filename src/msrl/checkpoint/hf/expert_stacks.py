"""Hugging Face tensors that stack the experts of a layer along the first axis.

They are unstacked on reading and stacked on writing. In between, entry 3 of the tensor NAME is a
separate tensor `NAME[3]` (see `models.entries`).

Files of a family that publishes stacks have experts in one of three forms. All are read, and the
published one is written:

    experts.gate_up_proj [experts, 2 ffn, hidden]   experts.down_proj [experts, hidden, ffn]
    experts.gate_up_proj [experts, hidden, 2 ffn]   experts.down_proj [experts, ffn, hidden]
    experts.3.gate_proj.weight, experts.3.up_proj.weight, experts.3.down_proj.weight

Source: the mappings of `qwen3_vl_moe` and `qwen2_moe` in transformers' `conversion_mapping.py`.
transformers 5 writes the first form of Qwen3-VL, which is published in the second one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from msrl.checkpoint.hf.weight_files import StoredTensor
from msrl.checkpoint.torch_files.reader import TensorSpec
from msrl.models.entries import entry, split_entry
from msrl.models.rules import Packed, Rule


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


def published_experts(
    stored: Mapping[str, StoredTensor], rules: Iterable[Rule]
) -> dict[str, StoredTensor]:
    """Return unstacked tensors with all experts in the published form of their family."""
    tensors, entries = dict(stored), dict[str, Rule]()
    for rule in rules:
        if rule.expert is None or split_entry(rule.hf[0]) is None or len(rule.shapes[0]) < 2:
            continue
        layout = rule.layout
        if isinstance(layout, Packed) and layout.alternating:
            continue  # gpt-oss, whose files have one form
        entries[rule.hf[0]] = rule
    for name, rule in entries.items():
        if name not in tensors:
            _join_expert(tensors, name, rule)
    # One of the two matrices may be square, which tells nothing.
    if any(_is_turned(tensors.get(name), rule) for name, rule in entries.items()):
        tensors |= {name: _turned(tensors[name]) for name in entries if name in tensors}
    return tensors


def _join_expert(tensors: dict[str, StoredTensor], name: str, rule: Rule) -> None:
    """Replace the tensors of an expert that is separate by the entry `name`, if they exist."""
    position = split_entry(name)
    assert position is not None
    prefix, _, last = position[0].rpartition(".")
    projections = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    names = [f"{prefix}.{position[1]}.{projection}.weight" for projection in projections]
    parts = [tensors[each] for each in names if each in tensors]
    if len(parts) < len(names) or any(part.spec != parts[0].spec for part in parts):
        return
    for each in names:
        del tensors[each]
    first = parts[0].spec
    spec = TensorSpec(first.dtype, (first.shape[0] * len(parts), *first.shape[1:]))
    joined = StoredTensor(parts[0].file, spec, partial(_read_rows, parts))
    is_transposed = isinstance(rule.layout, Packed) and rule.layout.transposed
    tensors[name] = _turned(joined) if is_transposed else joined


def _is_turned(stored: StoredTensor | None, rule: Rule) -> bool:
    """Return True for a tensor with inputs and outputs exchanged."""
    size = rule.shapes[0]
    return stored is not None and stored.spec.shape == size[::-1] != size


def _turned(stored: StoredTensor) -> StoredTensor:
    spec = TensorSpec(stored.spec.dtype, stored.spec.shape[::-1])
    return StoredTensor(stored.file, spec, partial(_read_turned, stored))


def _read_turned(stored: StoredTensor) -> Tensor:
    return stored.read().mT


def _read_rows(parts: list[StoredTensor]) -> Tensor:
    return torch.cat([part.read() for part in parts])


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
