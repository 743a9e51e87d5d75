"""Arguments in Megatron files, compared with the config of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import families
import tiny_checkpoints as tiny
from families import FAMILIES
from mixture_families import MIXTURES
from msrl.checkpoint.convert import McoreTarget, write_mcore
from msrl.checkpoint.mcore.argument_table import contradictions
from msrl.checkpoint.mcore.files import namespace
from msrl.checkpoint.source import open_mcore, open_weights
from msrl.errors import ManyErrors, MsrlError
from msrl.models.parallel_layout import ParallelLayout
from support import mentions

# Arguments of MindSpeed-LLM's first converter, which leaves most others at their defaults.
PARSER_DEFAULTS = {"mock_data": True, "perform_initialization": False}


def write_checkpoint(folder: Path, *, distributed: bool = False, **arguments: Any) -> Path:
    """Convert a small model and change the arguments of its file."""
    tiny.save(folder / "hf", "qwen2")
    save = folder / "mcore"
    write_mcore(open_weights(folder / "hf"), save, McoreTarget(distributed=distributed))
    file = next(save.rglob("common.pt" if distributed else "*.pt"))
    contents = torch.load(file, weights_only=False)
    vars(contents["args"]).update(arguments)
    torch.save(contents, file)
    (save / "msrl_manifest.json").unlink()
    return save


CONTRADICTIONS = [
    ({"rotary_base": 10000}, ("rotary_base=10000", "rope_theta=1000000.0")),
    ({"rope_theta": 5e5}, ("rope_theta=500000.0", "rope_theta=1000000.0")),
    ({"norm_epsilon": 1e-5}, ("norm_epsilon=1e-05", "rms_norm_eps=1e-06")),
    ({"qk_layernorm": True}, ("qk_layernorm=True", "q_norm=False")),
    ({"rotary_interleaved": True}, ("rotary_interleaved=True",)),
    ({"rotary_percent": 0.5}, ("rotary_percent=0.5", "partial_rotary_factor=1.0")),
    ({"num_query_groups": 4}, ("num_query_groups=4", "num_key_value_heads=2")),
    ({"rope_scaling_type": "yarn"}, ("rope_scaling_type=yarn", "None")),
    ({"rotary_seq_len_interpolation_factor": 2}, ("rotary_seq_len_interpolation_factor=2",)),
    ({"normalization": "LayerNorm"}, ("normalization=LayerNorm", "RMSNorm")),
    ({"multi_latent_attention": True}, ("multi_latent_attention=True",)),
    ({"num_experts": 8}, ("num_experts=8",)),
]


@pytest.mark.sample(8)
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(("arguments", "message"), CONTRADICTIONS)
def test_an_argument_that_contradicts_the_config_is_refused_with_both_values(
    tmp_path: Path, arguments: dict[str, Any], message: tuple[str, ...], distributed: bool
) -> None:
    save = write_checkpoint(tmp_path, distributed=distributed, **arguments)
    file = "common.pt" if distributed else "model_optim_rng.pt"
    with pytest.raises(MsrlError, match=mentions(file, *message, "contradicts", "config.json")):
        open_mcore(save)


def test_all_contradictions_are_reported_at_once(tmp_path: Path) -> None:
    save = write_checkpoint(tmp_path, rotary_base=10000, norm_epsilon=1e-5)
    with pytest.raises(ManyErrors, match=mentions("rotary_base", "norm_epsilon")):
        open_mcore(save)


@pytest.mark.parametrize(
    "arguments",
    [
        {"norm_epsilon": 9.999999974752427e-07},  # 1e-6 in float32
        {"rotary_base": 1000000},
        {"num_query_groups": 1, "group_query_attention": False},
        {"max_position_embeddings": 64, "seq_length": 64, "attention_dropout": 0.1},
        {**PARSER_DEFAULTS, "rotary_base": 10000, "norm_epsilon": 1e-5, "qk_layernorm": False},
    ],
)
def test_arguments_without_a_counterpart_or_of_equal_value_are_accepted(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    open_mcore(write_checkpoint(tmp_path, **arguments))


@pytest.mark.sample(30)
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("name", FAMILIES | MIXTURES)
def test_arguments_that_msrl_writes_agree_with_the_config(name: str, distributed: bool) -> None:
    shape = families.shape((FAMILIES | MIXTURES)[name].config)
    written = vars(namespace(shape, ParallelLayout(), distributed=distributed))
    assert list(contradictions(written, shape)) == []


@pytest.mark.parametrize("recorded", [True, False])
def test_both_values_of_qk_layernorm_are_read_for_latent_attention(recorded: bool) -> None:
    """msrl wrote False before it wrote the value of MindSpeed-LLM."""
    shape = families.shape(MIXTURES["deepseek v3"].config)
    written = {**vars(namespace(shape, ParallelLayout())), "qk_layernorm": recorded}
    assert list(contradictions(written, shape)) == []
