"""The vision tower compared with transformers, features and gradients, and its pixels."""

from __future__ import annotations

import copy
import io
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import families
import image_models
from families import FAMILIES
from msrl.memory.flops import tower_flops
from msrl.models.vision.tower import TrainedParts
from msrl.trainer.model.vision.pixels import Pixels
from msrl.trainer.model.vision.tower import VisionTower
from msrl.verification.images import tiles_of
from msrl.vision.pixels import decode_image, patches_of
from msrl.vision.settings import read_vision_settings

GRIDS = [(1, 6, 8), (1, 10, 4), (1, 8, 8), (1, 8, 8), (1, 2, 2)]
CHANGES = {
    "qwen2-vl": {},
    "qwen2.5-vl": {"depth": 3, "window_size": 56, "fullatt_block_indexes": [1]},
    "qwen3-vl": {"depth": 3, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 25},
}
TILED = ("internvl", "internvl, qwen3")
TILES = [(3, 4, 4), (1, 4, 4), (2, 4, 4)]


def config(name: str) -> dict[str, Any]:
    """Return a config whose images have several windows and positions between entries."""
    values = copy.deepcopy(FAMILIES[name].config)
    values["vision_config"] |= CHANGES[name]
    return values


def reference(values: dict[str, Any]) -> torch.nn.Module:
    import transformers

    model_class = getattr(transformers, values["architectures"][0])
    torch.manual_seed(0)
    tower = model_class(model_class.config_class(**copy.deepcopy(values))).model.visual
    with torch.no_grad():
        for parameter in tower.parameters():  # every parameter must matter
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return tower


def relative(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_features_and_gradients_equal_those_of_transformers(name: str, recomputes: bool) -> None:
    values = config(name)
    theirs, vision = reference(values), families.shape(values).vision
    ours = VisionTower(vision, torch.float32, recomputes=recomputes)
    ours.load_state_dict(theirs.state_dict())
    patches = torch.randn(sum(rows * columns for _, rows, columns in GRIDS), vision.patch_elements)
    output = theirs(patches, grid_thw=torch.tensor(GRIDS))
    expected = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
    features = ours(patches, GRIDS)
    assert len(features) == len(expected) == 1 + len(vision.deepstack)
    assert max(map(relative, features, expected)) < 1e-5
    weights = [torch.randn_like(each) for each in expected]
    for outputs in (features, expected):
        sum((each * weight).sum() for each, weight in zip(outputs, weights, strict=True)).backward()
    gradients = {key: each.grad for key, each in theirs.named_parameters()}
    for key, parameter in ours.named_parameters():
        assert relative(parameter.grad, gradients[key]) < 1e-5, key


def _attention(*shapes: Any, **_: Any) -> int:
    return sdpa_flop_count(*shapes[:3])


def _attention_backward(*shapes: Any, **_: Any) -> int:
    return sdpa_backward_flop_count(*shapes[:4])


_CPU_ATTENTION = {  # which FlopCounterMode does not know
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CHANGES)
def test_the_operations_of_a_tower_are_those_that_torch_counts(name: str) -> None:
    values = config(name)
    vision = families.shape(values).vision
    tower = VisionTower(vision, torch.float32)
    tower.load_state_dict(reference(values).state_dict())
    patches = torch.randn(sum(rows * columns for _, rows, columns in GRIDS), vision.patch_elements)
    for trained in itertools.starmap(TrainedParts, itertools.product((False, True), repeat=2)):
        for key, parameter in tower.named_parameters():
            parameter.requires_grad_(trained.projector if "merger" in key else trained.tower)
        with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
            features = tower(patches, GRIDS)
            if trained.tower or trained.projector:
                sum(each.sum() for each in features).backward()
        counted = tower_flops(vision, GRIDS, trained)
        assert counter.get_total_flops() == pytest.approx(counted, rel=0.05), trained


@pytest.mark.parametrize("name", CHANGES)
def test_a_picture_has_the_same_features_beside_others(name: str) -> None:
    values = config(name)
    vision = families.shape(values).vision
    tower = VisionTower(vision, torch.float32)
    tower.load_state_dict(reference(values).state_dict())
    sizes = [rows * columns for _, rows, columns in GRIDS]
    patches = torch.randn(sum(sizes), vision.patch_elements).split(sizes)
    with torch.no_grad():
        together = tower(torch.cat(patches), GRIDS)[0]
        alone = [tower(each, [grid])[0] for each, grid in zip(patches, GRIDS, strict=True)]
        swapped = tower(patches[0], [(1, 8, 6)])[0]
    assert relative(together, torch.cat(alone)) < 1e-5
    assert relative(swapped, alone[0]) > 1e-3, "rows and columns are interchangeable"


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", TILED)
def test_features_of_tiles_equal_those_of_transformers(name: str, recomputes: bool) -> None:
    import transformers

    values = copy.deepcopy(FAMILIES[name].config)
    model_class = getattr(transformers, values["architectures"][0])
    torch.manual_seed(0)
    theirs = model_class(model_class.config_class(**copy.deepcopy(values))).model
    parts = {"": theirs.vision_tower, "multi_modal_projector.": theirs.multi_modal_projector}
    named = {
        f"{k}{key}": each for k, part in parts.items() for key, each in part.named_parameters()
    }
    with torch.no_grad():
        for parameter in named.values():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    vision = families.shape(values).vision
    ours = VisionTower(vision, torch.float32, recomputes=recomputes)
    ours.load_state_dict(named)
    patches = torch.randn(sum(tiles * 16 for tiles, _, _ in TILES), vision.patch_elements)
    expected = theirs.get_image_features(
        tiles_of(patches, vision), vision_feature_layer=-1, vision_feature_select_strategy="default"
    ).pooler_output.flatten(0, 1)
    (features,) = ours(patches, TILES)
    assert relative(features, expected) < 1e-5
    weight = torch.randn_like(expected)
    for output in (features, expected):
        (output * weight).sum().backward()
    for key, parameter in ours.named_parameters():
        if key.endswith("k_proj.bias"):  # which shifts all scores of a query equally
            assert parameter.grad.abs().max() < 1e-4
        else:
            assert relative(parameter.grad, named[key].grad) < 1e-5, key


def test_pictures_have_the_size_of_the_data_whatever_the_limits_of_the_model(
    tmp_path: Path,
) -> None:
    """A grid of 4 x 8 patches halves an image of 8 x 16 patches, as Pillow does."""
    from PIL import Image as Pillow

    folder = image_models.save_model(tmp_path / "model", "qwen2-vl")
    image = image_models.picture(folder, 0, 4, 8)
    pixels = Pixels(folder, torch.device("cpu"))
    assert pixels.patches([image]).shape == (128, 1176)
    smaller = replace(image, grid=(1, 4, 8))
    settings = read_vision_settings(folder)
    opened = Pillow.open(io.BytesIO(image.data)).resize((112, 56), settings.resample)
    expected = patches_of(np.array(opened), settings)
    np.testing.assert_array_equal(pixels.patches([smaller]).numpy(), expected)


def test_the_latest_pictures_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = image_models.save_model(tmp_path / "model", "qwen2-vl")
    images = [image_models.picture(folder, seed, 1, 1) for seed in range(3)]
    decoded = list[str]()

    def decode(data: bytes, *arguments: Any) -> Any:
        decoded.append(next(image.key for image in images if image.data == data))
        return decode_image(data, *arguments)

    monkeypatch.setattr("msrl.trainer.model.vision.pixels.decode_image", decode)
    num_bytes = 28 * 28 * 3
    pixels = Pixels(folder, torch.device("cpu"), cache_bytes=2 * num_bytes)
    for number in (0, 1, 0, 2, 0, 1):
        pixels.patches([images[number]])
    assert decoded == [images[number].key for number in (0, 1, 2, 1)]
