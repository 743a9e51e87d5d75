"""Training on Megatron ranks: all layouts agree with each other and with transformers and AdamW."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from msrl.trainer.launch import run_ranks
from poisoned_ranks import LENGTHS, MASKED_OUT, Observation
from product_ranks import Step, combinations
from support import python_path
from training_cases import (
    BF16_CASES,
    CRITICS,
    DROPOUT_LAYOUTS,
    LAYOUTS,
    LORAS,
    POISONED,
    POLICIES,
    PRODUCTS,
    SIZES,
    STEPS_BESIDE_TRANSFORMERS,
    TABLE,
    all_cases,
    models,
    randomize,
)  # fmt: skip
from training_ranks import NUM_SEQUENCES, VALUE_CLIP, VALUE_LR, Result, sequences, value_sequences

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Return Hugging Face folders with a small random model of each family and a reward model."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    root = tmp_path_factory.mktemp("models")
    for name, model in models().items():
        randomize(model).save_pretrained(root / name)
    torch.manual_seed(1)
    scored = Qwen2ForSequenceClassification(Qwen2Config(**SIZES, num_labels=1, pad_token_id=None))
    randomize(scored).save_pretrained(root / "scored")
    return {name: root / name for name in (*models(), "scored")}


@pytest.fixture(scope="session")
def results(folders, tmp_path_factory) -> dict[str, Any]:
    from msrl.platforms import get

    cases = all_cases(folders, tmp_path_factory.mktemp("saves"))
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


def _assert_weights_close(name: str, actual: np.ndarray, expected: np.ndarray) -> None:
    """Assert a small mean difference of trained weights.

    For near-zero gradients Adam amplifies rounding errors to the size of the learning rate, so a
    few entries may differ. For a key's bias all entries may: without rotation it adds the same
    value to all scores of a query, so its gradient is zero.
    """
    tolerance = 2e-4 if name.endswith("k_proj.bias") else 2e-5
    assert np.mean(np.abs(actual - expected)) < tolerance, name


def _transformers_losses(folder: Path, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train in transformers on the same batches with torch's AdamW and gradient clipping."""
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
    """Train on one step's batch, one sequence at a time, and return the loss."""
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


@pytest.mark.parametrize("family", ["qwen2", "qwen2 tied", "qwen3", "llama", "gemma2", "glm"])
def test_losses_and_final_weights_agree_with_transformers_and_adamw(results, folders, family):
    losses, weights = _transformers_losses(
        folders[family], STEPS_BESIDE_TRANSFORMERS.get(family, 8)
    )
    np.testing.assert_allclose(_losses(results[f"unsharded {family}"]), losses, rtol=0, atol=1e-4)
    for name, value in results[f"unsharded {family}"].weights.items():
        _assert_weights_close(name, value, weights[name])


@pytest.mark.parametrize("layout", [*TABLE, "lora tp2"])
def test_ten_losses_and_the_gradient_of_every_tensor_agree_with_the_unsharded_run(results, layout):
    """Norms of differences are compared, since single elements of a gradient may cross zero."""
    sharded, unsharded = (
        results[f"table {layout}"],
        results["table lora" if layout == "lora tp2" else "table unsharded"],
    )
    np.testing.assert_allclose(_losses(sharded), _losses(unsharded), rtol=1e-5)
    assert sharded.gradients.keys() == unsharded.gradients.keys() and len(unsharded.gradients) > 30
    distances = {
        n: np.linalg.norm(sharded.gradients[n] - g) / np.linalg.norm(g)
        for n, g in unsharded.gradients.items()
    }
    assert max(distances.values()) < 1e-5, sorted(distances.items(), key=lambda pair: -pair[1])[:5]


@pytest.mark.parametrize("case", BF16_CASES)
def test_padded_bfloat16_batches_have_nearly_the_loss_and_the_gradients_of_float32(results, case):
    half, unsharded = results[f"first bf16 {case}"], results[f"first {case.split()[0]}"]
    assert _losses(half) == pytest.approx(_losses(unsharded), rel=5e-3)
    assert half.gradients.keys() == unsharded.gradients.keys() and len(unsharded.gradients) > 30
    distances = {
        n: np.linalg.norm(half.gradients[n] - g) / np.linalg.norm(g)
        for n, g in unsharded.gradients.items()
    }
    assert max(distances.values()) < 0.05, sorted(distances.items(), key=lambda pair: -pair[1])[:5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_on_changing_batches_do_not_depend_on_the_layout_or_the_micro_batch(results, layout):
    unsharded = results["unsharded qwen2 tied"].reports
    sharded = results[f"{layout} qwen2 tied"].reports
    for report, expected in zip(sharded, unsharded[: len(sharded)], strict=True):
        assert report["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "glm"])
def test_sharded_post_norms_and_fused_weights_train_like_unsharded_ones(results, family):
    sharded, unsharded = results[f"tp2 sp {family}"], results[f"unsharded {family}"]
    np.testing.assert_allclose(_losses(sharded), _losses(unsharded), rtol=1e-5)
    for name, value in sharded.weights.items():
        _assert_weights_close(name, value, unsharded.weights[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_policy_update_does_not_depend_on_the_layout_or_the_micro_batch(results, layout):
    for sharded, unsharded in zip(
        results[f"policy {layout}"].reports, results["policy unsharded"].reports, strict=True
    ):
        assert set(sharded) == set(unsharded)
        for name in unsharded:
            assert sharded[name] == pytest.approx(unsharded[name], rel=2e-5, abs=2e-7), name


@pytest.mark.parametrize("name", [name for name, _, _ in POLICIES])
def test_policy_losses_do_not_depend_on_tp_cp_dp_or_the_micro_batch(results, name):
    for sharded, unsharded in zip(
        results[f"{name} sharded"].reports, results[f"{name} unsharded"].reports, strict=True
    ):
        assert set(sharded) == set(unsharded) and unsharded["grad_norm"] > 1e-4
        for metric in unsharded:
            assert sharded[metric] == pytest.approx(unsharded[metric], rel=5e-5, abs=5e-7), metric


@pytest.mark.parametrize("spread", [name for name in PRODUCTS if name != "product unsharded"])
@pytest.mark.parametrize("name", combinations(), ids=" ".join)
def test_losses_do_not_depend_on_ranks_micro_batches_or_the_order_of_samples(results, name, spread):
    unsharded, sharded = (results[of].steps[name] for of in ("product unsharded", spread))
    assert set(sharded.report) == set(unsharded.report) and unsharded.report["grad_norm"] > 1e-4
    for metric in unsharded.report:
        assert sharded.report[metric] == pytest.approx(
            unsharded.report[metric], rel=5e-5, abs=5e-7
        ), metric
    tolerance = 1e-5 * unsharded.report["grad_norm"]
    assert (
        max(abs(sharded.gradients[key] - value) for key, value in unsharded.gradients.items())
        < tolerance
    )


def test_every_combination_of_loss_ratio_and_aggregation_has_a_different_gradient(results):
    steps: dict[Any, Step] = results["product unsharded"].steps
    assert len(steps) == 44 and all(len(step.gradients) > 40 for step in steps.values())
    norms = sorted(step.report["grad_norm"] for step in steps.values())
    assert all(after > before * (1 + 1e-6) for before, after in itertools.pairwise(norms))


@pytest.mark.parametrize("sharded", ["tp2 dp2", "tp2 pp2", "tp2 cp2"])
def test_the_exact_kl_divergence_does_not_depend_on_the_layout(results, sharded):
    for report, unsharded in zip(
        results[f"full {sharded}"].reports, results["full unsharded"].reports, strict=True
    ):
        assert set(report) == set(unsharded)
        for metric in unsharded:
            assert report[metric] == pytest.approx(unsharded[metric], rel=5e-5, abs=5e-7), metric


@torch.no_grad()
def test_the_exact_kl_divergence_agrees_with_transformers(results, folders):
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
    assert results["full unsharded"].reports[0]["kl"] == pytest.approx(exact, rel=1e-4)


def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(results):
    assert _losses(results["resumed"]) == _losses(results["unsharded qwen2 tied"])[4:]
    for name, value in results["unsharded qwen2 tied"].weights.items():
        np.testing.assert_array_equal(results["resumed"].weights[name], value)


@pytest.mark.parametrize(
    "name",
    [
        "resumed tp2 pp2",
        "resumed pp2 cp2",
        "resumed uneven from vpp",
        "resumed vpp from vpp",
        "resumed dp2 from tp2 pp2",
    ],
)
def test_a_run_can_be_resumed_in_another_layout(results, name):
    np.testing.assert_allclose(
        _losses(results[name]), _losses(results["unsharded qwen2 tied"])[4:], rtol=1e-5
    )


def test_frozen_parameters_stay_constant_in_every_layout_and_after_a_resume(results, folders):
    from safetensors.torch import load_file

    before = load_file(folders["qwen2 tied"] / "model.safetensors")
    losses = _losses(results["frozen"])
    np.testing.assert_allclose(_losses(results["frozen tp2 pp2"]), losses, rtol=1e-5)
    np.testing.assert_allclose(_losses(results["frozen resumed dp2"]), losses[2:], rtol=1e-5)
    for name, value in results["frozen tp2 pp2"].weights.items():
        is_frozen = "embed" in name or "mlp" in name or ".layers.0." in name or ".layers.1." in name
        assert np.array_equal(value, before[name].numpy()) == is_frozen, name


@pytest.mark.parametrize("name", [*LORAS, "lora resumed"])
def test_lora_training_does_not_depend_on_the_layout_even_across_a_resume(results, name):
    unsharded, sharded = results["lora unsharded"], results[name]
    np.testing.assert_allclose(
        _losses(sharded), _losses(unsharded)[-len(sharded.reports) :], rtol=1e-5
    )
    for weight, value in unsharded.weights.items():
        # Adam amplifies rounding errors of near-zero gradients to the size of the learning rate.
        assert np.mean(np.abs(sharded.weights[weight] - value)) < 2e-5, weight


def test_lora_training_agrees_with_transformers(results, folders):
    """The reference computes W x + s B A x in transformers, with msrl's initial values of A."""
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
    np.testing.assert_allclose(_losses(results["lora unsharded"]), losses, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "start", "steps"), [("unsharded", "qwen2 tied", 4), ("scored", "scored", 3)]
)
def test_critic_training_agrees_with_a_token_classifier_in_transformers(
    results, folders, name, start, steps
):
    """The reference applies the classifier head to every hidden state."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        folders[start], dtype=torch.float32, num_labels=1
    )
    if name == "unsharded":
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
        _assert_weights_close(
            weight, results[f"critic {name}"].weights[f"critic.{weight}"], value.detach().numpy()
        )
    assert len(results[f"critic {name}"].reports) == steps and report["value_squares"] > 1e-3


def _value_losses(model, batch) -> tuple[torch.Tensor, float, float]:
    """Return mean loss, share of clipped tokens and sum of squared values of the trained tokens."""
    losses, clipped, squares = [], [], 0.0
    for ids, mask, old, returns in zip(
        batch.token_ids, batch.loss_masks, *batch.fields.values(), strict=True
    ):
        hidden = model.model(torch.from_numpy(ids)[None]).last_hidden_state[0, :-1]
        rows = torch.from_numpy(mask[1:])
        values = model.score(hidden)[rows, 0]
        old_values, targets = (torch.from_numpy(field[1:])[rows] for field in (old, returns))
        clipped_values = torch.minimum(
            torch.maximum(values, old_values - VALUE_CLIP), old_values + VALUE_CLIP
        )
        plain, sharded = (values - targets) ** 2 / 2, (clipped_values - targets) ** 2 / 2
        losses.append(torch.maximum(plain, sharded))
        clipped.append((sharded > plain).float())
        squares += (values**2).sum().item()
    return torch.cat(losses).mean(), torch.cat(clipped).mean().item(), squares


@pytest.mark.parametrize("layout", CRITICS)
def test_critic_training_depends_on_no_layout_and_does_not_change_the_policy(results, layout):
    unsharded = results["critic unsharded" if CRITICS[layout].dp == 2 else "critic scored"]
    for sharded, expected in zip(
        results[f"critic {layout}"].reports, unsharded.reports, strict=False
    ):
        assert set(sharded) == set(expected)
        for name, value in expected.items():
            assert sharded[name] == pytest.approx(value, rel=1e-4, abs=1e-7), name
    np.testing.assert_allclose(
        _losses(unsharded),
        _losses(results["unsharded qwen2 tied"])[: len(unsharded.reports)],
        rtol=1e-6,
    )


@pytest.mark.parametrize(
    ("resumed", "saved"),
    [("critic resumed", "critic unsharded"), ("critic bf16 resumed", "critic bf16")],
)
def test_a_resumed_critic_is_bitwise_equal_to_an_uninterrupted_one(results, resumed, saved):
    assert results[resumed].reports == results[saved].reports[2:]
    for name, value in results[saved].weights.items():
        np.testing.assert_array_equal(results[resumed].weights[name], value)


def test_a_critic_can_be_resumed_in_another_layout(results):
    for report, expected in zip(
        results["critic resumed tp2 pp2"].reports,
        results["critic unsharded"].reports[2:],
        strict=True,
    ):
        for name in ("loss", "value_loss", "value_grad_norm", "value_squares"):
            assert report[name] == pytest.approx(expected[name], rel=1e-3), name


@pytest.mark.parametrize("name", DROPOUT_LAYOUTS)
def test_recomputed_layers_use_the_same_lora_dropout_masks(results, name):
    """The ranks also check that replicated weights stay bitwise equal."""
    assert _losses(results[f"{name} recomputed"]) == _losses(results[name])
    undropped = _losses(results["lora unsharded"])[:3]
    # B is zero before the first update.
    assert undropped[0] == pytest.approx(_losses(results[name])[0], rel=1e-6)
    assert abs(undropped[2] - _losses(results[name])[2]) > 1e-4


def test_an_update_with_a_non_finite_gradient_changes_nothing(results):
    first, *later_reports = results["poisoned"].reports
    assert first["skipped"] == 1 and not np.isfinite(first["grad_norm"])
    assert later_reports == results["not poisoned"].reports
    for name, value in results["not poisoned"].weights.items():
        np.testing.assert_array_equal(results["poisoned"].weights[name], value)


def test_a_checkpoint_before_the_first_update_resumes_with_a_new_optimizer(results):
    np.testing.assert_allclose(
        _losses(results["resumed unmoved"]), _losses(results["not poisoned"]), rtol=1e-5
    )


def test_bf16_resumes_its_fp32_main_parameters_and_stays_close_to_fp32(results):
    assert _losses(results["bf16 resumed"]) == _losses(results["bf16"])[3:]
    np.testing.assert_allclose(
        _losses(results["bf16"]), _losses(results["unsharded qwen2"])[:6], rtol=2e-2
    )
    np.testing.assert_allclose(
        _losses(results["bf16 tp2 dp2"]), _losses(results["bf16"]), rtol=1e-2
    )


def test_the_batches_have_sequences_of_many_lengths():
    assert len({len(ids) for ids in sequences(0).token_ids}) > NUM_SEQUENCES // 2


# Invalid values in padding and masked samples.


def _assert_same(actual: Observation, expected: Observation) -> None:
    assert actual.loss == expected.loss
    for name, gradient in expected.gradients.items():
        np.testing.assert_array_equal(actual.gradients[name], gradient, err_msg=name)


def _trained_logprobs(observation: Observation) -> np.ndarray:
    return np.concatenate(
        [
            row
            for number, row in enumerate(np.split(observation.logprobs, np.cumsum(LENGTHS)[:-1]))
            if number not in MASKED_OUT
        ]
    )


@pytest.mark.parametrize("name", POISONED)
def test_masked_samples_do_not_change_the_loss_and_gradients_of_other_samples(results, name):
    observations = results[name].observations
    assert np.linalg.norm(list(observations["clean"].gradients.values())[-1]) > 0
    _assert_same(observations["masked samples large"], observations["clean"])
    # Gradients of matrices are NaN in the second case, since 0 * NaN is NaN.
    for poison in ("masked samples large", "masked samples nan"):
        assert observations[poison].loss == observations["clean"].loss
        np.testing.assert_array_equal(
            _trained_logprobs(observations[poison]), _trained_logprobs(observations["clean"])
        )
    assert not np.isfinite(observations["masked samples nan"].logprobs).all()


@pytest.mark.parametrize("name", POISONED)
def test_nan_in_padding_and_in_masked_fields_does_not_change_loss_and_gradients(results, name):
    observations = results[name].observations
    _assert_same(observations["padding nan"], observations["clean"])
    np.testing.assert_array_equal(
        observations["padding nan"].logprobs, observations["clean"].logprobs
    )
    _assert_same(observations["masked fields nan"], observations["clean policy"])
