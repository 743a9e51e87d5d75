"""The memory estimate of a training against live tensors and resident memory of real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from families import GEMMA2, GEMMA3, QWEN2_5_VL, QWEN3_5
from llama_like import COHERE2, EXAONE4, HUNYUAN, MINICPM3
from memory_ranks import Case, Measurement
from mixture_families import DEEPSEEK_V3, DEEPSEEK_V32, MINIMAX_M2
from msrl.cli.configuration import load_configuration as load
from msrl.config.sections.train import LoraConfig, RecomputeConfig, VisionConfig
from msrl.memory.estimate import Memory, training_memory
from msrl.models.families import all_rules, load_shape
from msrl.plan.run_plan import resolve
from msrl.trainer.launch import run_ranks
from msrl.trainer.settings import Layout
from support import python_path

COMMON = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "torch_dtype": "float32",
}
MODELS = {
    "dense": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 16384,
        "tie_word_embeddings": True,
    },
    "large vocabulary": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 65536,
        "tie_word_embeddings": False,
    },
    "mixture": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "head_dim": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
        "tie_word_embeddings": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "latent attention": {
        **DEEPSEEK_V3,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 8192,
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "moe_intermediate_size": 128,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
    },
    "capped": {
        **GEMMA2,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 64,
        "num_key_value_heads": 2,
        "vocab_size": 16384,
        "sliding_window": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
}
MODELS["two bases"] = {
    **MODELS["capped"],
    **{key: value for key, value in GEMMA3.items() if key not in MODELS["capped"]},
    "architectures": ["Gemma3ForCausalLM"],
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
MODELS["sparse attention"] = {
    **DEEPSEEK_V32,
    **{
        key: value
        for key, value in MODELS["latent attention"].items()
        if key not in ("architectures", "model_type")
    },
    "index_topk": 64,
    "index_head_dim": 32,
}
MODELS["norms over all heads"] = {
    **MINIMAX_M2,
    **{key: MODELS["mixture"][key] for key in ("hidden_size", "num_attention_heads", "head_dim")},
    "rotary_dim": 32,
    "intermediate_size": 256,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
}
_SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "head_dim": 64,
    "vocab_size": 16384, "max_position_embeddings": 4096,
}  # fmt: skip
MODELS["norms after blocks"] = {**EXAONE4, **_SIZES, "sliding_window": 128}
MODELS["parallel blocks"] = {**COHERE2, **_SIZES, "sliding_window": 128}
MODELS["norms after the rotation"] = {**HUNYUAN, **_SIZES, "attention_head_dim": 64}
MODELS["scaled latent attention"] = {
    **MINICPM3,
    **{key: size for key, size in _SIZES.items() if key != "head_dim"},
    "rope_scaling": None,
}
MODELS["delta networks"] = {
    **QWEN3_5,
    **{key: MODELS["dense"][key] for key in ("hidden_size", "intermediate_size", "vocab_size")},
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
MODELS["pictures"] = {
    **QWEN2_5_VL,
    **{key: MODELS["dense"][key] for key in ("hidden_size", "intermediate_size")},
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    "vision_config": {
        **QWEN2_5_VL["vision_config"],
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 384,
        "out_hidden_size": 384,
    },
}
MOVED_NORMS = (
    "norms after blocks",
    "parallel blocks",
    "norms after the rotation",
    "scaled latent attention",
)
LENGTHS = (233, 90, 61, 128, 300, 200, 12)


def make_model(folder: Path, config: dict) -> Path:
    """Write a Hugging Face folder with random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "", **COMMON, **config}))
    torch.manual_seed(0)
    pairs = [
        pair
        for rule in all_rules(load_shape(folder))
        for pair in zip(rule.hf, rule.shapes, strict=True)
    ]
    save_file(
        {name: torch.randn(size) * 0.02 for name, size in pairs}, folder / "model.safetensors"
    )
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_model(root / name.replace(" ", "_"), config) for name, config in MODELS.items()
    }


def estimate(case: Case, *sets: str) -> Memory:
    """Return the estimate for the configuration of a case, whose tokens may be of images."""
    layout = case.layout
    settings = [
        f"model.path={case.model}",
        f"model.dtype={case.dtype}",
        f"cluster.devices_per_node={layout.replica_size}",
        f"train.parallel.tp={layout.tp}",
        f"train.parallel.pp={layout.pp}",
        f"train.parallel.cp={layout.cp}",
        f"train.parallel.cp_algo={layout.cp_algo}",
        f"train.parallel.ep={layout.ep}",
        f"train.parallel.etp={layout.etp or 'null'}",
        f"train.parallel.sp={str(layout.sp).lower()}",
        f"train.max_tokens_per_micro_batch={sum(case.lengths)}",
        *sets,
    ]
    return training_memory(
        resolve(load(sets=settings).config, "train-sft"),
        longest=max(case.lengths),
        temporary_elements=1 << 18,
        attention_bytes=4,
        has_images=bool(case.pictures),
    )


def measure(cases: list[Case], num_ranks: int) -> list[Measurement]:
    from msrl.platforms import get

    return run_ranks(
        "memory_ranks:main",
        cases,
        num_ranks=num_ranks,
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )


@pytest.mark.full
@pytest.mark.slow
def test_the_estimate_matches_live_tensors_and_resident_memory_of_three_models(
    folders,
):
    """Live tensors are counted by storage, from allocation to release."""
    dtypes = {"dense": "float32", "large vocabulary": "bfloat16", "mixture": "float32"}
    cases = {
        name: Case(name, folders[name], LENGTHS, dtype=dtype) for name, dtype in dtypes.items()
    }
    for result in measure(list(cases.values()), 1):
        expected = estimate(cases[result.name]).training
        assert result.live == pytest.approx(expected, rel=0.05), (result.name, result.by_operation)
        assert result.resident == pytest.approx(expected, rel=0.3), result.name


@pytest.mark.slow
def test_a_mixture_always_uses_sequence_parallelism(folders):
    cases = [
        Case("mixture", folders["mixture"], LENGTHS, Layout(tp=2, sp=is_set))
        for is_set in (False, True)
    ]
    assert estimate(cases[0]) == estimate(cases[1])


TABLE: dict[str, tuple[str, dict, tuple[str, ...]]] = {
    "recomputed and chunked": (
        "large vocabulary",
        {"more": {"logit_chunk": 64, "recompute": RecomputeConfig(granularity="full")}},
        ("train.chunk=64", "train.recompute.granularity=full"),
    ),
    "first layers recomputed": (
        "dense",
        {"more": {"recompute": RecomputeConfig(granularity="full", method="block", layers=4)}},
        (
            "train.recompute.granularity=full",
            "train.recompute.method=block",
            "train.recompute.layers=4",
        ),
    ),
    "parts recomputed": (
        "dense",
        {
            "more": {
                "recompute": RecomputeConfig(granularity="selective", modules=("core_attn", "mlp"))
            }
        },
        ("train.recompute.granularity=selective", "train.recompute.modules=[core_attn,mlp]"),
    ),
    "adapters": (
        "dense",
        {"more": {"lora": LoraConfig(rank=8, alpha=16.0, targets=("linear_qkv", "linear_proj"))}},
        ("train.lora.rank=8", "train.lora.targets=[q_proj,k_proj,v_proj,linear_proj]"),
    ),
    "adapters of experts": (
        "mixture",
        {
            "more": {
                "lora": LoraConfig(
                    rank=8, alpha=16.0, targets=("linear_proj", "linear_fc1", "linear_fc2")
                )
            },
            "layout": Layout(tp=2, ep=2, etp=1, sp=True),
        },
        (
            "train.parallel.etp=1",
            "train.lora.rank=8",
            "train.lora.targets=[o_proj,linear_fc1,linear_fc2]",
        ),
    ),
    "adapters everywhere": (
        "dense",
        {
            "more": {
                "lora": LoraConfig(
                    rank=8,
                    alpha=16.0,
                    targets=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
                )
            }
        },
        ("train.lora.rank=8",),
    ),
    "adapters of latent attention": (
        "latent attention",
        {"more": {"lora": LoraConfig(rank=8, alpha=16.0, targets=("linear_qkv", "o_proj"))}},
        ("train.lora.rank=8", "train.lora.targets=[q_a_proj,kv_a_proj_with_mqa,linear_proj]"),
    ),
    "float32 logits": (
        "large vocabulary",
        {"dtype": "bfloat16", "logits_dtype": "float32"},
        ("model.logits_dtype=float32",),
    ),
    "float32 logits chunked": (
        "large vocabulary",
        {"dtype": "bfloat16", "logits_dtype": "float32", "more": {"logit_chunk": 64}},
        ("model.logits_dtype=float32", "train.chunk=64"),
    ),
    "frozen": ("dense", {"more": {"freeze": ("*.mlp.*",)}}, ("train.freeze=['*.mlp.*']",)),
    "latent attention": ("latent attention", {}, ()),
    "sparse attention": ("sparse attention", {}, ()),
    "sparse attention, tp2 sp": ("sparse attention", {"layout": Layout(tp=2, sp=True)}, ()),
    "trained indexers": (
        "sparse attention",
        {"more": {"indexer_loss_coef": 1.0}},
        ("train.indexer_loss_coef=1.0",),
    ),
    "capped scores and logits": ("capped", {}, ()),
    "two bases": ("two bases", {}, ()),
    "norms over all heads": ("norms over all heads", {"layout": Layout(tp=2, sp=True)}, ()),
    **{name: (name, {}, ()) for name in MOVED_NORMS},
    "norms after blocks, adapters": (
        "norms after blocks",
        {"more": {"lora": LoraConfig(rank=8, alpha=16.0, targets=("o_proj", "down_proj"))}},
        ("train.lora.rank=8", "train.lora.targets=[o_proj,down_proj]"),
    ),
    "parallel blocks, tp2 sp": ("parallel blocks", {"layout": Layout(tp=2, sp=True)}, ()),
    "delta networks": ("delta networks", {}, ()),
    "delta networks, tp2 sp": ("delta networks", {"layout": Layout(tp=2, sp=True)}, ()),
    "tp2 sp": ("dense", {"layout": Layout(tp=2, sp=True)}, ()),
    "tp2": ("dense", {"layout": Layout(tp=2)}, ()),
    "pp2": ("dense", {"layout": Layout(pp=2), "batches": 3}, ()),
    "pp2 vpp": ("dense", {"layout": Layout(pp=2, vpp=1), "batches": 4}, ("train.parallel.vpp=1",)),
    "cp2": ("dense", {"layout": Layout(cp=2)}, ()),
    "cp2 ulysses": ("dense", {"layout": Layout(cp=2, cp_algo="ulysses", head_ranks=2)}, ()),
    "cp2 ring": ("dense", {"layout": Layout(cp=2, cp_algo="ring")}, ()),
    "experts spread": (
        "mixture",
        {"layout": Layout(tp=2, ep=2, etp=1, sp=True), "dtype": "bfloat16"},
        ("train.parallel.etp=1",),
    ),
}


@pytest.mark.slow
@pytest.mark.full
def test_the_estimate_holds_for_every_layout_and_memory_option(folders):
    cases = {
        name: Case(name, folders[model], LENGTHS, **more)
        for name, (model, more, _) in TABLE.items()
    }
    fullest: dict[str, int] = {}
    for result in measure(list(cases.values()), 2):
        fullest[result.name] = max(result.live, fullest.get(result.name, 0))
    ratios = {
        name: estimate(cases[name], *TABLE[name][2]).training / live
        for name, live in fullest.items()
    }
    assert set(ratios) == set(TABLE)
    assert {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > 0.1} == {}, ratios


TOWERS: dict[str, tuple[VisionConfig, RecomputeConfig]] = {
    "frozen": (VisionConfig(), RecomputeConfig()),
    "projector": (VisionConfig(projector_lr=1e-4), RecomputeConfig()),
    "trained": (VisionConfig(tower_lr=1e-4, projector_lr=1e-4), RecomputeConfig()),
    "recomputed": (
        VisionConfig(tower_lr=1e-4, projector_lr=1e-4),
        RecomputeConfig(granularity="full"),
    ),
}


@pytest.mark.slow
@pytest.mark.full
def test_the_estimate_counts_the_vision_tower(folders):
    """Nearly all tokens are of images, as the estimate assumes."""
    shape = {"lengths": (203, 403), "pictures": (14, 20)}
    cases, keys = dict[str, Case](), dict[str, tuple[str, ...]]()
    for name, (vision, recompute) in TOWERS.items():
        more = {"vision": vision, "recompute": recompute}
        cases[name] = Case(name, folders["pictures"], more=more, **shape)
        rates = vision.model_dump(exclude_none=True)
        keys[name] = (
            *(f"train.vision.{key}={rate}" for key, rate in rates.items()),
            f"train.recompute.granularity={recompute.granularity}",
        )
    for result in measure(list(cases.values()), 1):
        expected = estimate(cases[result.name], *keys[result.name]).training
        assert result.live == pytest.approx(expected, rel=0.05), (result.name, result.by_operation)
