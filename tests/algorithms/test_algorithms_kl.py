"""KL estimators against the exact divergence and hand calculation, and mismatch correction."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from msrl.algorithms import kl
from msrl.algorithms.mismatch import Correction, mismatch_statistics, off_policy_mask
from msrl.algorithms.packing import Sequences
from msrl.errors import MsrlError
from msrl.trainer.objective.losses import Outputs, PolicyLoss
from msrl.workflows.rl.update.updater import mean_importance_weight
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


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_straight_through_estimators_have_the_value_of_one_and_the_gradient_of_k2(estimator):
    reference, mask = torch.tensor([-2.0, -0.5, -30.0]), torch.ones(3, dtype=torch.bool)
    values = {}
    for name in (estimator, f"{estimator}+", "k2"):
        policy = torch.tensor([-1.0, -1.2, -0.1], requires_grad=True)
        value = kl.per_token(name, policy, reference, mask)
        value.sum().backward()
        assert policy.grad is not None
        values[name] = (value.tolist(), policy.grad.tolist())
    assert values[f"{estimator}+"] == (values[estimator][0], values["k2"][1])


@pytest.mark.parametrize("estimator", ["k1+", "k3+", "k2"])
def test_in_the_loss_they_have_the_gradient_of_the_divergence(estimator):
    """Sum p times the gradient of every outcome, by the logits: p (log p / q - KL)."""
    logits = torch.from_numpy(np.log(POLICY)).requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    values = kl.per_token(
        estimator, logprobs, torch.from_numpy(np.log(REFERENCE)), torch.ones(3, dtype=torch.bool)
    )
    (torch.from_numpy(POLICY) * values).sum().backward()
    assert logits.grad is not None
    exact = POLICY * (np.log(POLICY / REFERENCE) - EXACT)
    np.testing.assert_allclose(logits.grad.numpy(), exact, rtol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_bias_correction_gives_the_gradient_of_the_divergence_off_policy(estimator):
    """Every outcome once, with the probability of the policy that sampled (uniform)."""
    logits = torch.from_numpy(np.log(POLICY)).requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    fields = {
        "weights": third,
        "advantages": torch.zeros(3, dtype=torch.float64),
        "old_logprobs": third.log(),
        "reference_logprobs": torch.from_numpy(np.log(REFERENCE)),
    }
    loss = PolicyLoss(1.0, kl_coef=1.0, kl_estimator=estimator, kl_bias_correction=True)
    value, _ = loss(Outputs(logprobs, torch.arange(3)), fields, 3)
    value.backward()
    assert logits.grad is not None and value.item() == pytest.approx(EXACT, rel=1e-12)
    exact = POLICY * (np.log(POLICY / REFERENCE) - EXACT)
    np.testing.assert_allclose(logits.grad.numpy(), exact, rtol=1e-12)


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
        (Correction("none", 3.0, "sequence-product", 0.9, 1.1), [1.0, 1.0, 0.0, 0.0], 0, 1),
        (Correction("token", 3.0, scale=0.5), [1.0, 0.25, 1.5, 0.0], 1, 0),
    ],
)
def test_corrections_by_hand(correction, weights, truncated, filtered):
    got, stats = correction(TRAINER, SAMPLER, MASK, NUMBERS)
    assert got.tolist() == pytest.approx(weights)
    assert stats["mismatch_truncated"].sum() == truncated
    assert stats.get("mismatch_filtered", torch.zeros(1)).sum() == filtered
    assert stats["mismatch_weight"].tolist() == pytest.approx(weights)
    assert correction.is_on and not Correction().is_on


def test_a_product_of_ratios_is_filtered_where_the_geometric_mean_is_not():
    trainer = torch.full((40,), 0.1, dtype=torch.float64)
    sampler, mask = torch.zeros_like(trainer), torch.ones(40, dtype=torch.bool)
    numbers = torch.zeros(40, dtype=torch.int64)
    mean = Correction(filter="sequence", high=2.0)(trainer, sampler, mask, numbers)[0]
    product = Correction(filter="sequence-product", high=2.0)(trainer, sampler, mask, numbers)[0]
    assert mean.tolist() == [1.0] * 40 and not product.any()


def test_weights_are_normalized_over_tokens_or_sequences_of_an_update():
    """Ratios 2, 1/2 of the first sequence, 4 of the second; the second's weight is truncated."""
    sequences = Sequences(
        (np.arange(3), np.arange(3), np.arange(2)),
        (np.array([False, True, True]), np.zeros(3, bool), np.array([False, True])),
        {
            "old_logprobs": (np.log([9.0, 2.0, 0.5]), np.zeros(3), np.log([9.0, 4.0])),
            "sampler_logprobs": (np.zeros(3), np.ones(3), np.zeros(2)),
        },
    )
    by_token, by_sequence = Correction("token", 3.0), Correction("sequence", 3.0)
    assert mean_importance_weight(by_token, sequences) == pytest.approx((2 + 0.5 + 3) / 3)
    assert mean_importance_weight(by_sequence, sequences) == pytest.approx((1 + 3) / 2)
    without_filter = mean_importance_weight(Correction("token", 3.0, "token"), sequences)
    assert without_filter == pytest.approx((2 + 0.5 + 3) / 3)


def test_the_off_policy_mask_drops_bad_sequences_that_the_policy_has_left():
    """Mean distances of 0.2, 0.2, -0.5 nats, with advantages below, above and below 0."""
    behavior = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
    logprobs = behavior - torch.tensor([0.1, 0.3, 0.2, 0.2, -0.5])
    advantages = torch.tensor([-1.0, -2.0, 1.0, 1.0, -1.0])
    numbers, mask = torch.tensor([0, 0, 1, 1, 2]), torch.ones(5, dtype=torch.bool)
    arguments = (logprobs, behavior, advantages, mask, numbers)
    assert off_policy_mask(*arguments, limit=0.15).tolist() == [True, True, False, False, False]
    assert not off_policy_mask(*arguments, limit=0.25).any()
    leaf = logprobs.clone().requires_grad_()
    fields = {
        "weights": torch.ones(5),
        "advantages": advantages,
        "old_logprobs": logprobs,
        "sampler_logprobs": behavior,
    }
    value, sums = PolicyLoss(1.0, policy_loss="vanilla", off_policy_limit=0.15)(
        Outputs(leaf, numbers), fields, 5
    )
    value.backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0, 0.0, -1.0, -1.0, 1.0] and sums["off_policy_masked"] == 2


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


def test_the_terms_of_the_loss_have_the_signs_and_coefficients_of_the_settings():
    """The loss falls with the entropy and rises with the divergence and the likelihood loss."""
    logprobs = torch.tensor([-0.5, -2.0], dtype=torch.float64)
    entropy, divergence = torch.tensor([1.0, 3.0]), torch.tensor([0.25, 0.75])
    outputs = Outputs(logprobs, torch.arange(2), entropy, divergence[:, None])
    fields = {
        "weights": torch.full((2,), 0.5, dtype=torch.float64),
        "advantages": torch.tensor([1.0, -1.0], dtype=torch.float64),
    }
    coefs = {"kl_coef": 0.1, "kl_estimator": "full", "entropy_coef": 0.01, "sft_coef": 0.2}
    value, sums = PolicyLoss(1.0, policy_loss="vanilla", **coefs)(outputs, fields, 2)
    policy = sums["policy_loss"].item() / 2
    likelihood = 0.5 / 2  # of the answer with a positive advantage
    assert value.item() == pytest.approx(policy + 0.1 * 0.5 - 0.01 * 2.0 + 0.2 * likelihood)
    assert sums["entropy"].item() == pytest.approx(4.0)
