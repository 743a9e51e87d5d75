"""Weight source of a distributed checkpoint, readable in any parallel layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from msrl.checkpoint import tensor_layouts as layouts
from msrl.checkpoint.distributed.names import GlobalPosition, possible_positions, split_names
from msrl.checkpoint.distributed.read import GlobalTensors
from msrl.checkpoint.hf.pass_through import tower_tensors
from msrl.checkpoint.prediction_layers import refuse_prediction_layers
from msrl.checkpoint.weights import WeightSource
from msrl.errors import MsrlError
from msrl.models.families import all_rules
from msrl.models.reward_head import OUTPUT_LAYER
from msrl.models.rules import Rule, Vocab, Zeros
from msrl.models.shape import Shape
from msrl.models.vision.tensors import is_tower


class DistSource(WeightSource):
    """Weights of a distributed checkpoint of one iteration."""

    def __init__(self, shape: Shape, folder: Path, hf_dir: Path) -> None:
        """Check the tensors of the checkpoint.

        Raises:
            MsrlError: A tensor is missing, unexpected or has another shape.
        """
        self.shape, self.hf_dir = shape, hf_dir
        self._folder, self._tensors = folder, GlobalTensors(folder)
        rules = all_rules(shape)
        has_tower = any(is_tower(rule) and rule.mcore in self._tensors.stored for rule in rules)
        # By Megatron's name; older checkpoints have the vision tower in a separate file.
        self._tower = {} if has_tower else tower_tensors(hf_dir, shape)
        self._positions = {
            rule.mcore: self._find(rule) for rule in rules if rule.mcore not in self._tower
        }
        self._refuse_unexpected()
        for rule in rules:
            if isinstance(rule.layout, Zeros) and self._unshard(rule).any():
                raise MsrlError(
                    f"{folder}: {rule.mcore} is not zero, "
                    f"but {shape.architecture} has no such parameter"
                )

    def _find(self, rule: Rule) -> tuple[GlobalPosition, ...]:
        """Return the positions of a tensor's components after comparing their shapes.

        A vocabulary may be padded to any size.
        """
        components = split_names(rule.mcore, self.shape)
        if components:
            columns = rule.shapes[0][1:]
            return tuple(
                self._position(name, (rows, *columns)) for name, rows in components.items()
            )
        size = layouts.shard_shape(rule.layout, rule.shapes, 1, self._rows(rule))
        return (self._position(rule.mcore, size),)

    def _rows(self, rule: Rule) -> int | None:
        """Return the stored rows of a vocabulary; None for other tensors and for a missing one."""
        table = self._tensors.stored.get(rule.mcore) if isinstance(rule.layout, Vocab) else None
        if table is None:
            return None
        if table.shape[0] < self.shape.vocab_size:
            raise MsrlError(
                f"{self._folder}: {rule.mcore} has {table.shape[0]} rows, "
                f"but vocab_size={self.shape.vocab_size} in the config"
            )
        return table.shape[0]

    def _position(self, name: str, size: tuple[int, ...]) -> GlobalPosition:
        """Return the position of the tensor `name`, which must have shape `size`."""
        stored = self._tensors.stored
        candidates = list(possible_positions(name, self.shape))
        position = next((position for position in candidates if position.key in stored), None)
        if position is None:
            raise MsrlError(f"{self._folder}: {name} is missing (expected as {candidates[0].key})")
        actual, expected = stored[position.key].shape, (*position.extents, *size)
        if actual != expected:
            raise MsrlError(
                f"{self._folder}: {position.key} has shape {list(actual)}, "
                f"but the model needs {list(expected)}"
            )
        return position

    def _refuse_unexpected(self) -> None:
        """Raise MsrlError for tensors that do not belong to the model.

        Tensors of an optimizer are allowed, and the output layer, which a reward model does not
        use.
        """
        known = {position.key for positions in self._positions.values() for position in positions}
        if self.shape.reward_head:
            known.add(OUTPUT_LAYER)
        unexpected = sorted(
            key
            for key in self._tensors.stored.keys() - known
            if "optimizer." not in key and "_extra_state" not in key
        )
        refuse_prediction_layers(self._folder, unexpected)
        if unexpected:
            names = ", ".join(unexpected[:3])
            raise MsrlError(
                f"{self._folder}: {len(unexpected)} tensors are not part of "
                f"{self.shape.architecture}: {names}"
            )

    def _unshard(self, rule: Rule) -> Tensor:
        """Return the tensor as a single rank would hold it."""
        if rule.mcore in self._tower:
            return self._tower[rule.mcore].read()
        tensors = [
            self._tensors.read(position.key, position.index)
            for position in self._positions[rule.mcore]
        ]
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]

    def dtype(self, rule: Rule) -> torch.dtype:
        if rule.mcore in self._tower:
            return self._tower[rule.mcore].spec.dtype
        return self._tensors.stored[self._positions[rule.mcore][0].key].dtype

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        return layouts.unfuse(rule.layout, layouts.join(rule.layout, [self._unshard(rule)]))

    def pieces(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Iterator[Tensor]:
        tensor = self._unshard(rule)
        shape = layouts.shard_shape(rule.layout, rule.shapes, 1, padded_vocab)
        if size == 1 and tuple(tensor.shape) == shape:
            yield tensor
        else:
            tensors = layouts.unfuse(rule.layout, layouts.join(rule.layout, [tensor]))
            yield from layouts.pieces(rule.layout, tensors, rank, size, padded_vocab)
