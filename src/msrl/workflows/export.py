"""A training checkpoint as a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from msrl.trainer.resume import SavedTraining


def export_hf(saved: SavedTraining, target: Path) -> Path:
    """Write the model of a checkpoint to `target` (replaced when a run was resumed and exports again)."""
    from msrl.checkpoint.convert import write_hf
    from msrl.checkpoint.source import open_mcore

    if target.exists():
        shutil.rmtree(target)
    write_hf(open_mcore(saved.root, iteration=saved.step), target, None)
    return target
