"""A float32 output layer, and passes in float32 of models whose weights are bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import families
from mixture_families import QWEN3_MOE
from msrl.config.sections.train import RecomputeConfig
from msrl.trainer.settings import Layout
from support import python_path
from training_cases import LORA, make_model, randomize
from training_ranks import sequences
from widened_ranks import Case, Result, first_batch

pytestmark = pytest.mark.slow

MODELS = ("qwen2", "qwen2 tied")


def make_cases(folders: dict[str, Path]) -> list[Case]:
    untied, tied = (folders[name] for name in MODELS)
    full = {"recompute": RecomputeConfig(granularity="full")}
    return [
        Case("untied rounded", untied, logits_dtype=None),
        Case("tied rounded", tied, logits_dtype=None),
        Case("untied", untied),
        Case("untied chunked", untied, more={"logit_chunk": 7}),
        Case("untied tp2 sp", untied, Layout(tp=2, sp=True)),
        Case("untied tp2 chunked", untied, Layout(tp=2), more={"logit_chunk": 7, **full}),
        Case("untied pp2", untied, Layout(pp=2)),
        Case("tied", tied, more=full),
        Case("tied chunked tp2", tied, Layout(tp=2), more={"logit_chunk": 7}),
        Case("tied vpp", tied, Layout(pp=2, vpp=1)),
        Case("tied lora", tied, Layout(tp=2), more=LORA),
        Case("mixture tp2", folders["mixture"], Layout(tp=2, sp=True)),
    ]


NAMES = [case.name for case in make_cases(dict.fromkeys((*MODELS, "mixture"), Path()))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    folders = {name: root / name for name in (*MODELS, "mixture")}
    for name in MODELS:
        randomize(make_model(name)).save_pretrained(folders[name])
    folders["mixture"].mkdir()
    (folders["mixture"] / "config.json").write_text(json.dumps(QWEN3_MOE))
    save_file(
        families.weights(QWEN3_MOE),
        folders["mixture"] / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folders


@pytest.fixture(scope="module")
def results(folders: dict[str, Path]) -> dict[str, Result]:
    from msrl.platforms import get
    from msrl.trainer.launch import run_ranks

    reports = run_ranks(
        "widened_ranks:main",
        make_cases(folders),
        num_ranks=2,
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    return {result.name: result for result in reports}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, np.ndarray]:
    """Log-probabilities of transformers in float32, with weights rounded to bfloat16."""
    return {name: _reference_logprobs(folder) for name, folder in folders.items()}


@torch.no_grad()
def _reference_logprobs(folder: Path) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float().eval()
    batch, rows = first_batch(1), list[np.ndarray]()
    for ids in sequences(0).token_ids:
        logprobs = model(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
        labels = torch.from_numpy(np.append(ids[1:], 0))[:, None]
        rows.append(logprobs.gather(1, labels)[:, 0].numpy())
    return np.concatenate(rows)[batch.loss_mask[: sum(map(len, rows))]]


@pytest.mark.parametrize("name", [name for name in NAMES if "rounded" not in name])
def test_logits_are_a_float32_product_of_the_hidden_states(
    name: str, results: dict[str, Result]
) -> None:
    result = results[name]
    assert result.product_error < 1e-5
    assert not result.is_rounded
    assert result.hidden_dtype == "torch.float32"


@pytest.mark.parametrize("name", ["untied rounded", "tied rounded"])
def test_logits_have_the_dtype_of_the_model_by_default(
    name: str, results: dict[str, Result]
) -> None:
    assert results[name].is_rounded
    assert results[name].hidden_dtype == "torch.bfloat16"


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_in_float32_agrees_with_transformers_and_changes_nothing(
    name: str, results: dict[str, Result], expected: dict[str, np.ndarray]
) -> None:
    result, model = results[name], _model_of(name)
    assert np.abs(result.in_float32 - expected[model]).max() < 1e-4
    assert np.abs(result.logprobs - expected[model]).max() > 1e-3
    assert result.is_unchanged


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_in_float32_takes_no_gradients_from_later_updates(
    name: str, results: dict[str, Result]
) -> None:
    assert results[name].grad_norm == pytest.approx(results[name].norm_before, rel=1e-5)


@pytest.mark.parametrize("name", ["untied", "untied chunked", "tied"])
def test_a_float32_output_layer_adds_no_error(
    name: str, results: dict[str, Result], expected: dict[str, np.ndarray]
) -> None:
    """Compared on one rank: reductions over tensor-parallel ranks round, too.

    Most of the error is from rounded hidden states, whose last bits differ between processors.
    """
    exact = expected[_model_of(name)]
    error, rounded_error = (
        np.abs(results[each].logprobs - exact).mean() for each in (name, _rounded(name))
    )
    assert error < 1.05 * rounded_error


@pytest.mark.parametrize("name", [name for name in NAMES if "mixture" not in name])
def test_a_float32_output_layer_has_the_same_gradient(
    name: str, results: dict[str, Result]
) -> None:
    result, rounded = results[name], results[_rounded(name)]
    assert result.loss == pytest.approx(rounded.loss, rel=1e-2)
    if "lora" not in name:
        assert result.grad_norm == pytest.approx(rounded.grad_norm, rel=3e-2)


def _rounded(case: str) -> str:
    """Return the case of the same model with logits in bfloat16, on one rank."""
    return f"{case.partition(' ')[0]} rounded"


def _model_of(case: str) -> str:
    return {"untied": "qwen2", "tied": "qwen2 tied", "mixture": "mixture"}[case.partition(" ")[0]]
