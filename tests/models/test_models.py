"""Shapes, weight rules and Megatron settings from the config.json of real models."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mixture_families import QWEN3_MOE
from msrl.errors import ManyErrors, MsrlError
from msrl.models.families import all_rules, families, load_shape, num_parameters, shape_from_config
from msrl.models.hf_config import HfConfig
from msrl.models.megatron import transformer_settings
from msrl.models.rules import Grouped
from msrl.models.shape import Llama3RopeScaling, YarnRopeScaling
from support import assert_mentions, mentions, shared_data

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
LLAMA = {**QWEN2, "architectures": ["LlamaForCausalLM"]}
MISTRAL = {**QWEN2, "architectures": ["MistralForCausalLM"]}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def shape(config: dict[str, Any], **changes: Any) -> Any:
    return shape_from_config(HfConfig({**config, **changes}, "config.json"))


# The counts come from the models' cards and the indices of their published weights.
@pytest.mark.parametrize(
    ("file", "parameters", "tied", "theta", "dtype"),
    [
        ("Mistral-7B-Instruct-v0.2.config.json", 7_241_732_096, False, 1e6, "bfloat16"),
        ("Yi-6B-Chat.config.json", 6_061_035_520, False, 5e6, "bfloat16"),
        ("Qwen1.5-0.5B-Chat.config.json", 463_987_712, True, 1e6, "bfloat16"),
        ("Llama-2-7b-chat.config.json", 6_738_415_616, False, 1e4, "float16"),
        ("Llama-3.2-3B-Instruct.config.json", 3_212_749_824, True, 5e5, "bfloat16"),
        ("aic/meta-llama--Meta-Llama-3.1-8B_config.json", 8_030_261_248, False, 5e5, "bfloat16"),
        ("Qwen2.5-0.5B-Instruct.config.json", 494_032_768, True, 1e6, "float32"),
        ("Qwen2.5-1.5B-Instruct.transformers5.config.json", 1_543_714_304, True, 1e6, "float16"),
        ("Qwen2.5-7B-Instruct.config.json", 7_615_616_512, False, 1e6, "bfloat16"),
        ("aic/Qwen--Qwen3-0.6B_config.json", 596_049_920, True, 1e6, "bfloat16"),
        ("Qwen3-4B.config.json", 4_022_468_096, True, 1e6, "bfloat16"),
    ],
)
def test_shape_of_a_real_model_is_read_from_its_config(
    file: str, parameters: int, tied: bool, theta: float, dtype: str
) -> None:
    model = load_shape(shared_data("configs", file))
    assert (num_parameters(model), model.tie_word_embeddings, model.rotary.theta, model.dtype) == (
        parameters,
        tied,
        theta,
        dtype,
    )


@pytest.mark.parametrize(
    ("config", "index", "bytes_per_parameter"),
    [
        ("cogito-v1-preview-qwen-14B.config.json", "Qwen2.5-14B.model.safetensors.index.json", 2),
        ("Reflection-Llama-3.1-70B.config.json", "Llama-3.1-70B.model.safetensors.index.json", 4),
    ],
)
def test_rules_name_exactly_the_tensors_of_a_published_index(
    config: str, index: str, bytes_per_parameter: int
) -> None:
    model = load_shape(shared_data("configs", config))
    published = json.loads(shared_data("weight_index", index).read_text())
    assert {name for rule in all_rules(model) for name in rule.hf} == set(published["weight_map"])
    assert num_parameters(model) * bytes_per_parameter == published["metadata"]["total_size"]


def test_llama3_scaling_is_read_with_all_its_numbers() -> None:
    model = load_shape(shared_data("configs", "Llama-3.2-3B-Instruct.config.json"))
    assert model.rotary.scaling == Llama3RopeScaling(32.0, 1.0, 4.0, 8192)


def test_head_size_of_qwen3_is_independent_of_the_hidden_size() -> None:
    model = load_shape(shared_data("configs", "Qwen3-4B.config.json"))
    assert (model.head_dim, model.hidden_size // model.num_attention_heads) == (128, 80)
    assert (model.qkv_bias, model.qk_norm) == (False, True)


def test_several_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(ManyErrors(["a: one", "b: two"])))
    assert (
        isinstance(error, ManyErrors)
        and error.messages == ("a: one", "b: two")
        and str(error) == "a: one\nb: two"
    )


def test_both_spellings_of_the_number_of_experts_mean_the_same() -> None:
    """Accept num_local_experts, as transformers 5 writes it for Qwen3."""
    values = {**QWEN3_MOE, "num_local_experts": 4}
    del values["num_experts"]
    moe = shape_from_config(HfConfig(values, "config.json")).moe
    assert moe is not None and moe.num_experts == 4


def test_both_spellings_of_the_rope_settings_mean_the_same() -> None:
    old = shape(LLAMA, rope_theta=5e5, rope_scaling=LLAMA3_SCALING)
    new = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "torch_dtype")}
    assert old == shape(
        new, dtype="bfloat16", rope_parameters={**LLAMA3_SCALING, "rope_theta": 5e5}
    )


def test_real_configs_of_other_architectures_are_refused_by_name() -> None:
    folder = shared_data("configs")
    refused = 0
    for file in sorted(folder.rglob("*.json")):
        config = json.loads(file.read_text())
        names = config.get("architectures")
        if not names or names[0] in families():
            continue
        with pytest.raises(
            MsrlError, match=mentions(names[0], "LlamaForCausalLM", "Qwen2ForCausalLM")
        ):
            load_shape(file)
        refused += 1
    assert refused > 10


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("base", "changes", "fragments"),
    [
        (QWEN2, {"hidden_size": None}, ("hidden_size=null", "missing")),
        (QWEN2, {"num_hidden_layers": 0}, ("num_hidden_layers=0", "number")),
        (QWEN2, {"intermediate_size": "96"}, ("intermediate_size",)),
        (QWEN2, {"vocab_size": True}, ("vocab_size=true",)),
        (QWEN2, {"rms_norm_eps": -1e-6}, ("rms_norm_eps",)),
        (QWEN2, {"num_key_value_heads": 3}, ("num_key_value_heads=3", "num_attention_heads=4")),
        (QWEN2, {"num_key_value_heads": None}, ("num_key_value_heads",)),
        (
            QWEN2,
            {"num_attention_heads": 3, "num_key_value_heads": 1},
            ("hidden_size", "num_attention_heads=3"),
        ),
        (QWEN3, {"head_dim": 33}, ("head_dim", "even")),
        (QWEN2, {"torch_dtype": "float8_e4m3fn"}, ("float8_e4m3fn",)),
        (QWEN2, {"hidden_act": "gelu"}, ("hidden_act",)),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 0}, ("sliding_window=0", "number")),
        (
            QWEN2,
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": -1},
            ("max_window_layers=-1",),
        ),
        (
            QWEN2,
            {"layer_types": ["full_attention", "sliding_attention"]},
            ("layer_types", "sliding_attention", "window"),
        ),
        (
            QWEN2,
            {"layer_types": ["full_attention", "chunked_attention"]},
            ("layer_types", "2 layers"),
        ),
        (QWEN2, {"layer_types": ["full_attention"]}, ("layer_types", "2 layers")),
        (MISTRAL, {"sliding_window": "8"}, ("sliding_window",)),
        (
            MISTRAL,
            {"layer_types": ["full_attention", "sliding_attention"]},
            ("layer_types", "transformers", "sliding_attention"),
        ),
        (
            LLAMA,
            {"rope_scaling": {"type": "su", "factor": 4.0}},
            ("'su'", "default, llama3, linear"),
        ),
        (
            LLAMA,
            {"rope_scaling": {"type": "longrope", "factor": 4.0}},
            ("rope_scaling.short_factor", "numbers"),
        ),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, ("rope_scaling.factor", "missing")),
        (
            LLAMA,
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": "no"}},
            ("rope_scaling.truncate",),
        ),
        (LLAMA, {"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "heads")),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ("low_freq_factor",)),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": ["llama3"], "factor": 8.0}},
            ("['llama3']", "rope type"),
        ),
        (
            LLAMA,
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 0.5,
                }
            },
            ("original_max_position_embeddings", "1"),
        ),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "mscale_all_dim": "x"}},
            ("mscale_all_dim", "number"),
        ),
        (LLAMA, {"attention_bias": True}, ("attention_bias=true",)),
        (LLAMA, {"mlp_bias": True}, ("mlp_bias",)),
        (LLAMA, {"quantization_config": {"quant_method": "awq"}}, ("quantization_config",)),
        (LLAMA, {"architectures": None}, ("architectures",)),
    ],
)
def test_invalid_and_unsupported_values_are_refused_by_key(
    base: dict[str, Any], changes: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    with pytest.raises(MsrlError) as error:
        shape(base, **changes)
    assert str(error.value).startswith("config.json: ")
    assert_mentions(error.value, *fragments)


def test_a_window_that_no_layer_uses_is_ignored() -> None:
    assert shape(QWEN2, use_sliding_window=True, sliding_window=8, max_window_layers=2) == shape(
        QWEN2
    )
    assert all(layer.mixer.window is None for layer in shape(MISTRAL, sliding_window=None).layers)


def test_each_family_has_windows_in_its_own_layers() -> None:
    def layers(config: dict[str, Any], **changes: Any) -> list[int | None]:
        model = shape(config, num_hidden_layers=4, **changes)
        return [layer.mixer.window for layer in model.layers]

    assert layers(QWEN2, use_sliding_window=True, sliding_window=8, max_window_layers=3) == [
        None,
        None,
        None,
        8,
    ]
    assert layers(QWEN2, use_sliding_window=True, max_window_layers=0) == [4096] * 4
    kinds = ["full_attention", "sliding_attention"] * 2
    assert layers(QWEN2, use_sliding_window=True, sliding_window=8, layer_types=kinds) == [
        None,
        8,
        None,
        8,
    ]
    assert layers(MISTRAL, sliding_window=16) == [16] * 4 and layers(MISTRAL) == [4096] * 4


def test_missing_yarn_settings_have_the_defaults_of_transformers() -> None:
    """0.1 ln(4) + 1 = 1.13863; with both mscales, DeepSeek-V2-Lite's ratio of two equal numbers is
    1.
    """
    scaling = shape(
        QWEN2, rope_scaling={"type": "yarn", "factor": 4.0}, max_position_embeddings=64
    ).rotary.scaling
    assert scaling == YarnRopeScaling(4.0, 32.0, 1.0, 64, pytest.approx(1.1386294), True)
    both = {
        "type": "yarn",
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    }
    assert shape(QWEN2, rope_scaling=both).rotary.scaling == YarnRopeScaling(
        40.0, 32.0, 1.0, 4096, 1.0, True, 0.707
    )


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MsrlError, match=mentions("config.json")):
        load_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(MsrlError, match=mentions("config.json", "JSON")):
        load_shape(tmp_path)


def test_megatron_settings_are_derived_from_the_shape() -> None:
    settings = transformer_settings(shape(QWEN2))
    expected = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "add_qkv_bias": True,
        "qk_layernorm": False,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": "silu",
    }
    assert {name: settings[name] for name in expected} == expected


def test_a_rule_of_a_layer_names_its_tensors() -> None:
    qwen3 = shape(QWEN3)
    rules = {rule.mcore: rule for rule in all_rules(qwen3)}
    qkv = rules["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert qkv.hf == tuple(f"model.layers.1.self_attn.{kind}_proj.weight" for kind in "qkv")
    assert qkv.layout == Grouped(2, (64, 32, 32))
    assert qkv.shapes == ((128, 64), (64, 64), (64, 64))
    assert rules["decoder.layers.0.self_attention.k_layernorm.weight"].hf == (
        "model.layers.0.self_attn.k_norm.weight",
    )


@pytest.mark.slow
@pytest.mark.parametrize("config", [QWEN2, QWEN3, LLAMA, MISTRAL])
@pytest.mark.parametrize("tied", [True, False])
def test_rules_name_the_parameters_of_transformers_models(
    config: dict[str, Any], tied: bool
) -> None:
    import torch
    import transformers

    values = {
        key: value for key, value in config.items() if key not in ("architectures", "torch_dtype")
    }
    with torch.device("meta"):
        name = config["architectures"][0]
        settings = getattr(transformers, name.replace("ForCausalLM", "Config"))(
            **values, tie_word_embeddings=tied
        )
        model = getattr(transformers, name)(settings)
    rules = all_rules(shape(config, tie_word_embeddings=tied))
    sizes = {name: size for rule in rules for name, size in zip(rule.hf, rule.shapes, strict=True)}
    assert sizes == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


SIGNATURE = """
import inspect, json
from megatron.core.transformer.transformer_config import TransformerConfig
print(json.dumps(list(inspect.signature(TransformerConfig).parameters)))
"""


@pytest.mark.full
@pytest.mark.slow
def test_settings_are_arguments_of_transformer_config() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SIGNATURE],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(transformer_settings(shape(QWEN2))) <= set(json.loads(done.stdout.splitlines()[-1]))
