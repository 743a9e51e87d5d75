"""Training on real Megatron ranks: every layout walks the same path, and it is the path of transformers with torch's AdamW."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from msrl.trainer.launch import run_ranks
from poisoned_ranks import LENGTHS, MASKED_OUT, Seen
from product_ranks import Step, combinations
from support import python_path
from training_cases import (
    CRITICS,
    DROPPED,
    HALVES,
    LAYOUTS,
    LORAS,
    POISONED,
    POLICIES,
    SIZES,
    SPREAD,
    STEPS_BESIDE_TRANSFORMERS,
    TABLE,
    all_cases,
    models,
    randomised,
)  # fmt: skip
from training_ranks import NUM_SEQUENCES, VALUE_CLIP, VALUE_LR, Result, sequences, value_sequences

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A small random model of each family, and a reward model, as Hugging Face folders."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    root = tmp_path_factory.mktemp("models")
    for name, model in models().items():
        randomised(model).save_pretrained(root / name)
    torch.manual_seed(1)
    scored = Qwen2ForSequenceClassification(Qwen2Config(**SIZES, num_labels=1, pad_token_id=None))
    randomised(scored).save_pretrained(root / "scored")
    return {name: root / name for name in (*models(), "scored")}


@pytest.fixture(scope="session")
def results(folders, tmp_path_factory) -> dict[str, Any]:
    from msrl.platforms import get

    cases = all_cases(folders, tmp_path_factory.mktemp("saves"))
    found = run_ranks(
        "training_ranks:main",
        cases,
        num_ranks=4,
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    return {result.name: result for result in found}


def _losses(result: Result) -> list[float]:
    return [report["loss"] for report in result.reports]


def _assert_trained_alike(name: str, found: np.ndarray, expected: np.ndarray) -> None:
    """Adam turns rounding into a step of the learning rate where a gradient is nearly zero, so a few entries may differ by that.

    Of a key's bias all may: where channels are not rotated it moves all scores of a query alike, and its gradient is zero.
    """
    assert np.mean(np.abs(found - expected)) < (2e-4 if name.endswith("k_proj.bias") else 2e-5), (
        name
    )


def _transformers_losses(folder: Path, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same batches through transformers, one sequence at a time, with torch's own AdamW and clipping."""
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
    """One step on the batch of that number, one sequence at a time; its loss."""
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
def test_losses_and_final_weights_are_those_of_transformers_with_adamw(results, folders, family):
    losses, weights = _transformers_losses(
        folders[family], STEPS_BESIDE_TRANSFORMERS.get(family, 8)
    )
    np.testing.assert_allclose(_losses(results[f"whole {family}"]), losses, rtol=0, atol=1e-4)
    for name, value in results[f"whole {family}"].weights.items():
        _assert_trained_alike(name, value, weights[name])


@pytest.mark.parametrize("layout", [*TABLE, "lora tp2"])
def test_ten_steps_on_one_batch_and_the_gradient_of_every_tensor_after_them_are_those_of_the_unsplit_run(
    results, layout
):
    """A tensor's gradients are compared by the norm of their difference: single elements of a gradient cross zero."""
    cut, whole = (
        results[f"table {layout}"],
        results["table lora" if layout == "lora tp2" else "table whole"],
    )
    np.testing.assert_allclose(_losses(cut), _losses(whole), rtol=1e-5)
    assert cut.gradients.keys() == whole.gradients.keys() and len(whole.gradients) > 30
    distances = {
        n: np.linalg.norm(cut.gradients[n] - g) / np.linalg.norm(g)
        for n, g in whole.gradients.items()
    }
    assert max(distances.values()) < 1e-5, sorted(distances.items(), key=lambda pair: -pair[1])[:5]


@pytest.mark.parametrize("case", HALVES)
def test_bfloat16_with_its_padding_has_the_loss_and_the_gradients_of_float32(results, case):
    half, whole = results[f"first bf16 {case}"], results[f"first {case.split()[0]}"]
    assert _losses(half) == pytest.approx(_losses(whole), rel=5e-3)
    assert half.gradients.keys() == whole.gradients.keys() and len(whole.gradients) > 30
    distances = {
        n: np.linalg.norm(half.gradients[n] - g) / np.linalg.norm(g)
        for n, g in whole.gradients.items()
    }
    assert max(distances.values()) < 0.05, sorted(distances.items(), key=lambda pair: -pair[1])[:5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_on_changing_batches_do_not_depend_on_the_layout_or_the_micro_batch(results, layout):
    whole, cut = results["whole qwen2 tied"].reports, results[f"{layout} qwen2 tied"].reports
    for found, expected in zip(cut, whole[: len(cut)], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "glm"])
def test_norms_behind_each_part_and_packed_weights_train_alike_when_cut(results, family):
    cut, whole = results[f"tp2 sp {family}"], results[f"whole {family}"]
    np.testing.assert_allclose(_losses(cut), _losses(whole), rtol=1e-5)
    for name, value in cut.weights.items():
        _assert_trained_alike(name, value, whole.weights[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_policy_update_does_not_depend_on_the_layout_or_the_micro_batch(results, layout):
    for cut, whole in zip(
        results[f"policy {layout}"].reports, results["policy whole"].reports, strict=True
    ):
        assert set(cut) == set(whole)
        for name in whole:
            assert cut[name] == pytest.approx(whole[name], rel=2e-5, abs=2e-7), name


@pytest.mark.parametrize("name", [name for name, _, _ in POLICIES])
def test_no_policy_loss_depends_on_tensor_context_and_data_parallelism_or_the_micro_batch(
    results, name
):
    for cut, whole in zip(
        results[f"{name} cut"].reports, results[f"{name} whole"].reports, strict=True
    ):
        assert set(cut) == set(whole) and whole["grad_norm"] > 1e-4
        for metric in whole:
            assert cut[metric] == pytest.approx(whole[metric], rel=5e-5, abs=5e-7), metric


@pytest.mark.parametrize("spread", [name for name in SPREAD if name != "product whole"])
@pytest.mark.parametrize("name", combinations(), ids=" ".join)
def test_no_loss_ratio_and_aggregation_depends_on_ranks_micro_batches_and_the_order_of_samples(
    results, name, spread
):
    whole, cut = (results[of].steps[name] for of in ("product whole", spread))
    assert set(cut.report) == set(whole.report) and whole.report["grad_norm"] > 1e-4
    for metric in whole.report:
        assert cut.report[metric] == pytest.approx(whole.report[metric], rel=5e-5, abs=5e-7), metric
    tolerance = 1e-5 * whole.report["grad_norm"]
    assert (
        max(abs(cut.gradients[key] - value) for key, value in whole.gradients.items()) < tolerance
    )


def test_every_loss_ratio_and_aggregation_is_another(results):
    steps: dict[Any, Step] = results["product whole"].steps
    assert len(steps) == 56 and all(len(step.gradients) > 40 for step in steps.values())
    norms = sorted(step.report["grad_norm"] for step in steps.values())
    assert all(after > before * (1 + 1e-6) for before, after in itertools.pairwise(norms))


@pytest.mark.parametrize("cut", ["tp2 dp2", "tp2 pp2", "tp2 cp2"])
def test_the_exact_divergence_does_not_depend_on_the_layout(results, cut):
    for found, whole in zip(
        results[f"full {cut}"].reports, results["full whole"].reports, strict=True
    ):
        assert set(found) == set(whole)
        for metric in whole:
            assert found[metric] == pytest.approx(whole[metric], rel=5e-5, abs=5e-7), metric


@torch.no_grad()
def test_the_exact_divergence_is_that_of_the_distributions_of_transformers(results, folders):
    from transformers import AutoModelForCausalLM

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(
            folders[name], dtype=torch.float32, attn_implementation="eager"
        )
        for name in ("qwen2", "qwen2 tied")
    )
    batch, found = sequences(0, with_fields=True), []
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
        found.append((p.exp() * (p - q)).sum(-1))
    exact = torch.cat(found).mean().item()
    assert exact > 0.1
    assert results["full whole"].reports[0]["kl"] == pytest.approx(exact, rel=1e-4)


def test_a_resumed_run_goes_on_to_the_bit(results):
    assert _losses(results["resumed"]) == _losses(results["whole qwen2 tied"])[4:]
    for name, value in results["whole qwen2 tied"].weights.items():
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
def test_another_layout_resumes_the_same_run(results, name):
    np.testing.assert_allclose(
        _losses(results[name]), _losses(results["whole qwen2 tied"])[4:], rtol=1e-5
    )


def test_frozen_parameters_stay_and_the_others_learn_alike_in_every_layout_and_after_a_resume(
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


@pytest.mark.parametrize("name", [*LORAS, "lora resumed"])
def test_adapters_learn_alike_in_every_layout_and_after_a_resume_in_another(results, name):
    whole, cut = results["lora whole"], results[name]
    np.testing.assert_allclose(_losses(cut), _losses(whole)[-len(cut.reports) :], rtol=1e-5)
    for weight, value in whole.weights.items():
        # Adam turns rounding into a step of the learning rate where a gradient is nearly zero.
        assert np.mean(np.abs(cut.weights[weight] - value)) < 2e-5, weight


def test_adapters_learn_as_they_do_in_transformers(results, folders):
    """The same batches through transformers with W x + s B A x written out and torch's AdamW; A's first values are taken from ours."""
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
            part = "mlp" if "mlp" in name else "self_attention"
            key = f"decoder.layers.{name.split('.')[2]}.{part}.{fused[last]}.weight"
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
    np.testing.assert_allclose(_losses(results["lora whole"]), losses, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "start", "steps"), [("whole", "qwen2 tied", 4), ("scored", "scored", 3)]
)
def test_a_critic_learns_as_a_model_of_transformers_with_a_score_per_token_does(
    results, folders, name, start, steps
):
    """Scores are those of the classifier's head on every position's hidden state; the loss is written out here once more."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(
        folders[start], dtype=torch.float32, num_labels=1
    )
    if name == "whole":
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
    """Mean loss, share of clipped tokens, and sum of squares of the values of what is learnt."""
    losses, clipped, squares = [], [], 0.0
    for ids, mask, old, returns in zip(
        batch.token_ids, batch.loss_masks, *batch.fields.values(), strict=True
    ):
        hidden = model.model(torch.from_numpy(ids)[None]).last_hidden_state[0, :-1]
        rows = torch.from_numpy(mask[1:])
        values = model.score(hidden)[rows, 0]
        before, wanted = (torch.from_numpy(field[1:])[rows] for field in (old, returns))
        held = torch.minimum(torch.maximum(values, before - VALUE_CLIP), before + VALUE_CLIP)
        plain, cut = (values - wanted) ** 2 / 2, (held - wanted) ** 2 / 2
        losses.append(torch.maximum(plain, cut))
        clipped.append((cut > plain).float())
        squares += (values**2).sum().item()
    return torch.cat(losses).mean(), torch.cat(clipped).mean().item(), squares


@pytest.mark.parametrize("layout", CRITICS)
def test_a_critic_learns_alike_in_every_layout_and_beside_a_policy_that_it_does_not_touch(
    results, layout
):
    whole = results["critic whole" if CRITICS[layout].dp == 2 else "critic scored"]
    for cut, expected in zip(results[f"critic {layout}"].reports, whole.reports, strict=False):
        assert set(cut) == set(expected)
        for name, value in expected.items():
            assert cut[name] == pytest.approx(value, rel=1e-4, abs=1e-7), name
    np.testing.assert_allclose(
        _losses(whole), _losses(results["whole qwen2 tied"])[: len(whole.reports)], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("resumed", "saved"),
    [("critic resumed", "critic whole"), ("critic bf16 resumed", "critic bf16")],
)
def test_a_critic_is_resumed_to_the_bit(results, resumed, saved):
    assert results[resumed].reports == results[saved].reports[2:]
    for name, value in results[saved].weights.items():
        np.testing.assert_array_equal(results[resumed].weights[name], value)


def test_another_layout_resumes_the_same_critic(results):
    for found, expected in zip(
        results["critic resumed tp2 pp2"].reports, results["critic whole"].reports[2:], strict=True
    ):
        for name in ("loss", "value_loss", "value_grad_norm", "value_squares"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3), name


@pytest.mark.parametrize("name", DROPPED)
def test_dropout_of_adapters_drops_the_same_when_layers_are_computed_again(results, name):
    """That tensor-parallel ranks drop the same of what all of them hold is looked at on the ranks: their copies stay equal to the bit."""
    assert _losses(results[f"{name} recomputed"]) == _losses(results[name])
    without = _losses(results["lora whole"])[:3]
    assert without[0] == pytest.approx(
        _losses(results[name])[0], rel=1e-6
    )  # B is zero before the first update
    assert abs(without[2] - _losses(results[name])[2]) > 1e-4


def test_an_update_whose_gradient_is_not_finite_leaves_no_trace(results):
    first, *others = results["poisoned"].reports
    assert first["skipped"] == 1 and not np.isfinite(first["grad_norm"])
    assert others == results["not poisoned"].reports
    for name, value in results["not poisoned"].weights.items():
        np.testing.assert_array_equal(results["poisoned"].weights[name], value)


def test_a_checkpoint_from_before_the_first_update_starts_the_optimizer_anew(results):
    np.testing.assert_allclose(
        _losses(results["resumed unmoved"]), _losses(results["not poisoned"]), rtol=1e-5
    )


def test_bf16_keeps_fp32_masters_through_a_resume_and_close_to_fp32(results):
    assert _losses(results["bf16 resumed"]) == _losses(results["bf16"])[3:]
    np.testing.assert_allclose(
        _losses(results["bf16"]), _losses(results["whole qwen2"])[:6], rtol=2e-2
    )
    np.testing.assert_allclose(
        _losses(results["bf16 tp2 dp2"]), _losses(results["bf16"]), rtol=1e-2
    )


def test_the_batches_hold_sequences_of_many_lengths():
    assert len({len(ids) for ids in sequences(0).token_ids}) > NUM_SEQUENCES // 2


# --- garbage stays where it is ----------------------------------------------------------------------------------------------------------


def _assert_same(found: Seen, expected: Seen) -> None:
    assert found.loss == expected.loss
    for name, gradient in expected.gradients.items():
        np.testing.assert_array_equal(found.gradients[name], gradient, err_msg=name)


def _of_learnt_samples(seen: Seen) -> np.ndarray:
    return np.concatenate(
        [
            row
            for number, row in enumerate(np.split(seen.logprobs, np.cumsum(LENGTHS)[:-1]))
            if number not in MASKED_OUT
        ]
    )


@pytest.mark.parametrize("name", POISONED)
def test_what_samples_that_are_masked_out_hold_changes_no_bit_of_the_loss_and_the_gradient_of_the_others(
    results, name
):
    seen = results[name].seen
    assert np.linalg.norm(list(seen["clean"].gradients.values())[-1]) > 0
    _assert_same(seen["neighbours large"], seen["clean"])
    for poison in (
        "neighbours large",
        "neighbours nan",
    ):  # a product of 0 and NaN is NaN, so that gradients of matrices are
        assert seen[poison].loss == seen["clean"].loss
        np.testing.assert_array_equal(
            _of_learnt_samples(seen[poison]), _of_learnt_samples(seen["clean"])
        )
    assert not np.isfinite(seen["neighbours nan"].logprobs).all()


@pytest.mark.parametrize("name", POISONED)
def test_nan_in_the_embedding_of_the_padding_token_and_in_masked_fields_changes_no_bit(
    results, name
):
    seen = results[name].seen
    _assert_same(seen["padding nan"], seen["clean"])
    np.testing.assert_array_equal(seen["padding nan"].logprobs, seen["clean"].logprobs)
    _assert_same(seen["masked fields nan"], seen["clean policy"])
