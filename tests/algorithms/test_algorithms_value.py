"""Value loss and its statistics: hand calculation, finite differences, order and padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from msrl.algorithms.value import explained_variance, value_loss
from msrl.trainer.objective.losses import ValueLoss


def reals(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_the_value_loss_is_half_the_larger_of_two_squares():
    """Values 1, 1, -1, 0.1 (old values 0), returns 2, 0.5, 0, 0, clip 0.3.

    By hand, the clipped values are 0.3, 0.3, -0.3, 0.1.
    """
    clipped = value_loss(reals(1, 1, -1, 0.1), torch.zeros(4), reals(2, 0.5, 0, 0), clip=0.3)
    assert clipped.loss.tolist() == pytest.approx([1.7**2 / 2, 0.5**2 / 2, 1 / 2, 0.1**2 / 2])
    assert clipped.stats["value_clip_fraction"].tolist() == [1, 0, 0, 0]
    plain = value_loss(reals(1, 1, -1, 0.1), torch.zeros(4), reals(2, 0.5, 0, 0), clip=None)
    assert (
        plain.loss.tolist() == pytest.approx([1 / 2, 0.5**2 / 2, 1 / 2, 0.1**2 / 2])
        and not plain.stats
    )


@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradients_of_the_value_loss_agree_with_finite_differences(clip):
    torch.manual_seed(0)
    values, old, returns = (torch.randn(40, dtype=torch.float64) for _ in range(3))
    values.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: value_loss(x, old, returns, clip=clip).loss.sum(), values
    )


def test_a_clipped_value_that_moves_away_from_its_return_is_still_trained():
    values = reals(1.0, -1.0).requires_grad_()
    value_loss(values, torch.zeros(2), reals(0.0, 0.0), clip=0.2).loss.sum().backward()
    assert values.grad is not None and values.grad.tolist() == [1.0, -1.0]
    values = reals(1.0).requires_grad_()
    value_loss(values, torch.zeros(1), reals(2.0), clip=0.2).loss.sum().backward()
    assert values.grad is not None and values.grad.tolist() == [0.0]


def test_the_loss_of_an_update_is_a_mean_over_all_tokens_for_any_split_and_order():
    random = np.random.default_rng(0)
    values, fields = torch.from_numpy(random.normal(size=30)), {
        name: torch.from_numpy(random.normal(size=30)) for name in ("old_values", "returns")
    }  # fmt: skip
    loss = ValueLoss(0.2)
    whole, sums = loss(values, fields, 30)
    order = torch.from_numpy(random.permutation(30))
    pieces = [
        loss(values[rows], {name: field[rows] for name, field in fields.items()}, 30)
        for rows in order.split([7, 1, 22])
    ]
    assert sum(value for value, _ in pieces).item() == pytest.approx(whole.item(), rel=1e-12)
    for name, total in sums.items():
        assert sum(shares[name] for _, shares in pieces).item() == pytest.approx(
            total.item(), rel=1e-12
        )
    assert whole.item() == pytest.approx(sums["value_loss"].item() / 30)


def test_explained_variance_is_one_for_the_truth_and_zero_for_a_constant():
    returns = np.array([0.0, 1.0, 4.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(3, 7.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, np.ones(3)) == 0.0
