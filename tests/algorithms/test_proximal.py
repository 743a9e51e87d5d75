"""Denominators of the likelihood ratio: behavior policy and log-linear proximal policy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from msrl.algorithms.mismatch import Correction
from msrl.algorithms.proximal import log_linear, proximal_shares
from msrl.trainer.objective.losses import Outputs, PolicyLoss
from msrl.types import Completion, Prompt, Reward, RolloutGroup, ScoredGroup, VersionRun
from msrl.workflows.rl.update.batches import with_proximal_shares
from prepared_steps import make_step


def test_before_the_first_update_the_proximal_policy_is_the_current_one() -> None:
    versions = np.array([5, 4, 1], np.float32)
    assert proximal_shares(versions, 5, 0.0).tolist() == [1.0, 1.0, 1.0]


def test_the_share_is_the_position_of_the_step_between_behavior_and_current_version() -> None:
    # Half of the updates of step 5 are done: the current version is 5.5.
    shares = proximal_shares(np.array([5, 4, 1], np.float32), 5, 0.5)
    assert shares == pytest.approx([0.0, 1 / 1.5, 4 / 4.5])


def test_the_log_linear_approximation_interpolates_log_probabilities() -> None:
    current = torch.tensor([-1.0, -2.0], requires_grad=True)
    behavior, shares = torch.tensor([-3.0, -2.5]), torch.tensor([0.25, 1.0])
    proximal = log_linear(current, behavior, shares)
    assert proximal.tolist() == [-2.5, -2.0] and not proximal.requires_grad


def make_group() -> ScoredGroup:
    prompt = Prompt(0, np.array([7, 8]))
    logprobs = np.full(3, -1.0, np.float32)
    runs = (VersionRun(2, 1), VersionRun(4, 2))
    mixed = Completion(np.array([1, 2, 3]), logprobs, "stop", 2, "", runs)
    plain = Completion(np.array([4]), logprobs[:1], "stop", 3, "")
    return ScoredGroup(RolloutGroup(prompt, (mixed, plain)), (Reward(1.0, {}), Reward(0.0, {})))


def test_every_response_token_gets_the_version_that_sampled_it() -> None:
    sequences = make_step([make_group()], None, None, "algo.old_logprobs=log-linear").sequences
    first, second = sequences.fields["behavior_versions"]
    assert first.tolist() == [0, 0, 2, 4, 4] and second.tolist() == [0, 0, 3]
    shares = with_proximal_shares(sequences, 4, 0.5).fields["proximal_shares"]
    assert shares[0][2:] == pytest.approx([2 / 2.5, 0.0, 0.0])
    assert "behavior_versions" not in with_proximal_shares(sequences, 4, 0.5).fields


def test_every_sampled_token_gets_the_reward_of_its_sample() -> None:
    sets = ("algo.policy_loss=topr", "algo.options.split=reward")
    first, second = make_step([make_group()], None, None, *sets).sequences.fields["scores"]
    assert (first.tolist(), second.tolist()) == ([0.0] * 2 + [1.0] * 3, [0.0] * 3)


def loss_and_gradient(loss: PolicyLoss, logprobs: list[float], **fields: list[float]) -> tuple:
    values = torch.tensor(logprobs, requires_grad=True)
    tensors = {name: torch.tensor(numbers) for name, numbers in fields.items()}
    tensors["weights"] = torch.full_like(values, 1.0).detach()
    sequences = torch.zeros(len(logprobs), dtype=torch.int64)
    result, sums = loss(Outputs(values, sequences), tensors, 1)
    result.backward()
    return result.item(), values.grad, sums


def test_the_ratio_to_the_behavior_policy_is_clipped() -> None:
    loss = PolicyLoss(
        1.0, clip_low=0.2, clip_high=0.2, old_logprobs="behavior", needs_entropy=False
    )
    value, gradient, sums = loss_and_gradient(
        loss, [-1.0, -1.0], sampler_logprobs=[-2.0, -1.1], advantages=[1.0, 1.0]
    )
    assert value == pytest.approx(-1.2 - math.exp(0.1))
    assert gradient.tolist() == pytest.approx([0.0, -math.exp(0.1)])
    assert sums["clip_fraction"].item() == 1.0
    # The distance between trainer and engine is still reported.
    assert sums["sampler_logprob_difference"].item() == pytest.approx(1.1)


def test_a_filter_measures_the_current_policy_against_the_behavior_policy() -> None:
    correction = Correction(filter="sequence", low=0.99, high=1.01)
    loss = PolicyLoss(
        1.0, policy_loss="tis", correction=correction, old_logprobs="behavior", needs_entropy=False
    )
    value, gradient, sums = loss_and_gradient(
        loss, [-1.0, -1.0], sampler_logprobs=[-1.2, -1.1], advantages=[1.0, 1.0]
    )
    assert value == 0.0 and gradient.tolist() == [0.0, 0.0]
    assert sums["mismatch_filtered"].item() == 2.0


def test_decoupled_ppo_weights_the_clipped_ratio_to_the_approximated_proximal_policy() -> None:
    correction = Correction(weight="token", upper=2.0)
    loss = PolicyLoss(1.0, correction=correction, old_logprobs="log-linear", needs_entropy=False)
    value, gradient, _ = loss_and_gradient(
        loss,
        [-1.0, -1.0],
        sampler_logprobs=[-1.2, -3.0],
        proximal_shares=[0.5, 0.5],
        advantages=[1.0, 1.0],
    )
    # Token 0: proximal -1.1, weight e^0.1, ratio e^0.1. Token 1: weight capped at 2, ratio clipped.
    assert value == pytest.approx(-math.exp(0.2) - 2.0 * 1.2)
    assert gradient.tolist() == pytest.approx([-math.exp(0.2), 0.0])


def test_extreme_log_ratios_stay_finite() -> None:
    for old_logprobs in ("behavior", "log-linear"):
        loss = PolicyLoss(
            1.0,
            policy_loss="tis",
            options={"cap": 1e30},
            correction=Correction(weight="token", upper=1e30),
            old_logprobs=old_logprobs,
            needs_entropy=False,
        )
        value, gradient, _ = loss_and_gradient(
            loss,
            [-1.0, -400.0],
            sampler_logprobs=[-400.0, -1.0],
            proximal_shares=[0.5, 0.5],
            advantages=[1.0, -1.0],
        )
        assert math.isfinite(value) and bool(torch.isfinite(gradient).all())
