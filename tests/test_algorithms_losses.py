"""The policy loss, the KL estimators and the token mean against numpy in float64, poison in masked places, and every split of a batch."""

import math

import numpy as np
import pytest
import torch

from msrl import registry
from msrl.algorithms import kl
from msrl.algorithms.aggregate import token_mean
from msrl.algorithms.losses.ppo import policy_loss
from msrl.errors import MsrlError

PACKAGE = "msrl.algorithms.losses"
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
# Four tokens: r = 1.5 and A = 1 is clipped to 1.28; r = 0.5 and A = 1 stays; r = 0.5 and A = -1 is clipped to 0.8; r = 1.5, A = -1 stays.
RATIOS = [1.5, 0.5, 0.5, 1.5]
ADVANTAGES = [1.0, 1.0, -1.0, -1.0]
GOLDEN = {"ppo": (-1.28 - 0.5 + 0.8 + 1.5) / 4}


@pytest.mark.parametrize("name", registry.names(PACKAGE))
def test_every_loss_has_a_golden_row_and_reproduces_it(name):
    assert name in GOLDEN, f"algorithms/losses/{name}.py has no golden row in this test"
    module = registry.load(PACKAGE, name, key="algo.policy_loss")
    logprobs = torch.tensor(RATIOS, dtype=torch.float64).log()
    got = module.policy_loss(logprobs, torch.zeros(4), torch.tensor(ADVANTAGES), torch.ones(4, dtype=torch.bool), **CLIP, num_tokens=4)
    assert got.loss.item() == pytest.approx(GOLDEN[name], abs=1e-7)


def batch(num_tokens=64, seed=0):
    random = np.random.default_rng(seed)
    old = random.normal(-2, 1, num_tokens)
    new = old + random.normal(0, 0.5, num_tokens)
    return new, old, random.normal(0, 1, num_tokens), random.random(num_tokens) < 0.7


def loss_of(new, old, advantages, mask, num_tokens, **options):
    leaf = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    old, advantages = (torch.tensor(x, dtype=torch.float64) for x in (old, advantages))
    result = policy_loss(leaf, old, advantages, torch.tensor(mask), **{**CLIP, **options}, num_tokens=num_tokens)
    result.loss.backward()
    return result, leaf.grad.numpy()


def numpy_loss_and_gradient(new, old, advantages, mask, dual=None):
    ratio = np.exp(new - old)
    terms, slopes = [], []
    for r, a, m in zip(ratio, advantages, mask, strict=True):
        r_cut = min(max(r, 0.8), 1.28)
        value, slope = (r * a, r * a) if r * a <= r_cut * a else (r_cut * a, 0.0)
        if dual is not None and a < 0 and value < dual * a:
            value, slope = dual * a, 0.0
        terms.append(-value * m)
        slopes.append(-slope * m)
    return np.sum(terms) / mask.sum(), np.array(slopes) / mask.sum()


@pytest.mark.parametrize("dual", [None, 1.5, 3.0])
def test_policy_loss_and_its_gradient_equal_numpy(dual):
    new, old, advantages, mask = batch()
    expected, slopes = numpy_loss_and_gradient(new, old, advantages, mask, dual)
    result, gradient = loss_of(new, old, advantages, mask, int(mask.sum()), dual=dual)
    assert result.loss.item() == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-12, atol=1e-15)


def test_statistics_are_sums_over_the_tokens_that_count():
    new, old, advantages, mask = batch()
    result, _ = loss_of(new, old, advantages, mask, 1)
    ratio = np.exp(new - old)
    cut = ((ratio > 1.28) & (advantages > 0)) | ((ratio < 0.8) & (advantages < 0))
    assert result.clip_fraction_sum.item() == (cut & mask).sum()
    assert result.approx_kl_sum.item() == pytest.approx((ratio - 1 - np.log(ratio))[mask].sum(), rel=1e-9)
    assert result.ratio_sum.item() == pytest.approx(ratio[mask].sum(), rel=1e-12)
    assert not result.approx_kl_sum.requires_grad


def test_dual_clip_caps_the_loss_at_exactly_c_and_counts_it():
    result, gradient = loss_of(np.log([5.0, 2.0]), np.zeros(2), np.array([-1.0, -1.0]), np.array([True, True]), 1, dual=3.0)
    assert result.loss.item() == pytest.approx(3.0 + 2.0)
    assert gradient.tolist() == pytest.approx([0.0, 2.0])
    assert result.dual_clip_fraction_sum.item() == 1


def test_a_dual_clip_inside_the_ordinary_range_is_refused():
    with pytest.raises(ValueError, match="dual clip"):
        loss_of(np.zeros(1), np.zeros(1), np.zeros(1), np.array([True]), 1, dual=1.1)


@pytest.mark.parametrize("cuts", [[], [1], [10, 30], list(range(1, 64))])
def test_no_split_of_the_batch_changes_loss_or_gradient(cuts):
    new, old, advantages, mask = batch()
    whole, gradient = loss_of(new, old, advantages, mask, int(mask.sum()))
    pieces = [
        loss_of(*(x[start:end] for x in (new, old, advantages, mask)), int(mask.sum()))
        for start, end in zip([0, *cuts], [*cuts, 64], strict=True)
    ]
    assert sum(p.loss.item() for p, _ in pieces) == pytest.approx(whole.loss.item(), rel=1e-12)
    np.testing.assert_allclose(np.concatenate([g for _, g in pieces]), gradient, rtol=1e-12)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_in_masked_places_reaches_neither_loss_nor_gradient(poison):
    new, old, advantages, mask = batch()
    clean, clean_gradient = loss_of(new, old, advantages, mask, 10)
    for poisoned in range(3):
        arrays = [new.copy(), old.copy(), advantages.copy()]
        arrays[poisoned][~mask] = poison
        result, gradient = loss_of(*arrays, mask, 10, dual=None)
        for name in ("loss", "clip_fraction_sum", "approx_kl_sum", "ratio_sum"):
            assert getattr(result, name).item() == getattr(clean, name).item()
        np.testing.assert_array_equal(gradient, clean_gradient)


def test_a_micro_batch_without_a_token_to_learn_has_loss_and_gradient_zero():
    result, gradient = loss_of(np.full(3, np.nan), np.zeros(3), np.ones(3), np.zeros(3, dtype=bool), 5)
    assert result.loss.item() == 0.0
    assert gradient.tolist() == [0.0] * 3


def test_a_ratio_that_overflows_leaves_finite_numbers():
    result, gradient = loss_of(np.array([200.0, 200.0, -200.0]), np.zeros(3), np.array([1.0, -1.0, 1.0]), np.ones(3, dtype=bool), 3)
    assert math.isfinite(result.loss.item())
    assert np.isfinite(gradient).all()


def test_half_precision_is_computed_in_single():
    new = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16)
    result = policy_loss(new, new.clone(), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bool), **CLIP, num_tokens=2)
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == -1.0


def test_an_update_without_tokens_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        token_mean(torch.zeros(2), torch.zeros(2, dtype=torch.bool), num_tokens=0)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [0.5, -1.0]), ("abs", [0.5, 1.0]), ("k2", [0.125, 0.5]), ("k3", [math.exp(-0.5) - 0.5, math.e - 2.0])],
)
def test_kl_estimators_by_hand(estimator, expected):
    policy, reference = torch.tensor([-1.0, -3.0], dtype=torch.float64), torch.tensor([-1.5, -2.0], dtype=torch.float64)
    got = kl.per_token(estimator, policy, reference, torch.ones(2, dtype=torch.bool))
    assert got.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_exact_kl_of_two_categoricals(estimator):
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.25, 0.35])
    exact = float((policy * np.log(policy / reference)).sum())
    logprobs = (torch.from_numpy(np.log(p)) for p in (policy, reference))
    per_token = kl.per_token(estimator, *logprobs, torch.ones(3, dtype=torch.bool))  # every outcome once; weighted by its probability
    assert float((torch.from_numpy(policy) * per_token).sum()) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("estimator", kl.ESTIMATORS)
def test_kl_is_zero_and_without_gradient_where_masked(estimator):
    policy = torch.tensor([-1.0, math.nan, -math.inf], requires_grad=True)
    got = kl.per_token(estimator, policy, torch.tensor([-2.0, -1.0, math.nan]), torch.tensor([True, False, False]))
    got.sum().backward()
    assert got[1:].tolist() == [0.0, 0.0]
    assert policy.grad[1:].tolist() == [0.0, 0.0]
    assert policy.grad[0] != 0


def test_k3_is_cut_at_ten_and_stays_finite():
    got = kl.per_token("k3", torch.tensor([-500.0, -3.0]), torch.tensor([-1.0, -1.0]), torch.ones(2, dtype=torch.bool))
    assert got.tolist() == pytest.approx([10.0, math.exp(2) - 3.0])


def test_an_unknown_kl_estimator_is_refused_by_name():
    with pytest.raises(MsrlError, match="did you mean 'k3'"):
        kl.per_token("k33", torch.zeros(1), torch.zeros(1), torch.ones(1, dtype=torch.bool))
