"""Adapters of mixture-of-experts models in every layout.

They are on experts, on shared experts and on the replicated layer of latent attention. Gradients
are compared with transformers by the chain rule, and per tensor with a single rank's gradients.
Saved adapters equal the trained ones.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import families
from mixture_families import DEEPSEEK_V3, DEEPSEEK_V32, MIXTRAL, QWEN3_MOE
from msrl.checkpoint import tensor_layouts as layouts
from msrl.checkpoint.adapters.megatron import read_adapter
from msrl.checkpoint.adapters.merge import Adapter, Delta, MergedSource
from msrl.checkpoint.adapters.peft import write_peft
from msrl.checkpoint.convert import write_hf
from msrl.checkpoint.source import open_weights
from msrl.checkpoint.weights import WeightSource
from msrl.config.sections.train import LoraConfig, RecomputeConfig
from msrl.models.families import all_rules, load_shape
from msrl.models.rules import Rule
from msrl.models.select import is_layer
from msrl.trainer.settings import Layout
from msrl.workflows.engine import hf_weights
from reference_gradients import _file_gradients, backward
from test_mixture_exactness import _assert_same
from test_mixture_training import _train
from training_ranks import Case, Result

pytestmark = [pytest.mark.slow, pytest.mark.full]
MODELS = {
    "qwen3 moe": QWEN3_MOE,
    "deepseek v3": {**DEEPSEEK_V3, "first_k_dense_replace": 2},
    "deepseek v3.2": {**DEEPSEEK_V32, "first_k_dense_replace": 2},
}
LORAS = {
    # Only some of the modules of the fused layers.
    "qwen3 moe": LoraConfig(
        rank=4, alpha=8.0, targets=("q_proj", "linear_proj", "up_proj", "down_proj")
    ),
    "deepseek v3": LoraConfig(
        rank=4, alpha=8.0, targets=("linear_qkv", "kv_b_proj", "linear_fc1", "linear_fc2")
    ),
    "deepseek v3.2": LoraConfig(
        rank=4,
        alpha=8.0,
        targets=("kv_a_proj_with_mqa", "q_b_proj", "o_proj", "up_proj", "linear_fc2"),
    ),
}
FAST_LAYOUTS = {"ep2": Layout(ep=2), "tp2 ep2 etp2, sp": Layout(tp=2, ep=2, etp=2, sp=True)}
SLOW_LAYOUTS = {
    "tp2": Layout(tp=2),
    "tp2 etp1": Layout(tp=2, etp=1),
    "tp2 ep2 etp1": Layout(tp=2, ep=2, etp=1),
    "tp2 ep2 etp1, sp": Layout(tp=2, ep=2, etp=1, sp=True),
    "tp2 ep2 etp2": Layout(tp=2, ep=2, etp=2),
    "pp2 ep2": Layout(pp=2, ep=2),
    "cp2 ep2": Layout(ep=2, cp=2),
    "cp2 ep2, ulysses": Layout(ep=2, cp=2, cp_algo="ulysses", head_ranks=2),
    "pp2 vpp1 ep2": Layout(pp=2, vpp=1, ep=2),
}
# The chosen keys of a sequence must be on one rank.
SLOW_PAIRS = [
    (name, layout)
    for name in MODELS
    for layout in SLOW_LAYOUTS
    if (name, layout) != ("deepseek v3.2", "cp2 ep2")
]
DROPOUT = LORAS["qwen3 moe"].model_copy(update={"dropout": 0.3})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders with a small random model of each kind."""
    root = tmp_path_factory.mktemp("mixtures")
    return {name: families.save_model(root / name, config) for name, config in MODELS.items()}


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saves")


def _case(name: str, layout: str, folders: dict[str, Path]) -> Case:
    """Return a case of four steps.

    AdamW's epsilon is large, so that a gradient of mere rounding errors causes no full step.
    """
    return Case(
        f"{name}, {layout}",
        folders[name],
        {**FAST_LAYOUTS, **SLOW_LAYOUTS, "single": Layout()}[layout],
        steps=4,
        lr=1e-3,
        eps=1e-3,
        is_same_batch=True,
        more={"lora": LORAS[name]},
    )


@pytest.fixture(scope="module")
def results(folders: dict[str, Path], saves: Path) -> dict[str, Result]:
    cases = [
        _case(name, layout, folders) for name in MODELS for layout in ("single", *FAST_LAYOUTS)
    ]
    for name in MODELS:
        single, split = _case(name, "single", folders), _case(name, "tp2 ep2 etp2, sp", folders)
        cases += [
            dataclasses.replace(single, name=f"{name}, first step", steps=1),
            dataclasses.replace(
                split, name=f"{name}, saved", steps=2, save_at=2, save_to=saves / name
            ),
            dataclasses.replace(
                single,
                name=f"{name}, resumed",
                layout=Layout(ep=2),
                first_step=2,
                resume_from=saves / name,
            ),
        ]
    dropout = dataclasses.replace(
        _case("qwen3 moe", "tp2 ep2 etp2, sp", folders), name="dropout", more={"lora": DROPOUT}
    )
    settings = {"lora": DROPOUT, "recompute": RecomputeConfig(granularity="full")}
    recomputed = dataclasses.replace(dropout, name="dropout, recomputed", more=settings)
    return _train([*cases, dropout, recomputed])


@pytest.fixture(scope="module")
def more_results(folders: dict[str, Path], results: dict[str, Result]) -> dict[str, Result]:
    return {
        **results,
        **_train([_case(name, layout, folders) for name, layout in SLOW_PAIRS]),
    }


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_the_first_gradients_agree_with_transformers_by_the_chain_rule(
    results: dict[str, Result], folders: dict[str, Path], name: str
):
    """With B = 0, the gradient of A is 0 and of B s dW A^T, with transformers' dW."""
    actual, weights = results[f"{name}, first step"].gradients, _weight_gradients(folders[name])
    expected = {
        rule.mcore: _gradient_of_b(rule, LORAS[name], weights)
        for rule in _adapted_rules(folders[name], LORAS[name])
    }
    assert actual.keys() == {f"{key} {factor}" for key in expected for factor in "AB"}
    norm = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    assert (
        norm > 1e-3
        and sum(
            ".local_experts." in key and float(grad.norm()) > 0 for key, grad in expected.items()
        )
        > 20
    )
    for key, gradient in expected.items():
        assert not actual[f"{key} A"].any(), key
        distance = np.linalg.norm(actual[f"{key} B"] - (gradient / max(norm, 1.0)).numpy())
        assert distance <= 1e-4 * float(gradient.norm() / max(norm, 1.0)) + 1e-9, key


@pytest.mark.parametrize("layout", FAST_LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_adapters_train_equally_with_expert_and_expert_tensor_parallelism(
    results: dict[str, Result], name: str, layout: str
):
    _assert_same(results[f"{name}, {layout}"], results[f"{name}, single"])
    losses = [report["loss"] for report in results[f"{name}, single"].reports]
    assert losses[0] > losses[-1] + 1e-3


@pytest.mark.full
@pytest.mark.parametrize(("name", "layout"), SLOW_PAIRS)
def test_adapters_train_equally_in_every_layout(
    more_results: dict[str, Result], name: str, layout: str
):
    _assert_same(more_results[f"{name}, {layout}"], more_results[f"{name}, single"])


@pytest.mark.parametrize("name", MODELS)
def test_adapters_resume_in_another_layout(results: dict[str, Result], name: str):
    single = results[f"{name}, single"]
    _assert_same(
        results[f"{name}, resumed"], dataclasses.replace(single, reports=single.reports[2:])
    )


@pytest.mark.parametrize("name", MODELS)
def test_saved_adapters_merge_to_the_weights_that_the_engine_gets(
    results: dict[str, Result], folders: dict[str, Path], saves: Path, name: str
):
    base = open_weights(folders[name])
    adapter = read_adapter(saves / name, base.shape)
    assert "model.layers.3.mlp.experts.7.up_proj.weight" in adapter.deltas
    merged = dict(hf_weights(MergedSource(base, adapter)))
    trained = results[f"{name}, saved"].weights
    assert merged.keys() == trained.keys()
    for key, weight in merged.items():
        np.testing.assert_allclose(trained[key], weight.numpy(), rtol=1e-6, atol=1e-7, err_msg=key)
    write_peft(adapter, saves / f"{name} peft", "base")
    again = read_adapter(saves / f"{name} peft", base.shape)
    assert again.deltas.keys() == adapter.deltas.keys()
    assert all(
        torch.equal(again.deltas[key].a, delta.a) and torch.equal(again.deltas[key].b, delta.b)
        for key, delta in adapter.deltas.items()
    )


@pytest.mark.parametrize("config", [QWEN3_MOE, MIXTRAL])
def test_peft_reads_the_adapters_of_experts(tmp_path: Path, config: dict[str, Any]):
    """PEFT stacks adapters of experts on reading, since transformers stacks experts of a layer."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = open_weights(families.save_model(tmp_path / "hf", config))
    adapter = _random_adapter(base, ("linear_proj", "linear_fc1", "linear_fc2"))
    write_peft(adapter, tmp_path / "peft", "base")
    write_hf(MergedSource(base, adapter), tmp_path / "merged", None)
    (tmp_path / "merged" / "config.json").write_text(json.dumps(config))
    merged, plain = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / n, dtype=torch.float32)
        for n in ("merged", "hf")
    )
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected, before = merged(ids).logits, plain(ids).logits
        actual = peft.PeftModel.from_pretrained(plain, str(tmp_path / "peft"))(ids).logits
    assert (before - expected).abs().max() > 0.1
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_dropout_in_experts_is_the_same_when_layers_are_recomputed(results: dict[str, Result]):
    plain, recomputed, without = (
        results[name].reports for name in ("dropout", "dropout, recomputed", "qwen3 moe, single")
    )
    np.testing.assert_allclose(
        [r["grad_norm"] for r in plain], [r["grad_norm"] for r in recomputed], rtol=1e-5
    )
    assert all(np.isfinite(report["loss"]) for report in plain)
    assert abs(plain[-1]["loss"] - without[-1]["loss"]) > 1e-6


def _random_adapter(base: WeightSource, targets: tuple[str, ...]) -> Adapter:
    random, deltas = torch.Generator().manual_seed(0), dict[str, Delta]()
    for rule in all_rules(base.shape):
        if is_layer(rule.mcore, rule.hf, targets):
            a = 0.02 * torch.randn(4, rule.shapes[0][1], generator=random)
            for name, size in zip(rule.hf, rule.shapes, strict=True):
                deltas[name] = Delta(a, 0.02 * torch.randn(size[0], 4, generator=random), 2.0)
    return Adapter("random", 8.0, deltas, {})


def _adapted_rules(folder: Path, lora: LoraConfig) -> list[Rule]:
    return [
        rule
        for rule in all_rules(load_shape(folder))
        if is_layer(rule.mcore, rule.hf, lora.targets)
    ]


def _gradient_of_b(rule: Rule, lora: LoraConfig, weights: dict[str, Tensor]) -> Tensor:
    from msrl.trainer.model.lora import _initial

    a = _initial(lora.rank, rule.shapes[0][1], 0, rule.mcore)
    is_fused_layer = is_layer(rule.mcore, (), lora.targets)
    gradients = []
    for hf in rule.hf:
        gradient = lora.alpha / lora.rank * weights[hf] @ a.T
        is_adapted = is_fused_layer or is_layer("", (hf,), lora.targets)
        gradients.append(gradient if is_adapted else torch.zeros_like(gradient))
    return layouts.join(rule.layout, [layouts.shard(rule.layout, gradients, 0, 1)])


@functools.cache
def _weight_gradients(folder: Path) -> dict[str, Tensor]:
    """Return transformers' unclipped gradients of all weights on the first batch.

    Gradients of experts without tokens are 0.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    backward(model, 0)
    return {
        key: value
        for parameter in model.named_parameters()
        if ".indexer." not in parameter[0]
        for key, value in _file_gradients(*parameter, is_stacked=True)
    }
