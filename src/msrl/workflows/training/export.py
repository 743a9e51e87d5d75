"""Export of a training checkpoint to Hugging Face folders: the model and the critic."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from msrl.models.parallel_layout import ParallelLayout
from msrl.models.shape import Shape
from msrl.temporary import owned_folder
from msrl.trainer.checkpointing.resume import SavedTraining, saved_steps
from msrl.workflows.training.best import Best

if TYPE_CHECKING:
    from msrl.checkpoint.source import ShardedSource


def final_checkpoint(saved: SavedTraining, *, keep_best: bool) -> tuple[SavedTraining, str]:
    """Return the checkpoint to export and a note on it.

    It has the best evaluation if `keep_best`, otherwise it is the last.
    """
    best = Best.of(saved.state()["extra"]) if keep_best else None
    if best is None or best.step == saved.step or best.step not in saved_steps(saved.root):
        return saved, ""
    return SavedTraining(saved.root, best.step), f", of step {best.step}, the best evaluation"


def export_hf(
    saved: SavedTraining, target: Path, *, base: Path | None = None, hf_dir: Path | None = None
) -> Path:
    """Write the model of a checkpoint to `target`, replacing an earlier export.

    `base` holds the weights that a checkpoint of adapters belongs to. `hf_dir` holds config and
    tokenizer for a base without them.
    """
    from msrl.checkpoint.adapters.megatron import read_mcore_lora
    from msrl.checkpoint.adapters.merge import MergedSource
    from msrl.checkpoint.convert import write_hf
    from msrl.checkpoint.mcore.files import SIDECAR
    from msrl.checkpoint.source import open_mcore, open_weights

    with _replacing(target) as fresh:
        if base is None:
            write_hf(open_mcore(saved.root, iteration=saved.step), fresh, None)
        else:
            weights = open_weights(base, hf_dir)
            adapters = read_mcore_lora(saved.root, weights.shape, saved.step)
            sidecars = saved.root / SIDECAR  # a checkpoint of another system has none
            write_hf(
                MergedSource(weights, adapters, hf_dir=sidecars if sidecars.is_dir() else None),
                fresh,
                None,
            )
    return target


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yield a folder that replaces `target` once it is complete.

    A killed process leaves `target` complete or absent. The next one removes what it left.
    """
    fresh, old = (target.with_name(f"{target.name}.{name}") for name in ("new", "old"))
    for folder in (fresh, old):
        if folder.is_symlink():  # in a folder of others, which may lead anywhere
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)
    yield fresh
    if target.is_symlink():
        target.unlink()
    elif target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def export_critic(saved: SavedTraining, target: Path, shape: Shape, hf_dir: Path) -> Path:
    """Write the critic of a checkpoint as a sequence classifier with one label.

    `hf_dir` holds the config that it started from.
    """
    from msrl.checkpoint.convert import write_hf
    from msrl.checkpoint.hf.folder import copy_sidecars, record_score_head

    with owned_folder("msrl-critic-") as folder, _replacing(target) as fresh:
        copy_sidecars(hf_dir, folder, None)
        record_score_head(folder)
        write_hf(_critic(saved, shape, folder), fresh, None)
    return target


def _critic(saved: SavedTraining, shape: Shape, hf_dir: Path) -> ShardedSource:
    """Return the critic's weights from the files of all ranks."""
    from msrl.checkpoint.source import ShardedSource
    from msrl.trainer.checkpointing.publish import critic_weights

    layout = ParallelLayout.from_json(saved.state()["cut"])
    shards = {at: critic_weights(saved.training_dir, at) for at in layout.ranks()}
    return ShardedSource(shape, layout, shards, hf_dir, str(saved.training_dir))
