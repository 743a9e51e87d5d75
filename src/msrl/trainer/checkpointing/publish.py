"""What becomes of a checkpoint once the ranks have met: every rank writes its part, the first makes the whole visible.

Nothing here meets other ranks, so it may run beside the training; the parts are known by the lists that their writers leave in the
staged folder. A checkpoint is on the disk, and not in a cache alone, before it is visible.
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
from msrl.checkpoint.hf.folder import copy_sidecars
from msrl.checkpoint.hf.pass_through import write_pass_through
from msrl.checkpoint.mcore import files as mcore
from msrl.checkpoint.mcore.names import LOCAL
from msrl.checkpoint.rank_shapes import make_plan
from msrl.checkpoint.torch_files.reader import WrittenFile
from msrl.files import flush_to_disk, write_text
from msrl.models.parallel_layout import Coords
from msrl.models.shape import Shape
from msrl.trainer.checkpointing.integrity import Record, seal, sealed_json
from msrl.trainer.checkpointing.resume import STATE, Retention, training_dir
from msrl.trainer.settings import Layout
from msrl.types import ChatFormat

WEIGHT = "weight"  # of the critic, beside its optimizer's kinds
_POLL_S = 0.02


def optimizer_file(at: Coords) -> str:
    return f"optimizer_{at.tp:02d}_{at.pp:03d}_{at.ep:03d}.safetensors"


def critic_file(at: Coords) -> str:
    return f"critic_{at.tp:02d}_{at.pp:03d}_{at.ep:03d}.safetensors"


def critic_weights(folder: Path, at: Coords) -> dict[str, Tensor]:
    """The weights of the critic in a rank's file, by name; views of the file."""
    with safe_open(folder / critic_file(at), "pt") as file:
        return beginning(file, f"{WEIGHT}.")


def beginning(file: Any, prefix: str) -> dict[str, Tensor]:
    """The tensors of an open safetensors file whose names begin with `prefix`, by what follows it."""
    return {name.removeprefix(prefix): file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118 - no mapping


def random_file(rank: int) -> str:
    return f"rng_{rank:05d}.safetensors"


def _part_file(rank: int) -> str:
    return f"part_{rank:05d}.json"


def _staged_training(root: Path, step: int) -> Path:
    return training_dir(root, step).with_name(f".iter_{step:07d}.partial")


def prepare_folders(root: Path, step: int) -> None:
    """Empty folders for the parts; what killed runs left of this and other steps is cleared, for nobody goes on from it."""
    for folder in (mcore.staging_dir(root, step), _staged_training(root, step)):
        for half in (folder, *folder.parent.glob(".iter_*.partial")):
            shutil.rmtree(half, ignore_errors=True)
        folder.mkdir(parents=True)


@dataclass(frozen=True, slots=True)
class Weights:
    """What one of the ranks that hold the same part of the model writes for all of them."""

    folder: str  # of the rank, as `mcore.py` names it
    weights: Mapping[str, Tensor]
    args: argparse.Namespace
    states: Mapping[str, dict[str, Tensor]]  # of the optimizer, and of the critic with its weights, by the name of their file


@dataclass(frozen=True, slots=True)
class RankFiles:
    """What one rank writes of a checkpoint: its random-number states, and weights and optimizer states if it is the one to write them."""

    root: Path
    step: int
    rank: int
    random_states: dict[str, Tensor]
    weights: Weights | None = None

    def write(self) -> None:
        """Write all, then the list of what was written."""
        staged, visible = _staged_training(self.root, self.step), training_dir(self.root, self.step).relative_to(self.root)
        tensors = {random_file(self.rank): self.random_states}
        records: dict[str, Record] = {}
        if self.weights is not None:
            tensors |= self.weights.states
            records |= self._write_model(self.weights)
        for name, contents in tensors.items():
            save_file(contents, staged / name)
            records[str(visible / name)] = seal(staged / name)
        write_text(staged / _part_file(self.rank), json.dumps(records))

    def _write_model(self, mine: Weights) -> dict[str, Record]:
        inside = Path(mine.folder, mcore.FILE)
        path = mcore.staging_dir(self.root, self.step) / inside
        written = mcore.write_rank_file(path, mine.weights, mine.args, self.step)
        flush_to_disk(path)
        name = mcore.iteration_dir(self.root, self.step).relative_to(self.root) / inside
        return {str(name): {"bytes": written.num_bytes, "sha256": written.sha256}}


@dataclass(frozen=True, slots=True)
class SavedModel:
    """What a checkpoint says of its model."""

    shape: Shape
    layout: Layout
    dtype: str
    is_adapters: bool


@dataclass(frozen=True, slots=True)
class Publication:
    """How the parts of all ranks become a checkpoint. `state` is what `state.json` says besides the files."""

    root: Path
    step: int
    num_parts: int
    state: Mapping[str, Any]
    model: SavedModel
    hf_dir: Path
    retention: Retention
    chat: ChatFormat | None = None  # how the model is asked from then on

    def publish(self) -> None:
        """Make the checkpoint visible once all parts are there: what only a resume needs first, the model and its tracker last."""
        staged, final = _staged_training(self.root, self.step), training_dir(self.root, self.step)
        records = self._records(staged)
        write_text(staged / STATE, sealed_json({**self.state, "files": records}))
        flush_to_disk(staged)
        self._place_sidecars()
        shutil.rmtree(mcore.iteration_dir(self.root, self.step), ignore_errors=True)  # the model's first: what is left is never whole
        shutil.rmtree(final, ignore_errors=True)
        staged.rename(final)
        flush_to_disk(final.parent)
        mcore.write_manifest(self.root, self.step, self._manifest_entry(records))
        mcore.publish(self.root, self.step)
        self._prune()

    def _records(self, staged: Path) -> dict[str, Record]:
        """What all ranks wrote, once they have; their lists are taken away."""
        lists = [staged / _part_file(rank) for rank in range(self.num_parts)]
        while not all(path.is_file() for path in lists):
            time.sleep(_POLL_S)
        records = {name: record for path in lists for name, record in json.loads(path.read_text(encoding="utf-8")).items()}
        for path in lists:
            path.unlink()
        return dict(sorted(records.items()))

    def _place_sidecars(self) -> None:
        """Config, tokenizer and what the model carries, whole: checkpoints that are there need them all the time."""
        place = self.root / mcore.SIDECAR
        is_needed = any(self.root.glob("iter_*"))
        if place.exists() and (is_needed or self.hf_dir.resolve() == place.resolve()):
            return
        staged = place.with_name(f".{place.name}.partial")
        shutil.rmtree(staged, ignore_errors=True)
        copy_sidecars(self.hf_dir, staged, getattr(torch, self.model.dtype), self.chat)
        write_pass_through(self.hf_dir, staged, self.model.shape)
        shutil.rmtree(place, ignore_errors=True)
        staged.rename(place)

    def _manifest_entry(self, records: Mapping[str, Record]) -> dict[str, Any]:
        files = {name: WrittenFile(record["bytes"], record["sha256"]) for name, record in records.items() if "sha256" in record}
        plan = make_plan(self.model.shape, self.model.layout)
        entry = mcore.manifest_entry(self.model.shape, plan, self.model.dtype, files, LOCAL, versions())
        return {**entry, "adapters_only": True} if self.model.is_adapters else entry

    def _prune(self) -> None:
        """Remove what need not stay; the model's folder first, so that what is left is never taken for whole."""
        for step in self.retention.surplus(self.root, self.step):
            shutil.rmtree(mcore.iteration_dir(self.root, step))
            shutil.rmtree(training_dir(self.root, step))
