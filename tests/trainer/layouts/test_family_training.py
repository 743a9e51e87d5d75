"""Training of families with uncommon layers is equal in every layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import families
from families import FAMILIES, Family
from mixture_families import DEEPSEEK_V32, MIXTURES
from msrl.config.sections.train import LoraConfig, RecomputeConfig
from msrl.trainer.settings import Layout
from test_mixture_exactness import _assert_same as assert_same_mixture
from test_mixture_training import _assert_same, _train
from training_ranks import Case, Result

pytestmark = pytest.mark.slow
STEPS = 2
# Families with parts that Llama lacks: scales, unrotated layers, norms in other places, LongRoPE.
LLAMA_LIKE = (
    *("smollm 3", "smollm 3 windows", "olmo 2", "olmo 3", "phi 3", "phi 4 mini", "granite 3"),
    *("granite 4", "ernie 4.5", "hunyuan v1", "exaone 4", "exaone 4 small", "cohere", "cohere 2"),
    *("minicpm 3", "minicpm 4", "mimo"),
)
LLAMA_LIKE_MIXTURES = (
    *("granite 3 moe", "granite 3 moe, shared", "granite 4 moe", "ernie 4.5 moe"),
    "hunyuan v1 moe",
)
DENSE = ("gemma 3", "ministral 3", "qwen3.5", *LLAMA_LIKE)
SPARSE = ("deepseek v3.2", "glm 5.2")
# Odd numbers of heads, and more chosen keys than the longest sequence has.
VARIANTS = {
    "odd heads": {
        **DEEPSEEK_V32,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "index_n_heads": 5,
        "index_topk": 5,
    },
    "all keys": {**DEEPSEEK_V32, "index_topk": 64},
}
EXPERTS = (
    *("glm 4.7 flash", "minimax m2", "hunyuan 3", "ling 2", "qwen3-next"),
    *(*LLAMA_LIKE_MIXTURES, *SPARSE, *VARIANTS),
)
ULYSSES = {"cp_algo": "ulysses", "head_ranks": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"layout": Layout(tp=2)},
    "pp2": {"layout": Layout(pp=2)},
    "cp2": {"layout": Layout(cp=2, **ULYSSES)},
    "dp2": {"dp": 2, "micro_batch": 1},
    "single rows": {"micro_batch": 1},
    "recomputed": {"more": {"recompute": RecomputeConfig(granularity="full")}},
    "tp2 cp2": {"layout": Layout(tp=2, cp=2, **ULYSSES)},
}
# Models with experts always have sequence parallelism.
DENSE_LAYOUTS = {**LAYOUTS, "tp2 sp": {"layout": Layout(tp=2, sp=True)}}
# Delta networks have two key heads, which tp2 cp2 cannot divide.
WITHOUT = {("qwen3.5", "tp2 cp2"), ("qwen3-next", "tp2 cp2")}
# Ranks cannot divide three heads.
WITHOUT |= {("odd heads", layout) for layout in ("tp2", "cp2", "tp2 cp2", "tp2 ep2 etp1")}
EXPERT_LAYOUTS = {
    **LAYOUTS,
    "tp2 ep2 etp1": {"layout": Layout(tp=2, ep=2, etp=1)},
    "pp2 ep2": {"layout": Layout(pp=2, ep=2)},
}
PAIRS = [
    pair
    for names, layouts in ((DENSE, DENSE_LAYOUTS), (EXPERTS, EXPERT_LAYOUTS))
    for pair in ((name, layout) for name in names for layout in layouts)
    if pair not in WITHOUT
]
# Outside of the full tables: windows, delta networks, sparse attention, and norms and scales.
FAST = [
    *(("gemma 3", "tp2 sp"), ("ling 2", "pp2 ep2"), ("qwen3-next", "cp2")),
    *(("deepseek v3.2", "cp2"), ("glm 5.2", "pp2"), ("olmo 3", "tp2 sp")),
    *(("hunyuan v1", "tp2 sp"), ("cohere 2", "tp2 sp"), ("granite 3 moe", "tp2 ep2 etp1")),
    ("phi 4 mini", "cp2"),
]
FAST_NAMES = tuple(name for name, _ in FAST)
REMAINING = [pair for pair in PAIRS if pair not in FAST]
# Layouts that train models with indexers on the loss of GRPO.
POLICY = ("tp2", "pp2", "cp2", "dp2", "single rows", "pp2 ep2", "tp2 ep2 etp1")
ADAPTED = {
    "qwen3-next": ("in_proj_qkvz", "in_proj_ba", "q_proj", "o_proj", "out_proj"),
    "deepseek v3.2": ("linear_qkv", "q_b_proj", "kv_b_proj", "o_proj", "linear_fc1", "linear_fc2"),
}
# Layouts that train indexers by their loss. GLM-5.2 has two indexers, of two layers each.
FAST_LOSS = (("deepseek v3.2", "tp2 ep2 etp1"),)
MORE_LOSS = [
    ("glm 5.2", "single rows"),
    *(("deepseek v3.2", layout) for layout in ("pp2 ep2", "dp2", "recomputed")),
    *(("glm 5.2", "tp2"), ("odd heads", "pp2"), ("all keys", "tp2")),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders with a small random model of each family."""
    rows = FAMILIES | MIXTURES | {name: Family(config, "") for name, config in VARIANTS.items()}
    root = tmp_path_factory.mktemp("families")
    return families.save_models(root, {name: rows[name] for name in DENSE + EXPERTS})


def _row(name: str, layout: str, folders: dict[str, Path]) -> Case:
    changes = EXPERT_LAYOUTS | DENSE_LAYOUTS
    # AdamW amplifies rounding where gradients are nearly 0, as those of key biases of MiMo.
    eps = 1e-4 if name in LLAMA_LIKE + LLAMA_LIKE_MIXTURES else 1e-8
    case = Case(f"{name}, {layout}", folders[name], steps=STEPS, eps=eps)
    return dataclasses.replace(case, **changes.get(layout, {}))


def _policy(name: str, layout: str, folders: dict[str, Path]) -> Case:
    row = _row(name, layout, folders)
    return dataclasses.replace(row, name=f"policy, {row.name}", loss="policy")


def _adapted(name: str, layout: str, folders: dict[str, Path]) -> Case:
    mixing = ("linear_qkv", "linear_proj")
    targets = mixing if name in EXPERTS else (*mixing, "linear_fc1", "linear_fc2")
    lora = LoraConfig(rank=4, alpha=8.0, targets=ADAPTED.get(name, targets))
    row = _row(name, layout, folders)
    return dataclasses.replace(row, name=f"adapters, {row.name}", more={"lora": lora})


def _indexer_loss(name: str, layout: str, folders: dict[str, Path]) -> Case:
    row = _row(name, layout, folders)
    more = {**row.more, "indexer_loss_coef": 0.5}
    return dataclasses.replace(
        row, name=f"loss, {row.name}", more=more, is_same_batch=True, steps=3, eps=1e-4
    )


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def results(folders: dict[str, Path], saves: Path) -> dict[str, Result]:
    return _train(
        [
            *[_row(name, "single", folders) for name in FAST_NAMES],
            *[_row(name, layout, folders) for name, layout in FAST],
            _indexer_loss("deepseek v3.2", "single", folders),
            *[_indexer_loss(name, layout, folders) for name, layout in FAST_LOSS],
            *_without_indexer_loss(folders),
            *_resumed_indexers(folders, saves),
        ]
    )


def _without_indexer_loss(folders: dict[str, Path]) -> list[Case]:
    """Return cases of one step with and without the loss of indexers."""
    case = _indexer_loss("deepseek v3.2", "single", folders)
    with_loss = dataclasses.replace(case, name="one step, loss", steps=1)
    return [with_loss, dataclasses.replace(with_loss, name="one step", more={})]


def _resumed_indexers(folders: dict[str, Path], saves: Path) -> list[Case]:
    """Return cases in bfloat16, where norms of indexers are float32, saved and resumed."""
    case = _indexer_loss("deepseek v3.2", "tp2", folders)
    case = dataclasses.replace(case, dtype="bfloat16", steps=4, eps=1e-8, is_same_batch=False)
    return [
        dataclasses.replace(case, name="bf16", save_at=2, save_to=saves),
        dataclasses.replace(case, name="bf16 resumed", first_step=2, resume_from=saves),
    ]


@pytest.fixture(scope="module")
def more_results(folders: dict[str, Path]) -> dict[str, Result]:
    policies = [_policy(x, layout, folders) for x in SPARSE for layout in ("single", *POLICY)]
    losses = [_indexer_loss(name, layout, folders) for name, layout in MORE_LOSS]
    losses += [_indexer_loss(name, "single", folders) for name in (*VARIANTS, "glm 5.2")]
    rows = [_row(name, layout, folders) for name, layout in REMAINING]
    rows += [_row(name, "single", folders) for name in DENSE + EXPERTS if name not in FAST_NAMES]
    new = [(x, y) for x in LLAMA_LIKE + LLAMA_LIKE_MIXTURES for y in ("single", "tp2")]
    policies += [_policy(x, layout, folders) for x, layout in new]
    pairs = [(x, y) for x in ADAPTED for y in ("single", "tp2")] + new
    adapters = [_adapted(name, layout, folders) for name, layout in pairs]
    return _train([*rows, *policies, *losses, *adapters])


@pytest.mark.parametrize(("name", "layout"), FAST)
def test_a_family_trains_equally_in_some_layouts(
    results: dict[str, Result], name: str, layout: str
) -> None:
    _assert_same(results[f"{name}, {layout}"], results[f"{name}, single"])


@pytest.mark.parametrize("name", SPARSE)
def test_an_indexer_is_not_trained(
    results: dict[str, Result], folders: dict[str, Path], name: str
) -> None:
    _assert_only_indexers_stay(results[f"{name}, single"], folders[name])


@pytest.mark.full
def test_an_indexer_with_odd_heads_is_not_trained(
    more_results: dict[str, Result], folders: dict[str, Path]
) -> None:
    _assert_only_indexers_stay(more_results["odd heads, single rows"], folders["odd heads"])


def _assert_only_indexers_stay(result: Result, folder: Path) -> None:
    same = _unchanged(result, folder)
    assert {key for key in same if ".indexer." not in key and "e_score" not in key} == set()


def _unchanged(result: Result, folder: Path) -> set[str]:
    """Return the names of the weights that a training left as they were, the indexers' included."""
    before, after = load_file(folder / "model.safetensors"), result.weights
    assert before.keys() == after.keys()
    same = {key for key, tensor in before.items() if np.array_equal(tensor.numpy(), after[key])}
    assert {key for key in before if ".indexer." in key} <= same
    return same


@pytest.mark.full
@pytest.mark.parametrize(("name", "layout"), REMAINING)
def test_all_families_train_equally_in_all_layouts(
    results: dict[str, Result], more_results: dict[str, Result], name: str, layout: str
) -> None:
    both = results | more_results
    _assert_same(both[f"{name}, {layout}"], both[f"{name}, single"])


@pytest.mark.full
@pytest.mark.parametrize("name", LLAMA_LIKE + LLAMA_LIKE_MIXTURES)
def test_families_train_equally_on_the_loss_of_grpo(
    more_results: dict[str, Result], name: str
) -> None:
    _assert_same(more_results[f"policy, {name}, tp2"], more_results[f"policy, {name}, single"])


@pytest.mark.full
@pytest.mark.parametrize("name", LLAMA_LIKE + LLAMA_LIKE_MIXTURES)
def test_adapters_of_families_train_equally_on_several_ranks(
    more_results: dict[str, Result], name: str
) -> None:
    _assert_same(more_results[f"adapters, {name}, tp2"], more_results[f"adapters, {name}, single"])


@pytest.mark.full
@pytest.mark.parametrize("layout", POLICY)
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention_trains_equally_on_the_loss_of_grpo(
    more_results: dict[str, Result], name: str, layout: str
) -> None:
    actual, single = (more_results[f"policy, {name}, {x}"] for x in (layout, "single"))
    _assert_same(actual, single)


@pytest.mark.full
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_train_equally_on_several_ranks(
    more_results: dict[str, Result], name: str
) -> None:
    _assert_same(more_results[f"adapters, {name}, tp2"], more_results[f"adapters, {name}, single"])


@pytest.mark.full
def test_adapters_change_latent_attention_around_an_unchanged_indexer(
    more_results: dict[str, Result], folders: dict[str, Path]
) -> None:
    same = _unchanged(more_results["adapters, deepseek v3.2, single"], folders["deepseek v3.2"])
    adapted = ("a_proj.", "mqa.", "b_proj.", "o_proj.", "gate_proj.", "up_proj.", "down_proj.")
    assert not [key for key in same if any(part in key for part in adapted)]


@pytest.mark.parametrize(("name", "layout"), FAST_LOSS)
def test_the_loss_of_indexers_does_not_depend_on_the_layout(
    results: dict[str, Result], name: str, layout: str
) -> None:
    _assert_same_loss(results[f"loss, {name}, {layout}"], results[f"loss, {name}, single"])


@pytest.mark.full
@pytest.mark.parametrize(("name", "layout"), MORE_LOSS)
def test_the_loss_of_indexers_does_not_depend_on_more_layouts(
    results: dict[str, Result], more_results: dict[str, Result], name: str, layout: str
) -> None:
    both = results | more_results
    _assert_same_loss(both[f"loss, {name}, {layout}"], both[f"loss, {name}, single"])


def _assert_same_loss(actual: Result, single: Result) -> None:
    assert_same_mixture(actual, single)
    losses = [report["indexer_loss"] for report in single.reports]
    assert losses[0] > losses[-1] > 0
    indexers = [key for key in single.gradients if ".indexer." in key]
    assert len(indexers) in (10, 20)
    assert all(np.linalg.norm(single.gradients[key]) > 0 for key in indexers)


def test_the_loss_of_indexers_changes_no_other_gradient(results: dict[str, Result]) -> None:
    """Gradients are clipped to one norm, so those of other weights are in proportion."""
    with_loss, without = results["one step, loss"], results["one step"]
    assert with_loss.reports[0]["loss"] == without.reports[0]["loss"]
    assert "indexer_loss" not in without.reports[0]
    norms = [result.reports[0]["grad_norm"] for result in (with_loss, without)]
    factors = [max(norm, 1.0) for norm in norms]
    for key, gradient in without.gradients.items():
        if ".indexer." not in key and "e_score" not in key:
            other = with_loss.gradients[key] * factors[0]
            np.testing.assert_allclose(other, gradient * factors[1], rtol=1e-4, atol=1e-7)
    assert norms[0] > norms[1]


def test_trained_indexers_resume_bit_for_bit_in_bfloat16(results: dict[str, Result]) -> None:
    complete, resumed = results["bf16"], results["bf16 resumed"]
    for name in ("loss", "indexer_loss", "grad_norm"):
        values = [[report[name] for report in result.reports] for result in (resumed, complete)]
        assert values[0] == values[1][2:], name
    for key, value in complete.weights.items():
        np.testing.assert_array_equal(resumed.weights[key], value, err_msg=key)
