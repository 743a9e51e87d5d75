"""Mixtures of experts on real Megatron ranks have the logits of transformers in every layout."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import families
import parity_ranks
import reference_models
from mixture_families import MIXTURES
from msrl.checkpoint.convert import write_hf
from msrl.checkpoint.hf.pass_through import pass_through_tensors
from msrl.checkpoint.rank_shapes import make_plan
from msrl.checkpoint.source import ShardedSource, open_weights
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.models.families import all_rules, load_shape, num_parameters
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.trainer.settings import Layout
from msrl.verification.bits import compare
from msrl.workflows.convert.run import run as convert
from parity_ranks import Case
from support import assert_mentions, mentions, shared_data
from test_families import transformers_logits

LAYOUTS = {
    "one rank": Layout(),
    "tp2": Layout(tp=2),
    "ep2": Layout(ep=2),
    "tp2 pp2": Layout(tp=2, pp=2),
    "tp2 ep2 etp1": Layout(tp=2, ep=2, etp=1),
    "tp2 ep2 etp2": Layout(tp=2, ep=2, etp=2),
    "pp2 ep2": Layout(pp=2, ep=2),
    "pp2": Layout(pp=2),
    "pp2 vpp ep2": Layout(pp=2, vpp=1, ep=2),
    "tp2 pp2, uneven": Layout(tp=2, pp=2, num_layer_list=(3, 1)),
    "pp2 ep2, empty layers": Layout(pp=2, ep=2, noop_layers=(0, 5)),
}

USUAL = (
    ("qwen3 moe", "ep2"),
    ("deepseek v2 lite", "tp2 ep2 etp2"),
    ("deepseek v3", "pp2 ep2"),
    ("gpt-oss", "tp2 ep2 etp1"),
    ("ling 2", "tp2 ep2 etp1"),
    ("glm 4.7 flash", "tp2"),
    ("deepseek v3.2", "one rank"),
    ("glm 5.2", "one rank"),
)
# Stages would begin with layers that share the choice of a layer before them.
WITHOUT = (("glm 5.2", "pp2 vpp ep2"), ("glm 5.2", "tp2 pp2, uneven"))
REMAINING = tuple(
    (name, layout)
    for name in MIXTURES
    for layout in LAYOUTS
    if (name, layout) not in USUAL + WITHOUT
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a small random model of each family as a Hugging Face folder."""
    return families.save_models(tmp_path_factory.mktemp("mixtures"), MIXTURES)


@pytest.fixture(scope="module")
def megatron(folders: dict[str, Path]) -> dict[str, np.ndarray]:
    """Return logits for pairs of model and layout, [tokens, vocabulary]."""
    return _logits(folders, USUAL)


@pytest.fixture(scope="module")
def more_megatron(folders: dict[str, Path]) -> dict[str, np.ndarray]:
    return _logits(folders, REMAINING)


def _logits(folders: dict[str, Path], rows: Sequence[tuple[str, str]]) -> dict[str, np.ndarray]:
    cases = [Case(f"{name}, {layout}", folders[name], LAYOUTS[layout]) for name, layout in rows]
    return parity_ranks.rank_logits(cases)


@functools.cache
def _reference_logits(folder: Path, name: str) -> np.ndarray:
    config, reference = MIXTURES[name].config, MIXTURES[name].reference
    ids = parity_ranks.sequences(config.get("text_config", config)["vocab_size"])
    if reference == "transformers":
        return transformers_logits(folder, ids)
    forward = getattr(reference_models, reference)
    return forward(config, load_file(folder / "model.safetensors"), ids)


def _assert_logits_of_reference(logits: np.ndarray, folder: Path, name: str) -> None:
    expected = _reference_logits(folder, name)
    assert expected.std() > 0.3, "the logits are too small for a comparison"
    assert np.abs(logits - expected).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), USUAL)
def test_logits_agree_with_the_reference(
    folders: dict[str, Path], megatron: dict[str, np.ndarray], name: str, layout: str
) -> None:
    _assert_logits_of_reference(megatron[f"{name}, {layout}"], folders[name], name)


@pytest.mark.slow
@pytest.mark.full
def test_a_conversion_of_a_mixture_is_verified(
    tmp_path: Path, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Convert with sharded and distributed experts and back; real ranks verify the conversion."""
    forward = {
        "command": "hf2mcore",
        "load": str(folders["deepseek v3"]),
        "save": str(tmp_path / "mcore"),
        "tp": 2,
        "ep": 2,
        "etp": 1,
    }
    convert(Config.model_validate({"convert": forward}))
    back = {"command": "mcore2hf", "load": str(tmp_path / "mcore"), "save": str(tmp_path / "back")}
    convert(Config.model_validate({"convert": back}))
    assert capsys.readouterr().out.count("round trip") == 2
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (folders["deepseek v3"], tmp_path / "back")
    )
    assert before.keys() == after.keys() and all(
        torch.equal(after[name], tensor) for name, tensor in before.items()
    )


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(("name", "layout"), REMAINING)
def test_logits_agree_with_the_reference_in_all_layouts(
    folders: dict[str, Path], more_megatron: dict[str, np.ndarray], name: str, layout: str
) -> None:
    _assert_logits_of_reference(more_megatron[f"{name}, {layout}"], folders[name], name)


@pytest.mark.sample(22)
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(ep=4),
        ParallelLayout(tp=2, ep=2, etp=1),
        ParallelLayout(tp=2, ep=4, etp=2, pp=2),
        ParallelLayout(tp=2, ep=2, moe_tp_extend_ep=True),
    ],
    ids=str,
)
def test_a_mixture_is_recovered_from_every_layout(
    folders: dict[str, Path], name: str, layout: ParallelLayout
) -> None:
    source = open_weights(folders[name])
    shards = {at: dict(source.local_tensors(layout, at)) for at in layout.ranks()}
    result = compare(
        source, ShardedSource(source.shape, layout, shards, folders[name], "shards"), None
    )
    count = len(pass_through_tensors(folders[name], source.shape))
    assert result.different == () and result.num_tensors == count + sum(
        len(rule.hf) for rule in all_rules(source.shape)
    )


def _exchanged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of a model with inputs and outputs of stacked experts exchanged."""
    return {
        name: tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }


def _one_by_one(tensors: dict[str, torch.Tensor], *, is_exchanged: bool) -> dict[str, torch.Tensor]:
    """Return tensors of a model with stacked experts as separate matrices."""
    result = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        stack, _, last = name.rpartition(".experts.")
        if not stack:
            result[name] = tensor
            continue
        for number, entry in enumerate(tensor.mT if is_exchanged else tensor):
            names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            for projection, rows in zip(names, entry.chunk(len(names)), strict=True):
                result[f"{stack}.experts.{number}.{projection}.weight"] = rows.contiguous()
    return result


@pytest.mark.parametrize("form", ["exchanged", "one by one"])
@pytest.mark.parametrize("name", ["qwen3-vl moe", "qwen3.5 moe, language model"])
def test_stacked_experts_are_read_in_every_form(
    tmp_path: Path, folders: dict[str, Path], name: str, form: str
) -> None:
    """transformers 5 writes Qwen3-VL with outputs before inputs, unlike the published files."""
    tensors = load_file(folders[name] / "model.safetensors")
    changed = (
        _exchanged(tensors)
        if form == "exchanged"
        else _one_by_one(tensors, is_exchanged=name == "qwen3-vl moe")
    )
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(MIXTURES[name].config))
    source, other = open_weights(folders[name]), open_weights(tmp_path)
    assert compare(source, other, None).different == ()
    assert source.has_published_experts and not other.has_published_experts
    write_hf(other, tmp_path / "hf", None)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in tensors.items())


def test_an_expert_without_a_matrix_is_named(tmp_path: Path, folders: dict[str, Path]) -> None:
    tensors = load_file(folders["qwen3-vl moe"] / "model.safetensors")
    changed = _one_by_one(tensors, is_exchanged=True)
    del changed["model.language_model.layers.2.mlp.experts.3.up_proj.weight"]
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(MIXTURES["qwen3-vl moe"].config))
    with pytest.raises(MsrlError, match=mentions("layers.2.mlp.experts", "[3]")):
        open_weights(tmp_path)


def test_an_expert_is_sharded_on_its_rank(folders: dict[str, Path]) -> None:
    """Expert 5 of 8 is number 1 of the second group, with two groups of two shards each."""
    hf, source = (
        load_file(folders["deepseek v3"] / "model.safetensors"),
        open_weights(folders["deepseek v3"]),
    )
    tensors = dict(source.local_tensors(ParallelLayout(tp=2, ep=2), Coords(tp=1, ep=1)))
    gate, up, down = (
        hf[f"model.layers.2.mlp.experts.5.{kind}_proj.weight"] for kind in ("gate", "up", "down")
    )
    expert = "decoder.layers.2.mlp.experts.local_experts.1."
    assert torch.equal(tensors[expert + "linear_fc1.weight"], torch.cat([gate[24:], up[24:]]))
    assert torch.equal(tensors[expert + "linear_fc2.weight"], down[:, 24:])
    attention = "model.layers.2.self_attn."
    rows = torch.cat(
        [hf[attention + "q_a_proj.weight"], hf[attention + "kv_a_proj_with_mqa.weight"]]
    )
    assert torch.equal(tensors["decoder.layers.2.self_attention.linear_qkv.weight"], rows)
    assert torch.equal(
        tensors["decoder.layers.2.self_attention.linear_q_up_proj.weight"],
        hf[attention + "q_b_proj.weight"][80:],
    )
    assert torch.equal(
        tensors["decoder.layers.2.mlp.router.expert_bias"],
        hf["model.layers.2.mlp.gate.e_score_correction_bias"],
    )
    assert (
        "decoder.layers.0.mlp.linear_fc1.weight" in tensors
        and "decoder.layers.0.mlp.router.weight" not in tensors
    )


def test_the_bias_of_experts_remains_in_float32(folders: dict[str, Path]) -> None:
    source = open_weights(folders["deepseek v3"])
    types = {
        name: tensor.dtype
        for name, tensor in source.local_tensors(ParallelLayout(), Coords(), torch.bfloat16)
    }
    wide = {name for name, dtype in types.items() if dtype == torch.float32}
    assert wide == {f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in (1, 2, 3)}


# The counts come from the models' cards and the indices of their published weights.
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("file", "parameters", "layout"),
    [
        ("aic/Qwen--Qwen3-30B-A3B_config.json", 30_532_122_624, ParallelLayout(tp=4, ep=8, etp=1)),
        (
            "aic/Qwen--Qwen3-235B-A22B_config.json",
            235_093_634_560,
            ParallelLayout(tp=4, pp=2, ep=32, etp=1),
        ),
        (
            "aic/mistralai--Mixtral-8x22B-v0.1_config.json",
            140_620_634_112,
            ParallelLayout(tp=8, pp=4, ep=8, etp=1),
        ),
        ("DeepSeek-V2-Lite.config.json", 15_706_484_224, ParallelLayout(ep=8)),
        (
            "aic/Qwen--Qwen3-VL-30B-A3B-Instruct_config.json",
            31_070_754_032,
            ParallelLayout(tp=4, ep=8, etp=1),
        ),
        ("aic/openai--gpt-oss-20b_config.json", 20_914_757_184, ParallelLayout(tp=4, ep=8, etp=1)),
        (
            "aic/openai--gpt-oss-120b_config.json",
            116_829_156_672,
            ParallelLayout(tp=4, pp=4, ep=16, etp=1),
        ),
        (
            "aic/deepseek-ai--DeepSeek-V3_config.json",
            671_026_419_200,
            ParallelLayout(tp=4, pp=8, num_layer_list=(7, *[8] * 6, 6), ep=32, etp=1),
        ),
    ],
)
def test_the_plan_of_a_large_model_takes_seconds(
    file: str, parameters: int, layout: ParallelLayout
) -> None:
    shape = load_shape(shared_data("configs", file))
    assert num_parameters(shape) == parameters
    begun = time.process_time()
    plan = make_plan(shape, layout)
    assert time.process_time() - begun < 10
    experts = sum(
        math.prod(size)
        for rank in plan.ranks
        for name, size in rank.tensors.items()
        if "local_experts" in name
    )
    assert experts == sum(
        math.prod(size)
        for rule in all_rules(shape)
        if rule.expert is not None
        for size in rule.shapes
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "parameters", "indexers"),
    [
        ("deepseek-ai--DeepSeek-V3.2", 671_877_944_064, 61),
        ("zai-org--GLM-5", 743_911_218_432, 78),
        ("zai-org--GLM-5.1", 743_911_218_432, 78),
        ("zai-org--GLM-5.2", 743_377_019_904, 21),
    ],
)
def test_published_configs_with_indexers_are_read(
    model: str, parameters: int, indexers: int
) -> None:
    """Sizes from the configs, checked against the rounded ones of the models' cards."""
    shape = load_shape(shared_data("configs", f"aic/{model}_config.json"))
    assert num_parameters(shape) == parameters
    frozen = [rule.mcore for rule in all_rules(shape) if rule.frozen]
    assert len(frozen) == 5 * indexers and all("dsa_indexer" in name for name in frozen)
    assert shape.indexer is not None and shape.indexer.top_k == 2048
    assert shape.indexer.rotary.interleaved == ("GLM" in model)


def test_rules_name_exactly_the_tensors_of_a_published_index() -> None:
    shape = load_shape(shared_data("configs", "aic/mistralai--Mixtral-8x22B-v0.1_config.json"))
    published = json.loads(
        shared_data("weight_index", "Mixtral-8x22B.model.safetensors.index.json").read_text()
    )
    assert {name for rule in all_rules(shape) for name in rule.hf} == set(published["weight_map"])
    assert num_parameters(shape) * 2 == published["metadata"]["total_size"]


@pytest.mark.sample(13)
@pytest.mark.parametrize(
    ("name", "changes", "fragments"),
    [
        ("qwen3 moe", {"num_experts_per_tok": 9}, ("num_experts_per_tok=9", "8 experts")),
        ("mixtral", {"num_experts_per_tok": 1}, ("num_experts_per_tok=1", "gradient")),
        ("qwen3 moe", {"decoder_sparse_step": 5}, ("num_hidden_layers=4", "experts")),
        (
            "qwen3 moe",
            {"shared_expert_intermediate_size": 64},
            ("shared_expert_intermediate_size=64",),
        ),
        ("deepseek v3", {"n_group": 3}, ("n_group=3", "8 experts")),
        ("deepseek v3", {"n_group": 8}, ("n_group=8", "two")),
        ("deepseek v3", {"topk_group": 5}, ("topk_group=5", "4 groups")),
        ("deepseek v3", {"topk_group": 1}, ("num_experts_per_tok=3", "4 groups")),
        ("deepseek v3", {"scoring_func": "softmax"}, ("scoring_func",)),
        ("deepseek v3", {"moe_layer_freq": 2}, ("moe_layer_freq=2",)),
        (
            "deepseek v3",
            {"num_key_value_heads": 2},
            ("num_key_value_heads=2", "num_attention_heads=4"),
        ),
        ("deepseek v3", {"qk_rope_head_dim": 15}, ("qk_rope_head_dim", "even")),
        (
            "deepseek v3",
            {"first_k_dense_replace": None, "mlp_layer_types": ["dense", *["sparse"] * 3]},
            ("mlp_layer_types", "first_k_dense_replace=3"),
        ),
        ("glm 4.7 flash", {"head_dim": 40}, ("head_dim=40", "16")),
        ("glm 4.7 flash", {"first_k_dense_replace": 2}, ("mlp_layer_types", "replace=2")),
        ("hunyuan 3", {"first_k_dense_replace": 2}, ("first_k_dense_replace=2", "transformers")),
        ("minimax m2", {"rotary_dim": 34}, ("rotary_dim=34", "32 channels")),
        ("qwen3 moe", {"layer_types": ["full_attention"] * 3}, ("layer_types", "transformers")),
        (
            "mixtral",
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
            ("layer_types", "sliding_attention"),
        ),
        ("deepseek v2", {"norm_topk_prob": True}, ("norm_topk_prob=true",)),
        ("gpt-oss", {"attention_bias": False}, ("attention_bias=false",)),
        ("gpt-oss", {"swiglu_limit": 0}, ("swiglu_limit=0", "above 0")),
        ("gpt-oss", {"quantization_config": {"quant_method": "fp8"}}, ("quant_method", "mxfp4")),
        (
            "mixtral",
            {"quantization_config": {"quant_method": "mxfp4"}},
            ("quant_method", "fp8", "weight_block_size"),
        ),
        ("mixtral", {"router_jitter_noise": 0.1}, ("router_jitter_noise=0.1",)),
        ("deepseek v3.2", {"index_head_dim": 8}, ("index_head_dim=8", "qk_rope_head_dim=16")),
        ("deepseek v3.2", {"q_lora_rank": None}, ("q_lora_rank=null", "latent")),
        ("deepseek v3.2", {"index_topk": 0}, ("index_topk=0", "positive")),
        ("deepseek v3.2", {"indexer_rope_interleave": True}, ("indexer_rope_interleave=true",)),
        ("deepseek v3.2", {"index_topk_freq": 2}, ("index_topk_freq=2",)),
        (
            "deepseek v3.2",
            {"layer_types": ["full_attention"] * 4},
            ("layer_types", "indexed_attention", "4 layers"),
        ),
        (
            "deepseek v3.2",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            ("rope_parameters.rope_theta", "rope_scaling"),
        ),
        ("glm 5", {"indexer_rope_interleave": False}, ("indexer_rope_interleave=false",)),
        ("glm 5", {"moe_router_dtype": "bfloat16"}, ("moe_router_dtype", "float32")),
        ("glm 5", {"index_skip_topk_offset": -1}, ("index_skip_topk_offset=-1", "0 or more")),
        ("glm 5.2", {"indexer_types": ["full"] * 4}, ("index_topk_pattern", "indexer_types")),
        ("glm 5.2", {"indexer_types": ["full"] * 3}, ("indexer_types", "4 layers")),
        ("glm 5.2", {"index_topk_pattern": "FSXS"}, ("index_topk_pattern", "shared")),
        (
            "glm 5.2",
            {"indexer_types": None, "index_topk_pattern": "SFFF"},
            ("index_topk_pattern", "first layer"),
        ),
    ],
)
def test_an_inconsistent_mixture_is_refused_by_key(
    name: str, changes: dict[str, Any], fragments: tuple[str, ...]
) -> None:
    with pytest.raises(MsrlError) as error:
        families.shape(MIXTURES[name].config, **changes)
    assert_mentions(error.value, *fragments)


def test_a_mixture_of_qwen3_has_one_window_in_all_layers() -> None:
    changes = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    shape = families.shape(MIXTURES["qwen3 moe"].config, **changes)
    assert [layer.mixer.window for layer in shape.layers] == [8] * 4


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(("deepseek v2", "n_shared_experts"), ("deepseek v3", "n_shared_experts")),
        *(("hunyuan 3", "num_shared_experts"), ("ling 2", "num_shared_experts")),
    ],
)
@pytest.mark.parametrize("number", [0, None])
def test_a_mixture_may_have_no_shared_experts(name: str, key: str, number: int | None) -> None:
    shape = families.shape(MIXTURES[name].config, **{key: number})
    assert shape.moe.shared_ffn_hidden_size == 0
    assert not any("shared" in rule.mcore for rule in all_rules(shape))
