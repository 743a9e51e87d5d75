"""The weights of a distributed checkpoint, given in any layout: what it was saved by makes no
difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from msrl.checkpoint import tensor_layouts as layouts
from msrl.checkpoint.dist.names import GlobalPosition, parts_of, places_of
from msrl.checkpoint.dist.read import GlobalTensors
from msrl.checkpoint.weights import WeightSource
from msrl.errors import MsrlError
from msrl.models.families import all_rules
from msrl.models.reward_head import OUTPUT_LAYER
from msrl.models.rules import Rule, Vocab, Zeros
from msrl.models.shape import Shape


class DistSource(WeightSource):
    """The folder of one iteration."""

    def __init__(self, shape: Shape, folder: Path, hf_dir: Path) -> None:
        """Raises MsrlError when a tensor of the model is missing or misshapen, or one is there that
        the model has no place for.
        """
        self.shape, self.hf_dir = shape, hf_dir
        self._folder, self._tensors = folder, GlobalTensors(folder)
        self._places = {rule.mcore: self._found(rule) for rule in all_rules(shape)}
        self._refuse_others()
        for rule in all_rules(shape):
            if isinstance(rule.layout, Zeros) and self._whole(rule).any():
                raise MsrlError(f"{folder}: {rule.mcore} is not zero, and {shape.architecture} has no place for it")

    def _found(self, rule: Rule) -> tuple[GlobalPosition, ...]:
        """Where a tensor lies, in parts where Megatron-core keeps them apart; sizes compared, but a
        vocabulary may be padded to any.
        """
        parts = parts_of(rule.mcore, self.shape)
        if parts:
            return tuple(self._place(name, (rows, *rule.shapes[0][1:])) for name, rows in parts.items())
        return (self._place(rule.mcore, layouts.shard_shape(rule.layout, rule.shapes, 1, self._rows(rule))),)

    def _rows(self, rule: Rule) -> int | None:
        """How many rows of a vocabulary are there; None for any other tensor, and for one that is
        not there.
        """
        found = self._tensors.stored.get(rule.mcore) if isinstance(rule.layout, Vocab) else None
        if found is not None and found.shape[0] < self.shape.vocab_size:
            rows = f"has {found.shape[0]} rows, fewer than the {self.shape.vocab_size} tokens of the config"
            raise MsrlError(f"{self._folder}: {rule.mcore} {rows}")
        return found.shape[0] if found is not None else None

    def _place(self, name: str, size: tuple[int, ...]) -> GlobalPosition:
        """Where the tensor `name` of this size lies."""
        stored = self._tensors.stored
        place = next((place for place in places_of(name, self.shape) if place.key in stored), None)
        if place is None:
            raise MsrlError(f"{self._folder}: {name} is missing (looked for as {next(places_of(name, self.shape)).key})")
        found, wanted = stored[place.key].shape, (*place.extents, *size)
        if found != wanted:
            raise MsrlError(f"{self._folder}: {place.key} is {list(found)}, but the model makes it {list(wanted)}")
        return place

    def _refuse_others(self) -> None:
        """Only an optimizer's tensors may lie beside the model's, and the output layer that a
        reward model does not use.
        """
        known = {place.key for places in self._places.values() for place in places} | ({OUTPUT_LAYER} if self.shape.reward_head else set())
        extra = sorted(key for key in self._tensors.stored if key not in known and "optimizer." not in key and "_extra_state" not in key)
        if extra:
            names = ", ".join(extra[:3])
            raise MsrlError(f"{self._folder}: {len(extra)} tensors have no place in {self.shape.architecture}: {names}")

    def _whole(self, rule: Rule) -> Tensor:
        """The tensor as a single rank would hold it."""
        parts = [self._tensors.read(place.key, place.index) for place in self._places[rule.mcore]]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def dtype(self, rule: Rule) -> torch.dtype:
        return self._tensors.stored[self._places[rule.mcore][0].key].dtype

    def canonical(self, rule: Rule) -> Tensor:
        return layouts.join(rule.layout, [self._whole(rule)])

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        return layouts.unfuse(rule.layout, self.canonical(rule))

    def shard(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Tensor:
        parts = list(self.pieces(rule, rank, size, padded_vocab))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def pieces(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Iterator[Tensor]:
        whole = self._whole(rule)
        if size == 1 and tuple(whole.shape) == layouts.shard_shape(rule.layout, rule.shapes, 1, padded_vocab):
            yield whole
        else:
            tensors = layouts.unfuse(rule.layout, layouts.join(rule.layout, [whole]))
            yield from layouts.pieces(rule.layout, tensors, rank, size, padded_vocab)
