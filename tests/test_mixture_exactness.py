"""Mixtures of experts under every layout and memory option, with the losses and biases that keep experts in use, and with adapters:
gradients tensor by tensor, against the whole model's, and those of the balance losses against transformers with its own formula.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import families
from mixture_families import DEEPSEEK_V3, QWEN3_MOE
from msrl.config.sections.train import LoraConfig, RecomputeConfig, RouterConfig
from msrl.trainer.settings import Layout
from poisoned_ranks import LENGTHS, MASKED_OUT, Poisoned
from reference_gradients import _as_in_files
from test_mixture_training import _trained
from training_ranks import Case, Result, sequences

pytestmark = pytest.mark.slow
MODELS = {"qwen3 moe": QWEN3_MOE, "deepseek v3": {**DEEPSEEK_V3, "first_k_dense_replace": 2}}
FULL, MOE = (
    RecomputeConfig(granularity="full"),
    RecomputeConfig(granularity="selective", modules=("moe",)),
)
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "ep2": (Layout(ep=2), {}),
    "tp2 ep2 etp1": (Layout(tp=2, ep=2, etp=1), {}),
    "tp2 ep2 etp2": (Layout(tp=2, ep=2, etp=2), {}),
    "cp2, chunked": (Layout(cp=2), {"logit_chunk": 5}),
}
MORE_LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "pp2 ep2, recompute": (Layout(pp=2, ep=2), {"recompute": FULL}),
    "tp2, recompute of experts": (Layout(tp=2), {"recompute": MOE}),
}
BALANCE = RouterConfig(aux_loss_coef=0.05, aux_loss_over="sequence", z_loss_coef=1e-3)
PER_PASS = RouterConfig(aux_loss_coef=0.05, aux_loss_over="micro_batch", z_loss_coef=1e-3)
BALANCED: dict[
    str, dict[str, Any]
] = {  # with the losses that keep experts in use; of sequences, whatever the micro-batch
    "dp2 ep2": {"layout": Layout(ep=2), "dp": 2, "micro_batch": 1},
    "tp2 cp2, recompute": {
        "layout": Layout(tp=2, cp=2),
        "more": {"recompute": FULL, "router": BALANCE},
    },
}
MORE_BALANCED: dict[str, dict[str, Any]] = {
    "micro-batches by tokens": {"max_tokens": 64},
    "pp2 ep2, recompute of experts": {
        "layout": Layout(pp=2, ep=2),
        "more": {"recompute": MOE, "router": BALANCE},
    },
}
ATTENTION = LoraConfig(rank=4, alpha=8.0, targets=("linear_q_up_proj", "kv_b_proj", "o_proj"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random model of each as a Hugging Face folder."""
    root = tmp_path_factory.mktemp("mixtures")
    return {name: families.save_model(root / name, config) for name, config in MODELS.items()}


def _bases(folders: dict[str, Path]) -> dict[str, Case]:
    """The cases of the whole models."""
    qwen, deepseek = folders["qwen3 moe"], folders["deepseek v3"]
    cases = [
        Case("whole", qwen, steps=10, lr=1e-4, is_same_batch=True),
        Case("balanced", qwen, steps=3, is_same_batch=True, more={"router": BALANCE}),
        Case("biased", deepseek, steps=3, more={"router": RouterConfig(bias_update_rate=0.01)}),
        Case(
            "lora",
            deepseek,
            steps=4,
            lr=3e-3,
            eps=1e-3,
            is_same_batch=True,
            more={"lora": ATTENTION},
        ),
    ]
    return {case.name: case for case in cases}


def _tables(
    bases: dict[str, Case], layouts: dict[str, Any], balanced: dict[str, Any]
) -> list[Case]:
    rows = [
        dataclasses.replace(bases["whole"], name=name, layout=layout, more=more)
        for name, (layout, more) in layouts.items()
    ]
    return [
        *rows,
        *[
            dataclasses.replace(bases["balanced"], name=f"balanced, {name}", **changes)
            for name, changes in balanced.items()
        ],
    ]


def _cases(folders: dict[str, Path]) -> list[Any]:
    """What the usual tests look at, in one start of the ranks."""
    bases = _bases(folders)
    first = dataclasses.replace(bases["balanced"], name="balanced, first step", steps=1)
    return [
        *bases.values(),
        *_tables(bases, LAYOUTS, BALANCED),
        first,
        dataclasses.replace(
            first, name="per pass, first step", micro_batch=8, more={"router": PER_PASS}
        ),
        dataclasses.replace(bases["biased"], name="biased, first step", steps=1),
        dataclasses.replace(bases["biased"], name="biased, dp2 ep2", layout=Layout(ep=2), dp=2),
        dataclasses.replace(bases["lora"], name="lora, tp2 ep2", layout=Layout(tp=2, ep=2, etp=1)),
        Poisoned("poisoned", folders["qwen3 moe"], Layout(cp=2, ep=2), {"logit_chunk": 5}),
    ]


def _more_cases(folders: dict[str, Path]) -> list[Any]:
    bases = _bases(folders)
    return [
        *_tables(bases, MORE_LAYOUTS, MORE_BALANCED),
        dataclasses.replace(bases["biased"], name="biased, pp2 cp2", layout=Layout(pp=2, cp=2)),
        dataclasses.replace(bases["lora"], name="lora, pp2 cp2", layout=Layout(pp=2, cp=2)),
    ]


@pytest.fixture(scope="module")
def results(folders: dict[str, Path]) -> dict[str, Any]:
    return _trained(_cases(folders))


@pytest.fixture(scope="module")
def more_results(folders: dict[str, Path], results: dict[str, Any]) -> dict[str, Any]:
    return {**results, **_trained(_more_cases(folders))}


def _assert_same(found: Result, whole: Result) -> None:
    """Reports to 1e-5, and the last step's gradient of every tensor to 1e-5 of its own norm."""
    for name in {*whole.reports[0]} - {"lr"}:
        values = [[report[name] for report in result.reports] for result in (found, whole)]
        np.testing.assert_allclose(values[0], values[1], rtol=1e-5, err_msg=name)
    assert found.gradients.keys() == whole.gradients.keys()
    distances = {
        n: np.linalg.norm(found.gradients[n] - g) / max(np.linalg.norm(g), 1e-30)
        for n, g in whole.gradients.items()
    }
    assert max(distances.values()) < 1e-5, sorted(distances.items(), key=lambda pair: -pair[1])[:5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_of_a_mixture_and_the_gradient_after_them_are_those_of_the_unsplit_run(
    results: dict[str, Any], layout: str
) -> None:
    _assert_same(results[layout], results["whole"])


@pytest.mark.full
def test_more_layouts_and_recomputation_change_nothing_either(more_results: dict[str, Any]) -> None:
    for layout in MORE_LAYOUTS:
        _assert_same(more_results[layout], more_results["whole"])
    for name in MORE_BALANCED:
        _assert_same(more_results[f"balanced, {name}"], more_results["balanced"])
    _assert_same(more_results["lora, pp2 cp2"], more_results["lora"])
    _assert_same_biases(more_results["biased, pp2 cp2"], more_results["biased"])


# --- what keeps experts in use --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BALANCED)
def test_the_balance_of_sequences_depends_on_no_layout_and_no_micro_batch(
    results: dict[str, Any], name: str
) -> None:
    assert {"router_aux_loss", "router_z_loss", "busiest_expert"} <= results["balanced"].reports[
        0
    ].keys()
    _assert_same(results[f"balanced, {name}"], results["balanced"])


@pytest.mark.parametrize(
    ("name", "settings"), [("balanced, first step", BALANCE), ("per pass, first step", PER_PASS)]
)
def test_balance_and_z_loss_and_their_gradients_are_those_of_transformers(
    results: dict[str, Any], folders: dict[str, Path], name: str, settings: RouterConfig
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folders["qwen3 moe"], dtype=torch.float32, attn_implementation="eager"
    )
    aux, large = _losses_of_transformers(model, settings)
    report = results[name].reports[0]
    assert report["router_aux_loss"] == pytest.approx(aux, rel=1e-5)
    assert report["router_z_loss"] == pytest.approx(large, rel=1e-5)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    expected = {
        key: value
        for parameter in model.named_parameters()
        for key, value in _as_in_files(*parameter, is_stacked=True)
    }
    assert expected.keys() == results[name].gradients.keys()
    for key, gradient in expected.items():
        assert (
            np.linalg.norm(results[name].gradients[key] - gradient.numpy()) < 1e-4 * gradient.norm()
        ), key


def _losses_of_transformers(model: Any, settings: RouterConfig) -> tuple[float, float]:
    """Gradients of all losses, in the model; the two of the routers, a layer's mean. transformers' own function is of all layers and of
    counts that have the sum k: of one layer and divided by k it is the loss of arXiv:2101.03961.
    """
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    batch, task, count = sequences(0), torch.zeros(()), 0
    routed: list[tuple[Tensor, ...]] = []  # by sequence: of each layer [T, E]
    for ids, mask in zip(batch.token_ids, batch.loss_masks, strict=True):
        output = model(torch.from_numpy(ids)[None], output_router_logits=True)
        logprobs = output.logits[0, :-1].log_softmax(-1)
        task = (
            task
            - logprobs.gather(-1, torch.from_numpy(ids[1:])[:, None])[:, 0][
                torch.from_numpy(mask[1:])
            ].sum()
        )
        count += int(mask[1:].sum())
        routed.append(output.router_logits)
    layers = list(zip(*routed, strict=True))
    aux = torch.zeros(())
    for layer in layers:
        groups = layer if settings.aux_loss_over == "sequence" else [torch.cat(layer)]
        total = sum(len(group) for group in groups)
        aux = aux + sum(
            len(group) / total * load_balancing_loss_func((group,), 8, 3) / 3 for group in groups
        )
    large = sum(
        (torch.cat(layer).logsumexp(-1).square().mean() for layer in layers), torch.zeros(())
    )
    (task / count + settings.aux_loss_coef * aux + settings.z_loss_coef * large).backward()
    return aux.item() / len(layers), large.item() / len(layers)


def test_biases_of_experts_move_by_the_load_of_the_whole_batch(
    results: dict[str, Any], folders: dict[str, Path]
) -> None:
    """Up where transformers sends fewer tokens than the mean, and the same in another layout."""
    before, load = (
        families.weights(MODELS["deepseek v3"]),
        _loads_of_transformers(folders["deepseek v3"]),
    )
    assert len(load) == 2
    for name, counts in load.items():
        moved = results["biased, first step"].weights[name] - before[name].numpy()
        np.testing.assert_allclose(
            moved, 0.01 * np.sign(counts.mean().item() - counts.numpy()), atol=1e-6
        )
    busiest = max((counts.max() / counts.mean()).item() for counts in load.values())
    assert results["biased"].reports[0]["busiest_expert"] == pytest.approx(busiest)
    _assert_same_biases(results["biased, dp2 ep2"], results["biased"])


def _assert_same_biases(found: Result, whole: Result) -> None:
    np.testing.assert_allclose(
        *[[report["busiest_expert"] for report in result.reports] for result in (found, whole)],
        rtol=1e-6,
    )
    for name, weight in whole.weights.items():
        if name.endswith("e_score_correction_bias"):
            np.testing.assert_array_equal(found.weights[name], weight)


@torch.no_grad()
def _loads_of_transformers(folder: Path) -> dict[str, Tensor]:
    """How many tokens of the first batch go to each expert, by the name of the expert's bias."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    found = {
        name: torch.zeros(8)
        for name, _ in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }
    for name in found:
        gate = model.get_submodule(name.rsplit(".", 1)[0])
        gate.register_forward_hook(functools.partial(_count, found[name]))
    for ids in sequences(0).token_ids:
        model(torch.from_numpy(ids)[None])
    return found


def _count(
    load: Tensor, module: torch.nn.Module, inputs: object, output: tuple[Tensor, ...]
) -> None:
    """transformers' routers give logits, weights and experts."""
    load += output[2].flatten().bincount(minlength=len(load))


# --- adapters, and garbage ------------------------------------------------------------------------------------------------------------


def test_adapters_of_latent_attention_learn_alike_in_another_layout(
    results: dict[str, Any],
) -> None:
    assert len(results["lora"].gradients) == 4 * 3 * 2
    assert results["lora"].reports[0]["loss"] > results["lora"].reports[-1]["loss"] + 1e-3
    _assert_same(results["lora, tp2 ep2"], results["lora"])


def test_garbage_in_a_pack_reaches_no_other_sample_of_a_mixture(results: dict[str, Any]) -> None:
    """Other samples' tokens decide how many rows an expert multiplies at once, hence 1e-6 of rounding; NaN stays where it is."""
    seen = results["poisoned"].seen
    learnt = np.concatenate(
        [np.full(length, number not in MASKED_OUT) for number, length in enumerate(LENGTHS)]
    )
    for poison in ("neighbours large", "neighbours nan", "padding nan"):
        assert seen[poison].loss == pytest.approx(seen["clean"].loss, rel=1e-6), poison
        np.testing.assert_allclose(
            seen[poison].logprobs[learnt], seen["clean"].logprobs[learnt], rtol=1e-5, err_msg=poison
        )
    for poison in ("neighbours large", "padding nan"):
        for name, gradient in seen["clean"].gradients.items():
            assert (
                np.linalg.norm(seen[poison].gradients[name] - gradient)
                <= 1e-5 * np.linalg.norm(gradient) + 1e-12
            ), (poison, name)
