"""Policy losses against plain loops, finite differences and NaN at masked positions.

Losses do not depend on splits and order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import golden
from msrl import registry
from msrl.algorithms.aggregate import (
    MODES,
    AveragingGroup,
    sequence_weights,
    weighted_sum,
)
from msrl.algorithms.losses.cpgd import policy_drift
from msrl.algorithms.tokens import PolicyTokens, sequence_means, sequence_sums
from msrl.trainer.objective.losses import required_arguments
from support import mentions

PACKAGE = "msrl.algorithms.losses"
# Losses that select tokens within a micro-batch are tested in test_algorithms_covariance.py.
SELECTING = [
    name
    for name in registry.names(PACKAGE)
    if getattr(registry.load(PACKAGE, name, key=""), "SELECTS_TOKENS", False)
]
LOSSES = [name for name in registry.names(PACKAGE) if name not in SELECTING]
CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "dual": None}
RATIOS = {
    name: ["token"]
    if getattr(registry.load(PACKAGE, name, key=""), "OWN_RATIO", False)
    else ["token", "sequence"]
    for name in LOSSES
}
BOTH = [(name, ratio) for name in LOSSES for ratio in RATIOS[name]]
SIZES = [5, 1, 9, 3, 12]


class Batch:
    """Five sequences with gaps in their masks.

    Fields are float64 arrays, and `sequences` has the number of the sequence of each position.
    """

    def __init__(self, seed: int = 0, spread: float = 0.4) -> None:
        random = np.random.default_rng(seed)
        total = sum(SIZES)
        self.sequences = np.repeat(np.arange(len(SIZES)), SIZES)
        self.old = random.normal(-2, 0.5, total)
        self.new = self.old + random.normal(0, spread, total)
        self.advantages = np.array([1.0, -0.7, -2.0, 0.0, 0.4])[self.sequences]
        self.mask = random.random(total) < 0.7
        self.mask[:6] = True
        self.mask[self.sequences == 3] = False

    def weights(self, mode: str) -> np.ndarray:
        counts = [int(self.mask[self.sequences == s].sum()) for s in range(len(SIZES))]
        groups = [AveragingGroup((0, 3)), AveragingGroup((1, 4), 2.0), AveragingGroup((2,))]
        weights = sequence_weights(counts, mode, constant=17.0, groups=groups)  # type: ignore[arg-type]
        return weights[self.sequences]

    def pick(self, positions: np.ndarray) -> Batch:
        """Return some positions, in complete sequences, in this order. Sequences are renumbered."""
        subset = Batch.__new__(Batch)
        for name in ("old", "new", "advantages", "mask"):
            setattr(subset, name, getattr(self, name)[positions])
        changes = np.diff(self.sequences[positions]) != 0
        subset.sequences = np.concatenate(([0], changes.cumsum()))
        return subset


def aggregated_loss(
    name: str, batch: Batch, weights: np.ndarray, ratio: str = "token", **options: Any
) -> tuple[float, np.ndarray, dict[str, Any]]:
    """Return aggregated loss, gradient by the log-probabilities, and sums of the statistics."""
    leaf = torch.tensor(batch.new, requires_grad=True)
    old, advantages, mask, sequences = (
        torch.tensor(x) for x in (batch.old, batch.advantages, batch.mask, batch.sequences)
    )
    tokens = PolicyTokens.of(leaf, old, advantages, mask, sequences, ratio=ratio)  # type: ignore[arg-type]
    function = registry.load(PACKAGE, name, key="").policy_loss
    own = {key: value for key, value in options.items() if key not in CLIP}
    result = function(tokens, **required_arguments(function, {**CLIP, **options}), **own)
    loss = weighted_sum(result.loss, torch.tensor(weights), mask)
    loss.backward()
    assert leaf.grad is not None
    return (
        loss.item(),
        leaf.grad.numpy(),
        {key: value.sum().item() for key, value in result.stats.items()},
    )


def by_loops(
    name: str, batch: Batch, weights: np.ndarray, ratio: str, low: float = 0.2, high: float = 0.28
) -> float:
    """Return the loss as a sum over tokens."""
    return float((weights * token_losses(name, batch, ratio, low, high))[batch.mask].sum())


def token_losses(
    name: str, batch: Batch, ratio: str, low: float = 0.2, high: float = 0.28
) -> np.ndarray:
    """Return the formula of a loss at every trained token; 0 at others."""
    losses = np.zeros(len(batch.new))
    for s in range(int(batch.sequences.max()) + 1):
        positions = [i for i in range(len(batch.new)) if batch.sequences[i] == s and batch.mask[i]]
        logs = [float(batch.new[i] - batch.old[i]) for i in positions]
        for i, own in zip(positions, logs, strict=True):
            d = own if ratio == "token" else sum(logs) / len(logs)
            token = golden.Token(
                d, float(batch.advantages[i]), float(batch.new[i]), logs, low, high
            )
            losses[i] = golden.LOSSES[name].formula(token)
    return losses


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "ratio"), BOTH)
def test_every_loss_ratio_and_aggregation_equals_plain_loops(name, ratio, mode):
    batch = Batch()
    value, _, _ = aggregated_loss(name, batch, batch.weights(mode), ratio)
    assert value == pytest.approx(by_loops(name, batch, batch.weights(mode), ratio), rel=1e-10)


def loss_at(name: str, batch: Batch, weights: np.ndarray, ratio: str, at: np.ndarray) -> float:
    """Return the loss at other log-probabilities.

    Weights that are constants of the gradient remain the weights of `batch`.
    """
    if not golden.LOSSES[name].is_linear:
        moved = batch.pick(np.arange(len(batch.new)))
        moved.new = at
        return aggregated_loss(name, moved, weights, ratio)[0]
    fixed = token_losses(name, batch, ratio) / batch.new  # -weight * A: the loss is linear
    return float((weights * fixed * at)[batch.mask].sum())


@pytest.mark.sample(25)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "ratio"), BOTH)
def test_the_gradient_of_every_loss_equals_finite_differences(name, ratio, mode):
    batch, step = Batch(seed=3), 1e-6
    weights = batch.weights(mode)
    _, gradient, _ = aggregated_loss(name, batch, weights, ratio)
    for i in range(len(batch.new)):
        high, low = batch.new.copy(), batch.new.copy()
        high[i] += step
        low[i] -= step
        numeric = (
            loss_at(name, batch, weights, ratio, high) - loss_at(name, batch, weights, ratio, low)
        ) / (2 * step)
        assert gradient[i] == pytest.approx(numeric, rel=1e-5, abs=1e-8)
    assert np.abs(gradient).max() > 1e-3


@pytest.mark.sample(25)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "ratio"), BOTH)
def test_split_and_order_of_the_sequences_do_not_change_loss_and_gradient(name, ratio, mode):
    batch = Batch()
    weights = batch.weights(mode)
    value, gradient, _ = aggregated_loss(name, batch, weights, ratio)
    for order in ([[0], [1], [2], [3], [4]], [[4, 2], [0, 3, 1]], [[3, 1, 4, 0, 2]]):
        total, gradients = 0.0, np.zeros_like(gradient)
        for numbers in order:
            positions = np.concatenate([np.flatnonzero(batch.sequences == s) for s in numbers])
            share, slope, _ = aggregated_loss(
                name, batch.pick(positions), weights[positions], ratio
            )
            total += share
            gradients[positions] = slope
        assert total == pytest.approx(value, rel=1e-11)
        np.testing.assert_allclose(gradients, gradient, rtol=1e-10, atol=1e-15)


@pytest.mark.sample(25)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize(("name", "ratio"), BOTH)
def test_values_at_masked_positions_do_not_reach_loss_and_gradient(name, ratio, poison, mode):
    batch = Batch()
    weights = batch.weights(mode)
    clean = aggregated_loss(name, batch, weights, ratio)
    for field in ("new", "old", "advantages"):
        dirty = batch.pick(np.arange(len(batch.new)))
        dirty.sequences = batch.sequences
        values = getattr(batch, field).copy()
        values[~batch.mask] = poison
        setattr(dirty, field, values)
        value, gradient, stats = aggregated_loss(name, dirty, weights, ratio)
        assert value == clean[0] and stats == clean[2]
        np.testing.assert_array_equal(gradient, clean[1])


@pytest.mark.sample(25)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "ratio"), BOTH)
def test_padding_of_any_width_changes_nothing(name, ratio, mode):
    batch = Batch()
    weights = batch.weights(mode)
    value, gradient, stats = aggregated_loss(name, batch, weights, ratio)
    last = int(batch.sequences[-1])
    for width in (1, 7, 64):
        wide = Batch()
        for field, filler in (
            ("new", math.nan),
            ("old", 3.0),
            ("advantages", 1.0),
            ("mask", False),
            ("sequences", last),
        ):
            setattr(
                wide,
                field,
                np.concatenate(
                    (getattr(batch, field), np.full(width, filler, getattr(batch, field).dtype))
                ),
            )
        padded = aggregated_loss(name, wide, np.concatenate((weights, np.ones(width))), ratio)
        assert padded[0] == pytest.approx(value, rel=1e-12) and padded[2] == pytest.approx(stats)
        np.testing.assert_allclose(padded[1][:-width], gradient, rtol=1e-12)
        assert not padded[1][-width:].any()


@pytest.mark.parametrize(("name", "ratio"), BOTH)
def test_factors_of_the_advantages_are_factors_of_the_policy_loss(name, ratio):
    options = {"drift": 0.0} if name == "cpgd" else {}
    batch, doubled = Batch(), Batch()
    doubled.advantages = batch.advantages * 2.5
    weights = batch.weights("token-mean")
    assert aggregated_loss(name, doubled, weights, ratio, **options)[0] == pytest.approx(
        2.5 * aggregated_loss(name, batch, weights, ratio, **options)[0]
    )


@pytest.mark.parametrize(("name", "ratio"), BOTH)
def test_the_first_update_of_every_loss_is_the_policy_gradient(name, ratio):
    batch = Batch()
    batch.old = batch.new
    weights = batch.weights("token-mean")
    _, gradient, _ = aggregated_loss(name, batch, weights, ratio)
    np.testing.assert_allclose(
        gradient, -weights * batch.advantages * batch.mask, rtol=1e-12, atol=1e-16
    )


@pytest.mark.parametrize(("name", "ratio"), BOTH)
def test_overflowing_ratios_leave_finite_numbers_and_no_tokens_leave_zero(name, ratio):
    batch = Batch()
    batch.new = batch.old + np.where(np.arange(len(batch.old)) % 2, 300.0, -300.0)
    value, gradient, stats = aggregated_loss(name, batch, batch.weights("token-mean"), ratio)
    assert (
        math.isfinite(value)
        and np.isfinite(gradient).all()
        and all(map(math.isfinite, stats.values()))
    )
    empty = batch.pick(np.arange(4))
    empty.mask = np.zeros(4, bool)
    value, gradient, _ = aggregated_loss(name, empty, np.ones(4), ratio)
    assert value == 0.0 and not gradient.any()
    nothing = batch.pick(np.arange(1))
    for field in ("new", "old", "advantages", "mask", "sequences"):
        setattr(nothing, field, getattr(nothing, field)[:0])
    assert aggregated_loss(name, nothing, np.ones(0), ratio)[0] == 0.0


def two_tokens(logs: list[float], advantage: float) -> Batch:
    batch = Batch()
    batch.old, batch.new = np.zeros(len(logs)), np.array(logs)
    batch.sequences, batch.mask = np.zeros(len(logs), np.int64), np.ones(len(logs), bool)
    batch.advantages = np.full(len(logs), advantage)
    return batch


def test_clip_higher_is_asymmetric_and_its_fraction_is_counted():
    batch = two_tokens(list(np.log([1.5, 0.5, 1.25])), 1.0)
    value, gradient, stats = aggregated_loss("ppo", batch, np.ones(3))
    assert value == pytest.approx(-1.28 - 0.5 - 1.25)
    assert gradient.tolist() == pytest.approx([0.0, -0.5, -1.25]) and stats["clip_fraction"] == 1
    batch = two_tokens(list(np.log([1.5, 0.5])), -1.0)
    assert aggregated_loss("ppo", batch, np.ones(2))[0] == pytest.approx(1.5 + 0.8)


def test_dual_clip_caps_the_loss_at_exactly_c_and_counts_it():
    value, gradient, stats = aggregated_loss(
        "ppo", two_tokens(list(np.log([5.0, 2.0])), -1.0), np.ones(2), dual=3.0
    )
    assert value == pytest.approx(3.0 + 2.0)
    assert gradient.tolist() == pytest.approx([0.0, 2.0])
    assert stats["dual_clip_fraction"] == 1
    with pytest.raises(ValueError, match=mentions("dual clip", "1.1")):
        aggregated_loss("ppo", two_tokens([0.0], 1.0), np.ones(1), dual=1.1)


def test_gspo_spreads_the_gradient_of_the_sequence_evenly_over_its_tokens():
    batch = two_tokens([0.3, -0.1], 2.0)  # s = exp(0.1), inside of the clip
    value, gradient, _ = aggregated_loss("ppo", batch, np.full(2, 0.5), "sequence")
    assert value == pytest.approx(-2.0 * math.exp(0.1))
    assert gradient.tolist() == pytest.approx([-math.exp(0.1)] * 2)


def test_gmpo_is_the_geometric_mean_of_clipped_ratios():
    batch = two_tokens(
        [0.9, -0.3], 1.0
    )  # 0.9 is cut at 0.28, -0.3 counts although below -0.2: it hurts already
    value, gradient, stats = aggregated_loss("gmpo", batch, np.full(2, 0.5))
    assert value == pytest.approx(-math.sqrt(math.exp(0.28) * math.exp(-0.3)))
    assert gradient.tolist() == pytest.approx([0.0, value / 2]) and stats["clip_fraction"] == 1


def test_the_gate_of_sapo_has_slope_one_on_policy_and_fades_on_both_sides():
    batch = two_tokens([0.0, math.log(3), math.log(0.2)], -1.0)
    _, gradient, stats = aggregated_loss("sapo", batch, np.ones(3), tau_negative=2.0)

    def slope(r: float) -> float:  # of 4 / tau sigmoid(tau (r - 1)) by r
        gate = 1 / (1 + math.exp(-2.0 * (r - 1)))
        return 4 * gate * (1 - gate)

    assert gradient.tolist() == pytest.approx([1.0, 3 * slope(3.0), 0.2 * slope(0.2)])
    assert stats["gate_slope"] == pytest.approx(1.0 + slope(3.0) + slope(0.2))


def test_dppo_masks_by_probabilities_in_the_direction_of_the_advantage():
    """Ratios of 4 and 1/4: a rare token stays in the region, a frequent one leaves it."""
    new, old = np.log([0.04, 0.8, 0.2, 0.01]), np.log([0.01, 0.2, 0.8, 0.04])
    expected = {1.0: [-4.0, 0.0, -0.25, -0.25], -1.0: [4.0, 4.0, 0.0, 0.25]}
    for advantage, gradients in expected.items():
        batch = two_tokens([0.0] * 4, advantage)
        batch.new, batch.old = new, old
        for divergence, clip in (("tv", 0.1), ("kl", 0.1)):
            options = {"clip_low": clip, "clip_high": clip, "divergence": divergence}
            _, gradient, stats = aggregated_loss("dppo", batch, np.ones(4), **options)
            assert gradient.tolist() == pytest.approx(gradients)
            assert stats["clip_fraction"] == 1
    assert aggregated_loss("dppo", two_tokens([5.0], 1.0), np.ones(1), clip_high=1e9, cap=3.0)[
        1
    ].tolist() == [-3.0]
    with pytest.raises(ValueError, match=mentions("divergence=js", "tv")):
        aggregated_loss("dppo", two_tokens([0.0], 1.0), np.ones(1), divergence="js")


def test_dppo_masks_tokens_that_the_old_policy_excluded():
    """A token of probability 0 has a divergence of log(1 / (1 - p)), not NaN."""
    batch = two_tokens([0.0], 1.0)
    batch.new, batch.old = np.log([0.6]), np.array([-np.inf])
    options = {"clip_low": 0.1, "clip_high": 0.1, "divergence": "kl"}
    value, gradient, stats = aggregated_loss("dppo", batch, np.ones(1), **options)
    assert value == 0.0 and gradient.tolist() == [0.0] and stats["clip_fraction"] == 1


def test_topr_tapers_negative_sequences_by_the_product_of_their_ratios_only():
    batch = two_tokens([-0.3, -0.4], -1.0)
    _, gradient, stats = aggregated_loss("topr", batch, np.ones(2))
    assert gradient.tolist() == pytest.approx([math.exp(-0.7)] * 2) and stats[
        "taper"
    ] == pytest.approx(2 * math.exp(-0.7))
    assert aggregated_loss("topr", batch, np.ones(2), level="token")[1].tolist() == pytest.approx(
        [math.exp(-0.3), math.exp(-0.4)]
    )
    batch.advantages = -batch.advantages
    assert aggregated_loss("topr", batch, np.ones(2))[1].tolist() == [-1.0, -1.0]
    with pytest.raises(ValueError, match=mentions("level=word", "sequence")):
        aggregated_loss("topr", batch, np.ones(2), level="word")
    with pytest.raises(ValueError, match="split"):
        aggregated_loss("topr", batch, np.ones(2), split="reward")


def test_the_drift_of_cpgd_has_the_gradient_of_the_kl_until_its_cap():
    d = torch.tensor([-1.0, 0.0, 0.1, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    policy_drift(d, 0.2).sum().backward()
    assert d.grad is not None
    assert d.grad.tolist() == pytest.approx([math.exp(-1) - 1, 0.0, math.exp(0.1) - 1, 0.2, 0.2])
    knee = torch.tensor([math.log(1.2) - 1e-9, math.log(1.2) + 1e-9], dtype=torch.float64)
    assert policy_drift(knee, 0.2).diff().abs().item() < 1e-8


def test_half_precision_is_computed_in_single():
    new = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16)
    numbers = torch.zeros(2, dtype=torch.int64)
    tokens = PolicyTokens.of(
        new,
        new.clone(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.bool),
        numbers,
    )
    assert tokens.log_ratio.dtype == tokens.advantages.dtype == torch.float32


def test_sums_and_means_of_sequences_exclude_masked_positions():
    values, mask = torch.tensor([1.0, 2.0, math.nan, 5.0]), torch.tensor([True, True, False, True])
    numbers = torch.tensor([0, 0, 0, 1])
    assert sequence_sums(values, mask, numbers).tolist() == [3.0, 3.0, 0.0, 5.0]
    assert sequence_means(values, mask, numbers).tolist() == [1.5, 1.5, 0.0, 5.0]
    assert sequence_sums(values, mask, torch.tensor([0, 0, 2, 3])).tolist() == [
        3.0,
        3.0,
        0.0,
        5.0,
    ], "a sequence without positions"


def test_the_weights_of_the_four_aggregations_by_hand():
    counts = [4, 0, 1]
    assert sequence_weights(counts, "token-mean").tolist() == [0.2] * 3
    assert sequence_weights(counts, "seq-mean-token-mean")[[0, 2]].tolist() == [1 / 8, 1 / 2]
    assert sequence_weights(counts, "seq-mean-token-sum").tolist() == [0.5] * 3
    assert sequence_weights(counts, "seq-sum-over-constant", constant=10).tolist() == [0.1] * 3
    with pytest.raises(ValueError, match=mentions("token", "masked")):
        sequence_weights([0, 0], "token-mean")
    with pytest.raises(ValueError, match="constant=None"):
        sequence_weights(counts, "seq-sum-over-constant")
