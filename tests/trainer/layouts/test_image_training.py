"""Training on images equals transformers in every layout: logits, loss and all gradients."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import image_models
import image_ranks
from image_ranks import RECOMPUTED, Case, Result
from msrl.config.sections.train import LoraConfig, VisionConfig
from msrl.trainer.settings import Layout

pytestmark = pytest.mark.slow
MODELS = tuple(image_models.CHANGES)
# Relative to the largest number of a tensor. transformers rounds delta networks in another order.
TOLERANCES = {"qwen3.5": 5e-5, "qwen3.5 moe": 5e-5}
ULYSSES = {"cp_algo": "ulysses", "head_ranks": 2}
# One rank without an image, and ranks with unequal numbers of images
UNEQUAL, WITHOUT = (((0, 1, 2), (3,)), ((4, 5, 6),)), (((0,), (2, 3, 4, 5, 6)), ((1,),))
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "single rows": {"batches": (tuple((row,) for row in range(7)),)},
    "tp2": {"layout": Layout(tp=2)},
    "tp2 sp": {"layout": Layout(tp=2, sp=True)},
    "pp2": {"layout": Layout(pp=2)},
    "vpp": {"layout": Layout(pp=2, vpp=1)},
    "cp2": {"layout": Layout(cp=2)},
    "cp2 ring": {"layout": Layout(cp=2, cp_algo="ring")},
    "cp2 ulysses": {"layout": Layout(cp=2, **ULYSSES)},
    "cp4 hybrid": {"layout": Layout(cp=4, cp_algo="hybrid", head_ranks=2)},
    "cp2 dp2": {"layout": Layout(cp=2), "batches": UNEQUAL},
    "dp2": {"batches": UNEQUAL},
    "dp2 text": {"batches": WITHOUT},
    "ep2": {"layout": Layout(ep=2), "batches": UNEQUAL},
    "ep2 text": {"layout": Layout(ep=2), "batches": WITHOUT},
    "tp2 ep2": {"layout": Layout(tp=2, ep=2), "batches": UNEQUAL},
    "tp2 ep2 etp1": {"layout": Layout(tp=2, ep=2, etp=1)},
    "pp2 ep2": {"layout": Layout(pp=2, ep=2), "batches": UNEQUAL},
    "cp2 ep2": {"layout": Layout(cp=2, ep=2)},
}
# Steps with overlapped reduction, whose last micro-batches have images on some ranks or none. The
# steps before them have text only, images only, or images on some ranks.
IMAGES_LAST = ((1,), (0, 2, 3, 4, 5, 6))
OVERLAPPED: dict[str, dict[str, Any]] = {
    "text last": {"batches": (IMAGES_LAST[::-1],), "earlier": ((((0,),),), (((1,),),))},
    "images last": {"batches": (IMAGES_LAST,), "earlier": ((((1,), (0,)),), (((1,),),))},
    "text on one rank": {"batches": WITHOUT, "earlier": (UNEQUAL, (((1,),), ((1,),)))},
    "tp2 sp": {"layout": Layout(tp=2, sp=True), "batches": (IMAGES_LAST[::-1],)},
    "pp2": {"layout": Layout(pp=2), "batches": (IMAGES_LAST,), "earlier": ((((1,), (1,)),),)},
    "cp2": {"layout": Layout(cp=2), "batches": (IMAGES_LAST[::-1],)},
}


def _row(folders: dict[str, Path], model: str, layout: str, *, recomputed: bool = False) -> Case:
    name = f"{model}, {layout}, {recomputed}"
    case = Case(name, folders[model], **LAYOUTS[layout])
    return dataclasses.replace(case, more=RECOMPUTED) if recomputed else case


# Deeper features of Qwen3-VL are added on the first virtual stage only, and delta networks of
# Qwen3.5 need all tokens of a head.
DELTA = ("qwen3.5", "qwen3.5 moe")
WHOLE_HEADS = ("cp2", "cp2 ring", "cp2 ep2", "cp4 hybrid", "cp2 dp2")
WITHOUT_LAYOUT = {
    *(("qwen3-vl", "vpp"), ("qwen3-vl moe", "vpp")),
    *((model, layout) for model in DELTA for layout in WHOLE_HEADS),
}
MIXTURES = ("qwen3-vl moe", "qwen3.5 moe")
TABLE = [
    (model, layout, recomputed)
    for model in MODELS
    for layout in LAYOUTS
    for recomputed in (False, True)
    if (model, layout) not in WITHOUT_LAYOUT
    if model in MIXTURES or not LAYOUTS[layout].get("layout", Layout()).ep > 1
]
# Every model and every kind of parallelism, with and without recomputation
FAST = [
    ("qwen2.5-vl", "one rank", True),
    ("qwen3.5", "tp2", True),
    ("qwen3-vl", "tp2 sp", True),
    ("qwen2-vl", "pp2", True),
    ("qwen3-vl", "cp2 ring", False),
    ("qwen3.5", "cp2 ulysses", False),
    ("qwen2.5-vl", "dp2 text", True),
    ("qwen2-vl", "cp2 dp2", False),
    ("qwen3-vl moe", "tp2 ep2 etp1", False),
    ("internvl", "one rank", True),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("images")
    return {name: image_models.save_model(root / name, name) for name in MODELS}


def _assert_equal(case: Case, result: Result) -> None:
    """Assert that results are transformers', relative to the largest number of each tensor."""
    expected = image_models.reference(case.model)
    tolerance = TOLERANCES.get(case.model.name, 1e-5)
    if result.logits:
        for rows, logits in zip(case.batches[0], result.logits, strict=True):
            rows_logits = np.concatenate([expected.logits[row] for row in rows])
            difference = np.abs(logits[: len(rows_logits)] - rows_logits).max()
            assert difference < tolerance * np.abs(rows_logits).max(), case.name
    assert result.metrics["loss"] == pytest.approx(expected.loss, rel=1e-6), case.name
    assert expected.gradients.keys() == result.gradients.keys()
    for key, gradient in expected.gradients.items():
        largest = np.abs(gradient).max()
        difference = np.abs(result.gradients[key] - gradient).max()
        assert largest > 0 and difference < tolerance * largest, (case.name, key)


def test_pictures_train_like_those_of_transformers(folders: dict[str, Path]) -> None:
    cases = [_row(folders, *row[:2], recomputed=row[2]) for row in FAST]
    results = image_ranks.run(cases)
    for case in cases:
        _assert_equal(case, results[case.name])


def _overlapping(folder: Path, name: str, *, recomputed: bool) -> Case:
    more = RECOMPUTED if recomputed else {}
    label = f"{folder.name}, {name}, {recomputed}"
    return Case(label, folder, overlaps=True, more=more, **OVERLAPPED[name])


def test_steps_with_and_without_pictures_overlap_their_reduction(
    folders: dict[str, Path],
) -> None:
    cases = [
        _overlapping(folders["qwen2-vl"], "text last", recomputed=False),
        _overlapping(folders["qwen3-vl"], "text on one rank", recomputed=True),
        _overlapping(folders["qwen2.5-vl"], "tp2 sp", recomputed=False),
    ]
    results = image_ranks.run(cases)
    for case in cases:
        _assert_equal(case, results[case.name])


@pytest.mark.full
def test_only_parts_with_a_learning_rate_are_trained(folders: dict[str, Path]) -> None:
    changes: dict[str, dict[str, Any]] = {
        "none": {"vision": VisionConfig()},
        "tower_lr": {"vision": VisionConfig(tower_lr=1e-3)},
        "projector_lr": {"vision": VisionConfig(projector_lr=1e-3)},
        "adapters": {"vision": VisionConfig(), "lora": LoraConfig(rank=4)},
    }
    cases = [
        Case(f"{name}, {kind}", folders["qwen3-vl"], more={**more, **recompute})
        for name, more in changes.items()
        for kind, recompute in (("stored", {}), ("recomputed", RECOMPUTED))
    ]
    expected = image_models.reference(folders["qwen3-vl"])
    for name, result in image_ranks.run(cases).items():
        assert result.metrics["loss"] == pytest.approx(expected.loss, rel=1e-6), name
        trained = name.partition(",")[0]
        if trained == "adapters":
            assert not any("vision_model" in key for key in result.gradients)
            continue
        for key, gradient in expected.gradients.items():
            part = "projector_lr" if "merger" in key else "tower_lr"
            is_trained = not key.startswith("model.visual.") or trained == part
            wanted = gradient if is_trained else np.zeros_like(gradient)
            difference = np.abs(result.gradients[key] - wanted).max()
            assert difference < 1e-5 * np.abs(gradient).max(), (name, key)


@pytest.mark.full
def test_adapters_beside_packed_experts_train_on_pictures(folders: dict[str, Path]) -> None:
    lora = LoraConfig(rank=4, targets=("linear_qkv", "linear_proj"))
    more = {"vision": VisionConfig(), "lora": lora}
    cases = [
        Case(name, folders["qwen3-vl moe"], more=more, **LAYOUTS[name])
        for name in ("one rank", "tp2 sp", "ep2", "pp2 ep2")
    ]
    expected, results = image_models.reference(folders["qwen3-vl moe"]), image_ranks.run(cases)
    single = results["one rank"].gradients
    assert single and all("self_attention" in key for key in single)
    for name, result in results.items():
        assert result.metrics["loss"] == pytest.approx(expected.loss, rel=1e-6), name
        assert result.gradients.keys() == single.keys(), name
        for key, gradient in single.items():
            difference = np.abs(result.gradients[key] - gradient).max()
            assert difference <= 1e-5 * np.abs(gradient).max(), (name, key)


def test_a_frozen_tower_computes_every_image_once(folders: dict[str, Path]) -> None:
    """Policy, reference and update get the same bits as without memory for features."""
    sizes = {"kept": VisionConfig(), "computed again": VisionConfig(cache_gb=0)}
    cases = [
        Case(name, folders["qwen3-vl"], more={"vision": vision}, has_reference=True)
        for name, vision in sizes.items()
    ]
    kept, again = image_ranks.run(cases).values()
    placed = [placed for row in image_models.rows(folders["qwen3-vl"]) for placed in row.images]
    assert kept.passes == len({each.image for each in placed}) < again.passes
    assert kept.metrics == again.metrics and kept.gradients.keys() == again.gradients.keys()
    for name, gradient in kept.gradients.items():
        assert np.array_equal(gradient, again.gradients[name]), name
    assert len(kept.logits) == 2 * len(image_models.BATCHES)
    for own, other in zip(kept.logits, again.logits, strict=True):
        assert np.array_equal(own, other)


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_steps_of_every_model_overlap_their_reduction(folders: dict[str, Path], model: str) -> None:
    cases = [
        _overlapping(folders[model], name, recomputed=recomputed)
        for name in OVERLAPPED
        for recomputed in (False, True)
        if (model, name) not in WITHOUT_LAYOUT
    ]
    results = image_ranks.run(cases)
    for case in cases:
        _assert_equal(case, results[case.name])


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_pictures_train_like_those_of_transformers_in_every_layout(
    folders: dict[str, Path], model: str
) -> None:
    remaining = [row for row in TABLE if row[0] == model and row not in FAST]
    cases = [_row(folders, *row[:2], recomputed=row[2]) for row in remaining]
    results = image_ranks.run(cases)
    for case in cases:
        _assert_equal(case, results[case.name])
