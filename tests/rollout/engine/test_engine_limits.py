"""Limits of vLLM that are checked before an engine starts, against vLLM itself."""

from __future__ import annotations

import ast
import contextlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from families import FAMILIES
from mixture_families import MIXTURES
from msrl.config.sections.rollout import EngineConfig
from msrl.errors import MsrlError
from msrl.models.families import load_shape
from msrl.platforms import get
from msrl.rollout import engine_source
from msrl.rollout.engine import EngineImages, EngineSettings, is_eager
from msrl.rollout.engine_arguments import engine_arguments
from msrl.rollout.engine_limits import check_limits
from msrl.rollout.vllm import engine_variables
from msrl.vision.settings import read_vision_settings
from support import assert_mentions
from tiny_qwen2 import make_model
from vision_models import tiled_processor, write_tile_marks

CPU = get("cpu")


def write_config(folder: Path, **changes: object) -> EngineSettings:
    """Write the config of a tiny Qwen2 with changes, and return settings of its engine."""
    make_model(tied=False).config.save_pretrained(folder)
    path = folder / "config.json"
    values: dict[str, Any] = json.loads(path.read_text())
    values |= {"architectures": ["Qwen2ForCausalLM"], **changes}
    path.write_text(json.dumps(values))
    return EngineSettings(folder)


def refusal(settings: EngineSettings, platform: str = "cpu", **engine: Any) -> str:
    settings = replace(settings, engine=EngineConfig.model_validate(engine))
    try:
        check_limits(settings, get(platform))
    except MsrlError as error:
        return str(error)
    return ""


def test_a_step_has_room_for_all_tiles_of_an_image(tmp_path: Path) -> None:
    """vLLM's class of InternVL counts one tile where the processor's file does not ask for more."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["internvl"].config))
    processor = tiled_processor(56, max_tiles=120)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    write_tile_marks(tmp_path, 190, 191)
    vision = read_vision_settings(tmp_path)
    settings = EngineSettings(tmp_path, images=EngineImages(1, vision))
    arguments = engine_arguments(settings, load_shape(tmp_path), CPU)
    assert arguments["max_num_batched_tokens"] >= vision.max_tokens == 484


def test_a_head_size_without_a_kernel_is_refused_with_its_key(tmp_path: Path) -> None:
    settings = write_config(tmp_path, num_attention_heads=8, num_key_value_heads=4)
    message = refusal(settings)
    assert_mentions(message, "config.json", "hidden_size=128 / num_attention_heads=8", "16", "128")
    qwen3 = {**FAMILIES["qwen3"].config, "head_dim": 48}
    (tmp_path / "config.json").write_text(json.dumps(qwen3))
    assert_mentions(refusal(settings), "config.json", "head_dim=48", "Supported: 32, 64")


def test_a_head_size_is_not_checked_where_the_engine_selects_its_kernel(tmp_path: Path) -> None:
    settings = write_config(tmp_path, num_attention_heads=8, num_key_value_heads=4)
    assert refusal(settings, "cuda") == refusal(settings, "npu") == ""


def test_queries_that_grow_with_the_position_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["ministral 3"].config))
    assert_mentions(refusal(EngineSettings(tmp_path)), "llama_4_scaling_beta", "vLLM")


def test_sparse_attention_is_refused_where_vllm_has_none(tmp_path: Path) -> None:
    settings, file = EngineSettings(tmp_path), tmp_path / "config.json"
    config = MIXTURES["glm 5.2"].config
    file.write_text(json.dumps(config))
    assert_mentions(refusal(settings), str(tmp_path), "GlmMoeDsaForCausalLM", "sparse", "cpu")
    assert refusal(settings, "cuda") == ""
    file.write_text(json.dumps({**config, "index_topk_pattern": None}))
    assert_mentions(refusal(settings, "cuda"), "indexer_types", "index_topk_freq")
    file.write_text(json.dumps({**config, "indexer_rope_interleave": None}))
    assert_mentions(refusal(settings, "cuda"), "indexer_rope_interleave", "true")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("minimax m2", "groups"), ("ernie 4.5 moe", "bias"), ("glm 4.5", ""), ("mixtral", "")],
)
def test_experts_with_a_bias_need_groups_on_cpu(tmp_path: Path, name: str, reason: str) -> None:
    config = {**MIXTURES[name].config, "hidden_size": 128, "head_dim": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = EngineSettings(tmp_path)
    message = refusal(settings)
    assert bool(message) == bool(reason) and reason in message
    assert refusal(settings, "cuda") == ""


@pytest.mark.parametrize(
    ("name", "limit", "words"),
    [
        ("phi 3", 8, ("sliding_window=8", "no windows")),
        ("cohere 2", 8, ("sliding_window=8", "one more token")),
        ("phi 4 mini", 24, ("original_max_position_embeddings=24", "any length")),
        ("minicpm 3", 24, ("original_max_position_embeddings=24", "any length")),
    ],
)
def test_sequences_that_vllm_computes_in_another_way_are_refused(
    tmp_path: Path, name: str, limit: int, words: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[name].config))
    settings = EngineSettings(tmp_path)
    message = refusal(settings, "cuda", max_model_len=limit + 1)
    assert_mentions(message, *words, f"rollout.engine.max_model_len to {limit}")
    assert refusal(settings, "cuda", max_model_len=limit) == ""


def test_a_factor_of_a_long_rope_that_vllm_does_not_read_is_refused(tmp_path: Path) -> None:
    config = FAMILIES["phi 4 mini"].config
    scaling = {**config["rope_scaling"], "attention_factor": 1.5}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    message = refusal(EngineSettings(tmp_path), "cuda", max_model_len=24)
    assert_mentions(message, "rope_scaling", "1.40105", "1.5")


ALTERNATING = ["full_attention", "sliding_attention"] * 2


@pytest.mark.parametrize(
    ("name", "changes", "fragments"),
    [
        ("gpt-oss", {"swiglu_limit": 1.0}, ("swiglu_limit=1", "7")),
        ("gpt-oss", {"layer_types": ALTERNATING}, ("layer_types", "GptOss", "every second layer")),
        ("gpt-oss", {}, ()),
        ("gpt-oss", {"layer_types": ["full_attention"] * 4}, ()),
        (
            "qwen2.5",
            {"use_sliding_window": True, "layer_types": ALTERNATING},
            ("layer_types", "Qwen2ForCausalLM", "all layers"),
        ),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}, ("max_window_layers",)),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, ()),
        ("gemma 2", {"layer_types": ALTERNATING}, ()),
    ],
)
def test_windows_and_limits_that_vllm_does_not_read_are_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    config = {**(FAMILIES | MIXTURES)[name].config, "hidden_size": 128}
    config |= {"swiglu_limit": 7.0, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for platform in ("cpu", "cuda"):
        message = refusal(EngineSettings(tmp_path), platform)
        assert_mentions(message, *fragments)
        assert bool(message) == bool(fragments)


def _attributes(module: str) -> set[str]:
    """Return the names of the attributes that a class of a model in vLLM uses."""
    file = f"model_executor/models/{module}.py"
    nodes = engine_source.statements(file) or pytest.skip("no vLLM")
    found = (node for statement in nodes for node in ast.walk(statement))
    return {node.attr for node in found if isinstance(node, ast.Attribute)}


def test_the_classes_of_vllm_read_neither_the_window_of_each_layer_nor_a_limit() -> None:
    for module in ("gpt_oss", "qwen2", "qwen3", "qwen3_moe", "mixtral"):
        assert "layer_types" not in _attributes(module)
    assert "sliding_window" in _attributes("gpt_oss") and "layer_types" in _attributes("gemma2")
    assert "swiglu_limit" not in _attributes("gpt_oss")


LITE = {"hidden_size": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
KINDS = ["dense", "sparse", "dense", "sparse"]


@pytest.mark.parametrize(
    ("name", "changes", "fragments"),
    [
        ("hunyuan 3", {}, ()),
        ("hunyuan 3", {"expert_hidden_dim": None}, ("expert_hidden_dim", "Set it to 48")),
        ("hunyuan 3", {"first_k_dense_replace": None}, ("first_k_dense_replace", "Set it to 1")),
        ("glm 4.7 flash", LITE, ()),
        (
            "glm 4.7 flash",
            {**LITE, "first_k_dense_replace": None},
            ("first_k_dense_replace", "Set it to 1"),
        ),
        (
            "glm 4.7 flash",
            {**LITE, "first_k_dense_replace": None, "mlp_layer_types": KINDS},
            ("mlp_layer_types", "dense"),
        ),
    ],
)
def test_a_key_of_experts_that_only_vllm_reads_must_be_set(
    tmp_path: Path, name: str, changes: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MIXTURES[name].config, **changes}))
    for platform in ("cpu", "cuda"):
        message = refusal(EngineSettings(tmp_path), platform)
        assert_mentions(message, *fragments)
        assert bool(message) == bool(fragments)


def test_only_vllm_reads_these_keys_of_experts() -> None:
    from transformers import Glm4MoeLiteConfig, HYV3Config

    keys = {"expert_hidden_dim", "first_k_dense_replace"}
    assert keys <= _attributes("hy_v3") and "first_k_dense_replace" in _attributes("glm4_moe_lite")
    for config in (Glm4MoeLiteConfig(), HYV3Config()):
        assert not any(hasattr(config, key) for key in keys)


@pytest.mark.slow
def test_the_router_of_vllm_refuses_sigmoid_scores_without_groups_on_cpu() -> None:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    keys = {"top_k": 2, "global_num_experts": 4, "scoring_func": "sigmoid", "renormalize": True}
    router = CPURouter(**keys, use_grouped_topk=False)
    hidden, logits = torch.zeros(3, 8), torch.zeros(3, 4)
    with pytest.raises(AssertionError):
        router.select_experts(hidden, logits)


def test_the_platform_of_vllm_refuses_sparse_attention_on_cpu() -> None:
    (platform,) = (
        node
        for node in engine_source.statements("platforms/cpu.py") or pytest.skip("no vLLM")
        if isinstance(node, ast.ClassDef)
    )
    (chooses,) = (
        node
        for node in platform.body
        if isinstance(node, ast.FunctionDef) and node.name == "get_attn_backend_cls"
    )
    text = ast.unparse(chooses)
    assert "use_sparse" in text and "NotImplementedError" in text


DELTA_HEADS = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}


def test_delta_networks_in_another_type_than_bfloat16_are_refused_on_cpu(tmp_path: Path) -> None:
    config = {**FAMILIES["qwen3.5"].config, **DELTA_HEADS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = EngineSettings(tmp_path)
    assert_mentions(refusal(settings), "model.dtype=float32", "gated delta", "bfloat16")
    settings = replace(settings, dtype="bfloat16")
    assert refusal(settings, prefix_cache=False) == refusal(settings, "cuda") == ""
    assert_mentions(refusal(settings), "rollout.engine.prefix_cache=true", "cpu", "false")
    (tmp_path / "config.json").write_text(json.dumps({**config, "linear_value_head_dim": 128}))
    message = refusal(settings, prefix_cache=False)
    assert_mentions(message, "linear_value_head_dim=128", "cpu", "64 or 128")
    assert refusal(settings, "cuda") == ""


@pytest.mark.parametrize(
    ("key", "value"), [(32, 32), (64, 64), (96, 96), (128, 128), (256, 256), (64, 128)]
)
def test_the_kernel_of_delta_networks_has_these_head_sizes_on_cpu(key: int, value: int) -> None:
    from vllm import _custom_ops as kernels

    query = torch.ones(1, 3, 2, key, dtype=torch.bfloat16)
    values = torch.ones(1, 3, 2, value, dtype=torch.bfloat16)
    decay, beta = torch.zeros(1, 3, 2), torch.ones(1, 3, 2, dtype=torch.bfloat16)
    rows, ends = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    state = torch.zeros(1, 2, key, value)
    is_supported = key == value and key in CPU.delta_head_sizes
    with contextlib.nullcontext() if is_supported else pytest.raises(RuntimeError):
        kernels.chunk_gated_delta_rule_cpu(
            query, query, values, decay, beta, state, True, ends, False, True, rows
        )


def test_vllm_caches_states_only_with_prompts_in_several_steps() -> None:
    nodes = engine_source.statements("model_executor/models/config.py") or pytest.skip("no vLLM")
    (mamba,) = (x for x in nodes if isinstance(x, ast.ClassDef) and x.name == "MambaModelConfig")
    asserted = [ast.unparse(x) for x in ast.walk(mamba) if isinstance(x, ast.Assert)]
    assert any("enable_chunked_prefill" in text for text in asserted)


def test_a_latent_without_a_kernel_is_refused_unless_it_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = next(name for name, row in MIXTURES.items() if "kv_lora_rank" in row.config)
    config = {**MIXTURES[name].config, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16}
    settings = EngineSettings(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_mentions(refusal(settings), "kv_lora_rank=", "qk_rope_head_dim=16", "Supported: 576")
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    )
    assert refusal(settings) == ""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert refusal(settings) == ""


@pytest.mark.parametrize(
    ("engine", "fragments"),
    [
        ({"tp": 3}, ("rollout.engine.tp=3", "4 attention heads")),
        ({"max_model_len": 513}, ("rollout.engine.max_model_len=513", "512")),
        (
            {"max_num_batched_tokens": 511},
            ("rollout.engine.max_num_batched_tokens=511", "512 tokens"),
        ),
        (
            {"max_num_batched_tokens": 64, "max_model_len": 64, "max_num_seqs": 65},
            ("rollout.engine.max_num_batched_tokens=64", "max_num_seqs=65"),
        ),
    ],
)
def test_sizes_that_the_engine_refuses_are_refused_before_it_starts(
    engine: dict[str, Any], fragments: tuple[str, ...], tmp_path: Path
) -> None:
    settings = write_config(tmp_path)
    assert refusal(settings) == refusal(settings, max_num_batched_tokens=512) == ""
    assert_mentions(refusal(settings, **engine), *fragments)


def test_logits_in_float32_need_a_vllm_that_computes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(write_config(tmp_path), dtype="bfloat16", logits_dtype="float32")
    assert refusal(settings) == ""
    arguments = engine_arguments(settings, load_shape(settings.model_dir), CPU)
    assert arguments["hf_overrides"] == {"head_dtype": "float32"}
    engine_source.sets_logits_dtype.cache_clear()
    # A file without `head_dtype`, as the output layer of vLLM 0.23 is.
    monkeypatch.setattr(engine_source, "_LOGITS", "model_executor/layers/activation.py")
    assert_mentions(refusal(settings), "model.logits_dtype=float32", "head_dtype")
    assert refusal(replace(settings, dtype="float32")) == ""
    assert refusal(replace(settings, logits_dtype=None)) == ""
    engine_source.sets_logits_dtype.cache_clear()


def test_an_engine_compiles_on_a_cpu_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = write_config(tmp_path)
    for eager, is_compiled in ((None, False), (True, False), (False, True)):
        chosen = replace(settings, engine=EngineConfig(eager=eager))
        monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
        arguments = engine_arguments(chosen, load_shape(chosen.model_dir), CPU)
        assert arguments["enforce_eager"] is not is_compiled
        variables = engine_variables(CPU, chosen)
        assert variables["TORCHDYNAMO_DISABLE"] == str(int(not is_compiled))
    assert not is_eager(EngineConfig(), get("cuda")) and not is_eager(EngineConfig(), get("npu"))


def test_a_compilation_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = write_config(tmp_path)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert refusal(settings) == refusal(settings, eager=True) == ""
    key = "rollout.engine.eager=false"
    assert_mentions(refusal(settings, eager=False), key, "TORCHDYNAMO_DISABLE=1")
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert_mentions(refusal(settings, eager=False), key, "no-such-compiler", "not installed")
    assert refusal(settings) == ""
    changing = replace(settings, random_weights=True)
    for platform in ("npu", "cuda"):
        assert refusal(changing, platform) == refusal(changing, platform, eager=False) == ""
    routed = replace(settings, records_routes=True)
    assert_mentions(refusal(routed, eager=False), key, "hook", "train.router.replay=engine")


def test_key_value_heads_must_fit_the_devices_of_an_engine(tmp_path: Path) -> None:
    sizes = {"hidden_size": 192, "num_attention_heads": 6}
    settings = write_config(tmp_path, **sizes, num_key_value_heads=3)
    assert_mentions(refusal(settings, tp=2), "rollout.engine.tp=2", "3 KV heads")
    assert refusal(settings, tp=3) == refusal(settings, tp=6) == ""


@pytest.mark.parametrize(
    ("name", "reason"),
    [("baichuan 2", "BaichuanForCausalLM"), ("internlm 2", "model_type internlm2")],
)
def test_a_model_without_a_class_is_refused_before_an_engine_starts(
    name: str, reason: str, tmp_path: Path
) -> None:
    if CPU.missing() is not None or engine_source.architectures() is None:
        pytest.skip("no vLLM for this platform is installed")
    config = {**FAMILIES[name].config, "hidden_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_mentions(refusal(EngineSettings(tmp_path)), str(tmp_path), "vLLM", reason)


_PRINT_LISTS = """
import json
from vllm import ModelRegistry
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
print(json.dumps([
    CPUAttentionBackend.get_supported_head_sizes(),
    CPUMLABackend.get_supported_head_sizes(),
    sorted(ModelRegistry.get_supported_archs()),
    sorted(_CONFIG_REGISTRY),
]))
"""


@pytest.mark.full
@pytest.mark.slow
def test_the_lists_are_those_of_the_installed_vllm() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PRINT_LISTS], capture_output=True, text=True, timeout=300
    )
    heads, latents, architectures, config_types = json.loads(done.stdout.splitlines()[-1])
    assert engine_source.attention_head_sizes(CPU.attention_backend) == tuple(heads)
    assert engine_source.attention_head_sizes(CPU.latent_attention_backend) == tuple(latents)
    assert sorted(engine_source.architectures() or ()) == architectures
    assert sorted(engine_source.config_types() or ()) == config_types


def test_nothing_is_known_of_a_vllm_with_other_files() -> None:
    assert engine_source.attention_head_sizes("v1/attention/backends/none.py") is None
