"""A training checkpoint as a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from msrl.trainer.resume import SavedTraining


def export_hf(saved: SavedTraining, target: Path, *, base: Path | None = None, hf_dir: Path | None = None) -> Path:
    """Write the model of a checkpoint to `target` (replaced when a run was resumed and exports again).

    `base` has the weights that the checkpoint's adapters belong to, where it has adapters alone; `hf_dir` has config and tokenizer for a
    base that brings none.
    """
    from msrl.checkpoint.convert import write_hf
    from msrl.checkpoint.lora import MergedSource
    from msrl.checkpoint.lora_files import read_mcore_lora
    from msrl.checkpoint.mcore import SIDECAR
    from msrl.checkpoint.source import open_mcore, open_weights

    if target.exists():
        shutil.rmtree(target)
    if base is None:
        write_hf(open_mcore(saved.root, iteration=saved.step), target, None)
    else:
        weights = open_weights(base, hf_dir)
        adapters = read_mcore_lora(saved.root, weights.shape)
        sidecars = saved.root / SIDECAR  # a checkpoint of another system has none
        write_hf(MergedSource(weights, adapters, hf_dir=sidecars if sidecars.is_dir() else None), target, None)
    return target
