"""Weights to load, whatever they lie in: a Hugging Face folder or an mcore checkpoint of any
layout, given in any other layout.

One tensor at a time is in memory; what needs no change of type or layout is a view of the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrl.checkpoint import tensor_layouts as layouts
from msrl.checkpoint.dist.read import is_distributed
from msrl.checkpoint.dist.source import DistSource
from msrl.checkpoint.hf.folder import HfCheckpoint
from msrl.checkpoint.mcore.arguments import loaded_from
from msrl.checkpoint.mcore.files import SIDECAR, iteration_dir, read_rank_file
from msrl.checkpoint.mcore.locate import Found, empty_positions, find_checkpoint, latest_iteration
from msrl.checkpoint.rank_shapes import padded_vocab_size, rank_plan
from msrl.checkpoint.torch_files.reader import spec_of
from msrl.checkpoint.weights import WeightSource
from msrl.errors import MsrlError
from msrl.models.families import load_shape
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.reward_head import OUTPUT_LAYER
from msrl.models.rules import Replicated, Rule, Zeros
from msrl.models.shape import Shape
from msrl.models.stages import TIED_OUTPUT, chunk_name, stage_tensors


class HfSource(WeightSource):
    """A Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        self._checkpoint = HfCheckpoint(folder)
        self.shape, self.hf_dir = self._checkpoint.shape, folder

    def dtype(self, rule: Rule) -> torch.dtype:
        if not rule.hf:
            return self.main_dtype()
        kinds = {self._checkpoint.specs[name].dtype for name in rule.hf}
        if len(kinds) > 1:
            raise MsrlError(
                f"{self.hf_dir}: {', '.join(rule.hf)} have different types; choose one with --dtype"
            )
        return kinds.pop()

    def canonical(self, rule: Rule) -> Tensor:
        return layouts.fuse(rule.layout, self.hf_tensors(rule))

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        return tuple(self._checkpoint.tensor(name) for name in rule.hf)

    def shard(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Tensor:
        return layouts.shard(rule.layout, self.hf_tensors(rule), rank, size, padded_vocab)

    def pieces(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Iterator[Tensor]:
        yield from layouts.pieces(rule.layout, self.hf_tensors(rule), rank, size, padded_vocab)


Shards = Mapping[Coords, Mapping[str, Tensor]]


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A tensor that two ranks hold: which ones, as `NAME of rank ..., that of rank ...`, and both;
    the first is the one that is read.
    """

    ranks: str
    read: Tensor
    other: Tensor


class ShardedSource(WeightSource):
    """Any tensors that are named and cut like a model's weights (the weights, or an optimizer's
    moments), by rank.
    """

    def __init__(
        self, shape: Shape, cut: ParallelLayout, shards: Shards, hf_dir: Path, where: str
    ) -> None:
        """`shards` has the local names of every rank. Raises MsrlError when one is missing,
        misshapen or left over; `where` is for it.
        """
        cut.check(shape)
        self.shape, self.hf_dir, self.cut = shape, hf_dir, cut
        self._shards = shards
        self._where = where
        self._places: dict[str, dict[int, tuple[Coords, str]]] = {}
        self._copies: dict[
            tuple[str, int], list[tuple[Coords, str]]
        ] = {}  # of what several ranks hold alike, the one that is read first
        for at in cut.ranks():
            self._check_rank(at, shards[at])
            for placed in stage_tensors(shape, cut, at):
                if isinstance(placed.layout, Zeros) and shards[at][placed.name].any():
                    raise MsrlError(
                        f"{where}: {placed.name} is not zero, and {shape.architecture} has no place for it"
                    )
                if not placed.is_tied_copy:
                    self._places.setdefault(placed.rule.mcore, {}).setdefault(
                        placed.shard, (at, placed.name)
                    )
                    shard = 0 if isinstance(placed.layout, Replicated) else placed.shard
                    self._copies.setdefault((placed.rule.mcore, shard), []).append(
                        (at, placed.name)
                    )

    @property
    def _embedding(self) -> str:
        return chunk_name(
            "embedding.word_embeddings.weight", 0, self.cut.num_chunks(self.shape.num_layers)
        )

    def _check_rank(self, at: Coords, tensors: Mapping[str, Tensor]) -> None:
        """The rank holds what the plan says; its vocabulary may be padded to any size."""
        embedding = self._shards[at._replace(pp=0)].get(self._embedding)
        rows = (
            embedding.shape[0] * self.cut.tp
            if embedding is not None
            else padded_vocab_size(self.shape, self.cut.tp)
        )
        if rows < self.shape.vocab_size:
            raise MsrlError(
                f"{self._where}: the embedding has {rows} rows, fewer than the {self.shape.vocab_size} tokens of the config"
            )
        planned = rank_plan(self.shape, self.cut, at, rows).tensors
        rank = f"{self._where}, rank {self._rank(at)}"
        for name, size in planned.items():
            if name not in tensors:
                raise MsrlError(f"{rank}: {name} is missing")
            if tuple(tensors[name].shape) != size:
                raise MsrlError(
                    f"{rank}: {name} is {list(tensors[name].shape)}, but the model makes it {list(size)}"
                )
        extra = sorted(set(tensors) - set(planned))
        if extra:
            raise MsrlError(
                f"{rank}: {len(extra)} tensors have no place in {self.shape.architecture}: {', '.join(extra[:3])}"
            )

    def dtype(self, rule: Rule) -> torch.dtype:
        at, name = self._places[rule.mcore][0]
        return spec_of(self._shards[at][name]).dtype

    def canonical(self, rule: Rule) -> Tensor:
        return layouts.join(rule.layout, self._parts(rule))

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        return layouts.unfuse(rule.layout, self.canonical(rule))

    def hf_parts(self, rule: Rule) -> tuple[Iterable[Tensor], ...]:
        return layouts.hf_parts(rule.layout, self._parts(rule))

    def shard(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Tensor:
        pieces = list(self.pieces(rule, rank, size, padded_vocab))
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def pieces(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Iterator[Tensor]:
        parts = self._parts(rule)
        if size == len(parts) and layouts.shard_shape(
            rule.layout, rule.shapes, size, padded_vocab
        ) == tuple(parts[0].shape):
            yield parts[rank]
        else:
            yield from layouts.recut(rule.layout, parts, rank, size, padded_vocab)

    def tied_copy_differs(self) -> bool:
        """Whether a last stage's copy of a tied embedding is another tensor than the embedding
        itself.
        """
        if not self.shape.tie_word_embeddings or self.cut.pp == 1:
            return False
        return any(
            not torch.equal(
                self._shards[at._replace(pp=0)][self._embedding], self._shards[at][placed.name]
            )
            for at in self.cut.ranks()
            if at.pp == self.cut.pp - 1
            for placed in stage_tensors(self.shape, self.cut, at)
            if placed.is_tied_copy
        )

    def copies(self) -> Iterator[Copy]:
        """What several ranks hold and should hold alike: norms on tensor-parallel ranks, all but
        the experts on expert-parallel ones.
        """
        for (first, name), *others in self._copies.values():
            for at, other in others:
                ranks = f"{name} of rank {self._rank(at)}, that of rank {self._rank(first)}"
                yield Copy(ranks, self._shards[first][name], self._shards[at][other])

    def _rank(self, at: Coords) -> str:
        return f"tp {at.tp} pp {at.pp}" + (f" ep {at.ep}" if self.cut.ep > 1 else "")

    def _parts(self, rule: Rule) -> list[Tensor]:
        places = self._places[rule.mcore]
        return [self._shards[at][name] for at, name in (places[shard] for shard in sorted(places))]


def open_mcore(
    save: Path,
    hf_dir: Path | None = None,
    iteration: int | str | None = None,
    *,
    beside_adapter: bool = False,
) -> WeightSource:
    """The weights of an mcore checkpoint folder of either layout; its config is `<save>/hf`, or
    `hf_dir` where the checkpoint has none.

    With `beside_adapter`, a LoRA adapter in the files (see `lora_files`) is passed over; else it is
    refused, as the weights alone would be another model. Raises MsrlError for what is missing, cut
    short, harmful, or does not fit the config.
    """
    iteration = latest_iteration(save) if iteration is None else iteration
    config_dir = hf_dir or save / SIDECAR
    folder = iteration_dir(save, iteration)
    if is_distributed(folder):
        return DistSource(_shape(config_dir), folder, config_dir)
    return open_sharded(save, config_dir, iteration, beside_adapter=beside_adapter)


def _shape(config_dir: Path) -> Shape:
    if not (config_dir / "config.json").is_file():
        raise MsrlError(
            f"{config_dir}: there is no config.json; name the model's Hugging Face folder with --hf-config"
        )
    return load_shape(config_dir)


def open_sharded(
    save: Path, config_dir: Path, iteration: int | str, *, beside_adapter: bool = False
) -> ShardedSource:
    """`open_mcore` for a file per rank."""
    found = find_checkpoint(save, iteration)
    shape = _shape(config_dir)
    contents = {rank: read_rank_file(path) for rank, path in found.files.items()}
    models = {
        rank: _base_weights(content, save, beside_adapter) for rank, content in contents.items()
    }
    if shape.reward_head:
        models = {rank: _without_output_layer(model) for rank, model in models.items()}
    found = dataclasses.replace(
        found, cut=with_empty_layers(found.cut, contents[Coords()]["args"], shape, models)
    )
    for rank, content in contents.items():
        _check_args(found, rank, vars(content["args"]), shape)
    source = ShardedSource(shape, found.cut, models, config_dir, str(save))
    if source.tied_copy_differs():
        raise MsrlError(
            f"{save}: the model ties its embeddings, but the last stage's {TIED_OUTPUT} differs from the embedding"
        )
    return source


def with_empty_layers(
    cut: ParallelLayout, args: argparse.Namespace, shape: Shape, models: Shards
) -> ParallelLayout:
    """The cut with its empty layers; where the arguments only count them (as MindSpeed's converter
    does), the tensors' names tell.
    """
    num_positions = getattr(args, "num_layers", None)
    if cut.noop_layers or not isinstance(num_positions, int) or num_positions <= shape.num_layers:
        return cut
    found = dataclasses.replace(cut, noop_layers=empty_positions(cut, num_positions, models))
    return found if found.num_positions(shape.num_layers) == num_positions else cut


def _base_weights(
    content: Mapping[str, Any], save: Path, beside_adapter: bool
) -> dict[str, Tensor]:
    """The weights of a rank's file without a LoRA adapter's, under their plain names."""
    model: Mapping[str, Tensor] = content["model"]
    weights = {name: tensor for name, tensor in model.items() if ".lora_" not in name}
    if len(weights) < len(model) and not weights:
        raise MsrlError(
            f"{save}: holds a LoRA adapter alone; merge it into its base model: {_merging(save, content['args'])}"
        )
    if len(weights) < len(model) and not beside_adapter:
        raise MsrlError(
            f"{save}: holds a LoRA adapter beside the weights; merge it (convert-ckpt mcore2hf or reshard, with --lora {save})"
        )
    return {name.replace(".base_layer.", "."): tensor for name, tensor in weights.items()}


def _merging(save: Path, args: argparse.Namespace) -> str:
    """The command that makes a model of an adapter and its base."""
    base = loaded_from(save, args)
    is_hf = base is not None and (base / "config.json").is_file()
    words = [
        "hf2hf" if base is None or is_hf else "mcore2hf",
        "--load",
        str(base or "BASE"),
        "--lora",
        str(save),
        "--save",
        "FOLDER",
    ]
    command = f"msrl convert-ckpt {shlex.join(words)}"
    return (
        command
        if base is not None
        else f"{command}, with BASE its Hugging Face folder (mcore2hf where it is an mcore checkpoint)"
    )


def _without_output_layer(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """MindSpeed's reward models keep an output layer that is neither used nor trained."""
    return {name: tensor for name, tensor in model.items() if not name.endswith(OUTPUT_LAYER)}


def _check_args(found: Found, rank: Coords, args: Mapping[str, object], shape: Shape) -> None:
    """The arguments in a file agree with the files' names and the config."""
    wanted = {
        "tensor_model_parallel_size": found.cut.tp,
        "pipeline_model_parallel_size": found.cut.pp,
        "num_layers": found.cut.num_positions(shape.num_layers),
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
    }
    for name, value in wanted.items():
        if args.get(name, value) != value:
            raise MsrlError(
                f"{found.files[rank]}: says {name}={args[name]}, but folder names and config say {value}"
            )


def open_weights(path: Path, hf_dir: Path | None = None) -> WeightSource:
    """The weights in `path`: an mcore checkpoint folder or a Hugging Face folder. Raises MsrlError
    as the openers of the two do.
    """
    if not path.is_dir():
        raise MsrlError(f"{path}: there is no such folder")
    if (path / "config.json").is_file():
        return HfSource(path)
    if not any(path.iterdir()):
        raise MsrlError(
            f"{path}: the folder is empty; it must hold a Hugging Face model or an mcore checkpoint"
        )
    latest_iteration(path)
    return open_mcore(path, hf_dir)
