"""Stages of an image before the decoder layers, on the ranks and in transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import evidence as recorded
import tiny_qwen2
import vision_models
from msrl.cli.configuration import load_configuration
from msrl.diagnose.checks import check_image
from msrl.diagnose.evidence import Evidence
from msrl.diagnose.verdict import judge
from msrl.models.families import load_shape
from msrl.platforms import get
from msrl.types import Floats
from msrl.verification.logits import transformers_model
from msrl.workflows.diagnose.collect import compare, open_engine, open_ranks, trainer_image
from msrl.workflows.diagnose.images import image_probe, reference_stages
from msrl.workflows.diagnose.target import open_target
from support import mentions

STAGES = ("pixels", "tower block 0", "tower block 1", "features", "positions")


def with_stages(changed: tuple[str, ...] = (), *, dtype: str = "float32") -> Evidence:
    """Return healthy evidence with stages of an image, of which the ranks have changed ones."""
    random = np.random.default_rng(0)
    expected = {name: random.normal(size=(6, 4)).astype(np.float32) for name in STAGES}
    own = {name: rows + 0.5 * (name in changed) for name, rows in expected.items()}
    healthy = recorded.healthy()
    return replace(
        healthy,
        trainer=replace(healthy.trainer, image=own, dtype=dtype),
        reference=replace(healthy.reference, image=expected),
    )


@pytest.mark.parametrize("stage", STAGES)
def test_the_first_stage_of_an_image_that_deviates_is_named(stage: str) -> None:
    later = STAGES[STAGES.index(stage) :]
    cause = judge(with_stages(later)).cause
    assert cause is not None and (cause.name, cause.where) == ("image", "trainer")
    assert mentions(stage) and stage in cause.problem and "transformers" in cause.remedy


def test_other_features_of_the_engine_are_named_with_and_without_transformers() -> None:
    evidence = with_stages()
    features = {"features": evidence.trainer.image["features"] + np.float32(0.5)}
    other = replace(evidence, engine=replace(evidence.engine, image=features))
    alone = replace(other, reference=replace(other.reference, image={}))
    for each, word in ((other, "transformers"), (alone, "trainer")):
        cause = judge(each).cause
        assert cause is not None and (cause.name, cause.where) == ("image", "engine")
        assert "features" in cause.problem and word in cause.remedy
    scores = recorded.exact()
    apart = replace(evidence, with_image=(scores, scores + np.float32(0.5)))
    cause = judge(apart).cause
    assert cause is not None and cause.name == "unknown"


def test_equal_stages_and_a_model_without_a_tower_are_healthy() -> None:
    assert judge(with_stages()).cause is None
    assert check_image(recorded.healthy()) is None
    rounded = with_stages()
    image = {name: rows * np.float32(1.01) for name, rows in rounded.reference.image.items()}
    trainer = replace(rounded.trainer, image=image)
    assert check_image(replace(rounded, trainer=trainer)) is not None
    assert check_image(replace(rounded, trainer=replace(trainer, dtype="bfloat16"))) is None


def test_a_model_without_images_has_no_probe(tmp_path: Path) -> None:
    tiny_qwen2.save_model(tmp_path, tied=True)
    sets = [f"model.path={tmp_path}", "rollout.max_prompt_tokens=400"]
    target = open_target(load_configuration(sets=sets).config, "cpu", None)
    assert image_probe(target.plan.shape, target.reference_dir) is None


def test_a_model_whose_images_consist_of_tiles_has_no_probe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = vision_models.save_model(tmp_path / "model", "internvl")
    assert image_probe(load_shape(folder), folder) is None
    assert "tiles" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5-vl", pytest.param("qwen3-vl", marks=pytest.mark.full)])
def test_the_stages_of_the_ranks_equal_those_of_transformers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = vision_models.save_model(tmp_path / "model", name)
    sets = [f"model.path={folder}", "model.dtype=float32", "rollout.max_prompt_tokens=400"]
    target = open_target(load_configuration(sets=sets).config, "cpu", None)
    probe = image_probe(target.plan.shape, target.reference_dir)
    assert probe is not None
    with open_ranks(target, get("cpu")) as trainers:
        own = trainer_image(trainers, probe)
    model = transformers_model(target.source, torch.float32)
    expected = reference_stages(model, probe, target.source.hf_dir)
    vision = target.plan.shape.vision
    assert vision is not None
    blocks = [f"tower block {number}" for number in range(vision.depth)]
    assert [*own] == [*expected] == ["pixels", *blocks, "features", "positions"]
    for stage in own:
        assert _largest(own[stage], expected[stage]) < 1e-5, stage
    folder_without = tmp_path / "model" / "preprocessor_config.json"
    folder_without.unlink()
    assert image_probe(target.plan.shape, target.reference_dir) is None
    assert mentions("images") and "images" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_an_engine_whose_tower_computes_other_features_is_named(name: str, tmp_path: Path) -> None:
    folder = vision_models.save_model(tmp_path / "model", name)
    sets = [f"model.path={folder}", "model.dtype=float32", "rollout.max_prompt_tokens=400"]
    target = open_target(load_configuration(sets=sets).config, "cpu", None)
    target = replace(target, prompts=target.prompts[:2])
    platform, probe = get("cpu"), image_probe(target.plan.shape, target.reference_dir)
    with open_ranks(target, platform) as ranks, open_engine(target, platform, probe) as engine:
        healthy = compare(target, ranks, engine, probe)
        core: Any = engine._llm.llm_engine.engine_core.engine_core  # in this process
        tower = core.model_executor.driver_worker.worker.model_runner.get_model().visual
        handle = tower.register_forward_hook(lambda _, __, output: output * 1.1)
        faulty = judge(compare(target, ranks, engine, probe)).cause
        handle.remove()
    assert judge(healthy).cause is None
    own, expected = healthy.engine.image["features"], healthy.trainer.image["features"]
    assert _largest(own, expected) < 1e-5
    assert healthy.with_image is not None
    np.testing.assert_allclose(*healthy.with_image, rtol=0, atol=1e-5)
    assert faulty is not None and (faulty.name, faulty.where) == ("image", "engine")
    assert "features" in faulty.problem


def _largest(values: Floats, expected: Floats) -> float:
    return float(np.abs(values - expected).max() / np.abs(expected).max())
