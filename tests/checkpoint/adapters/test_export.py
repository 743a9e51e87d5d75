"""Export of adapters as a Hugging Face folder if the base weights have no configuration."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from msrl.checkpoint.convert import McoreTarget, write_mcore
from msrl.checkpoint.mcore import files as mcore
from msrl.checkpoint.source import open_weights
from msrl.errors import MsrlError
from msrl.models.families import load_shape
from msrl.models.parallel_layout import ParallelLayout
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.workflows.training.export import export_hf
from tiny_qwen2 import save_model

pytestmark = pytest.mark.slow  # imports transformers


def test_adapters_of_a_base_without_config_are_exported_with_that_of_the_model(tmp_path: Path):
    save_model(tmp_path / "hf", tied=True)
    write_mcore(open_weights(tmp_path / "hf"), tmp_path / "base", McoreTarget(ParallelLayout()))
    shutil.rmtree(tmp_path / "base" / "hf")  # as MindSpeed leaves it
    shape, saves, at = (
        load_shape(tmp_path / "hf"),
        tmp_path / "saves",
        next(iter(ParallelLayout().ranks())),
    )
    name = "decoder.layers.1.self_attention.linear_proj.lora_{}.default.weight"
    factors = {name.format("A"): torch.randn(2, 128), name.format("B"): torch.randn(128, 2)}
    args = mcore.namespace(shape, ParallelLayout())
    vars(args).update(lora_r=2, lora_alpha=8.0)
    mcore.write_rank_file(
        mcore.rank_file(saves, 3, ParallelLayout(), at, staged=True), factors, args, 3
    )
    mcore.publish(saves, 3)
    with pytest.raises(MsrlError, match=r"config\.json"):
        export_hf(SavedTraining(saves, 3), tmp_path / "merged", base=tmp_path / "base")
    export_hf(
        SavedTraining(saves, 3), tmp_path / "merged", base=tmp_path / "base", hf_dir=tmp_path / "hf"
    )
    # A failed export keeps the earlier one.
    with pytest.raises(MsrlError, match=r"config\.json"):
        export_hf(SavedTraining(saves, 3), tmp_path / "merged", base=tmp_path / "base")
    before, after = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "merged")
    )
    changed = "model.layers.1.self_attn.o_proj.weight"
    assert {key for key, value in after.items() if not torch.equal(value, before[key])} == {changed}
    expected = before[changed] + 4.0 * factors[name.format("B")] @ factors[name.format("A")]
    torch.testing.assert_close(after[changed], expected)
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    mcore.write_rank_file(
        mcore.rank_file(saves, 4, ParallelLayout(), at, staged=True),
        {key: 0 * value for key, value in factors.items()},
        args,
        4,
    )
    mcore.publish(saves, 4)
    (tmp_path / "again").symlink_to(tmp_path / "merged")
    export_hf(
        SavedTraining(saves, 3), tmp_path / "again", base=tmp_path / "base", hf_dir=tmp_path / "hf"
    )
    assert torch.equal(
        load_file(tmp_path / "again" / "model.safetensors")[changed], after[changed]
    ), "the export is that of the requested step, not of the newest one"
    assert (
        not (tmp_path / "again").is_symlink()
        and (tmp_path / "merged").is_dir()
        and not list(tmp_path.glob("*.new"))
    )
