"""clip_cov and kl_cov: selection of tokens by the covariance of advantage and log-probability."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from msrl.algorithms.losses import clip_cov, kl_cov, ppo
from msrl.algorithms.tokens import PolicyTokens, TokenLosses
from test_algorithms_losses import SELECTING

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
SIZE = 40


def make_tokens(seed: int = 0, spread: float = 0.2) -> tuple[torch.Tensor, PolicyTokens]:
    """Return the leaf of the log-probabilities and the tokens, a quarter of them masked."""
    random = np.random.default_rng(seed)
    old = torch.from_numpy(random.normal(-2.0, 1.5, SIZE))
    leaf = (old + torch.from_numpy(random.normal(0.0, spread, SIZE))).requires_grad_()
    mask = torch.from_numpy(random.random(SIZE) < 0.75)
    advantages = torch.from_numpy(random.normal(0.0, 1.5, SIZE))
    sequences = torch.from_numpy(np.repeat(np.arange(4), SIZE // 4))
    return leaf, PolicyTokens.of(leaf, old, advantages, mask, sequences)


def covariances_by_hand(tokens: PolicyTokens) -> dict[int, float]:
    """Return the covariance of each unmasked token by position."""
    positions = [i for i in range(SIZE) if tokens.mask[i]]
    logprobs, advantages = tokens.logprobs.tolist(), tokens.advantages.tolist()
    mean_logprob = sum(logprobs[i] for i in positions) / len(positions)
    mean_advantage = sum(advantages[i] for i in positions) / len(positions)
    return {i: (advantages[i] - mean_advantage) * (logprobs[i] - mean_logprob) for i in positions}


def gradient(losses: TokenLosses, leaf: torch.Tensor) -> torch.Tensor:
    losses.loss.sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def draws(seed: int) -> torch.Tensor:
    return torch.rand(SIZE, generator=torch.Generator().manual_seed(seed))


def positions(selected: torch.Tensor) -> set[int]:
    return set(selected.nonzero().flatten().tolist())


def test_the_losses_that_select_tokens_are_tested_here():
    assert SELECTING == ["clip_cov", "kl_cov"]


@pytest.mark.parametrize("share", [1e-9, 0.1, 1.0])
def test_clip_cov_takes_the_gradient_of_random_tokens_of_middling_covariance(share: float):
    for seed in range(5):
        leaf, tokens = make_tokens(seed)
        clipped = ppo.policy_loss(tokens, **CLIP, dual=None)
        covariances = covariances_by_hand(tokens)
        candidates = {
            i
            for i, value in covariances.items()
            if 0.5 < value < 3.0 and not clipped.stats["clip_fraction"][i]
        }
        losses = clip_cov.policy_loss(
            tokens, **CLIP, draws=draws(seed), share=share, low=0.5, high=3.0
        )
        selected = positions(losses.stats["covariance_fraction"])
        count = max(int(share * len(covariances)), 1)
        assert len(candidates) > 1 and selected <= candidates
        assert len(selected) == min(count, len(candidates))
        unselected = [i for i in range(SIZE) if i not in selected]
        torch.testing.assert_close(losses.loss[unselected], clipped.loss[unselected])
        assert not gradient(losses, leaf)[list(selected)].any()


def test_clip_cov_draws_by_the_numbers_of_tokens_and_none_without_candidates():
    """Equal random numbers draw equal tokens, other ones draw others of the same candidates."""
    tokens = make_tokens()[1]
    selected: list[set[int]] = []
    for seed in (1, 1, 2, 3):
        losses = clip_cov.policy_loss(
            make_tokens()[1], **CLIP, draws=draws(seed), share=0.1, low=0.1, high=9.0
        )
        selected.append(positions(losses.stats["covariance_fraction"]))
    assert selected[0] == selected[1] and len(set(map(frozenset, selected))) > 1
    unselective = clip_cov.policy_loss(tokens, **CLIP, draws=draws(0), low=1e6, high=1e7)
    torch.testing.assert_close(unselective.loss, ppo.policy_loss(tokens, **CLIP, dual=None).loss)
    assert not unselective.stats["covariance_fraction"].any()


@pytest.mark.parametrize("share", [1e-9, 0.2, 1.0])
def test_kl_cov_penalizes_the_tokens_of_highest_covariance(share: float):
    for seed in range(5):
        leaf, tokens = make_tokens(seed)
        covariances = covariances_by_hand(tokens)
        count = max(int(share * len(covariances)), 1)
        highest = sorted(covariances, key=lambda i: -covariances[i])[:count]
        losses = kl_cov.policy_loss(tokens, share=share, coef=0.7)
        assert positions(losses.stats["covariance_fraction"]) == set(highest)
        log_ratio, advantages = tokens.log_ratio.tolist(), tokens.advantages.tolist()
        expected = [
            -math.exp(log_ratio[i]) * advantages[i]
            + (0.7 * abs(log_ratio[i]) if i in highest else 0.0)
            for i in range(SIZE)
        ]
        assert losses.loss.tolist() == pytest.approx(expected)
        slopes = gradient(losses, leaf)
        top = highest[0]
        sign = math.copysign(1.0, log_ratio[top])
        assert slopes[top].item() == pytest.approx(
            -math.exp(log_ratio[top]) * advantages[top] + 0.7 * sign
        )


@pytest.mark.parametrize("function", [clip_cov.policy_loss, kl_cov.policy_loss])
def test_no_tokens_and_masked_tokens_are_ignored(function: Any):
    is_drawn = function is clip_cov.policy_loss
    options = {**CLIP, "draws": draws(0)} if is_drawn else {}
    leaf, tokens = make_tokens()
    empty = torch.zeros(0, dtype=torch.float64)
    nothing = PolicyTokens.of(empty, empty, empty, empty.bool(), empty.long())
    none = {**options, "draws": empty} if is_drawn else {}
    assert function(nothing, **none).loss.shape == (0,)
    masked = PolicyTokens.of(
        leaf,
        tokens.logprobs,
        tokens.advantages,
        torch.zeros(SIZE, dtype=torch.bool),
        tokens.sequences,
    )
    losses = function(masked, **options)
    assert not losses.loss.any() and not any(value.any() for value in losses.stats.values())
