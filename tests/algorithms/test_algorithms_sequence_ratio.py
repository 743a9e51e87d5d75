"""`algo.ratio: sequence` with advantages, weights or filters that differ by token.

The tests use the trainer's policy loss in float64.

The oracle of the clipped loss is the equation of GSPO-token (arXiv:2507.18071, section 4.3),
written here token by token and differentiated by autograd. S sequences, N tokens of all of them end
to end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from msrl import registry
from msrl.algorithms.aggregate import MODES, Mode
from msrl.algorithms.mismatch import Correction
from msrl.trainer.objective.losses import Outputs, PolicyLoss

PACKAGE = "msrl.algorithms.losses"
LOW, HIGH, DUAL = 0.1, 0.15, 1.3
CONSTANT = 37.0
PER_TOKEN = {
    "none": Correction(),
    "weight": Correction(weight="token", upper=1.4),
    "filter": Correction(filter="token", low=0.8, high=1.3),
    "both": Correction(weight="token", upper=1.4, filter="token", low=0.8, high=1.3),
    "sequence": Correction(weight="sequence", upper=1.4, filter="sequence", low=0.9, high=1.2),
}


def losses() -> list[tuple[str, str]]:
    """Return every policy loss with each ratio, if it supports advantages that differ by token."""
    modules = {name: registry.load(PACKAGE, name, key="") for name in registry.names(PACKAGE)}
    return [
        (name, ratio)
        for name, module in modules.items()
        if not getattr(module, "ONE_ADVANTAGE", False)
        and not getattr(module, "SELECTS_TOKENS", False)
        for ratio in (("token",) if getattr(module, "OWN_RATIO", False) else ("token", "sequence"))
    ]


@dataclass(frozen=True)
class Batch:
    """Log-probabilities of three policies and advantages of each token."""

    sizes: tuple[int, ...]  # S
    logprobs: Tensor  # [N]
    old: Tensor  # [N]
    sampler: Tensor  # [N]
    advantages: Tensor  # [N]

    @property
    def sequences(self) -> Tensor:  # [N]
        return torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes))

    def weights(self, mode: Mode) -> Tensor:  # [N]
        """The aggregation by its definition."""
        divisors = {
            "token-mean": [float(sum(self.sizes))] * len(self.sizes),
            "seq-mean-token-mean": [float(len(self.sizes) * size) for size in self.sizes],
            "seq-mean-token-sum": [float(len(self.sizes))] * len(self.sizes),
            "seq-sum-over-constant": [CONSTANT] * len(self.sizes),
            # Groups of the first two sequences and of all others.
            "micro-batch-mean": [
                2.0 * sum(self.sizes[:2] if number < 2 else self.sizes[2:])
                for number in range(len(self.sizes))
            ],
        }
        return (1.0 / torch.tensor(divisors[mode], dtype=torch.float64))[self.sequences]

    def with_equal_advantages(self) -> Batch:
        """The first token's advantage on all tokens of its sequence."""
        starts = np.cumsum([0, *self.sizes[:-1]])
        return replace(self, advantages=self.advantages[torch.from_numpy(starts)][self.sequences])


def make_batch(
    seed: int = 0, spread: float = 0.3, sizes: tuple[int, ...] = (7, 1, 12, 4, 9, 2)
) -> Batch:
    random, count = np.random.default_rng(seed), sum(sizes)
    old = random.normal(-2.0, 0.5, count)
    drift = np.repeat(
        random.normal(0.0, spread / 2, len(sizes)), sizes
    )  # so that some sequences leave the clip's range
    arrays = (
        old + drift + random.normal(0.0, spread, count),
        old,
        old + random.normal(0.0, 0.3, count),
        random.normal(0.0, 1.0, count),
    )
    return Batch(sizes, *(torch.from_numpy(array) for array in arrays))


def evaluate(
    batch: Batch, mode: Mode = "seq-mean-token-mean", **settings: Any
) -> tuple[float, Tensor]:
    """Value and gradient of the trainer's loss."""
    leaf = batch.logprobs.clone().requires_grad_()
    loss = PolicyLoss(1.0, **{"ratio": "sequence", "clip_low": LOW, "clip_high": HIGH, **settings})
    fields = {
        "weights": batch.weights(mode),
        "old_logprobs": batch.old,
        "sampler_logprobs": batch.sampler,
        "advantages": batch.advantages,
    }
    value, _ = loss(Outputs(leaf, batch.sequences), fields, len(leaf))
    return value.item(), differentiate(value, leaf)


def differentiate(value: Tensor, leaf: Tensor) -> Tensor:
    value.backward()
    assert leaf.grad is not None
    return leaf.grad


def correction_factors(batch: Batch, correction: Correction) -> Tensor:  # [N]
    """Truncated weights and filters by their definition, sequence by sequence."""
    factors = list[Tensor]()
    for log_ratio in (batch.old - batch.sampler).split(batch.sizes):
        levels = {
            "none": None,
            "token": log_ratio.exp(),
            "sequence": log_ratio.sum().exp().expand_as(log_ratio),
        }
        means = {
            "none": None,
            "token": log_ratio.exp(),
            "sequence": log_ratio.mean().exp().expand_as(log_ratio),
        }
        weight, ratio = levels[correction.weight], means[correction.filter]
        factor = (
            torch.ones_like(log_ratio) if weight is None else weight.clamp(max=correction.upper)
        )
        factors.append(
            factor
            if ratio is None
            else factor * ((ratio >= correction.low) & (ratio <= correction.high))
        )
    return torch.cat(factors)


def gspo_token(
    batch: Batch, weights: Tensor, factors: Tensor, dual: float | None
) -> tuple[float, Tensor]:
    """Return the paper's objective with s_{i,t} = sg[s_i] pi_t / sg[pi_t].

    `weights` replace its 1 / (G |y_i|).
    """
    leaf = batch.logprobs.clone().requires_grad_()
    objective = torch.zeros((), dtype=torch.float64)
    start = 0
    for size in batch.sizes:
        positions = range(start, start + size)
        likelihood = torch.exp(leaf[start : start + size].sum()) / torch.exp(
            batch.old[start : start + size].sum()
        )
        s_i = (likelihood ** (1.0 / size)).detach()
        for t in positions:
            pi = torch.exp(leaf[t])
            s_it = s_i * pi / pi.detach()
            term = torch.minimum(
                s_it * batch.advantages[t], s_it.clamp(1 - LOW, 1 + HIGH) * batch.advantages[t]
            )
            if dual is not None and batch.advantages[t] < 0:
                term = torch.maximum(term, dual * batch.advantages[t])
            objective = objective + weights[t] * factors[t] * term
        start += size
    return -objective.item(), differentiate(-objective, leaf)


def gspo(batch: Batch) -> tuple[float, Tensor]:
    """Return equation 5 of the paper for sequences.

    It is the mean of min(s_i A_i, clip(s_i) A_i) with differentiable s_i.
    """
    leaf = batch.logprobs.clone().requires_grad_()
    terms = list[Tensor]()
    columns = (
        leaf.split(batch.sizes),
        batch.old.split(batch.sizes),
        batch.advantages.split(batch.sizes),
    )
    for new, old, advantages in zip(*columns, strict=True):
        s_i, a_i = (new.sum() - old.sum()).exp() ** (1.0 / len(new)), advantages[0]
        terms.append(torch.minimum(s_i * a_i, s_i.clamp(1 - LOW, 1 + HIGH) * a_i))
    objective = torch.stack(terms).mean()
    return -objective.item(), differentiate(-objective, leaf)


@pytest.mark.sample(12)
@pytest.mark.parametrize("dual", [None, DUAL])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("correction", PER_TOKEN)
def test_the_clipped_loss_is_the_equation_of_gspo_token(
    correction: str, mode: Mode, dual: float | None
):
    for seed in range(5):
        batch = make_batch(seed, spread=0.6)
        factors = correction_factors(batch, PER_TOKEN[correction])
        value, gradient = evaluate(batch, mode, dual=dual, correction=PER_TOKEN[correction])
        expected, slope = gspo_token(batch, batch.weights(mode), factors, dual)
        assert value == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=1e-15)
        assert 0 < (slope == 0).sum() < len(slope), "some tokens are clipped, and not all"


@pytest.mark.parametrize("spread", [0.01, 0.3, 2.0])
def test_advantages_that_are_equal_within_a_sequence_give_the_loss_of_gspo(spread: float):
    for seed in range(5):
        batch = make_batch(seed, spread).with_equal_advantages()
        value, gradient = evaluate(batch)
        expected, slope = gspo(batch)
        assert value == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(gradient, slope, rtol=1e-11, atol=1e-15)


@pytest.mark.sample(35)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("correction", PER_TOKEN)
@pytest.mark.parametrize(("name", "ratio"), losses())
def test_the_gradient_on_policy_is_the_policy_gradient_of_each_tokens_advantage(
    name: str, ratio: str, correction: str, mode: Mode
):
    batch = make_batch()
    batch = replace(batch, logprobs=batch.old)
    _, gradient = evaluate(
        batch, mode, policy_loss=name, ratio=ratio, correction=PER_TOKEN[correction]
    )
    expected = (
        -batch.weights(mode) * correction_factors(batch, PER_TOKEN[correction]) * batch.advantages
    )
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-16)


@pytest.mark.sample(14)
@pytest.mark.parametrize("correction", ["filter", "both", "sequence"])
@pytest.mark.parametrize(("name", "ratio"), losses())
def test_filtered_tokens_have_no_gradient_at_all(name: str, ratio: str, correction: str):
    """The clip range is wide enough to keep all gradients, so only the filter removes tokens."""
    batch = make_batch(spread=0.1)
    _, gradient = evaluate(
        batch,
        policy_loss=name,
        ratio=ratio,
        correction=PER_TOKEN[correction],
        clip_low=0.99,
        clip_high=9.0,
    )
    filtered = correction_factors(batch, PER_TOKEN[correction]) == 0
    assert 0 < filtered.sum() < len(filtered)
    torch.testing.assert_close(gradient == 0, filtered)


def test_a_filtered_sequence_has_no_gradient_in_the_geometric_mean_either():
    batch = make_batch(spread=0.1).with_equal_advantages()
    _, gradient = evaluate(
        batch,
        policy_loss="gmpo",
        ratio="token",
        correction=PER_TOKEN["sequence"],
        clip_low=0.99,
        clip_high=9.0,
    )
    torch.testing.assert_close(gradient == 0, correction_factors(batch, PER_TOKEN["sequence"]) == 0)


@pytest.mark.parametrize("name", ["cispo", "tis", "cpgd"])
def test_every_other_loss_gives_each_token_its_own_advantage_at_the_ratio_of_its_sequence(
    name: str,
):
    """Derivatives by hand; cpgd with its drift of 0.01, whose slope is capped at 0.2."""
    batch = make_batch(seed=4)
    weights, advantages = batch.weights("token-mean"), batch.advantages
    means = [row.mean().expand_as(row) for row in (batch.logprobs - batch.old).split(batch.sizes)]
    log_ratio = torch.cat(means)
    ratio = log_ratio.exp()
    stays = torch.where(advantages > 0, ratio < 1 + HIGH, ratio > 1 - LOW)
    slopes = {
        "cispo": -ratio.clamp(1 - LOW, 1 + HIGH) * advantages,
        "tis": -ratio.clamp(max=1.0) * advantages,
        "cpgd": -advantages * stays + 0.01 * (ratio - 1).clamp(max=0.2),
    }
    options = {"tis": {"clip_low": 0.0, "clip_high": 0.0}}.get(name, {})
    _, gradient = evaluate(batch, "token-mean", policy_loss=name, **options)
    torch.testing.assert_close(gradient, weights * slopes[name], rtol=1e-12, atol=1e-16)
    assert not stays.all()


@pytest.mark.sample(14)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "ratio"), losses())
def test_the_split_into_micro_batches_does_not_change_value_and_gradient(
    name: str, ratio: str, mode: Mode
):
    batch = make_batch(seed=2)
    weights, correction = batch.weights(mode), PER_TOKEN["both"]
    value, gradient = evaluate(batch, mode, policy_loss=name, ratio=ratio, correction=correction)
    for groups in ([[0], [1], [2], [3], [4], [5]], [[5, 2], [4, 0, 3, 1]], [[3, 1, 5, 0, 2, 4]]):
        total = 0.0
        for numbers in groups:
            positions = torch.cat(
                [torch.nonzero(batch.sequences == number).flatten() for number in numbers]
            )
            leaf = batch.logprobs[positions].requires_grad_()
            own = torch.repeat_interleave(
                torch.arange(len(numbers)),
                torch.tensor([batch.sizes[number] for number in numbers]),
            )
            columns = {
                "weights": weights,
                "old_logprobs": batch.old,
                "sampler_logprobs": batch.sampler,
                "advantages": batch.advantages,
            }
            fields = {key: column[positions] for key, column in columns.items()}
            loss = PolicyLoss(
                1.0,
                policy_loss=name,
                ratio=ratio,
                clip_low=LOW,
                clip_high=HIGH,
                correction=correction,
            )  # pyright: ignore
            share, _ = loss(Outputs(leaf, own), fields, len(weights))
            total += share.item()
            torch.testing.assert_close(
                differentiate(share, leaf), gradient[positions], rtol=1e-10, atol=1e-15
            )
        assert total == pytest.approx(value, rel=1e-11)
