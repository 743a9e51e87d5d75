"""Training of mixture of experts: layouts agree with the unsharded model and transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import families
from mixture_families import DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS, QWEN3_MOE
from msrl.trainer.settings import Layout
from reference_gradients import (
    assert_same_gradients,
    backward,
    gradients_of_first_step,
    transformers_gradients,
)
from support import python_path
from training_ranks import Case, Result

pytestmark = pytest.mark.slow
STEPS = 6
MODELS = {
    "qwen3 moe": QWEN3_MOE,
    "deepseek v2 lite": {
        **DEEPSEEK_V2, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    },
    "gpt-oss": {**GPT_OSS, "swiglu_limit": 7.0},
    "gpt-oss, clamped": GPT_OSS,
     # the clamp makes its gradient discontinuous: one step can be compared
    "deepseek v3": {**DEEPSEEK_V3, "first_k_dense_replace": 2},
     # with PP 2, the first stage has no experts
}  # fmt: skip
LAYOUTS = {
    "tp2": Case("", Path(), Layout(tp=2)),
    "tp2 etp1": Case("", Path(), Layout(tp=2, etp=1)),
    "ep2": Case("", Path(), Layout(ep=2)),
    "ep2, micro-batches by tokens": Case("", Path(), Layout(ep=2), max_tokens=48),
    "dp2 ep2": Case("", Path(), Layout(ep=2), dp=2, micro_batch=1),
    "tp2 ep2 etp1": Case("", Path(), Layout(tp=2, ep=2, etp=1)),
    "tp2 ep2 etp2": Case("", Path(), Layout(tp=2, ep=2, etp=2)),
    "pp2 ep2": Case("", Path(), Layout(pp=2, ep=2)),
    "cp2 ep2": Case("", Path(), Layout(ep=2, cp=2)),
    "tp2 cp2 ep2": Case("", Path(), Layout(tp=2, ep=2, cp=2)),
    "pp2 vpp1 ep2": Case("", Path(), Layout(pp=2, vpp=1, ep=2)),
    "pp2 ep2, uneven": Case("", Path(), Layout(pp=2, ep=2, num_layer_list=(3, 1))),
    "pp2 ep2, empty layers": Case("", Path(), Layout(pp=2, ep=2, noop_layers=(0, 3))),
}

PAIRS = (("deepseek v3", "ep2"), ("gpt-oss", "tp2 ep2 etp1"))
TRAINED = ("qwen3 moe", "deepseek v2 lite", "gpt-oss", "deepseek v3")
MORE_PAIRS = tuple(
    (name, layout) for name in TRAINED for layout in LAYOUTS if (name, layout) not in PAIRS
)
COMPARED = (
    ("qwen3 moe", "ep2"), ("qwen3 moe", "pp2 vpp1 ep2"), ("gpt-oss, clamped", "tp2 ep2 etp1"),
    ("gpt-oss, clamped", "tp2 ep2 etp2"),
    ("deepseek v3", "tp2 ep2 etp1"),
)  # fmt: skip
ALSO_COMPARED = (
    ("qwen3 moe", "tp2 ep2 etp1"), ("qwen3 moe", "tp2 ep2 etp2"),
    ("qwen3 moe", "pp2 ep2, uneven"), ("qwen3 moe", "pp2 ep2, empty layers"),
    *[("gpt-oss, clamped", layout) for layout in ("ep2", "pp2 vpp1 ep2")],
    ("deepseek v3", "tp2"), ("deepseek v3", "pp2 vpp1 ep2"), ("deepseek v3", "pp2 ep2, uneven"),
    ("deepseek v3", "pp2 ep2, empty layers"), ("deepseek v3", "tp2 cp2 ep2"),
    ("deepseek v2 lite", "tp2 ep2 etp2"), ("deepseek v2 lite", "pp2 vpp1 ep2"),
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a small random model of each family as a Hugging Face folder."""
    root = tmp_path_factory.mktemp("mixtures")
    return {name: families.save_model(root / name, config) for name, config in MODELS.items()}


def _layout_case(name: str, layout: str, folders: dict[str, Path]) -> Case:
    case = Case("", Path()) if layout == "unsharded" else LAYOUTS[layout]
    return dataclasses.replace(case, name=f"{name}, {layout}", model=folders[name], steps=STEPS)


def _first_step(name: str, layout: str, folders: dict[str, Path], saves: Path) -> Case:
    case = _layout_case(name, layout, folders)
    return dataclasses.replace(
        case,
        name=f"{case.name}, first step",
        steps=1,
        save_at=1,
        save_to=saves / f"first, {case.name}",
    )


def _pair_cases(folders: dict[str, Path], saves: Path) -> list[Case]:
    model = folders["deepseek v3"]
    return [
        *[_layout_case(name, "unsharded", folders) for name in TRAINED],
        *[_layout_case(name, layout, folders) for name, layout in PAIRS],
        *[_first_step(name, layout, folders, saves) for name, layout in COMPARED],
        Case(
            "saved ep2",
            model,
            Layout(ep=2),
            steps=4,
            save_at=4,
            save_to=saves / "ep2",
            critic=model,
        ),
        *[
            Case(
                name,
                model,
                layout,
                first_step=4,
                steps=STEPS,
                resume_from=saves / "ep2",
                critic=model,
            )
            for name, layout in (
                ("resumed ep2", Layout(ep=2)),
                ("resumed unsharded from ep2", Layout()),
                ("resumed tp2 ep2 etp1 from ep2", Layout(tp=2, ep=2, etp=1)),
            )
        ],
        Case(
            "saved tp2 ep2 etp2",
            model,
            Layout(tp=2, ep=2),
            steps=4,
            save_at=4,
            save_to=saves / "tp2",
        ),
        Case(
            "resumed pp2 ep2 from tp2 ep2 etp2",
            model,
            Layout(pp=2, ep=2),
            first_step=4,
            steps=STEPS,
            resume_from=saves / "tp2",
        ),
        Case(
            "bf16 ep2",
            model,
            Layout(ep=2),
            dtype="bfloat16",
            steps=4,
            save_at=2,
            save_to=saves / "bf16",
        ),
        Case(
            "bf16 resumed",
            model,
            Layout(ep=2),
            dtype="bfloat16",
            first_step=2,
            steps=4,
            resume_from=saves / "bf16",
        ),
    ]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def results(folders: dict[str, Path], saves: Path) -> dict[str, Result]:
    return run_cases(_pair_cases(folders, saves))


@pytest.fixture(scope="module")
def more_results(folders: dict[str, Path], saves: Path) -> dict[str, Result]:
    first_steps = [_first_step(name, layout, folders, saves) for name, layout in ALSO_COMPARED]
    return run_cases(
        [*first_steps, *[_layout_case(name, layout, folders) for name, layout in MORE_PAIRS]]
    )


def run_cases(cases: list[Case]) -> dict[str, Result]:
    from msrl.platforms import get
    from msrl.trainer.launch import run_ranks

    messages = run_ranks(
        "training_ranks:main",
        cases,
        num_ranks=4,
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    return {result.name: result for result in messages}


def _losses(result: Result) -> list[float]:
    return [report["loss"] for report in result.reports]


def _transformers_losses(folder: Path) -> list[float]:
    """Train in transformers on the same batches with torch's AdamW and gradient clipping."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    vectors = {
        p for name, p in model.named_parameters() if p.dim() == 1 or name.endswith("_bias")
    }  # of all experts in one matrix
    matrices = [p for p in model.parameters() if p not in vectors]
    groups = [{"params": matrices}, {"params": list(vectors), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(backward(model, step))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


@pytest.mark.parametrize(("name", "layout"), COMPARED)
def test_the_gradient_of_every_tensor_agrees_with_transformers(
    results: dict[str, Result], saves: Path, folders: dict[str, Path], name: str, layout: str
) -> None:
    assert f"{name}, {layout}, first step" in results
    assert_same_gradients(
        gradients_of_first_step(saves / f"first, {name}, {layout}"),
        transformers_gradients(folders[name]),
    )


@pytest.mark.full
@pytest.mark.parametrize(("name", "layout"), ALSO_COMPARED)
def test_gradients_agree_with_transformers_in_more_layouts(
    more_results: dict[str, Result], saves: Path, folders: dict[str, Path], name: str, layout: str
) -> None:
    assert f"{name}, {layout}, first step" in more_results
    assert_same_gradients(
        gradients_of_first_step(saves / f"first, {name}, {layout}"),
        transformers_gradients(folders[name]),
    )


@pytest.mark.parametrize("name", TRAINED)
def test_losses_agree_with_transformers_and_adamw(
    results: dict[str, Result], folders: dict[str, Path], name: str
) -> None:
    np.testing.assert_allclose(
        _losses(results[f"{name}, unsharded"]),
        _transformers_losses(folders[name]),
        rtol=0,
        atol=1e-4,
    )


def _assert_same(actual: Result, unsharded: Result, steps: slice = slice(None)) -> None:
    """Assert equal losses (1e-5), gradient norms (1e-4) and weights (2e-5 of each tensor's norm).

    AdamW amplifies rounding errors. One element in 5,000 may differ by the size of the updates,
    since rounding decides the direction of AdamW for near-zero gradients.
    """
    np.testing.assert_allclose(_losses(actual), _losses(unsharded)[steps], rtol=1e-5)
    norms = [[report["grad_norm"] for report in result.reports] for result in (actual, unsharded)]
    np.testing.assert_allclose(norms[0], norms[1][steps], rtol=1e-4)
    assert {
        name for name in actual.weights if not name.startswith("critic.")
    } == unsharded.weights.keys()
    for name, value in unsharded.weights.items():
        differences = np.sort(np.abs(actual.weights[name] - value).ravel())
        distance = np.linalg.norm(differences[: -max(1, differences.size // 5000)]) / max(
            np.linalg.norm(value), 1e-30
        )
        assert distance < 2e-5, (name, distance)
        assert differences[-1] < 2 * sum(report["lr"] for report in unsharded.reports), (
            name,
            differences[-1],
        )


@pytest.mark.parametrize(("name", "layout"), PAIRS)
def test_a_mixture_trains_alike_when_sharded(
    results: dict[str, Result], name: str, layout: str
) -> None:
    _assert_same(results[f"{name}, {layout}"], results[f"{name}, unsharded"])


@pytest.mark.full
@pytest.mark.parametrize(("name", "layout"), MORE_PAIRS)
def test_all_mixtures_train_alike_in_all_layouts(
    results: dict[str, Result], more_results: dict[str, Result], name: str, layout: str
) -> None:
    _assert_same(more_results[f"{name}, {layout}"], results[f"{name}, unsharded"])


@pytest.mark.parametrize(
    "name",
    [
        "resumed unsharded from ep2",
        "resumed tp2 ep2 etp1 from ep2",
        "resumed pp2 ep2 from tp2 ep2 etp2",
    ],
)
def test_a_run_can_be_resumed_in_another_layout(results: dict[str, Result], name: str) -> None:
    _assert_same(results[name], results["deepseek v3, unsharded"], slice(4, None))


@pytest.mark.parametrize("name", ["resumed unsharded from ep2", "resumed tp2 ep2 etp1 from ep2"])
def test_a_critic_with_experts_can_be_resumed_in_another_layout(
    results: dict[str, Result], name: str
) -> None:
    for report, expected in zip(results[name].reports, results["resumed ep2"].reports, strict=True):
        assert expected["value_squares"] > 0
        for metric in ("value_loss", "value_squares", "value_grad_norm"):
            assert report[metric] == pytest.approx(expected[metric], rel=2e-4), metric


def test_resuming_in_the_same_layout_is_bitwise_equal(results: dict[str, Result]) -> None:
    assert _losses(results["resumed ep2"]) == _losses(results["deepseek v3, ep2"])[4:]
    for name, value in results["deepseek v3, ep2"].weights.items():
        np.testing.assert_array_equal(results["resumed ep2"].weights[name], value)
    assert _losses(results["bf16 resumed"]) == _losses(results["bf16 ep2"])[2:]


@pytest.mark.full
def test_train_sft_uses_the_configured_expert_parallelism(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    """Two ranks with EP 2, and with TP 2, which shards each expert, have the same losses."""
    from msrl.cli import app
    from test_train_sft import run_in_process
    from tiny_qwen2 import save_model

    save_model(tmp_path / "hf", tied=False, positions=256)  # for its tokenizer
    vocab = json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"]
    config = {**MODELS["qwen3 moe"], "vocab_size": vocab}
    for file in (tmp_path / "hf").glob("*.safetensors*"):
        file.unlink()
    families.save_model(tmp_path / "hf", config)
    rows = [
        json.dumps({"instruction": f"{i}+{i}=", "input": "", "output": f"{2 * i}" * (1 + i % 7)})
        for i in range(16)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    arguments = [
        "preprocess",
        "--input",
        str(tmp_path / "data.jsonl"),
        "--tokenizer",
        str(tmp_path / "hf"),
        "--handler",
        "alpaca",
    ]
    app.app(
        [*arguments, "--template", "qwen", "--output-prefix", str(tmp_path / "data")],
        standalone_mode=False,
    )
    losses: list[list[float]] = []
    for name, parallel in (("ep2", {"ep": 2}), ("tp2", {"tp": 2})):
        settings = {
            "run": {"dir": str(tmp_path / "runs"), "name": name},
            "model": {"path": str(tmp_path / "hf"), "dtype": "float32"},
            "data": {"train": str(tmp_path / "data")},
            "train": {
                "steps": 3,
                "global_batch": 8,
                "micro_batch": 2,
                "optimizer": {"lr": 1e-3},
                "parallel": parallel,
            },
            "cluster": {"platform": "cpu", "devices_per_node": 2},
        }
        losses.append(
            [case["train/loss"] for case in run_in_process(settings) if "train/loss" in case]
        )
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_expert_biases_are_constant_without_load_balancing(results: dict[str, Result]) -> None:
    biases = [
        name
        for name in results["deepseek v3, ep2"].weights
        if name.endswith("e_score_correction_bias")
    ]
    original = families.weights(MODELS["deepseek v3"])
    assert len(biases) == 2
    for name in biases:
        np.testing.assert_array_equal(
            results["deepseek v3, ep2"].weights[name], original[name].numpy()
        )
