"""FP8 weights with a scale per block: dequantization, conversion of a model, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import families
from mixture_families import DEEPSEEK_V3, DEEPSEEK_V32
from msrl.checkpoint.convert import McoreTarget, write_hf, write_mcore
from msrl.checkpoint.hf.fp8 import FP8, dequantize
from msrl.checkpoint.integrity import damages, mcore_checks
from msrl.checkpoint.source import open_weights
from msrl.errors import MsrlError
from msrl.models.families import all_rules
from msrl.models.parallel_layout import ParallelLayout
from support import assert_each_mentions, assert_mentions, mentions

BLOCK = (16, 32)
PACKED: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK)},
}  # fmt: skip
# Matrices inside layers that are published in bfloat16.
PLAIN = ("mlp.gate.weight", "indexer.weights_proj.weight")

UP = "model.layers.0.mlp.up_proj.weight"
UP_SCALE = f"{UP}_scale_inv"


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in FP8 and its scales: the largest element of a block becomes 448, the
    maximum of e4m3.
    """
    rows, columns = BLOCK
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    result = torch.empty(weight.shape, dtype=FP8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scales[i, j] = weight[block].abs().max() / 448
            result[block] = (weight[block] / scales[i, j]).to(FP8)
    return result, scales


def folder(
    path: Path, model: dict[str, Any] = DEEPSEEK_V3, **changes: Any
) -> tuple[Path, dict[str, Tensor]]:
    """Save a model with quantized matrices inside layers except routers and weights of indexers'
    heads, as DeepSeek V3 and V3.2 are published, and return its dequantized weights.
    """
    path.mkdir()
    tensors, meant = dict[str, Tensor](), dict[str, Tensor]()
    rules = all_rules(families.shape(model))
    wide = {name for rule in rules if rule.dtype == "float32" for name in rule.hf}
    for name, weight in families.weights(model).items():
        if ".layers." not in name or weight.dim() < 2 or name.endswith(PLAIN):
            meant[name] = tensors[name] = weight if name in wide else weight.bfloat16()
            continue
        tensors[name], tensors[f"{name}_scale_inv"] = quantize(weight)
        scales = (
            tensors[f"{name}_scale_inv"]
            .repeat_interleave(BLOCK[0], 0)
            .repeat_interleave(BLOCK[1], 1)
        )
        meant[name] = (
            tensors[name].float() * scales[: weight.shape[0], : weight.shape[1]]
        ).bfloat16()
    save_file({**tensors, **changes.pop("tensors", {})}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**model, **PACKED, **changes}))
    return path, meant


def test_blocks_are_multiplied_by_their_scales() -> None:
    weight = torch.tensor([[1.0, 2.0, -4.0], [0.5, 8.0, 16.0], [1.5, 3.0, 448.0]]).to(FP8)
    scales = torch.tensor([[2.0, 10.0], [0.5, 1.0]])
    expected = torch.tensor([[2.0, 4.0, -40.0], [1.0, 16.0, 160.0], [0.75, 1.5, 448.0]])
    assert torch.equal(dequantize(weight, scales, (2, 2), torch.float32), expected)


@pytest.mark.parametrize("model", [DEEPSEEK_V3, DEEPSEEK_V32], ids=["v3", "v3.2"])
def test_a_quantized_model_is_converted_dequantized(tmp_path: Path, model: dict[str, Any]) -> None:
    source, meant = folder(tmp_path / "fp8", model)
    write_mcore(open_weights(source), tmp_path / "mcore", McoreTarget(ParallelLayout(tp=2)))
    write_hf(open_weights(tmp_path / "mcore"), tmp_path / "back", None)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == meant.keys()
    assert all(
        torch.equal(back[name], meant[name]) and back[name].dtype == meant[name].dtype
        for name in meant
    )
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == {**model, "torch_dtype": "bfloat16"}


def test_layers_for_multi_token_prediction_pass_through(tmp_path: Path) -> None:
    """They are dequantized like the other weights."""
    plain = (torch.randn(32, 64) * 0.1).bfloat16()
    weight, scales = quantize(plain.float())
    extra = {
        f"model.layers.4.{name}": tensor
        for name, tensor in (("eh_proj.weight", weight), ("eh_proj.weight_scale_inv", scales))
    }
    source, meant = folder(
        tmp_path / "fp8",
        num_nextn_predict_layers=1,
        tensors={**extra, "model.layers.4.enorm.weight": plain[0].clone()},
    )
    write_mcore(open_weights(source), tmp_path / "mcore", McoreTarget(ParallelLayout(tp=2)))
    assert damages(mcore_checks(tmp_path / "mcore")) == []
    write_hf(open_weights(tmp_path / "mcore"), tmp_path / "back", None)
    file = tmp_path / "mcore" / "hf" / "msrl_carried.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert_each_mentions(
        damages(mcore_checks(tmp_path / "mcore")),
        ("hf/msrl_carried.safetensors", "altered", "manifest"),
    )
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == meant.keys() | {
        "model.layers.4.eh_proj.weight",
        "model.layers.4.enorm.weight",
    }
    assert torch.equal(
        back["model.layers.4.eh_proj.weight"], dequantize(weight, scales, BLOCK, torch.bfloat16)
    )
    assert torch.equal(back["model.layers.4.enorm.weight"], plain[0])


def test_a_model_may_come_without_its_layers_for_multi_token_prediction(tmp_path: Path) -> None:
    source, _ = folder(tmp_path / "fp8", num_nextn_predict_layers=1)
    write_mcore(open_weights(source), tmp_path / "mcore", McoreTarget(ParallelLayout(ep=2)))
    assert open_weights(tmp_path / "mcore").shape.pass_through == ("model.layers.4.",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, ("weight_block_size", "two numbers")),
        ({"quantization_config": {"quant_method": "awq"}}, ("quantization_config",)),
        ({"tensors": {UP: torch.ones(96, 64).bfloat16()}}, ("scales", f"{UP}_scale_inv", "FP8")),
        ({"tensors": {UP_SCALE: torch.ones(2, 2)}}, ("[2, 2]", "[16, 32]", "[6, 2]")),
    ],
)  # fmt: skip
def test_invalid_scales_and_blocks_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: tuple[str, ...]
) -> None:
    with pytest.raises(MsrlError) as error:
        open_weights(folder(tmp_path / "fp8", **changes)[0])
    assert_mentions(error.value, *message)


def test_fp8_without_scales_is_refused(tmp_path: Path) -> None:
    source, _ = folder(tmp_path / "fp8")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(
        MsrlError,
        match=mentions("_scale_inv", "FP8", "model.layers.1.mlp.experts.3.up_proj.weight"),
    ):
        open_weights(source)
