"""Bitwise round trips of every family through chains of parallel layouts and both file formats.

The full table converts from every layout separately.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import families
from families import FAMILIES
from mixture_families import MIXTURES
from msrl.checkpoint.convert import McoreTarget, write_hf, write_mcore
from msrl.checkpoint.dtypes import same_bits
from msrl.checkpoint.mcore.names import Naming
from msrl.checkpoint.source import open_weights
from msrl.models.parallel_layout import ParallelLayout
from msrl.verification.bits import compare
from tiny_checkpoints import LAYOUTS

ROWS = FAMILIES | MIXTURES
FULL = [pytest.mark.full]
# Outside of the full tables: biases, latent attention, indexers, delta networks, and images.
USUAL = ("gpt-oss", "deepseek v3.2", "qwen3.5 moe", "qwen3-vl moe")
SPREAD = {
    "ep4": ParallelLayout(ep=4), "tp2 ep2 etp1": ParallelLayout(2, ep=2, etp=1),
    "tp2 pp2 ep2": ParallelLayout(2, 2, ep=2), "tp2 ep4 etp1": ParallelLayout(2, ep=4, etp=1),
    "pp2 vpp ep2": ParallelLayout(pp=2, vpp=1, ep=2),
    "extended": ParallelLayout(2, ep=2, moe_tp_extend_ep=True),
}  # fmt: skip
TABLE = [
    (name, layout_name)
    for name in ROWS
    for layout_name in (LAYOUTS | SPREAD if name in MIXTURES else LAYOUTS)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a small random model of each row as a Hugging Face folder."""
    return families.save_models(tmp_path_factory.mktemp("families"), ROWS)


def _chain(name: str) -> tuple[McoreTarget, ...]:
    """Return targets: tp 2 pp 2, pp 4, tp 4 (or the number of query groups), one of them
    distributed.
    """
    tp = min(4, families.shape(ROWS[name].config).num_query_groups)
    layouts = (ParallelLayout(2, 2), ParallelLayout(1, 4), ParallelLayout(tp))
    if name in MIXTURES:
        layouts = (
            ParallelLayout(2, 2, ep=2, etp=1),
            ParallelLayout(1, 4, ep=4),
            ParallelLayout(tp, ep=2),
        )
    first, second, third = (
        McoreTarget(layout, naming=Naming(te=number == 1)) for number, layout in enumerate(layouts)
    )
    return first, second, McoreTarget(layouts[0], distributed=True, vocab_multiple=64), third


def _through_chain(folder: Path, root: Path, name: str) -> Path:
    """Return the Hugging Face folder at the end of the chain."""
    source = open_weights(folder)
    for number, target in enumerate(_chain(name)):
        write_mcore(source, root / str(number), target)
        source = open_weights(root / str(number))
    write_hf(source, root / "hf", None)
    return root / "hf"


def _assert_same_folder(folder: Path, expected: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (expected, folder))
    assert before.keys() == after.keys() and all(
        same_bits(before[tensor], after[tensor]) for tensor in before
    )
    configs = [json.loads((folder / "config.json").read_text()) for folder in (expected, folder)]
    assert configs[0] == configs[1]


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    "name",
    [
        *FAMILIES,
        *(
            pytest.param(name, marks=[pytest.mark.slow, *([] if name in USUAL else FULL)])
            for name in MIXTURES
        ),
    ],
)
def test_a_family_comes_back_from_a_chain_of_layouts_in_both_formats(
    folders: dict[str, Path], name: str, tmp_path: Path
) -> None:
    _assert_same_folder(_through_chain(folders[name], tmp_path, name), folders[name])


def test_layers_for_multi_token_prediction_go_through_the_chain_as_they_came(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """DeepSeek V3 numbers them after the last layer; they are not part of any parallel layout."""
    source, generator = folders["deepseek v3"], torch.Generator().manual_seed(0)
    more = {
        "enorm.weight": (64,),
        "hnorm.weight": (64,),
        "eh_proj.weight": (64, 128),
        "mlp.gate.e_score_correction_bias": (8,),
    }
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "config.json").write_text(
        json.dumps({**ROWS["deepseek v3"].config, "num_nextn_predict_layers": 1})
    )
    layer = {
        f"model.layers.4.{name}": torch.randn(size, generator=generator)
        for name, size in more.items()
    }
    save_file(
        load_file(source / "model.safetensors") | layer,
        tmp_path / "from" / "model.safetensors",
        metadata={"format": "pt"},
    )
    _assert_same_folder(
        _through_chain(tmp_path / "from", tmp_path, "deepseek v3"), tmp_path / "from"
    )


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(("name", "layout_name"), TABLE)
def test_every_family_comes_back_from_every_layout(
    folders: dict[str, Path], name: str, layout_name: str, tmp_path: Path
) -> None:
    """Local and Transformer Engine's names alternate, with separate and fused experts."""
    number = TABLE.index((name, layout_name))
    source = open_weights(folders[name])
    is_fused = name in MIXTURES and number % 4 > 1 and (number % 2 == 1 or name != "gpt-oss")
    naming = Naming(te=number % 2 == 1, grouped=is_fused)
    write_mcore(
        source, tmp_path / "mcore", McoreTarget((LAYOUTS | SPREAD)[layout_name], naming=naming)
    )
    assert compare(source, open_weights(tmp_path / "mcore"), None).different == ()
