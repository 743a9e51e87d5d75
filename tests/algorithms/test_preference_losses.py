"""Preference losses: formulas, TRL's functions, and independence of micro-batches and padding.

P pairs, or P labeled answers, of up to T tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import golden
from msrl import registry
from msrl.algorithms.answers import Answers, LabeledAnswers, Pairs
from msrl.algorithms.reward_model import bradley_terry
from msrl.trainer.objective.losses import Outputs
from msrl.trainer.objective.preference import PreferenceLoss, ScoreLoss
from peer_oracle import peer_module

LENGTHS = ((7, 3), (1, 12), (5, 5), (2, 9), (11, 4))  # tokens of chosen and rejected answers
PAIRWISE = tuple(name for name in golden.PREFERENCES if name != "kto")
SEEDS = range(5)


def random_sides(seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of policy and reference, and the mask of 2 P answers, [2 P, T].

    Chosen answers come first, as TRL orders them.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([pair[0] for pair in LENGTHS] + [pair[1] for pair in LENGTHS])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    policy, reference = (
        -torch.rand(mask.shape, generator=generator, dtype=torch.float64) * scale for _ in range(2)
    )
    return policy.masked_fill(~mask, 0.0), reference.masked_fill(~mask, 0.0), mask


def answers(policy: Tensor, reference: Tensor, mask: Tensor) -> Answers:
    return Answers(policy.sum(1), mask.sum(1), reference.sum(1))


def pairs(policy: Tensor, reference: Tensor, mask: Tensor, margin: float = 0.0) -> Pairs:
    count = len(LENGTHS)
    sides = (
        answers(policy[rows], reference[rows], mask[rows])
        for rows in (slice(None, count), slice(count, None))
    )
    return Pairs(*sides, torch.full((count,), margin, dtype=torch.float64))


def load(name: str) -> Any:
    return registry.load(registry.PREFERENCES, name, key="algo.preference.loss")


def value_and_gradient(loss: Tensor, leaf: Tensor) -> tuple[float, Tensor]:
    return loss.item(), torch.autograd.grad(loss, leaf)[0]


def assert_equal(ours: tuple[float, Tensor], theirs: tuple[float, Tensor]) -> None:
    assert ours[0] == pytest.approx(theirs[0], abs=1e-6, rel=1e-6)
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-6, rtol=1e-6)


# --- formulas ---


@pytest.mark.parametrize("name", PAIRWISE)
@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_a_loss_of_pairs_has_the_value_of_its_formula(name: str, margin: float) -> None:
    plugin = load(name)
    margin = margin if getattr(plugin, "READS_MARGINS", False) else 0.0
    policy, reference, mask = random_sides(0)
    losses = plugin.preference_loss(pairs(policy, reference, mask, margin), beta=0.4)
    sums = zip(policy.sum(1).tolist(), reference.sum(1).tolist(), strict=True)
    sides = [
        golden.Answer(own, other, count)
        for (own, other), count in zip(sums, mask.sum(1).tolist(), strict=True)
    ]
    expected = [
        golden.PREFERENCES[name](chosen, rejected, 0.4, margin)
        for chosen, rejected in zip(sides[: len(LENGTHS)], sides[len(LENGTHS) :], strict=True)
    ]
    assert losses.loss.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("is_desirable", [True, False])
def test_kto_has_the_value_of_its_formula(is_desirable: bool) -> None:
    answer = golden.Answer(-3.0, -4.0, 5)
    labeled = LabeledAnswers(
        Answers(torch.tensor([-3.0]), torch.tensor([5]), torch.tensor([-4.0])),
        torch.tensor([is_desirable]),
        torch.tensor(0.25),
    )
    losses = load("kto").preference_loss(labeled, beta=0.4, desirable_weight=2.0)
    expected = golden.PREFERENCES["kto"](answer, is_desirable, 0.4, 0.25)
    assert losses.loss.item() == pytest.approx(expected * (2.0 if is_desirable else 1.0))
    assert losses.rewards.item() == pytest.approx(0.4)


def test_a_certain_answer_has_a_finite_loss_and_gradient_in_orpo() -> None:
    certain = torch.zeros(1, requires_grad=True)
    chosen, rejected = (
        Answers(values, torch.ones(1)) for values in (certain, torch.tensor([-1.0]))
    )
    loss = load("orpo").preference_loss(Pairs(chosen, rejected, torch.zeros(1)), beta=0.1).loss
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(certain.grad).all()  # pyright: ignore


# --- TRL ---


class Model:
    """Model of TRL's trainers that returns given log-probabilities of the completion tokens."""

    def __init__(self, *outputs: Tensor) -> None:
        self._outputs, self.training = list(outputs), True

    def __call__(self, **_: Any) -> SimpleNamespace:
        logprobs = self._outputs.pop(0)
        nothing = torch.zeros_like(logprobs.detach())
        return SimpleNamespace(
            log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
        )


def trainer(**settings: Any) -> Any:
    """Return the attributes of a TRL trainer that the computation of its loss reads."""
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
    )
    defaults = {
        "accelerator": accelerator,
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "alpha": 0.0,
        "label_smoothing": 0.0,
    }
    return SimpleNamespace(**{**defaults, **settings})


def with_prompt(mask: Tensor) -> Tensor:
    """Return a completion mask with one token of the prompt before each answer."""
    return F.pad(mask, (1, 0)).long()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "theirs", "options"),
    [("dpo", "sigmoid", {}), ("dpo", "hinge", {"form": "hinge"}), ("ipo", "ipo", {})],
)
def test_losses_with_a_reference_equal_those_of_trl(
    name: str, theirs: str, options: dict[str, Any], seed: int
) -> None:
    trl = peer_module("trl.trainer.dpo_trainer")
    policy, reference, mask = random_sides(seed)
    count, leaf = len(LENGTHS), policy.clone().requires_grad_()
    own = load(name).preference_loss(pairs(leaf, reference, mask), beta=0.3, **options)
    inputs = {
        "input_ids": with_prompt(mask),
        "attention_mask": torch.ones_like(with_prompt(mask)),
        "completion_mask": with_prompt(mask),
        "ref_chosen_logps": reference[:count].sum(1),
        "ref_rejected_logps": reference[count:].sum(1),
    }
    other_leaf = policy.clone().requires_grad_()
    settings = trainer(
        beta=0.3, loss_types=[theirs], loss_weights=[1.0], ld_alpha=None, use_weighting=False,
        f_divergence_type="reverse_kl",
    )  # fmt: skip
    loss = trl.DPOTrainer._compute_loss(settings, Model(other_leaf), inputs, False)
    assert_equal(value_and_gradient(own.loss.mean(), leaf), value_and_gradient(loss, other_leaf))
    metrics = settings._metrics["train"]
    assert own.chosen_rewards.mean().item() == pytest.approx(metrics["rewards/chosen"][0])
    assert own.rejected_rewards.mean().item() == pytest.approx(metrics["rewards/rejected"][0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["simpo", "cpo", "orpo"])
def test_losses_without_a_reference_equal_those_of_trl(name: str, seed: int) -> None:
    file = "orpo" if name == "orpo" else "cpo"
    trl = peer_module(f"trl.experimental.{file}.{file}_trainer")
    policy, reference, mask = random_sides(seed)
    count = len(LENGTHS)
    options: dict[str, Any] = {"simpo": {"gamma": 0.7}, "cpo": {"alpha": 0.0}}.get(name, {})
    leaf, other_leaf = (policy.clone().requires_grad_() for _ in range(2))
    own = load(name).preference_loss(pairs(leaf, reference, mask), beta=0.5, **options).loss
    sums = other_leaf.sum(1) if name == "cpo" else other_leaf.sum(1) / mask.sum(1)
    sides = (sums[:count], sums[count:])
    if name == "orpo":
        own = own + leaf[:count].sum(1) / mask[:count].sum(1)  # without the likelihood
        theirs = -trl.ORPOTrainer.odds_ratio_loss(trainer(beta=0.5), *sides)[0]
    else:
        form = "simpo" if name == "simpo" else "sigmoid"
        settings = trainer(beta=0.5, loss_type=form, simpo_gamma=0.7)
        theirs = trl.CPOTrainer.cpo_loss(settings, *sides)[0]
    assert_equal(
        value_and_gradient(own.mean(), leaf), value_and_gradient(theirs.mean(), other_leaf)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_kto_equals_that_of_trl(seed: int) -> None:
    trl = peer_module("trl.trainer.kto_trainer")
    policy, reference, mask = random_sides(seed)
    labels = torch.tensor([True, False, True, True, False, False, True, False, True, False])
    leaf, other_leaf = (policy.clone().requires_grad_() for _ in range(2))
    unrelated = torch.linspace(-3, 3, len(labels), dtype=torch.float64) + seed - 1
    baseline = unrelated.mean().clamp(min=0)
    labeled = LabeledAnswers(answers(leaf, reference, mask), labels, baseline)
    own = load("kto").preference_loss(
        labeled, beta=0.3, desirable_weight=1.5, undesirable_weight=0.5
    )
    inputs = {
        "input_ids": with_prompt(mask),
        "attention_mask": torch.ones_like(with_prompt(mask)),
        "completion_mask": with_prompt(mask),
        "label": labels,
        "ref_logps": reference.sum(1),
        "ref_KL_logps": torch.zeros(len(labels), dtype=torch.float64),
    }
    settings = trainer(
        beta=0.3, loss_type="kto", calculate_KL=True, desirable_weight=1.5, undesirable_weight=0.5,
        _compute_kl_logps=lambda model, batch: unrelated,
    )  # fmt: skip
    loss = trl.KTOTrainer._compute_loss(settings, Model(other_leaf), inputs, False)
    assert_equal(value_and_gradient(own.loss.mean(), leaf), value_and_gradient(loss, other_leaf))


# --- micro-batches ---


def micro_batch(
    policy: Tensor, reference: Tensor, mask: Tensor, rows: Sequence[int], value: float
) -> tuple[Outputs, dict[str, Tensor]]:
    """Return the flat tensors of some pairs, as a training rank computes them."""
    order = [side for row in rows for side in (row, row + len(LENGTHS))]
    counts = mask[order].sum(1)
    sequences = torch.repeat_interleave(torch.arange(len(order)), counts)
    fields = {
        "values": torch.full((int(counts.sum()),), value, dtype=torch.float64),
        "weights": torch.repeat_interleave(
            torch.tensor([1.0 + row for row in rows for _ in range(2)], dtype=torch.float64), counts
        ),
        "reference_logprobs": torch.repeat_interleave(reference[order].sum(1), counts),
    }
    return Outputs(policy[order][mask[order]], sequences), fields


@pytest.mark.parametrize("name", PAIRWISE)
@pytest.mark.parametrize("split", [[[0], [1], [2], [3], [4]], [[4, 1], [0, 3, 2]]])
def test_the_loss_of_an_update_does_not_depend_on_its_micro_batches(
    name: str, split: list[list[int]]
) -> None:
    policy, reference, mask = random_sides(1)
    loss = PreferenceLoss(name, 0.2, sft_coef=0.1)
    results: list[tuple[float, Tensor, Mapping[str, float]]] = []
    for batches in ([[0, 1, 2, 3, 4]], split):
        leaf, total, sums = policy.clone().requires_grad_(), 0.0, defaultdict[str, float](float)
        for batch in batches:
            value, metrics = loss(*micro_batch(leaf, reference, mask, batch, 0.0), 15.0)
            total = total + value
            for key, metric in metrics.items():
                sums[key] += metric.item()
        assert isinstance(total, Tensor)
        results.append((*value_and_gradient(total, leaf), sums))
    assert_equal(results[0][:2], results[1][:2])
    assert dict(results[0][2]) == pytest.approx(dict(results[1][2]))


def test_weights_scale_the_pairs_and_the_metrics_are_weighted_means() -> None:
    policy, reference, mask = random_sides(2)
    outputs, fields = micro_batch(policy, reference, mask, range(5), 0.0)
    loss, sums = PreferenceLoss("dpo", 0.2)(outputs, fields, 15.0)
    single = load("dpo").preference_loss(pairs(policy, reference, mask), beta=0.2)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    assert loss.item() == pytest.approx((single.loss * weights).sum().item() / 15)
    is_right = (single.chosen_rewards > single.rejected_rewards).double()
    assert sums["accuracy"].item() == pytest.approx((is_right * weights).sum().item())


# --- reward models ---


def test_the_bradley_terry_loss_has_the_value_of_its_formula() -> None:
    chosen, rejected, margins = (torch.tensor([value]) for value in (1.0, 0.5, 0.2))
    losses = bradley_terry(chosen, rejected, margins, center_coef=0.1)
    assert losses.loss.item() == pytest.approx(np.log1p(np.exp(-0.3)) + 0.1 * 1.5**2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("center_coef", [0.0, 0.3])
@pytest.mark.parametrize("has_margins", [True, False])
def test_the_bradley_terry_loss_equals_that_of_trl(
    seed: int, center_coef: float, has_margins: bool
) -> None:
    trl = peer_module("trl.trainer.reward_trainer")
    generator = torch.Generator().manual_seed(seed)
    scores, margins = (
        torch.randn(size, generator=generator, dtype=torch.float64) * 3 for size in (10, 5)
    )
    margins = margins.abs() * has_margins
    leaf, other_leaf = (scores.clone().requires_grad_() for _ in range(2))
    own = bradley_terry(leaf[:5], leaf[5:], margins, center_coef=center_coef)
    settings = trainer(args=SimpleNamespace(center_rewards_coefficient=center_coef or None))
    inputs = {"attention_mask": torch.ones(10, 4, dtype=torch.long)}
    inputs |= {"margin": margins} if has_margins else {}
    output = SimpleNamespace(logits=other_leaf[:, None])
    loss = trl.RewardTrainer.compute_loss(settings, lambda **_: output, inputs)
    assert_equal(value_and_gradient(own.loss.mean(), leaf), value_and_gradient(loss, other_leaf))
    metrics = settings._metrics["train"]
    margin = (own.chosen_rewards - own.rejected_rewards).mean().item()
    assert margin == pytest.approx(metrics["margin"][0])


def test_scores_of_a_micro_batch_are_pairs() -> None:
    fields = {"values": torch.zeros(4), "weights": torch.tensor([1.0, 1.0, 3.0, 3.0])}
    loss, sums = ScoreLoss()(torch.tensor([2.0, 1.0, 0.0, 0.0]), fields, 4.0)
    expected = (np.log1p(np.exp(-1.0)) + 3 * np.log(2)) / 4
    assert loss.item() == pytest.approx(expected)
    assert sums["accuracy"].item() == pytest.approx(1 + 3 * 0.5)
