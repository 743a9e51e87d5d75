"""Mixture of experts in all layouts and memory options, with load balancing and with adapters.

Gradients of every tensor are compared with those of the unsharded model, and those of the
load-balancing losses with transformers.
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
from msrl.trainer.settings import Balance, Layout, Lora, Recompute
from poisoned_ranks import LENGTHS, MASKED_OUT, PoisonedCase
from reference_gradients import _as_in_files
from test_mixture_training import run_cases
from training_ranks import Case, Result, sequences

pytestmark = pytest.mark.slow
MODELS = {"qwen3 moe": QWEN3_MOE, "deepseek v3": {**DEEPSEEK_V3, "first_k_dense_replace": 2}}
FULL, MOE = Recompute("full"), Recompute("selective", modules=("moe",))
LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "ep2": (Layout(ep=2), {}),
    "tp2 ep2 etp1": (Layout(tp=2, ep=2, etp=1), {}),
    "tp2 ep2 etp2": (Layout(tp=2, ep=2, etp=2), {}),
    "cp2, chunked": (Layout(cp=2), {"chunk": 5}),
}
MORE_LAYOUTS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "pp2 ep2, recompute": (Layout(pp=2, ep=2), {"recompute": FULL}),
    "tp2, recompute of experts": (Layout(tp=2), {"recompute": MOE}),
}
BALANCE = Balance(0.05, "sequence", 1e-3)
PER_PASS = Balance(0.05, "micro_batch", 1e-3)
BALANCED: dict[str, dict[str, Any]] = {  # with the load-balancing losses, computed per sequence
    "dp2 ep2": {"layout": Layout(ep=2), "dp": 2, "micro_batch": 1},
    "tp2 cp2, recompute": {
        "layout": Layout(tp=2, cp=2),
        "more": {"recompute": FULL, "balance": BALANCE},
    },
}
MORE_BALANCED: dict[str, dict[str, Any]] = {
    "micro-batches by tokens": {"max_tokens": 64},
    "pp2 ep2, recompute of experts": {
        "layout": Layout(pp=2, ep=2),
        "more": {"recompute": MOE, "balance": BALANCE},
    },
}
ATTENTION = Lora(4, 8.0, ("linear_q_up_proj", "kv_b_proj", "o_proj"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a small random model of each family as a Hugging Face folder."""
    root = tmp_path_factory.mktemp("mixtures")
    return {name: families.save_model(root / name, config) for name, config in MODELS.items()}


def _base_cases(folders: dict[str, Path]) -> dict[str, Case]:
    """Return the cases of unsharded models."""
    qwen, deepseek = folders["qwen3 moe"], folders["deepseek v3"]
    cases = [
        Case("unsharded", qwen, steps=10, lr=1e-4, is_same_batch=True),
        Case("balanced", qwen, steps=3, is_same_batch=True, more={"balance": BALANCE}),
        Case("biased", deepseek, steps=3, more={"balance": Balance(bias_update_rate=0.01)}),
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


def _table_cases(
    bases: dict[str, Case], layouts: dict[str, Any], balanced: dict[str, Any]
) -> list[Case]:
    rows = [
        dataclasses.replace(bases["unsharded"], name=name, layout=layout, more=more)
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
    """Return the cases of the default tests for one start of the ranks."""
    bases = _base_cases(folders)
    first = dataclasses.replace(bases["balanced"], name="balanced, first step", steps=1)
    return [
        *bases.values(),
        *_table_cases(bases, LAYOUTS, BALANCED),
        first,
        dataclasses.replace(
            first, name="per pass, first step", micro_batch=8, more={"balance": PER_PASS}
        ),
        dataclasses.replace(bases["biased"], name="biased, first step", steps=1),
        dataclasses.replace(bases["biased"], name="biased, dp2 ep2", layout=Layout(ep=2), dp=2),
        dataclasses.replace(bases["lora"], name="lora, tp2 ep2", layout=Layout(tp=2, ep=2, etp=1)),
        PoisonedCase("poisoned", folders["qwen3 moe"], Layout(cp=2, ep=2), {"chunk": 5}),
    ]


def _more_cases(folders: dict[str, Path]) -> list[Any]:
    bases = _base_cases(folders)
    return [
        *_table_cases(bases, MORE_LAYOUTS, MORE_BALANCED),
        dataclasses.replace(bases["biased"], name="biased, pp2 cp2", layout=Layout(pp=2, cp=2)),
        dataclasses.replace(bases["lora"], name="lora, pp2 cp2", layout=Layout(pp=2, cp=2)),
    ]


@pytest.fixture(scope="module")
def results(folders: dict[str, Path]) -> dict[str, Any]:
    return run_cases(_cases(folders))


@pytest.fixture(scope="module")
def more_results(folders: dict[str, Path], results: dict[str, Any]) -> dict[str, Any]:
    return {**results, **run_cases(_more_cases(folders))}


def _assert_same(actual: Result, unsharded: Result) -> None:
    """Assert equal reports to 1e-5 and equal last gradients to 1e-5 of each tensor's norm."""
    for name in {*unsharded.reports[0]} - {"lr"}:
        values = [[report[name] for report in result.reports] for result in (actual, unsharded)]
        np.testing.assert_allclose(values[0], values[1], rtol=1e-5, err_msg=name)
    assert actual.gradients.keys() == unsharded.gradients.keys()
    distances = {
        n: np.linalg.norm(actual.gradients[n] - g) / max(np.linalg.norm(g), 1e-30)
        for n, g in unsharded.gradients.items()
    }
    assert max(distances.values()) < 1e-5, sorted(distances.items(), key=lambda pair: -pair[1])[:5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_losses_and_the_last_gradients_agree_with_the_unsharded_run(
    results: dict[str, Any], layout: str
) -> None:
    _assert_same(results[layout], results["unsharded"])


@pytest.mark.full
def test_more_layouts_and_recomputation_agree_with_the_unsharded_run(
    more_results: dict[str, Any],
) -> None:
    for layout in MORE_LAYOUTS:
        _assert_same(more_results[layout], more_results["unsharded"])
    for name in MORE_BALANCED:
        _assert_same(more_results[f"balanced, {name}"], more_results["balanced"])
    _assert_same(more_results["lora, pp2 cp2"], more_results["lora"])
    _assert_same_biases(more_results["biased, pp2 cp2"], more_results["biased"])


# Load balancing.


@pytest.mark.parametrize("name", BALANCED)
def test_the_balance_loss_per_sequence_does_not_depend_on_layout_and_micro_batch(
    results: dict[str, Any], name: str
) -> None:
    assert {"router_aux_loss", "router_z_loss", "busiest_expert"} <= results["balanced"].reports[
        0
    ].keys()
    _assert_same(results[f"balanced, {name}"], results["balanced"])


@pytest.mark.parametrize(
    ("name", "settings"), [("balanced, first step", BALANCE), ("per pass, first step", PER_PASS)]
)
def test_balance_loss_and_z_loss_agree_with_transformers(
    results: dict[str, Any], folders: dict[str, Path], name: str, settings: Balance
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folders["qwen3 moe"], dtype=torch.float32, attn_implementation="eager"
    )
    aux, z_loss = _losses_of_transformers(model, settings)
    report = results[name].reports[0]
    assert report["router_aux_loss"] == pytest.approx(aux, rel=1e-5)
    assert report["router_z_loss"] == pytest.approx(z_loss, rel=1e-5)
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


def _losses_of_transformers(model: Any, settings: Balance) -> tuple[float, float]:
    """Run backward for all losses and return balance loss and z-loss, averaged over layers.

    Transformers' function covers all layers and counts that sum to k. For one layer and divided by
    k it is the loss of arXiv:2101.03961.
    """
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    batch, task, count = sequences(0), torch.zeros(()), 0
    routed: list[tuple[Tensor, ...]] = []  # per sequence and layer: [T, E]
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
        groups = layer if settings.over == "sequence" else [torch.cat(layer)]
        total = sum(len(group) for group in groups)
        aux = aux + sum(
            len(group) / total * load_balancing_loss_func((group,), 8, 3) / 3 for group in groups
        )
    z_loss = sum(
        (torch.cat(layer).logsumexp(-1).square().mean() for layer in layers), torch.zeros(())
    )
    (task / count + settings.aux_loss_coef * aux + settings.z_loss_coef * z_loss).backward()
    return aux.item() / len(layers), z_loss.item() / len(layers)


def test_expert_biases_are_updated_by_the_load_of_the_global_batch(
    results: dict[str, Any], folders: dict[str, Path]
) -> None:
    """Biases rise for experts that get fewer tokens than average in transformers."""
    before, load = (
        families.weights(MODELS["deepseek v3"]),
        _loads_of_transformers(folders["deepseek v3"]),
    )
    assert len(load) == 2
    for name, counts in load.items():
        updates = results["biased, first step"].weights[name] - before[name].numpy()
        np.testing.assert_allclose(
            updates, 0.01 * np.sign(counts.mean().item() - counts.numpy()), atol=1e-6
        )
    busiest = max((counts.max() / counts.mean()).item() for counts in load.values())
    assert results["biased"].reports[0]["busiest_expert"] == pytest.approx(busiest)
    _assert_same_biases(results["biased, dp2 ep2"], results["biased"])


def _assert_same_biases(actual: Result, unsharded: Result) -> None:
    np.testing.assert_allclose(
        *[
            [report["busiest_expert"] for report in result.reports]
            for result in (actual, unsharded)
        ],
        rtol=1e-6,
    )
    for name, weight in unsharded.weights.items():
        if name.endswith("e_score_correction_bias"):
            np.testing.assert_array_equal(actual.weights[name], weight)


@torch.no_grad()
def _loads_of_transformers(folder: Path) -> dict[str, Tensor]:
    """Return the number of tokens of the first batch per expert, by name of the bias tensor."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    loads = {
        name: torch.zeros(8)
        for name, _ in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }
    for name in loads:
        gate = model.get_submodule(name.rsplit(".", 1)[0])
        gate.register_forward_hook(functools.partial(_count, loads[name]))
    for ids in sequences(0).token_ids:
        model(torch.from_numpy(ids)[None])
    return loads


def _count(
    load: Tensor, module: torch.nn.Module, inputs: object, output: tuple[Tensor, ...]
) -> None:
    """Count the tokens per expert; transformers' routers return logits, weights and experts."""
    load += output[2].flatten().bincount(minlength=len(load))


# Adapters and invalid values.


def test_adapters_of_latent_attention_train_alike_in_another_layout(
    results: dict[str, Any],
) -> None:
    assert len(results["lora"].gradients) == 4 * 3 * 2
    assert results["lora"].reports[0]["loss"] > results["lora"].reports[-1]["loss"] + 1e-3
    _assert_same(results["lora, tp2 ep2"], results["lora"])


def test_invalid_values_in_a_pack_do_not_affect_other_samples(results: dict[str, Any]) -> None:
    """The tolerance covers rounding: other samples change the number of rows of an expert."""
    observations = results["poisoned"].observations
    is_trained = np.concatenate(
        [np.full(length, number not in MASKED_OUT) for number, length in enumerate(LENGTHS)]
    )
    for poison in ("masked samples large", "masked samples nan", "padding nan"):
        assert observations[poison].loss == pytest.approx(observations["clean"].loss, rel=1e-6), (
            poison
        )
        np.testing.assert_allclose(
            observations[poison].logprobs[is_trained],
            observations["clean"].logprobs[is_trained],
            rtol=1e-5,
            err_msg=poison,
        )
    for poison in ("masked samples large", "padding nan"):
        for name, gradient in observations["clean"].gradients.items():
            assert (
                np.linalg.norm(observations[poison].gradients[name] - gradient)
                <= 1e-5 * np.linalg.norm(gradient) + 1e-12
            ), (poison, name)
