"""Training of families with uncommon layers is equal in every layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import families
from families import FAMILIES
from mixture_families import MIXTURES
from msrl.config.sections.train import LoraConfig, RecomputeConfig
from msrl.trainer.settings import Layout
from test_mixture_training import _assert_same, _train
from training_ranks import Case, Result

pytestmark = pytest.mark.slow
STEPS = 2
DENSE = ("gemma 3", "ministral 3", "qwen3.5")
SPARSE = ("deepseek v3.2", "glm 5.2")
EXPERTS = ("glm 4.7 flash", "minimax m2", "hunyuan 3", "ling 2", "qwen3-next", *SPARSE)
ULYSSES = {"cp_algo": "ulysses", "head_ranks": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"layout": Layout(tp=2)},
    "pp2": {"layout": Layout(pp=2)},
    "cp2": {"layout": Layout(cp=2, **ULYSSES)},
    "dp2": {"dp": 2, "micro_batch": 1},
    "single rows": {"micro_batch": 1},
    "recomputed": {"more": {"recompute": RecomputeConfig(granularity="full")}},
    "tp2 cp2": {"layout": Layout(tp=2, cp=2, **ULYSSES)},
}
# Models with experts always have sequence parallelism.
DENSE_LAYOUTS = {**LAYOUTS, "tp2 sp": {"layout": Layout(tp=2, sp=True)}}
# Delta networks have two key heads, which tp2 cp2 cannot divide.
WITHOUT = {("qwen3.5", "tp2 cp2"), ("qwen3-next", "tp2 cp2")}
EXPERT_LAYOUTS = {
    **LAYOUTS,
    "tp2 ep2 etp1": {"layout": Layout(tp=2, ep=2, etp=1)},
    "pp2 ep2": {"layout": Layout(pp=2, ep=2)},
}
PAIRS = [
    pair
    for names, layouts in ((DENSE, DENSE_LAYOUTS), (EXPERTS, EXPERT_LAYOUTS))
    for pair in ((name, layout) for name in names for layout in layouts)
    if pair not in WITHOUT
]
FAST = [
    *(("gemma 3", "tp2 sp"), ("minimax m2", "tp2"), ("ling 2", "pp2 ep2")),
    *(("hunyuan 3", "tp2 ep2 etp1"), ("qwen3.5", "tp2"), ("qwen3-next", "cp2")),
    *(("deepseek v3.2", "cp2"), ("glm 5.2", "pp2")),
]
REMAINING = [pair for pair in PAIRS if pair not in FAST]
TARGETS = ("in_proj_qkvz", "in_proj_ba", "q_proj", "o_proj", "out_proj")
ADAPTERS = {"lora": LoraConfig(rank=4, alpha=8.0, targets=TARGETS)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders with a small random model of each family."""
    rows = FAMILIES | MIXTURES
    root = tmp_path_factory.mktemp("families")
    return families.save_models(root, {name: rows[name] for name in DENSE + EXPERTS})


def _row(name: str, layout: str, folders: dict[str, Path]) -> Case:
    changes = EXPERT_LAYOUTS | DENSE_LAYOUTS
    case = Case(f"{name}, {layout}", folders[name], steps=STEPS)
    return dataclasses.replace(case, **changes.get(layout, {}))


@pytest.fixture(scope="module")
def results(folders: dict[str, Path]) -> dict[str, Result]:
    singles = [_row(name, "single", folders) for name in DENSE + EXPERTS]
    adapted = Case("adapters", folders["qwen3-next"], steps=STEPS, more=ADAPTERS)
    return _train(
        [
            *singles,
            *[_row(name, layout, folders) for name, layout in FAST],
            adapted,
            dataclasses.replace(adapted, name="adapters, tp2", layout=Layout(tp=2)),
        ]
    )


@pytest.fixture(scope="module")
def more_results(folders: dict[str, Path]) -> dict[str, Result]:
    return _train([_row(name, layout, folders) for name, layout in REMAINING])


@pytest.mark.parametrize(("name", "layout"), FAST)
def test_a_family_trains_equally_in_some_layouts(
    results: dict[str, Result], name: str, layout: str
) -> None:
    _assert_same(results[f"{name}, {layout}"], results[f"{name}, single"])


@pytest.mark.parametrize("name", SPARSE)
def test_an_indexer_is_not_trained(
    results: dict[str, Result], folders: dict[str, Path], name: str
) -> None:
    before = load_file(folders[name] / "model.safetensors")
    after = results[f"{name}, single"].weights
    assert before.keys() == after.keys()
    same = {key for key, tensor in before.items() if np.array_equal(tensor.numpy(), after[key])}
    assert {key for key in before if ".indexer." in key} <= same
    assert {key for key in same if ".indexer." not in key and "e_score" not in key} == set()


@pytest.mark.full
@pytest.mark.parametrize(("name", "layout"), REMAINING)
def test_all_families_train_equally_in_all_layouts(
    results: dict[str, Result], more_results: dict[str, Result], name: str, layout: str
) -> None:
    _assert_same(more_results[f"{name}, {layout}"], results[f"{name}, single"])


def test_adapters_of_delta_networks_train_equally_on_several_ranks(
    results: dict[str, Result],
) -> None:
    _assert_same(results["adapters, tp2"], results["adapters"])
