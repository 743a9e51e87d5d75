"""Training on Megatron ranks agrees with transformers and torch's AdamW in every layout."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from msrl.trainer.launch import run_ranks
from poisoned_ranks import LENGTHS, MASKED_OUT, StepResult
from product_ranks import Step, combinations
from support import python_path
from training_cases import (
    BFLOAT16_CASES,
    CHANGING_BATCHES,
    CRITICS,
    DROPOUT_LAYOUTS,
    FIRST_BFLOAT16,
    FULL_CASES,
    LAYOUTS,
    LORAS,
    MODELS,
    NOT_POISONED_BY,
    POISONED,
    POLICIES,
    POLICY_UPDATES,
    RESUMED,
    RESUMES,
    SHARDED_FAMILIES,
    SINGLE_FAMILIES,
    SIZES,
    SPLIT_CRITICS,
    SPLIT_LORAS,
    SPLIT_POLICIES,
    SPREAD,
    TABLE,
    TABLE_LAYOUTS,
    make_model,
    randomize,
    selected_cases,
)
from training_ranks import NUM_SEQUENCES, VALUE_CLIP, VALUE_LR, Result, sequences, value_sequences

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Hugging Face folders with a small random model of each family and a reward model."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        randomize(make_model(name)).save_pretrained(root / name)
    torch.manual_seed(1)
    scored = Qwen2ForSequenceClassification(Qwen2Config(**SIZES, num_labels=1, pad_token_id=None))
    randomize(scored).save_pretrained(root / "scored")
    return {name: root / name for name in (*MODELS, "scored")}


@pytest.fixture(scope="session")
def results(request, folders, tmp_path_factory) -> dict[str, Any]:
    """Results of all cases that the selected tests may need, by name."""
    from msrl.platforms import get

    is_full = any(item.get_closest_marker("full") is not None for item in request.session.items)
    cases = selected_cases(folders, tmp_path_factory.mktemp("saves"), is_full=is_full)
    actual = run_ranks(
        "training_ranks:main",
        cases,
        num_ranks=4,
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    return {result.name: result for result in actual}


def _full_except(names, core) -> list[Any]:
    """Return parameters of a table; those outside of `core` run only in the full tables."""
    return [
        pytest.param(name, marks=() if name in core else pytest.mark.full, id=name)
        for name in names
    ]


def _losses(result: Result) -> list[float]:
    return [report["loss"] for report in result.reports]


def _assert_trained_alike(name: str, actual: np.ndarray, expected: np.ndarray) -> None:
    """Assert that the mean difference of trained weights is small.

    Where a gradient is nearly zero, Adam amplifies rounding to a step of the learning rate, so a
    few entries may differ by that much. All entries of a key bias may differ: in channels without
    rotary embedding it shifts all scores of a query equally, so its gradient is zero.
    """
    assert np.mean(np.abs(actual - expected)) < (2e-4 if name.endswith("k_proj.bias") else 2e-5), (
        name
    )


def _transformers_losses(folder: Path, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train on the same batches with transformers, torch's AdamW and torch's gradient clipping."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = [
        _transformers_step(model, optimizer, list(model.parameters()), step)
        for step in range(steps)
    ]
    return losses, {name: p.detach().numpy() for name, p in model.named_parameters()}


def _transformers_step(model, optimizer, parameters, step: int) -> float:
    """Train on the batch of a step, one sequence at a time, and return the loss."""
    batch, total, count = sequences(step), torch.zeros(()), 0
    for ids, mask in zip(batch.token_ids, batch.loss_masks, strict=True):
        logprobs = model(torch.from_numpy(ids)[None]).logits[0, :-1].log_softmax(-1)
        picked = logprobs.gather(-1, torch.from_numpy(ids[1:])[:, None])[:, 0]
        total = total - picked[torch.from_numpy(mask[1:])].sum()
        count += int(mask[1:].sum())
    loss = total / count
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("family", _full_except(MODELS, SINGLE_FAMILIES))
def test_losses_and_final_weights_agree_with_transformers_and_adamw(results, folders, family):
    steps = len(results[f"single {family}"].reports)
    losses, weights = _transformers_losses(folders[family], steps)
    np.testing.assert_allclose(_losses(results[f"single {family}"]), losses, rtol=0, atol=1e-4)
    for name, value in results[f"single {family}"].weights.items():
        _assert_trained_alike(name, value, weights[name])


@pytest.mark.parametrize("layout", _full_except([*TABLE, "lora tp2"], TABLE_LAYOUTS))
def test_losses_and_gradients_of_several_steps_do_not_depend_on_the_layout(results, layout):
    """Gradients are compared by the norm of their difference, since some elements are near zero."""
    split = results[f"table {layout}"]
    single = results["table lora" if layout == "lora tp2" else "table single"]
    np.testing.assert_allclose(_losses(split), _losses(single), rtol=1e-5)
    _assert_near(split.gradients, single.gradients, 1e-5)


def _assert_near(
    gradients: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], tolerance: float
) -> None:
    """Compare gradients by the norms of their differences."""
    assert gradients.keys() == expected.keys() and len(expected) > 30
    distances = {
        n: np.linalg.norm(gradients[n] - g) / np.linalg.norm(g) for n, g in expected.items()
    }
    largest = sorted(distances.items(), key=lambda pair: -pair[1])[:5]
    assert max(distances.values()) < tolerance, largest


@pytest.mark.parametrize("case", _full_except(BFLOAT16_CASES, FIRST_BFLOAT16))
def test_bfloat16_with_its_padding_has_the_loss_and_the_gradients_of_float32(results, case):
    bfloat16, float32 = results[f"first bf16 {case}"], results[f"first {case.split()[0]}"]
    assert _losses(bfloat16) == pytest.approx(_losses(float32), rel=5e-3)
    _assert_near(bfloat16.gradients, float32.gradients, 0.05)


@pytest.mark.parametrize("layout", _full_except(LAYOUTS, CHANGING_BATCHES))
def test_losses_on_changing_batches_do_not_depend_on_the_layout_or_the_micro_batch(results, layout):
    single, split = results["single qwen2 tied"].reports, results[f"{layout} qwen2 tied"].reports
    for actual, expected in zip(split, single[: len(split)], strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("family", _full_except(("gemma2", "glm"), SHARDED_FAMILIES))
def test_post_norms_and_fused_weights_train_equally_when_sharded(results, family):
    split, single = results[f"tp2 sp {family}"], results[f"single {family}"]
    np.testing.assert_allclose(_losses(split), _losses(single), rtol=1e-5)
    for name, value in split.weights.items():
        _assert_trained_alike(name, value, single.weights[name])


@pytest.mark.parametrize("layout", _full_except(LAYOUTS, POLICY_UPDATES))
def test_a_policy_update_does_not_depend_on_the_layout_or_the_micro_batch(results, layout):
    for split, single in zip(
        results[f"policy {layout}"].reports, results["policy single"].reports, strict=True
    ):
        assert set(split) == set(single)
        for name in single:
            assert split[name] == pytest.approx(single[name], rel=2e-5, abs=2e-7), name


@pytest.mark.parametrize("name", _full_except([name for name, _, _ in POLICIES], SPLIT_POLICIES))
def test_policy_losses_do_not_depend_on_the_parallelism_or_the_micro_batch(results, name):
    for split, single in zip(
        results[f"{name} split"].reports, results[f"{name} single"].reports, strict=True
    ):
        assert set(split) == set(single) and single["grad_norm"] > 1e-4
        for metric in single:
            assert split[metric] == pytest.approx(single[metric], rel=5e-5, abs=5e-7), metric


@pytest.mark.parametrize(
    "spread",
    _full_except([name for name in SPREAD if name != "product single"], SPREAD.keys() - FULL_CASES),
)
@pytest.mark.parametrize("name", combinations(), ids=" ".join)
def test_losses_do_not_depend_on_ranks_micro_batches_and_the_order_of_samples(
    results, name, spread
):
    single, split = (results[case].steps[name] for case in ("product single", spread))
    assert set(split.report) == set(single.report) and single.report["grad_norm"] > 1e-4
    for metric in single.report:
        assert split.report[metric] == pytest.approx(single.report[metric], rel=5e-5, abs=5e-7), (
            metric
        )
    tolerance = 1e-5 * single.report["grad_norm"]
    assert (
        max(abs(split.gradients[key] - value) for key, value in single.gradients.items())
        < tolerance
    )


def test_all_losses_ratios_and_aggregations_have_different_gradients(results):
    steps: dict[Any, Step] = results["product single"].steps
    assert len(steps) == 70 and all(len(step.gradients) > 40 for step in steps.values())
    norms = sorted(step.report["grad_norm"] for step in steps.values())
    assert all(after > before * (1 + 1e-6) for before, after in itertools.pairwise(norms))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2 dp2", "tp2 pp2", "tp2 cp2"])
def test_the_exact_divergence_does_not_depend_on_the_layout(results, layout):
    for split, single in zip(
        results[f"full {layout}"].reports, results["full single"].reports, strict=True
    ):
        assert set(split) == set(single)
        for metric in single:
            assert split[metric] == pytest.approx(single[metric], rel=5e-5, abs=5e-7), metric


@torch.no_grad()
def test_the_exact_divergence_agrees_with_transformers(results, folders):
    from transformers import AutoModelForCausalLM

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(
            folders[name], dtype=torch.float32, attn_implementation="eager"
        )
        for name in ("qwen2", "qwen2 tied")
    )
    batch, divergences = sequences(0, with_fields=True), []
    for ids, mask in zip(batch.token_ids, batch.loss_masks, strict=True):
        p, q = (
            (
                model(torch.from_numpy(ids)[None])
                .logits[0, :-1][torch.from_numpy(mask[1:])]
                .double()
                / 0.7
            ).log_softmax(-1)
            for model in (policy, reference)
        )
        divergences.append((p.exp() * (p - q)).sum(-1))
    exact = torch.cat(divergences).mean().item()
    assert exact > 0.1
    assert results["full single"].reports[0]["kl"] == pytest.approx(exact, rel=1e-4)


@torch.no_grad()
def test_the_divergence_from_teachers_agrees_with_transformers(results, folders):
    """The sum over two teachers of weight times the divergence, as a mean over tokens."""
    from transformers import AutoModelForCausalLM

    def distribution(name: str) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(
            folders[name], dtype=torch.float32, attn_implementation="eager"
        )
        batch, rows = sequences(0, with_fields=True), []
        for ids, mask in zip(batch.token_ids, batch.loss_masks, strict=True):
            logits = model(torch.from_numpy(ids)[None]).logits[0, :-1].double() / 0.7
            rows.append(logits.softmax(-1)[torch.from_numpy(mask[1:])])
        return torch.cat(rows)

    student, total = distribution("qwen2"), 0.0
    for name, weight in (("qwen2 tied", 1.0), ("llama", 0.5)):
        teacher = distribution(name)
        mixture = 0.3 * teacher + 0.7 * student
        terms = 0.3 * teacher * (teacher / mixture).log()
        terms += 0.7 * student * (student / mixture).log()
        total += weight * terms.sum(-1).mean().item()
    assert results["full single"].reports[0]["distill"] == pytest.approx(total, rel=1e-4)


def test_a_resumed_run_is_bitwise_equal(results):
    assert _losses(results["resumed"]) == _losses(results["single qwen2 tied"])[4:]
    for name, value in results["single qwen2 tied"].weights.items():
        np.testing.assert_array_equal(results["resumed"].weights[name], value)


@pytest.mark.parametrize("name", _full_except(RESUMES, RESUMED))
def test_another_layout_resumes_the_same_run(results, name):
    np.testing.assert_allclose(
        _losses(results[name]), _losses(results["single qwen2 tied"])[4:], rtol=1e-5
    )


def test_frozen_parameters_stay_and_others_train_equally_in_all_layouts_and_after_a_resume(
    results, folders
):
    from safetensors.torch import load_file

    before = load_file(folders["qwen2 tied"] / "model.safetensors")
    losses = _losses(results["frozen"])
    np.testing.assert_allclose(_losses(results["frozen tp2 pp2"]), losses, rtol=1e-5)
    np.testing.assert_allclose(_losses(results["frozen resumed dp2"]), losses[2:], rtol=1e-5)
    for name, value in results["frozen tp2 pp2"].weights.items():
        is_frozen = "embed" in name or "mlp" in name or ".layers.0." in name or ".layers.1." in name
        assert np.array_equal(value, before[name].numpy()) == is_frozen, name


@pytest.mark.parametrize(
    "name", _full_except([*LORAS, "lora resumed"], [*SPLIT_LORAS, "lora resumed"])
)
def test_adapters_train_equally_in_every_layout_and_after_a_resume_in_another(results, name):
    single, split = results["lora single"], results[name]
    np.testing.assert_allclose(_losses(split), _losses(single)[-len(split.reports) :], rtol=1e-5)
    for weight, value in single.weights.items():
        # Adam amplifies rounding of nearly zero gradients to steps of the learning rate.
        assert np.mean(np.abs(split.weights[weight] - value)) < 2e-5, weight


def test_adapters_train_as_in_transformers(results, folders):
    """Compare with transformers, explicit W x + s B A x and torch's AdamW, from the same A."""
    from transformers import AutoModelForCausalLM

    from msrl.trainer.model.lora import _initial

    model = AutoModelForCausalLM.from_pretrained(
        folders["qwen2 tied"], dtype=torch.float32, attn_implementation="eager"
    )
    model.requires_grad_(False)
    fused = {
        "q_proj": "linear_qkv",
        "v_proj": "linear_qkv",
        "gate_proj": "linear_fc1",
        "up_proj": "linear_fc1",
        "o_proj": "linear_proj",
    }
    fused["down_proj"] = "linear_fc2"
    factors: dict[str, torch.Tensor] = {}

    def adapt(linear: torch.nn.Linear, a: torch.Tensor, b: torch.Tensor) -> None:
        linear.register_forward_hook(
            lambda module, inputs, output: output + 2.0 * (inputs[0] @ a.T) @ b.T
        )

    for name, linear in model.named_modules():
        last = name.rsplit(".", 1)[-1]
        if last in fused:
            block = "mlp" if "mlp" in name else "self_attention"
            key = f"decoder.layers.{name.split('.')[2]}.{block}.{fused[last]}.weight"
            if key not in factors:
                factors[key] = _initial(4, linear.in_features, 0, key).requires_grad_()
            factors[name] = torch.zeros(linear.out_features, 4, requires_grad=True)
            adapt(linear, factors[key], factors[name])
    optimizer = torch.optim.AdamW(
        factors.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01
    )
    losses = [
        _transformers_step(model, optimizer, list(factors.values()), step) for step in range(5)
    ]
    np.testing.assert_allclose(_losses(results["lora single"]), losses, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "start", "steps"),
    [
        ("single", "qwen2 tied", 4),
        pytest.param("scored", "scored", 3, marks=pytest.mark.full),
    ],
)
def test_a_critic_trains_as_a_transformers_model_with_a_score_per_token(
    results, folders, name, start, steps
):
    """The classifier's head scores every hidden state; `_value_losses` is an independent loss."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        folders[start], dtype=torch.float32, num_labels=1
    )
    if name == "single":
        torch.nn.init.zeros_(model.score.weight)
    matrices, vectors = (
        [p for p in model.parameters() if (p.dim() > 1) == big] for big in (True, False)
    )
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=VALUE_LR, betas=(0.9, 0.95), eps=1e-8)
    for step, report in enumerate(results[f"critic {name}"].reports):
        loss, clipped, squares = _value_losses(model, value_sequences(step))
        assert report["value_loss"] == pytest.approx(loss.item(), rel=2e-4, abs=1e-6)
        assert report["value_clip_fraction"] == pytest.approx(clipped, abs=0.02)
        assert report["value_squares"] == pytest.approx(squares, rel=1e-3, abs=1e-9)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for weight, value in model.named_parameters():
        _assert_trained_alike(
            weight, results[f"critic {name}"].weights[f"critic.{weight}"], value.detach().numpy()
        )
    assert len(results[f"critic {name}"].reports) == steps and report["value_squares"] > 1e-3


def _value_losses(model, batch) -> tuple[torch.Tensor, float, float]:
    """Return mean loss, fraction of clipped tokens and sum of squared values of trained tokens."""
    losses, clipped, squares = [], [], 0.0
    for ids, mask, old, returns in zip(
        batch.token_ids, batch.loss_masks, *batch.fields.values(), strict=True
    ):
        hidden = model.model(torch.from_numpy(ids)[None]).last_hidden_state[0, :-1]
        rows = torch.from_numpy(mask[1:])
        values = model.score(hidden)[rows, 0]
        before, target = (torch.from_numpy(field[1:])[rows] for field in (old, returns))
        bounded = torch.minimum(torch.maximum(values, before - VALUE_CLIP), before + VALUE_CLIP)
        plain, clipped_loss = (values - target) ** 2 / 2, (bounded - target) ** 2 / 2
        losses.append(torch.maximum(plain, clipped_loss))
        clipped.append((clipped_loss > plain).float())
        squares += (values**2).sum().item()
    return torch.cat(losses).mean(), torch.cat(clipped).mean().item(), squares


@pytest.mark.parametrize("layout", _full_except(CRITICS, SPLIT_CRITICS))
def test_a_critic_trains_equally_in_every_layout_and_does_not_change_the_policy(results, layout):
    single = results["critic single" if CRITICS[layout].dp == 2 else "critic scored"]
    for split, expected in zip(results[f"critic {layout}"].reports, single.reports, strict=False):
        assert set(split) == set(expected)
        for name, value in expected.items():
            assert split[name] == pytest.approx(value, rel=1e-4, abs=1e-7), name
    np.testing.assert_allclose(
        _losses(single), _losses(results["single qwen2 tied"])[: len(single.reports)], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("resumed", "saved"),
    [
        ("critic resumed", "critic single"),
        pytest.param("critic bf16 resumed", "critic bf16", marks=pytest.mark.full),
    ],
)
def test_a_resumed_critic_is_bitwise_equal(results, resumed, saved):
    assert results[resumed].reports == results[saved].reports[2:]
    for name, value in results[saved].weights.items():
        np.testing.assert_array_equal(results[resumed].weights[name], value)


@pytest.mark.full
def test_another_layout_resumes_the_same_critic(results):
    for actual, expected in zip(
        results["critic resumed tp2 pp2"].reports, results["critic single"].reports[2:], strict=True
    ):
        for name in ("loss", "value_loss", "value_grad_norm", "value_squares"):
            assert actual[name] == pytest.approx(expected[name], rel=1e-3), name


@pytest.mark.full
@pytest.mark.parametrize("name", DROPOUT_LAYOUTS)
def test_adapter_dropout_is_the_same_when_layers_are_recomputed(results, name):
    """The ranks themselves check that dropout keeps their copies bitwise equal."""
    assert _losses(results[f"{name} recomputed"]) == _losses(results[name])
    without = _losses(results["lora single"])[:3]
    # B is zero before the first update.
    assert without[0] == pytest.approx(_losses(results[name])[0], rel=1e-6)
    assert abs(without[2] - _losses(results[name])[2]) > 1e-4


def test_an_update_with_a_gradient_that_is_not_finite_changes_nothing(results):
    first, *later = results["poisoned"].reports
    assert first["skipped"] == 1 and not np.isfinite(first["grad_norm"])
    assert later == results["not poisoned"].reports
    for name, value in results["not poisoned"].weights.items():
        np.testing.assert_array_equal(results["poisoned"].weights[name], value)


def test_a_checkpoint_from_before_the_first_update_resets_the_optimizer(results):
    np.testing.assert_allclose(
        _losses(results["resumed unmoved"]), _losses(results["not poisoned"]), rtol=1e-5
    )


def test_bf16_keeps_fp32_masters_through_a_resume_and_close_to_fp32(results):
    assert _losses(results["bf16 resumed"]) == _losses(results["bf16"])[3:]
    np.testing.assert_allclose(
        _losses(results["bf16"]), _losses(results["single qwen2"])[:6], rtol=2e-2
    )


@pytest.mark.full
def test_bf16_of_four_ranks_is_close_to_one_rank(results):
    np.testing.assert_allclose(
        _losses(results["bf16 tp2 dp2"]), _losses(results["bf16"]), rtol=1e-2
    )


def test_the_batches_hold_sequences_of_many_lengths():
    assert len({len(ids) for ids in sequences(0).token_ids}) > NUM_SEQUENCES // 2


# --- invalid values in padding, masked positions and other samples have no effect


def _assert_same(actual: StepResult, expected: StepResult) -> None:
    assert actual.loss == expected.loss
    for name, gradient in expected.gradients.items():
        np.testing.assert_array_equal(actual.gradients[name], gradient, err_msg=name)


def _trained_logprobs(result: StepResult) -> np.ndarray:
    return np.concatenate(
        [
            row
            for number, row in enumerate(np.split(result.logprobs, np.cumsum(LENGTHS)[:-1]))
            if number not in MASKED_OUT
        ]
    )


@pytest.mark.parametrize("name", _full_except(POISONED, NOT_POISONED_BY))
def test_masked_samples_do_not_change_the_loss_and_the_gradients_of_others(results, name):
    steps = results[name].steps
    assert np.linalg.norm(list(steps["clean"].gradients.values())[-1]) > 0
    _assert_same(steps["neighbors large"], steps["clean"])
    # Gradients of matrices are NaN with NaN neighbors, because 0 times NaN is NaN.
    for poison in ("neighbors large", "neighbors nan"):
        assert steps[poison].loss == steps["clean"].loss
        np.testing.assert_array_equal(
            _trained_logprobs(steps[poison]), _trained_logprobs(steps["clean"])
        )
    assert not np.isfinite(steps["neighbors nan"].logprobs).all()


@pytest.mark.parametrize("name", _full_except(POISONED, NOT_POISONED_BY))
def test_nan_in_the_padding_embedding_and_in_masked_fields_has_no_effect(results, name):
    steps = results[name].steps
    _assert_same(steps["padding nan"], steps["clean"])
    np.testing.assert_array_equal(steps["padding nan"].logprobs, steps["clean"].logprobs)
    _assert_same(steps["masked fields nan"], steps["clean policy"])
