"""Weight sources: a Hugging Face folder or an mcore checkpoint, readable in any parallel layout.

One tensor at a time is in memory. A tensor that needs no change of type or layout is a view of the
file.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrl.checkpoint import tensor_layouts as layouts
from msrl.checkpoint.distributed.read import is_distributed, read_common
from msrl.checkpoint.distributed.source import DistSource
from msrl.checkpoint.distributed.write import COMMON
from msrl.checkpoint.hf.folder import HfCheckpoint
from msrl.checkpoint.hf.pass_through import tower_tensors
from msrl.checkpoint.hf.weight_files import StoredTensor
from msrl.checkpoint.mcore.arguments import load_folder, refuse_contradictions
from msrl.checkpoint.mcore.files import SIDECAR, iteration_dir, read_rank_file
from msrl.checkpoint.mcore.locate import (
    CheckpointFiles,
    empty_positions,
    find_checkpoint,
    latest_iteration,
)
from msrl.checkpoint.mcore.whole_mixers import has_whole_mixers, shard_mixers
from msrl.checkpoint.prediction_layers import refuse_prediction_layers
from msrl.checkpoint.rank_shapes import padded_vocab_size, rank_plan
from msrl.checkpoint.torch_files.reader import tensor_spec
from msrl.checkpoint.weights import WeightSource
from msrl.errors import MsrlError
from msrl.models.families import load_shape
from msrl.models.hf_config import MAX_LAYERS
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.reward_head import OUTPUT_LAYER
from msrl.models.reward_head import WEIGHT as SCORE_HEAD
from msrl.models.rules import Replicated, Rule, Vocab, Zeros
from msrl.models.shape import Shape
from msrl.models.stages import TIED_OUTPUT, StageTensor, chunk_name, stage_tensors
from msrl.models.vision.tensors import is_tower


class HfSource(WeightSource):
    """Weights of a Hugging Face folder."""

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor] | None = None) -> None:
        """Open the weight files of the folder, or `tensors` that are stored elsewhere."""
        self._checkpoint = HfCheckpoint(folder, tensors)
        self.shape, self.hf_dir = self._checkpoint.shape, folder
        self.has_published_experts = self._checkpoint.has_published_experts

    def dtype(self, rule: Rule) -> torch.dtype:
        if not rule.hf:
            return self.main_dtype()
        dtypes = {self._checkpoint.specs[name].dtype for name in rule.hf}
        if len(dtypes) > 1:
            raise MsrlError(
                f"{self.hf_dir}: {', '.join(rule.hf)} have different types. Select one with "
                "--dtype."
            )
        return dtypes.pop()

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        return tuple(self._checkpoint.tensor(name) for name in rule.hf)


Shards = Mapping[Coords, Mapping[str, Tensor]]


@dataclasses.dataclass(frozen=True, slots=True)
class TensorCopy:
    """A tensor that two ranks hold.

    `ranks` describes the two ranks (`NAME of rank ..., that of rank ...`); `read` is the tensor
    that conversions use.
    """

    ranks: str
    read: Tensor
    other: Tensor


class ShardedSource(WeightSource):
    """Tensors by rank, named and sharded like weights; also used for optimizer moments."""

    def __init__(
        self, shape: Shape, layout: ParallelLayout, shards: Shards, hf_dir: Path, where: str
    ) -> None:
        """Check the tensors of all ranks.

        Args:
            shape: Shape of the model.
            layout: Parallel layout of the tensors.
            shards: Tensors of every rank by local name.
            hf_dir: Folder of config.json and tokenizer.
            where: Prefix of error messages.

        Raises:
            MsrlError: A tensor is missing, unexpected or has another shape.
        """
        layout.check(shape)
        self.shape, self.hf_dir, self.layout = shape, hf_dir, layout
        self._shards = shards
        self._where = where
        self._shards_by_rule: dict[str, dict[int, tuple[Coords, str]]] = {}
        # By tensor and shard; the first of several copies is the one that is read.
        self._copies: dict[tuple[str, int], list[tuple[Coords, str]]] = {}
        for at in layout.ranks():
            self._check_rank(at, shards[at])
            for entry in stage_tensors(shape, layout, at):
                self._add(at, entry)

    def _add(self, at: Coords, entry: StageTensor) -> None:
        """Record which rank holds a shard. Raise MsrlError for a required zero that is not zero."""
        if isinstance(entry.layout, Zeros) and self._shards[at][entry.name].any():
            raise MsrlError(
                f"{self._where}: {entry.name} is not zero, "
                f"but {self.shape.architecture} has no such parameter"
            )
        if entry.is_tied_copy:
            return
        by_shard = self._shards_by_rule.setdefault(entry.rule.mcore, {})
        by_shard.setdefault(entry.shard, (at, entry.name))
        shard = 0 if isinstance(entry.layout, Replicated) else entry.shard
        self._copies.setdefault((entry.rule.mcore, shard), []).append((at, entry.name))

    @property
    def _embedding(self) -> str:
        return chunk_name(
            "embedding.word_embeddings.weight", 0, self.layout.num_chunks(self.shape.num_layers)
        )

    def _check_rank(self, at: Coords, tensors: Mapping[str, Tensor]) -> None:
        """Check that a rank has exactly the tensors of its plan; vocabulary padding may differ."""
        rows = self._vocab_rows()
        planned = rank_plan(self.shape, self.layout, at, max(rows) * self.layout.tp).tensors
        for entry in stage_tensors(self.shape, self.layout, at):
            if isinstance(entry.layout, Vocab):
                planned[entry.name] = (rows[at.tp], *planned[entry.name][1:])
        rank = f"{self._where}, rank {self._rank_text(at)}"
        for name, size in planned.items():
            if name not in tensors:
                raise MsrlError(f"{rank}: {name} is missing")
            if tuple(tensors[name].shape) != size:
                raise MsrlError(
                    f"{rank}: {name} has shape {list(tensors[name].shape)}, "
                    f"but the model needs {list(size)}"
                )
        unexpected = sorted(set(tensors) - set(planned))
        if unexpected:
            raise MsrlError(
                f"{rank}: {len(unexpected)} tensors are not part of {self.shape.architecture}: "
                f"{', '.join(unexpected[:3])}"
            )

    def _vocab_rows(self) -> list[int]:
        """Return the rows of the vocabulary on each tensor-parallel rank.

        msrl pads them to the same number. MindSpeed-LLM's converter does not pad, so that the last
        rank may have fewer rows.

        Raises:
            MsrlError: The rows do not equal the vocabulary, with or without padding.
        """
        tp = self.layout.tp
        stored = {
            at.tp: tensors[self._embedding].shape[0]
            for at, tensors in self._shards.items()
            if at.pp == 0 and self._embedding in tensors and tensors[self._embedding].dim()
        }
        rows = [stored.get(rank, padded_vocab_size(self.shape, tp) // tp) for rank in range(tp)]
        if sum(rows) < self.shape.vocab_size:
            raise MsrlError(
                f"{self._where}: the embedding has {sum(rows)} rows, "
                f"but vocab_size={self.shape.vocab_size} in the config"
            )
        if len(set(rows[:-1])) > 1 or rows[-1] > rows[0]:
            raise MsrlError(
                f"{self._where}: the tensor-parallel ranks have {rows} rows of the embedding, "
                "but all ranks before the last must have the same number and the last no more"
            )
        return rows

    def dtype(self, rule: Rule) -> torch.dtype:
        at, name = self._shards_by_rule[rule.mcore][0]
        return tensor_spec(self._shards[at][name]).dtype

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        return layouts.unfuse(rule.layout, layouts.join(rule.layout, self._shards_of_rule(rule)))

    def hf_pieces(self, rule: Rule) -> tuple[Iterable[Tensor], ...]:
        return layouts.hf_pieces(rule.layout, self._shards_of_rule(rule))

    def pieces(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Iterator[Tensor]:
        shards = self._shards_of_rule(rule)
        shape = layouts.shard_shape(rule.layout, rule.shapes, size, padded_vocab)
        if size == len(shards) and all(tuple(stored.shape) == shape for stored in shards):
            yield shards[rank]
        else:
            yield from layouts.reshard(rule.layout, shards, rank, size, padded_vocab)

    def tied_copy_differs(self) -> bool:
        """Return True if a copy of a tied embedding on a last stage differs from the embedding."""
        if not self.shape.tie_word_embeddings or self.layout.pp == 1:
            return False
        for at in self.layout.ranks():
            embedding = self._shards[at._replace(pp=0)].get(self._embedding)
            for entry in stage_tensors(self.shape, self.layout, at):
                is_last = at.pp == self.layout.pp - 1
                if not is_last or not entry.is_tied_copy:
                    continue
                if embedding is None or not torch.equal(embedding, self._shards[at][entry.name]):
                    return True
        return False

    def copies(self) -> Iterator[TensorCopy]:
        """Yield the tensors that several ranks hold and that should be equal.

        These are norms on tensor-parallel ranks, and everything but the experts on expert-parallel
        ranks.
        """
        for (first, name), *copies in self._copies.values():
            for at, other in copies:
                ranks = (
                    f"{name} of rank {self._rank_text(at)}, that of rank {self._rank_text(first)}"
                )
                yield TensorCopy(ranks, self._shards[first][name], self._shards[at][other])

    def _rank_text(self, at: Coords) -> str:
        return f"tp {at.tp} pp {at.pp}" + (f" ep {at.ep}" if self.layout.ep > 1 else "")

    def _shards_of_rule(self, rule: Rule) -> list[Tensor]:
        holders = self._shards_by_rule[rule.mcore]
        shards: list[Tensor] = []
        for shard in sorted(holders):
            at, name = holders[shard]
            shards.append(self._shards[at][name])
        return shards


def open_mcore(
    save: Path,
    hf_dir: Path | None = None,
    iteration: int | str | None = None,
    *,
    beside_adapter: bool = False,
) -> WeightSource:
    """Open the weights of an mcore checkpoint in MindSpeed's or Megatron's distributed format.

    Args:
        save: Checkpoint folder.
        hf_dir: Folder of the config, if the checkpoint has none in `<save>/hf`.
        iteration: Iteration to read; default: the latest.
        beside_adapter: Ignore a LoRA adapter in the files (see `adapters.megatron`). By default it
            is refused, because the weights without it are another model.

    Raises:
        MsrlError: The checkpoint is incomplete, truncated, harmful, or does not fit the config.
    """
    iteration = latest_iteration(save) if iteration is None else iteration
    config_dir = hf_dir or save / SIDECAR
    folder = iteration_dir(save, iteration)
    if is_distributed(folder):
        shape, arguments = _shape(config_dir), vars(read_common(folder)["args"])
        refuse_contradictions(folder / COMMON, arguments, shape, config_dir / "config.json")
        return DistSource(shape, folder, config_dir)
    return open_sharded(save, config_dir, iteration, beside_adapter=beside_adapter)


def _shape(config_dir: Path) -> Shape:
    if not (config_dir / "config.json").is_file():
        raise MsrlError(
            f"{config_dir}: no config.json found. "
            "Name the model's Hugging Face folder with --hf-config."
        )
    return load_shape(config_dir)


def open_sharded(
    save: Path, config_dir: Path, iteration: int | str, *, beside_adapter: bool = False
) -> ShardedSource:
    """Open the weights of a checkpoint with one file per rank; see `open_mcore`."""
    files = find_checkpoint(save, iteration)
    shape = _shape(config_dir)
    contents = {rank: read_rank_file(path) for rank, path in files.files.items()}
    models = {
        rank: _base_weights(content, save, beside_adapter) for rank, content in contents.items()
    }
    if shape.reward_head:
        models = {rank: _without_output_layer(model) for rank, model in models.items()}
    files = dataclasses.replace(
        files, layout=with_empty_layers(files.layout, contents[Coords()]["args"], shape, models)
    )
    for rank, content in contents.items():
        _check_args(files, rank, vars(content["args"]), shape, config_dir)
    if shape.delta is not None and any(map(has_whole_mixers, models.values())):
        files.layout.check(shape)
        models = {
            at: shard_mixers(model, stage_tensors(shape, files.layout, at))
            for at, model in models.items()
        }
    if shape.vision is not None:
        models = _with_tower(models, files.layout, shape, config_dir)
    source = ShardedSource(shape, files.layout, models, config_dir, str(save))
    if source.tied_copy_differs():
        raise MsrlError(
            f"{save}: tie_word_embeddings=true, "
            f"but {TIED_OUTPUT} of the last stage differs from the embedding"
        )
    return source


def with_empty_layers(
    layout: ParallelLayout, args: argparse.Namespace, shape: Shape, models: Shards
) -> ParallelLayout:
    """Return the parallel layout with its empty layers.

    Where the arguments only count them (as MindSpeed's converter does), they are derived from
    the names of the tensors.
    """
    num_positions = getattr(args, "num_layers", None)
    if (
        layout.noop_layers
        or not isinstance(num_positions, int)
        or not shape.num_layers < num_positions <= MAX_LAYERS
    ):
        return layout
    noop_layers = empty_positions(layout, num_positions, models)
    padded = dataclasses.replace(layout, noop_layers=noop_layers)
    return padded if padded.num_positions(shape.num_layers) == num_positions else layout


def _with_tower(
    models: Mapping[Coords, dict[str, Tensor]],
    layout: ParallelLayout,
    shape: Shape,
    config_dir: Path,
) -> dict[Coords, dict[str, Tensor]]:
    """Return the tensors of all ranks with the vision tower, which older checkpoints lack."""
    names: dict[Coords, dict[str, str]] = {}
    for at in models:
        placed = (entry for entry in stage_tensors(shape, layout, at) if is_tower(entry.rule))
        names[at] = {entry.name: entry.rule.mcore for entry in placed}
    if any(name in models[at] for at, of_rank in names.items() for name in of_rank):
        return dict(models)
    tower = {name: stored.read() for name, stored in tower_tensors(config_dir, shape).items()}
    return {
        at: models[at] | {name: tower[mcore] for name, mcore in of_rank.items()}
        for at, of_rank in names.items()
    }


def _base_weights(
    content: Mapping[str, Any], save: Path, beside_adapter: bool
) -> dict[str, Tensor]:
    """Return the weights of a rank's file under their plain names, without a LoRA adapter."""
    model: Mapping[str, Tensor] = content["model"]
    refuse_prediction_layers(save, model)
    weights = {name: tensor for name, tensor in model.items() if ".lora_" not in name}
    if holds_only_adapter(model):
        raise MsrlError(
            f"{save}: contains only a LoRA adapter. "
            f"Merge it into its base model: {_merge_command(save, content['args'])}"
        )
    if len(weights) < len(model) and not beside_adapter:
        raise MsrlError(
            f"{save}: contains a LoRA adapter in addition to the weights. "
            f"Merge it (convert-ckpt mcore2hf or reshard, with --lora {save})."
        )
    return {name.replace(".base_layer.", "."): tensor for name, tensor in weights.items()}


def holds_only_adapter(names: Collection[str]) -> bool:
    """Return True for the tensors of an adapter without base weights.

    An adapter of a reward model comes with its score head.
    """
    base_names = [name for name in names if ".lora_" not in name]
    is_adapter = len(base_names) < len(names)
    return is_adapter and all(name.endswith(SCORE_HEAD) for name in base_names)


def _merge_command(save: Path, args: argparse.Namespace) -> str:
    """Return the command that merges an adapter into its base model."""
    base = load_folder(save, args)
    is_hf = base is not None and (base / "config.json").is_file()
    arguments = [
        "hf2hf" if base is None or is_hf else "mcore2hf",
        "--load",
        str(base or "BASE"),
        "--lora",
        str(save),
        "--save",
        "FOLDER",
    ]
    command = f"msrl convert-ckpt {shlex.join(arguments)}"
    if base is not None:
        return command
    return (
        f"{command}, where BASE is its Hugging Face folder (use mcore2hf for an mcore checkpoint)"
    )


def _without_output_layer(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove the output layer, which MindSpeed's reward models keep but neither use nor train."""
    return {name: tensor for name, tensor in model.items() if not name.endswith(OUTPUT_LAYER)}


def _check_args(
    files: CheckpointFiles, rank: Coords, args: Mapping[str, object], shape: Shape, config_dir: Path
) -> None:
    """Check that the arguments in a file agree with the folder names and the config."""
    expected = {
        "tensor_model_parallel_size": files.layout.tp,
        "pipeline_model_parallel_size": files.layout.pp,
        "num_layers": files.layout.num_positions(shape.num_layers),
    }
    for name, value in expected.items():
        if args.get(name, value) != value:
            raise MsrlError(
                f"{files.files[rank]}: {name}={args[name]} contradicts "
                f"the folder names and the config ({value})"
            )
    refuse_contradictions(files.files[rank], args, shape, config_dir / "config.json")


def open_weights(path: Path, hf_dir: Path | None = None) -> WeightSource:
    """Open the weights of an mcore checkpoint folder or a Hugging Face folder.

    Raises:
        MsrlError: The folder is neither of the two, or one of the errors of the two openers.
    """
    if not path.is_dir():
        raise MsrlError(f"{path}: folder does not exist")
    if (path / "config.json").is_file():
        return HfSource(path)
    if not any(path.iterdir()):
        raise MsrlError(
            f"{path}: the folder is empty. Name a Hugging Face model or an mcore checkpoint."
        )
    latest_iteration(path)
    return open_mcore(path, hf_dir)
