"""Writing of a checkpoint: every rank writes its files, then the first rank publishes it.

Nothing here communicates with other ranks, so it may run alongside the training. The first rank
finds the parts by the lists that their writers leave in the staged folder. A checkpoint is flushed
to disk before it becomes visible.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from msrl.checkpoint.convert import versions
from msrl.checkpoint.hf.folder import copy_sidecars, record_score_head
from msrl.checkpoint.hf.pass_through import write_pass_through
from msrl.checkpoint.mcore import files as mcore
from msrl.checkpoint.mcore.names import LOCAL
from msrl.checkpoint.rank_shapes import make_plan
from msrl.checkpoint.torch_files.reader import WrittenFile
from msrl.files import flush_to_disk, write_text
from msrl.models.parallel_layout import Coords
from msrl.models.shape import Shape
from msrl.trainer.checkpointing.integrity import Record, record_file, with_checksum
from msrl.trainer.checkpointing.resume import STATE, Retention, training_dir
from msrl.trainer.settings import Layout
from msrl.types import ChatFormat

WEIGHT = "weight"  # kind of the critic's weights, in addition to the kinds of its optimizer state
_POLL_S = 0.02


def optimizer_file(at: Coords) -> str:
    """Return the name of the file of a rank's optimizer state."""
    return f"optimizer_{at.tp:02d}_{at.pp:03d}_{at.ep:03d}.safetensors"


def critic_file(at: Coords) -> str:
    """Return the name of the file of a rank's critic: its weights and its optimizer state."""
    return f"critic_{at.tp:02d}_{at.pp:03d}_{at.ep:03d}.safetensors"


def critic_weights(folder: Path, at: Coords) -> dict[str, Tensor]:
    """Return the weights of the critic in a rank's file, by name; views of the file."""
    with safe_open(folder / critic_file(at), "pt") as file:
        return tensors_with_prefix(file, f"{WEIGHT}.")


def tensors_with_prefix(file: Any, prefix: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file whose names begin with `prefix`, without it."""
    return {
        name.removeprefix(prefix): file.get_tensor(name)
        for name in file.keys()  # noqa: SIM118 - not a mapping
        if name.startswith(prefix)
    }


def random_file(rank: int) -> str:
    """Return the name of the file of a rank's random-number states."""
    return f"rng_{rank:05d}.safetensors"


def _part_file(rank: int) -> str:
    return f"part_{rank:05d}.json"


def _staged_training(root: Path, step: int) -> Path:
    return training_dir(root, step).with_name(f".iter_{step:07d}.partial")


def prepare_folders(root: Path, step: int) -> None:
    """Create empty folders for the files, and remove incomplete folders of killed runs."""
    for folder in (mcore.staging_dir(root, step), _staged_training(root, step)):
        for incomplete in (folder, *folder.parent.glob(".iter_*.partial")):
            shutil.rmtree(incomplete, ignore_errors=True)
        folder.mkdir(parents=True)


@dataclass(frozen=True, slots=True)
class Weights:
    """Model and optimizer state of a shard.

    Only the first of the ranks with the same shard writes it.
    """

    folder: str  # of the rank, as `mcore.rank_folder` names it
    weights: Mapping[str, Tensor]
    args: argparse.Namespace
    # By file name: optimizer state, and the critic with its weights.
    states: Mapping[str, dict[str, Tensor]]


def discard(root: Path, step: int) -> None:
    """Remove the files of a save that failed, which would keep a full disk full.

    Other ranks that still write fail then, too.
    """
    for folder in (mcore.staging_dir(root, step), _staged_training(root, step)):
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class RankFiles:
    """Files that one rank writes.

    They hold its random-number states and, on writers, weights and optimizer states.
    """

    root: Path
    step: int
    rank: int
    random_states: dict[str, Tensor]
    weights: Weights | None = None

    def write(self) -> None:
        """Write the files, then the list of them."""
        staged = _staged_training(self.root, self.step)
        visible = training_dir(self.root, self.step).relative_to(self.root)
        tensors = {random_file(self.rank): self.random_states}
        records: dict[str, Record] = {}
        if self.weights is not None:
            tensors |= self.weights.states
            records |= self._write_model(self.weights)
        for name, contents in tensors.items():
            save_file(contents, staged / name)
            records[str(visible / name)] = record_file(staged / name)
        write_text(staged / _part_file(self.rank), json.dumps(records))

    def _write_model(self, model: Weights) -> dict[str, Record]:
        inside = Path(model.folder, mcore.FILE)
        path = mcore.staging_dir(self.root, self.step) / inside
        written = mcore.write_rank_file(path, model.weights, model.args, self.step)
        flush_to_disk(path)
        name = mcore.iteration_dir(self.root, self.step).relative_to(self.root) / inside
        return {str(name): {"bytes": written.num_bytes, "sha256": written.sha256}}


@dataclass(frozen=True, slots=True)
class SavedModel:
    """Description of the model in a checkpoint."""

    shape: Shape
    layout: Layout
    dtype: str
    is_adapters: bool


@dataclass(frozen=True, slots=True)
class Publication:
    """Publication of the files of all ranks as a checkpoint.

    `state` are the contents of `state.json` besides the files.
    """

    root: Path
    step: int
    num_parts: int
    state: Mapping[str, Any]
    model: SavedModel
    hf_dir: Path
    retention: Retention
    chat: ChatFormat | None = None  # chat format of the trained model

    def publish(self) -> None:
        """Make the checkpoint visible once all ranks have written their files.

        The state for a resume becomes visible first, the model and its tracker last.
        """
        staged, final = _staged_training(self.root, self.step), training_dir(self.root, self.step)
        records = self._records(staged)
        write_text(staged / STATE, with_checksum({**self.state, "files": records}))
        flush_to_disk(staged)
        self._place_sidecars()
        # Remove the model's folder first, so that the remainder is never read as complete.
        shutil.rmtree(mcore.iteration_dir(self.root, self.step), ignore_errors=True)
        shutil.rmtree(final, ignore_errors=True)
        staged.rename(final)
        flush_to_disk(final.parent)
        mcore.write_manifest(self.root, self.step, self._manifest_entry(records))
        mcore.publish(self.root, self.step)
        self._prune()

    def _records(self, staged: Path) -> dict[str, Record]:
        """Wait for the lists of all ranks, remove them, and return the records of all files."""
        # A rank writes its list last, so all of its files are complete.
        lists = [staged / _part_file(rank) for rank in range(self.num_parts)]
        while not all(path.is_file() for path in lists):
            time.sleep(_POLL_S)
        records = {
            name: record
            for path in lists
            for name, record in json.loads(path.read_text(encoding="utf-8")).items()
        }
        for path in lists:
            path.unlink()
        return dict(sorted(records.items()))

    def _place_sidecars(self) -> None:
        """Copy config, tokenizer and pass-through tensors atomically.

        Existing checkpoints need them at all times.
        """
        sidecar = self.root / mcore.SIDECAR
        is_needed = any(self.root.glob("iter_*"))
        if sidecar.exists() and (is_needed or self.hf_dir.resolve() == sidecar.resolve()):
            return
        staged = sidecar.with_name(f".{sidecar.name}.partial")
        shutil.rmtree(staged, ignore_errors=True)
        copy_sidecars(self.hf_dir, staged, getattr(torch, self.model.dtype), self.chat)
        if self.model.shape.reward_head:
            record_score_head(staged)
        write_pass_through(self.hf_dir, staged, self.model.shape)
        shutil.rmtree(sidecar, ignore_errors=True)
        staged.rename(sidecar)

    def _manifest_entry(self, records: Mapping[str, Record]) -> dict[str, Any]:
        files = {
            name: WrittenFile(record["bytes"], record["sha256"])
            for name, record in records.items()
            if "sha256" in record
        }
        plan = make_plan(self.model.shape, self.model.layout)
        entry = mcore.manifest_entry(
            self.model.shape, plan, self.model.dtype, files, LOCAL, versions()
        )
        return {**entry, "adapters_only": True} if self.model.is_adapters else entry

    def _prune(self) -> None:
        """Remove surplus checkpoints.

        The model's folder is removed first, so that the remainder is never read as a complete
        checkpoint.
        """
        for step in self.retention.surplus(self.root, self.step):
            shutil.rmtree(mcore.iteration_dir(self.root, step))
            shutil.rmtree(training_dir(self.root, step))
