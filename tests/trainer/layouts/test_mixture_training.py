"""Training of mixture-of-experts models agrees with transformers in every layout."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import families
from mixture_families import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, GPT_OSS, MIXTURES, QWEN3_MOE
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
        **DEEPSEEK_V2,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt-oss": {**GPT_OSS, "swiglu_limit": 7.0},
    # The gradient is not continuous at the clamp, so only one step can be compared.
    "gpt-oss, clamped": GPT_OSS,
    # With two stages, the first one has no experts.
    "deepseek v3": {**DEEPSEEK_V3, "first_k_dense_replace": 2},
    "deepseek v3.2": DEEPSEEK_V32,
    "glm 5.2": MIXTURES["glm 5.2"].config,
    "deepseek v3.2, odd heads": {
        **DEEPSEEK_V32,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "index_n_heads": 5,
        "index_topk": 5,
    },
    "deepseek v3.2, all keys": {**DEEPSEEK_V32, "index_topk": 64},
}
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

FAST_PAIRS = (("deepseek v3", "ep2"), ("gpt-oss", "tp2 ep2 etp1"))
FAST_NAMES = tuple(name for name, _ in FAST_PAIRS)
TRAINED = ("qwen3 moe", "deepseek v2 lite", "gpt-oss", "deepseek v3")
SLOW_PAIRS = tuple(
    (name, layout) for name in TRAINED for layout in LAYOUTS if (name, layout) not in FAST_PAIRS
)
COMPARED = (
    ("qwen3 moe", "pp2 vpp1 ep2"),
    ("gpt-oss, clamped", "tp2 ep2 etp2"),
    ("deepseek v3", "tp2 ep2 etp1"),
)
ALSO_COMPARED = (
    ("qwen3 moe", "ep2"),
    ("gpt-oss, clamped", "tp2 ep2 etp1"),
    *[
        ("qwen3 moe", layout)
        for layout in ("tp2 ep2 etp1", "tp2 ep2 etp2", "pp2 ep2, uneven", "pp2 ep2, empty layers")
    ],
    *[("gpt-oss, clamped", layout) for layout in ("ep2", "pp2 vpp1 ep2")],
    *[
        ("deepseek v3", layout)
        for layout in (
            "tp2",
            "pp2 vpp1 ep2",
            "pp2 ep2, uneven",
            "pp2 ep2, empty layers",
            "tp2 cp2 ep2",
        )
    ],
    ("deepseek v2 lite", "tp2 ep2 etp2"),
    ("deepseek v2 lite", "pp2 vpp1 ep2"),
    ("deepseek v3.2", "tp2 ep2 etp1"),
    ("glm 5.2", "ep2"),
    ("deepseek v3.2, odd heads", "ep2"),
    ("deepseek v3.2, all keys", "tp2 ep2 etp1"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders with a small random model of each kind."""
    root = tmp_path_factory.mktemp("mixtures")
    return {name: families.save_model(root / name, config) for name, config in MODELS.items()}


def _row(name: str, layout: str, folders: dict[str, Path]) -> Case:
    case = Case("", Path()) if layout == "single" else LAYOUTS[layout]
    return dataclasses.replace(case, name=f"{name}, {layout}", model=folders[name], steps=STEPS)


def _first_step(name: str, layout: str, folders: dict[str, Path], saves: Path) -> Case:
    row = _row(name, layout, folders)
    return dataclasses.replace(
        row,
        name=f"{row.name}, first step",
        steps=1,
        save_at=1,
        save_to=saves / f"first, {row.name}",
    )


def _fast_cases(folders: dict[str, Path], saves: Path) -> list[Case]:
    model = folders["deepseek v3"]
    return [
        *[_row(name, "single", folders) for name in FAST_NAMES],
        *[_row(name, layout, folders) for name, layout in FAST_PAIRS],
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
                ("resumed tp2 ep2 etp1 from ep2", Layout(tp=2, ep=2, etp=1)),
            )
        ],
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


def _more_resumed(folders: dict[str, Path], saves: Path) -> list[Case]:
    """Return a run that resumes on fewer ranks, and one that resumes with other stages."""
    model = folders["deepseek v3"]
    return [
        Case(
            "resumed single from ep2",
            model,
            first_step=4,
            steps=STEPS,
            resume_from=saves / "ep2",
            critic=model,
        ),
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
    ]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def results(folders: dict[str, Path], saves: Path) -> dict[str, Result]:
    return _train(_fast_cases(folders, saves))


@pytest.fixture(scope="module")
def more_results(
    results: dict[str, Result], folders: dict[str, Path], saves: Path
) -> dict[str, Result]:
    """Return further results; runs resume from checkpoints of `results`."""
    cases = [_first_step(name, layout, folders, saves) for name, layout in ALSO_COMPARED]
    cases += [_row(name, layout, folders) for name, layout in SLOW_PAIRS]
    cases += [_row(name, "single", folders) for name in TRAINED if name not in FAST_NAMES]
    return _train([*cases, *_more_resumed(folders, saves)])


def _train(cases: list[Case]) -> dict[str, Result]:
    """Train all cases with one start of the ranks; return the results by name."""
    from msrl.platforms import get
    from msrl.trainer.launch import run_ranks

    reports = run_ranks(
        "training_ranks:main",
        cases,
        num_ranks=4,
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    return {result.name: result for result in reports}


def _losses(result: Result) -> list[float]:
    return [report["loss"] for report in result.reports]


def _transformers_losses(folder: Path) -> list[float]:
    """Train on the same batches with transformers, torch's AdamW and torch's gradient clipping."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    # transformers stacks the biases of all experts in one matrix.
    vectors = {p for name, p in model.named_parameters() if p.dim() == 1 or name.endswith("_bias")}
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
def test_the_gradient_of_every_tensor_agrees_with_transformers_in_more_layouts(
    more_results: dict[str, Result], saves: Path, folders: dict[str, Path], name: str, layout: str
) -> None:
    assert f"{name}, {layout}, first step" in more_results
    assert_same_gradients(
        gradients_of_first_step(saves / f"first, {name}, {layout}"),
        transformers_gradients(folders[name]),
    )


@pytest.mark.parametrize("name", FAST_NAMES)
def test_losses_agree_with_transformers_and_adamw(
    results: dict[str, Result], folders: dict[str, Path], name: str
) -> None:
    _assert_transformers_losses(results[f"{name}, single"], folders[name])


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in TRAINED if name not in FAST_NAMES])
def test_losses_of_more_models_agree_with_transformers_and_adamw(
    more_results: dict[str, Result], folders: dict[str, Path], name: str
) -> None:
    _assert_transformers_losses(more_results[f"{name}, single"], folders[name])


def _assert_transformers_losses(result: Result, folder: Path) -> None:
    np.testing.assert_allclose(_losses(result), _transformers_losses(folder), rtol=0, atol=1e-4)


def _assert_same(actual: Result, single: Result, steps: slice = slice(None)) -> None:
    """Assert equal losses (1e-5), gradient norms (1e-4) and weights (2e-5 of their norm).

    The tolerances allow for rounding errors, which AdamW amplifies. One element in 5,000 may differ
    by the size of the steps: where a gradient is nearly 0, its sign is rounding.
    """
    np.testing.assert_allclose(_losses(actual), _losses(single)[steps], rtol=1e-5)
    norms = [[report["grad_norm"] for report in result.reports] for result in (actual, single)]
    np.testing.assert_allclose(norms[0], norms[1][steps], rtol=1e-4)
    assert {
        name for name in actual.weights if not name.startswith("critic.")
    } == single.weights.keys()
    for name, value in single.weights.items():
        differences = np.sort(np.abs(actual.weights[name] - value).ravel())
        most = differences[: -max(1, differences.size // 5000)]
        distance = np.linalg.norm(most) / max(np.linalg.norm(value), 1e-30)
        assert distance < 2e-5, (name, distance)
        largest = differences[-1]
        assert largest < 2 * sum(report["lr"] for report in single.reports), (name, largest)


@pytest.mark.parametrize(("name", "layout"), FAST_PAIRS)
def test_a_mixture_trains_equally_in_some_layouts(
    results: dict[str, Result], name: str, layout: str
) -> None:
    _assert_same(results[f"{name}, {layout}"], results[f"{name}, single"])


@pytest.mark.full
@pytest.mark.parametrize(("name", "layout"), SLOW_PAIRS)
def test_all_mixtures_train_equally_in_all_layouts(
    results: dict[str, Result], more_results: dict[str, Result], name: str, layout: str
) -> None:
    both = results | more_results
    _assert_same(both[f"{name}, {layout}"], both[f"{name}, single"])


def test_another_layout_resumes_the_same_run(results: dict[str, Result]) -> None:
    resumed = results["resumed tp2 ep2 etp1 from ep2"]
    _assert_same(resumed, results["deepseek v3, single"], slice(4, None))
    _assert_same_critic(resumed, results["resumed ep2"])


@pytest.mark.full
def test_more_layouts_resume_the_same_run(
    results: dict[str, Result], more_results: dict[str, Result]
) -> None:
    for name in ("resumed single from ep2", "resumed pp2 ep2 from tp2 ep2 etp2"):
        _assert_same(more_results[name], results["deepseek v3, single"], slice(4, None))
    _assert_same_critic(more_results["resumed single from ep2"], results["resumed ep2"])


def _assert_same_critic(result: Result, same_layout: Result) -> None:
    for actual, expected in zip(result.reports, same_layout.reports, strict=True):
        assert expected["value_squares"] > 0
        for metric in ("value_loss", "value_squares", "value_grad_norm"):
            assert actual[metric] == pytest.approx(expected[metric], rel=2e-4), metric


def test_a_resume_in_the_same_layout_is_bitwise_equal(results: dict[str, Result]) -> None:
    assert _losses(results["resumed ep2"]) == _losses(results["deepseek v3, ep2"])[4:]
    for name, value in results["deepseek v3, ep2"].weights.items():
        np.testing.assert_array_equal(results["resumed ep2"].weights[name], value)
    assert _losses(results["bf16 resumed"]) == _losses(results["bf16 ep2"])[2:]


@pytest.mark.full
def test_train_sft_with_expert_parallelism_has_the_losses_of_tensor_parallelism(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    """Two ranks at EP 2 agree with two at TP 2, which shards each expert."""
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
            [row["train/loss"] for row in run_in_process(settings) if "train/loss" in row]
        )
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_biases_of_experts_do_not_change(results: dict[str, Result]) -> None:
    biases = [
        name
        for name in results["deepseek v3, ep2"].weights
        if name.endswith("e_score_correction_bias")
    ]
    before = families.weights(MODELS["deepseek v3"])
    assert len(biases) == 2
    for name in biases:
        np.testing.assert_array_equal(
            results["deepseek v3, ep2"].weights[name], before[name].numpy()
        )
