"""Features of gpt-oss: MXFP4 weights, stacked experts, interleaved gate and up, expert biases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import families
from mixture_families import GPT_OSS
from msrl.checkpoint.convert import McoreTarget, write_hf, write_mcore
from msrl.checkpoint.dtypes import same_bits
from msrl.checkpoint.hf.mxfp4 import dequantize
from msrl.checkpoint.mcore.names import Naming
from msrl.checkpoint.source import open_weights
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.models.hf_config import HfConfig
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.workflows.convert.run import run
from support import mentions

EXPERTS, HIDDEN, FFN = (
    GPT_OSS["num_local_experts"],
    GPT_OSS["hidden_size"],
    GPT_OSS["intermediate_size"],
)
DOWN = "model.layers.1.mlp.experts.down_proj"
PACKED = {key: value for key, value in GPT_OSS.items() if key != "torch_dtype"} | {
    "quantization_config": {"quant_method": "mxfp4"}
}


def _blocks(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return random blocks and scales of a stack whose entries have `rows` outputs; values are
    around 0.1.
    """
    blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(119, 123, blocks.shape[:-1], dtype=torch.uint8)


def _folder(path: Path, **changes: Tensor | None) -> tuple[Path, dict[str, Tensor]]:
    """Save a model as OpenAI publishes it (no dtype in config.json, experts in MXFP4), and return
    its weights as transformers dequantizes them.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    path.mkdir()
    expected_weights = {
        name: tensor.bfloat16() for name, tensor in families.weights(GPT_OSS).items()
    }
    tensors: dict[str, Tensor | None] = dict(expected_weights)
    for name, tensor in expected_weights.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, scales = _blocks(tensor.shape[2], tensor.shape[1])
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            expected_weights[name] = convert_moe_packed_tensors(blocks, scales)
    stored = {name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}
    save_file(stored, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(PACKED))
    return path, expected_weights


def test_four_bits_are_read_low_half_first_times_a_power_of_two() -> None:
    """0x2 is 1, 0x7 is 6, 0xB is -1.5 (OCP Microscaling Formats 1.0, table 5). Exponents 128 and
    125 multiply by 2 and 1/4.
    """
    blocks = torch.zeros(1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, 0], blocks[0, 1, 15] = 0x72, 0xB1
    result = dequantize(blocks, torch.tensor([[128, 125]], dtype=torch.uint8), torch.bfloat16)
    expected = torch.zeros(1, 64, dtype=torch.bfloat16)
    expected[0, 0], expected[0, 1], expected[0, 62], expected[0, 63] = 2, 12, 0.125, -0.375
    assert torch.equal(result, expected)


def test_weights_in_mxfp4_are_read_as_in_transformers(tmp_path: Path) -> None:
    folder, expected_weights = _folder(tmp_path / "packed")
    write_mcore(
        open_weights(folder), tmp_path / "mcore", McoreTarget(ParallelLayout(tp=2, ep=2, pp=2))
    )
    write_hf(open_weights(tmp_path / "mcore"), tmp_path / "plain", None)
    result = load_file(tmp_path / "plain" / "model.safetensors")
    assert result.keys() == expected_weights.keys()
    assert all(same_bits(result[name], tensor) for name, tensor in expected_weights.items())
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and "quantization_config" not in config


@pytest.mark.full
@pytest.mark.slow
def test_a_conversion_of_mxfp4_passes_its_verification(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron ranks with sharded and distributed experts agree with transformers; then the model
    is converted back.
    """
    folder, _ = _folder(tmp_path / "packed")
    there = {
        "command": "hf2mcore",
        "load": str(folder),
        "save": str(tmp_path / "mcore"),
        "tp": 2,
        "ep": 2,
        "dtype": "fp32",
    }
    run(Config.model_validate({"convert": there}))
    run(
        Config.model_validate(
            {
                "convert": {
                    "command": "mcore2hf",
                    "load": str(tmp_path / "mcore"),
                    "save": str(tmp_path / "hf"),
                }
            }
        )
    )
    assert capsys.readouterr().out.count("round trip") == 2


def test_an_expert_is_deinterleaved_transposed_and_sharded(tmp_path: Path) -> None:
    """Expert 5 of 8 is the second expert of rank 1 of 2. The second half of its columns has gate at
    even and up at odd positions.
    """
    hf = families.weights(GPT_OSS)
    save_file(hf, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    mine = dict(
        open_weights(tmp_path).local_tensors(ParallelLayout(tp=2, ep=2), Coords(tp=1, ep=1))
    )
    expert, theirs = "decoder.layers.2.mlp.experts.local_experts.1.", "model.layers.2.mlp.experts."
    half = slice(FFN, 2 * FFN)
    gate_up, bias = (
        hf[theirs + "gate_up_proj"][5][:, half],
        hf[theirs + "gate_up_proj_bias"][5][half],
    )
    assert torch.equal(
        mine[expert + "linear_fc1.weight"], torch.cat([gate_up[:, ::2].T, gate_up[:, 1::2].T])
    )
    assert torch.equal(mine[expert + "linear_fc1.bias"], torch.cat([bias[::2], bias[1::2]]))
    assert torch.equal(
        mine[expert + "linear_fc2.weight"], hf[theirs + "down_proj"][5][FFN // 2 :].T
    )
    assert torch.equal(mine[expert + "linear_fc2.bias"], hf[theirs + "down_proj_bias"][5])
    attention = "decoder.layers.2.self_attention."
    assert torch.equal(
        mine[attention + "core_attention.softmax_offset"], hf["model.layers.2.self_attn.sinks"][2:]
    )
    assert torch.equal(
        mine[attention + "linear_proj.bias"], hf["model.layers.2.self_attn.o_proj.bias"]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{DOWN}_scales": None}, ("_blocks", "_scales", "MXFP4", DOWN)),
        ({f"{DOWN}_scales": torch.zeros(EXPERTS, HIDDEN, 2, dtype=torch.uint8)}, (DOWN,)),
        ({f"{DOWN}_bias": torch.zeros(EXPERTS - 1, HIDDEN)}, ("missing", f"{DOWN}_bias[7]")),
        (
            {f"{DOWN}_bias": torch.zeros(EXPERTS, HIDDEN + 1)},
            ("down_proj_bias[0]", "[65]", "[64]", "config.json"),
        ),
        ({"model.norm.weight": torch.zeros(HIDDEN, dtype=torch.uint8)}, ("uint8",)),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: tuple[str, ...]
) -> None:
    folder, _ = _folder(tmp_path / "packed", **changes)
    with pytest.raises(MsrlError, match=mentions(*message)):
        open_weights(folder)


def test_fused_experts_have_no_biases_but_transformer_engines_have(tmp_path: Path) -> None:
    folder, expected_weights = _folder(tmp_path / "packed")
    with pytest.raises(MsrlError, match=mentions("--moe-grouped-gemm", "biases")):
        write_mcore(
            open_weights(folder), tmp_path / "fused", McoreTarget(naming=Naming(grouped=True))
        )
    assert not (tmp_path / "fused").exists()
    write_mcore(
        open_weights(folder),
        tmp_path / "te",
        McoreTarget(ParallelLayout(ep=2), naming=Naming(te=True, grouped=True)),
    )
    bias = f"{DOWN}_bias"
    write_hf(open_weights(tmp_path / "te"), tmp_path / "plain", None)
    assert torch.equal(
        load_file(tmp_path / "plain" / "model.safetensors")[bias], expected_weights[bias]
    )


def test_a_config_without_rope_settings_has_the_class_s_own() -> None:
    from transformers import GptOssConfig

    ours = families.shape_from_config(
        HfConfig(
            {key: value for key, value in GPT_OSS.items() if not key.startswith("rope")},
            "config.json",
        )
    )
    theirs = GptOssConfig().rope_parameters
    assert ours.rotary.theta == theirs["rope_theta"]
    for key in ("factor", "beta_fast", "beta_slow", "truncate", "original_max_position_embeddings"):
        assert getattr(ours.rotary.scaling, key) == theirs[key]
