"""Checkpoints that `eval` evaluates: their names, weights and digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from msrl.checks.serve import model_name
from msrl.files import digest_of_ends
from msrl.models.paths import is_adapter_folder, is_hf, is_iteration, is_mcore, run_checkpoints
from msrl.trainer.checkpointing.resume import saved_steps
from msrl.workflows.serve.model_cache import checkpoint_digest
from msrl.workflows.serve.served_model import base_folder, has_only_adapter

if TYPE_CHECKING:
    from msrl.checkpoint.integrity import FileCheck
    from msrl.checkpoint.source import WeightSource


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model to evaluate.

    Attributes:
        label: Name in the table, unique within an evaluation.
        series: Name of the curve that it is a point of: its run or folder.
        root: Folder of the weights.
        step: Step of the training that saved it; None for other models.
        iteration: Iteration of an mcore checkpoint; None for other folders.
    """

    label: str
    series: str
    root: Path
    step: int | None
    iteration: int | str | None

    @property
    def version(self) -> int:
        """Policy version of the completions.

        It selects the random streams, so that an evaluation during the training of this step gets
        the same completions.
        """
        return self.step or 0


def find_checkpoints(paths: Iterable[str]) -> list[Checkpoint]:
    """Return the checkpoints of the paths, in a run by step. Each occurs once."""
    checkpoints: dict[tuple[Path, int | str | None], Checkpoint] = {}
    for path in paths:
        for checkpoint in _checkpoints(Path(path)):
            checkpoints.setdefault((checkpoint.root, checkpoint.iteration), checkpoint)
    return with_unique_labels(checkpoints.values(), {})


def _checkpoints(path: Path) -> Iterator[Checkpoint]:
    folder = path.absolute()
    run = run_checkpoints(str(path))
    if run is not None:
        steps = saved_steps(run.absolute())
        for step in steps:
            yield _of_iteration(run.absolute(), step)
        if steps:
            return
        folder = run.absolute()
    if is_iteration(str(folder)):
        yield _of_iteration(folder.parent, int(folder.name[5:]))
    elif is_mcore(str(folder)) and not is_hf(str(folder)):
        from msrl.checkpoint.mcore.locate import latest_iteration

        yield _of_iteration(folder, latest_iteration(folder))
    else:
        is_export = folder.name == "hf"  # of a run, whose checkpoints have the name alone
        name = f"{folder.parent.name} hf" if is_export else model_name(str(folder))
        yield Checkpoint(name, name, folder, None, None)


def _of_iteration(root: Path, iteration: int | str) -> Checkpoint:
    """Return the checkpoint of an iteration, which is a step if a training saved it."""
    name = model_name(str(root))
    if iteration in saved_steps(root):
        assert isinstance(iteration, int)
        return Checkpoint(f"{name} step {iteration}", name, root, iteration, iteration)
    return Checkpoint(name, name, root, None, iteration)


def with_unique_labels(
    checkpoints: Iterable[Checkpoint], folders: Mapping[str, Path]
) -> list[Checkpoint]:
    """Return the checkpoints with different labels, and a different series for each folder.

    Names that occur twice get the name of the parent folder, or a number. `folders` has the folder
    of each series that exists already.
    """
    unique: list[Checkpoint] = []
    names = dict(folders)
    for checkpoint in checkpoints:
        series, number = checkpoint.series, 1
        while names.setdefault(series, checkpoint.root) != checkpoint.root:
            number += 1
            parent = _named_folder(checkpoint.root).parent.name
            series = f"{parent}-{checkpoint.series}" if number == 2 else f"{series}-{number}"
        label = checkpoint.label.replace(checkpoint.series, series, 1)
        labels = {other.label for other in unique}
        if label in labels:  # several iterations of a folder without steps
            label = f"{label} iteration {checkpoint.iteration}"
        unique.append(replace(checkpoint, label=label, series=series))
    return unique


def _named_folder(root: Path) -> Path:
    """Return the folder whose name `model_name` returns."""
    return root.parent if root.name in ("checkpoints", "hf") else root


def model_folder(checkpoint: Checkpoint) -> Path:
    """Return the folder with config.json or its `hf`: the checkpoint's, or its base's."""
    root = checkpoint.root
    return base_folder(root) if is_adapter_folder(str(root)) else root


def file_checks(checkpoint: Checkpoint) -> list[FileCheck]:
    """Return the checks of the files of a checkpoint."""
    from msrl.checkpoint.integrity import mcore_checks, weight_checks

    if checkpoint.iteration is not None:
        return mcore_checks(checkpoint.root, checkpoint.iteration)
    return weight_checks(checkpoint.root)


def digest(checkpoint: Checkpoint) -> str:
    """Return a digest that changes with the weights of a checkpoint."""
    if checkpoint.iteration is not None:
        return checkpoint_digest(checkpoint.root, checkpoint.iteration)
    from msrl.checkpoint.hf.manifest import hf_manifest_files

    patterns = ("*.safetensors", "*.bin", "config.json", "adapter_config.json")
    files = sorted(file for pattern in patterns for file in checkpoint.root.glob(pattern))
    content = digest_of_ends((file.name, file) for file in files)
    records = json.dumps(hf_manifest_files(checkpoint.root), sort_keys=True)
    return hashlib.blake2b(f"{content}\n{records}".encode(), digest_size=16).hexdigest()


def open_checkpoint(checkpoint: Checkpoint) -> WeightSource:
    """Verify and open the weights of a checkpoint; an adapter is merged into its base model.

    Raises:
        MsrlError: A file is damaged, or the base model of an adapter was not found.
    """
    from msrl.workflows.training.integrity import verify_files

    verify_files(file_checks(checkpoint))
    root, iteration = checkpoint.root, checkpoint.iteration
    if has_only_adapter(root, iteration):
        return _merge_adapter(checkpoint)
    from msrl.checkpoint.source import open_mcore, open_weights

    return open_weights(root) if iteration is None else open_mcore(root, iteration=iteration)


def _merge_adapter(checkpoint: Checkpoint) -> WeightSource:
    from msrl.checkpoint.adapters.megatron import read_mcore_lora
    from msrl.checkpoint.adapters.merge import MergedSource
    from msrl.checkpoint.adapters.peft import read_peft
    from msrl.checkpoint.source import open_weights
    from msrl.workflows.training.integrity import verify_models

    root = checkpoint.root
    base_path = base_folder(root)
    verify_models([base_path])
    base = open_weights(base_path)
    if is_adapter_folder(str(root)):
        return MergedSource(base, read_peft(root))
    adapter = read_mcore_lora(root, base.shape, checkpoint.iteration)
    sidecars = root / "hf"
    return MergedSource(base, adapter, hf_dir=sidecars if sidecars.is_dir() else None)
