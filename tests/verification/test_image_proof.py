"""Verification of conversions by the logits of prompts with images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import image_models
from msrl.checkpoint.dtypes import same_bits
from support import assert_mentions
from test_convert import run

pytestmark = pytest.mark.slow
PROMPTS = "two images"


def report(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what was printed, without the line breaks of tables."""
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3-vl", {"tp": 2}),
        pytest.param("qwen2.5-vl", {"tp": 2, "pp": 2}, marks=pytest.mark.full),
        pytest.param("qwen2-vl", {"pp": 2, "vpp": 1}, marks=pytest.mark.full),
        pytest.param("qwen2.5-vl", {"format": "dist"}, marks=pytest.mark.full),
        pytest.param("internvl", {"tp": 2, "pp": 2}, marks=pytest.mark.full),
        pytest.param("qwen3-vl moe", {"tp": 2, "ep": 2, "etp": 1}, marks=pytest.mark.full),
    ],
)
def test_conversions_both_ways_are_verified_with_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, layout: dict[str, Any]
) -> None:
    folder = image_models.save_model(tmp_path / "model", name)
    run(command="hf2mcore", load=folder, save=tmp_path / "mcore", **layout)
    assert_mentions(report(capsys), "logits, fp32", PROMPTS, "transformers, Megatron")
    run(command="mcore2hf", load=tmp_path / "mcore", save=tmp_path / "hf")
    assert_mentions(report(capsys), "logits, fp32", PROMPTS)
    before, after = (load_file(x / "model.safetensors") for x in (folder, tmp_path / "hf"))
    assert before.keys() == after.keys()
    assert all(same_bits(after[key], tensor) for key, tensor in before.items())


@pytest.mark.full
def test_exchanged_experts_are_verified_layer_by_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' modules have outputs before inputs, other than the files."""
    folder = image_models.save_model(tmp_path / "model", "qwen3-vl moe")
    monkeypatch.setattr("msrl.verification.report.fits_in_memory", lambda shape: False)
    run(command="hf2mcore", load=folder, save=tmp_path / "mcore", ep=2)
    assert_mentions(report(capsys), "logits, fp32", "layer by layer", "transformers, Megatron")


@pytest.mark.full
def test_towers_are_cast_with_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = image_models.save_model(tmp_path / "model", "qwen2-vl")
    run(command="hf2mcore", load=folder, save=tmp_path / "mcore", dtype="bf16")
    assert_mentions(report(capsys), PROMPTS)
    run(command="mcore2hf", load=tmp_path / "mcore", save=tmp_path / "hf")
    before, after = (load_file(x / "model.safetensors") for x in (folder, tmp_path / "hf"))
    assert all(same_bits(after[key], tensor.bfloat16()) for key, tensor in before.items())


@pytest.mark.full
def test_deeper_features_on_another_stage_are_verified_with_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The two deeper layers of this Qwen3-VL are on different stages, which text does not need."""
    folder = image_models.save_model(tmp_path / "model", "qwen3-vl")
    layout = {"pp": 2, "num_layer_list": (1, 3)}
    run(command="hf2mcore", load=folder, save=tmp_path / "mcore", **layout)
    assert_mentions(report(capsys), "logits, fp32", "none with")
