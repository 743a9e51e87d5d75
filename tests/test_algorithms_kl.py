"""KL estimators against the exact divergence and hand calculation, and mismatch correction."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from msrl.algorithms import kl
from msrl.algorithms.mismatch import Correction, mismatch_statistics
from msrl.errors import MsrlError
from support import mentions

POLICY, REFERENCE = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.25, 0.35])
EXACT = float((POLICY * np.log(POLICY / REFERENCE)).sum())


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.5, -1.0]),
        ("abs", [0.5, 1.0]),
        ("k2", [0.125, 0.5]),
        ("k3", [math.exp(-0.5) - 0.5, math.e - 2.0]),
    ],
)
def test_kl_estimators_by_hand(estimator, expected):
    policy, reference = (
        torch.tensor([-1.0, -3.0], dtype=torch.float64),
        torch.tensor([-1.5, -2.0], dtype=torch.float64),
    )
    got = kl.per_token(estimator, policy, reference, torch.ones(2, dtype=torch.bool))
    assert got.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
def test_estimators_by_monte_carlo_against_the_exact_kl(estimator):
    """200,000 tokens are sampled from the policy.

    k1 and k3 are unbiased, k2 is close for similar policies, and abs is an upper bound.
    """
    drawn = torch.from_numpy(np.random.default_rng(0).choice(3, 200_000, p=POLICY))
    logprobs = (torch.from_numpy(np.log(p))[drawn] for p in (POLICY, REFERENCE))
    values = kl.per_token(estimator, *logprobs, torch.ones(len(drawn), dtype=torch.bool))
    error = 4 * values.std().item() / math.sqrt(len(drawn))
    if estimator in ("k1", "k3"):
        assert values.mean().item() == pytest.approx(EXACT, abs=error)
    elif estimator == "k2":
        assert values.mean().item() == pytest.approx(EXACT, rel=0.15)
    else:
        assert values.mean().item() > EXACT + error
    if estimator == "k3":
        assert values.min().item() >= 0


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_exact_kl_of_two_categoricals(estimator):
    logprobs = (torch.from_numpy(np.log(p)) for p in (POLICY, REFERENCE))
    per_token = kl.per_token(
        estimator, *logprobs, torch.ones(3, dtype=torch.bool)
    )  # every outcome once; weighted by its probability
    assert float((torch.from_numpy(POLICY) * per_token).sum()) == pytest.approx(EXACT, rel=1e-12)


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
def test_as_a_penalty_in_rewards_k1_alone_has_the_gradient_of_the_divergence(estimator):
    """Gradients by the logits.

    The exact KL has p (log p / q - KL), the policy gradient sums p k (one-hot - p) over tokens.
    """
    logprobs = (torch.from_numpy(np.log(p)) for p in (POLICY, REFERENCE))
    penalty = kl.per_token(estimator, *logprobs, torch.ones(3, dtype=torch.bool)).numpy()
    exact, policy_gradient = (
        POLICY * (np.log(POLICY / REFERENCE) - EXACT),
        POLICY * (penalty - POLICY @ penalty),
    )
    assert np.allclose(policy_gradient, exact) == (estimator == "k1")
    if estimator != "k1":
        assert exact[2] < 0 < policy_gradient[2], (
            "the third token is too rare already, and is made rarer"
        )


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
def test_kl_is_zero_and_without_gradient_where_masked(estimator):
    policy = torch.tensor([-1.0, math.nan, -math.inf], requires_grad=True)
    got = kl.per_token(
        estimator, policy, torch.tensor([-2.0, -1.0, math.nan]), torch.tensor([True, False, False])
    )
    got.sum().backward()
    assert policy.grad is not None
    assert got[1:].tolist() == [0.0, 0.0]
    assert policy.grad[1:].tolist() == [0.0, 0.0]
    assert policy.grad[0] != 0


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
def test_the_gradient_of_every_estimator_equals_finite_differences(estimator):
    reference, mask = (
        torch.tensor([-2.0, -0.5, -1.0], dtype=torch.float64),
        torch.ones(3, dtype=torch.bool),
    )
    policy = torch.tensor([-1.0, -1.2, -1.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: kl.per_token(estimator, x, reference, mask), policy)


def test_k3_is_capped_at_ten_and_stays_finite():
    got = kl.per_token(
        "k3",
        torch.tensor([-500.0, -3.0]),
        torch.tensor([-1.0, -1.0]),
        torch.ones(2, dtype=torch.bool),
    )
    assert got.tolist() == pytest.approx([10.0, math.exp(2) - 3.0])


def test_an_unknown_kl_estimator_is_refused_by_name():
    with pytest.raises(MsrlError, match=mentions("k33", "'k3'")):
        kl.per_token("k33", torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool))


# Two sequences: ratios trainer : sampler of 2 and 1/2, then of 4 and a masked one.
TRAINER = torch.log(torch.tensor([2.0, 0.5, 4.0, math.nan], dtype=torch.float64))
SAMPLER, MASK, NUMBERS = (
    torch.zeros(4, dtype=torch.float64),
    torch.tensor([True, True, True, False]),
    torch.tensor([0, 0, 1, 1]),
)


@pytest.mark.parametrize(
    ("correction", "weights", "truncated", "filtered"),
    [
        (Correction("token", 3.0), [2.0, 0.5, 3.0, 0.0], 1, 0),
        (Correction("sequence", 3.0), [1.0, 1.0, 3.0, 0.0], 1, 0),
        (Correction("none", 3.0, "token", 0.6, 3.0), [1.0, 0.0, 0.0, 0.0], 0, 2),
        (Correction("none", 3.0, "sequence", 0.6, 3.0), [1.0, 1.0, 0.0, 0.0], 0, 1),
        (Correction("token", 9.0, "sequence", 0.6, 3.0), [2.0, 0.5, 0.0, 0.0], 0, 1),
    ],
)
def test_corrections_by_hand(correction, weights, truncated, filtered):
    got, stats = correction(TRAINER, SAMPLER, MASK, NUMBERS)
    assert got.tolist() == pytest.approx(weights)
    assert stats["mismatch_truncated"].sum() == truncated
    assert stats.get("mismatch_filtered", torch.zeros(1)).sum() == filtered
    assert stats["mismatch_weight"].tolist() == pytest.approx(weights)
    assert correction.is_on and not Correction().is_on


def test_the_diagnosis_by_hand_and_against_the_exact_divergences():
    stats = mismatch_statistics(TRAINER, SAMPLER, MASK)
    assert stats["sampler_logprob_difference"].tolist() == pytest.approx(
        [math.log(2), math.log(2), math.log(4), 0.0]
    )
    assert stats["sampler_chi2"].tolist() == pytest.approx([3.0, -0.75, 15.0, 0.0])
    trainer, sampler = (
        torch.from_numpy(np.log(p)) for p in (REFERENCE, POLICY)
    )  # drawn from the sampler
    exact = mismatch_statistics(trainer, sampler, torch.ones(3, dtype=torch.bool))
    means = {
        name: float((torch.from_numpy(POLICY) * values).sum()) for name, values in exact.items()
    }
    assert means["sampler_kl"] == pytest.approx(EXACT)
    assert means["sampler_chi2"] == pytest.approx(float((REFERENCE**2 / POLICY).sum() - 1))
