"""Advantages of a step, from its arrays, rewards and the values of its tokens.

In: `RolloutArrays`, the samples to train on, processed rewards and `StepValues`. Out:
`StepAdvantages`, an advantage of every sampled token. No function here calls a process or keeps a
state.

P prompts, G completions per prompt, N sampled tokens, end to end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from msrl import registry
from msrl.algorithms import kl
from msrl.algorithms.rollout_arrays import RolloutArrays
from msrl.algorithms.selection import Flags, sample_weights, trained_samples
from msrl.algorithms.token_rewards import Reals, TokenRewards
from msrl.algorithms.turns import Turns, with_turn_rewards
from msrl.algorithms.value import explained_variance
from msrl.config.schema import AlgoConfig, Config
from msrl.plan.derived import rewards_turns
from msrl.rewards.process import domains
from msrl.trainer.objective.losses import required_arguments
from msrl.types import Prompt
from msrl.workflows.rl.levels import difficulty
from msrl.workflows.rl.update.values import StepValues


@dataclass(frozen=True, slots=True)
class StepAdvantages:
    """Advantages of a step.

    Attributes:
        advantages: Advantages for the policy's loss: whitened, with those of teachers, clipped and
            weighted.
        returns: Targets of the critic; None without a critic.
        metrics: Metrics of the computation.
    """

    advantages: Reals  # [N]
    returns: Reals | None  # [N]
    metrics: Mapping[str, float]


def selected_samples(config: Config, arrays: RolloutArrays, is_informative: Flags) -> Flags:
    """Return which samples [P, G] the updates train on. `is_informative` [P]: `rollout.filter`."""
    mask = config.algo.mask
    unmasked = trained_samples(
        arrays.rewards,
        arrays.truncated,
        arrays.decided,
        drop_truncated=mask.truncated,
        drop_equal_groups=mask.equal_groups,
        difficulty=mask.difficulty,
    )
    return unmasked & ~arrays.faults & is_informative[:, None]


def compute_advantages(
    arrays: RolloutArrays,
    is_trained: Flags,  # [P, G]
    scores: Reals,  # [P, G], processed rewards
    values: StepValues,
    config: Config,
    *,
    greedy_rewards: Reals | None = None,  # [P], if the estimator needs them
    kl_factor: float = 1.0,  # of the KL penalty in the rewards
    has_rewards: bool = True,
) -> StepAdvantages:
    """Return the advantages of a step. With `has_rewards` False, only teachers give advantages."""
    algo, divergence = config.algo, _divergence(arrays, values, config)
    rewards = TokenRewards(
        scores,
        arrays.lengths,
        None if divergence is None else -algo.kl.reward.coef * kl_factor * divergence,
        is_trained,
        _domains(config, arrays.prompts),
        arrays.decided & arrays.greedy_decided[:, None],
        algo.advantage.correction,
    )
    turns = arrays.turns if config.environment.is_on else None
    if turns is not None:
        rewards = placed_rewards(config, rewards, turns)
    estimated = estimate_advantages(
        algo, rewards, values.critic, _distribution(arrays, values), greedy_rewards, turns
    )
    if not has_rewards:
        estimated = np.zeros_like(estimated)
    returns = None if values.critic is None else estimated + values.critic
    metrics = {
        **_reward_metrics(rewards, divergence, greedy_rewards),
        **_sample_metrics(arrays, is_trained, values.teachers),
        **_value_metrics(values.critic, returns),
    }
    advantages = _final_advantages(arrays, rewards, estimated, values.teachers, algo)
    return StepAdvantages(advantages, returns, metrics)


def _reward_metrics(
    rewards: TokenRewards,
    divergence: Reals | None,  # [N]
    greedy_rewards: Reals | None,  # [P]
) -> dict[str, float]:
    metrics = dict[str, float]()
    if divergence is not None:
        metrics["reward_kl"] = float(divergence.mean())
    if greedy_rewards is not None:
        counted = greedy_rewards[rewards.is_decided.any(axis=1)]
        metrics["greedy_reward"] = float(counted.mean()) if counted.size else 0.0
    return metrics


def _sample_metrics(
    arrays: RolloutArrays,
    is_trained: Flags,  # [P, G]
    taught: Reals | None,  # [N]
) -> dict[str, float]:
    metrics = dict[str, float]()
    if taught is not None:
        tokens = arrays.repeat_by_token(is_trained)
        metrics["distill_kl"] = -float(taught[tokens].sum()) / max(1, int(tokens.sum()))
    if not is_trained.all():
        metrics["masked"] = 1.0 - float(is_trained.mean())
    return metrics


def _value_metrics(values: Reals | None, returns: Reals | None) -> dict[str, float]:  # [N] each
    """Return metrics of the critic's values before the updates of a step."""
    if values is None or returns is None:
        return {}
    return {
        "value_mean": float(values.mean()),
        "return_mean": float(returns.mean()),
        "value_explained_variance": explained_variance(values, returns),
    }


def placed_rewards(config: Config, rewards: TokenRewards, turns: Turns) -> TokenRewards:
    """Give the reward of a turn to its last token.

    With `environment.reward_at` "end", the last token of an episode has all rewards.
    """
    if not rewards_turns(config):
        return rewards
    return with_turn_rewards(rewards, turns, config.environment.reward_weight)


def estimate_advantages(
    algo: AlgoConfig,
    rewards: TokenRewards,
    values: Reals | None = None,  # [N], if the estimator needs a critic
    distribution: Mapping[str, Reals] | None = None,  # [N] each, if the estimator needs it
    greedy_rewards: Reals | None = None,  # [P], if the estimator needs them
    turns: Turns | None = None,
) -> Reals:  # [N]
    """Return the advantages of the configured estimator, before whitening and clipping.

    They are 0 for responses without a real score.
    """
    advantage = algo.advantage
    estimate = registry.load(
        registry.ADVANTAGES, advantage.estimator, key="algo.advantage.estimator"
    ).advantages
    if advantage.whiten_rewards:
        rewards = rewards.whitened(advantage.eps)
    options = {
        name: value
        for name, value in algo.options.items()
        if name in registry.plugin_options(estimate)
    }
    arguments = {
        "eps": advantage.eps,
        "gamma": advantage.gamma,
        "lam": advantage.lam,
        "values": values,
        "turns": turns,
        "greedy_rewards": greedy_rewards,
        **(distribution or {}),
    }
    advantages = estimate(rewards, **required_arguments(estimate, arguments), **options)
    return np.where(rewards.everywhere(rewards.is_decided), advantages, 0.0)


def _final_advantages(
    arrays: RolloutArrays,
    rewards: TokenRewards,
    advantages: Reals,  # [N]
    taught: Reals | None,  # [N]
    algo: AlgoConfig,
) -> Reals:  # [N]
    """Whiten the advantages over the trained samples, add those of teachers, clip and weight."""
    settings = algo.advantage
    if settings.whiten:
        advantages = rewards.whiten(advantages, settings.eps)
    if taught is not None:
        advantages = advantages + algo.distill.coef * taught
    if settings.clip is not None:
        advantages = advantages.clip(-settings.clip, settings.clip)
    weight, difficulties = algo.sample_weight, None
    if weight.difficulty:
        key = "algo.sample_weight.difficulty"
        difficulties = np.array([difficulty(prompt, key) for prompt in arrays.prompts])
    assert rewards.trained is not None
    weights = sample_weights(
        arrays.lengths, rewards.trained, by_length=weight.length, difficulties=difficulties
    )
    return advantages * arrays.repeat_by_token(weights)


def _divergence(arrays: RolloutArrays, values: StepValues, config: Config) -> Reals | None:  # [N]
    """Return the divergence from the reference for the KL penalty in the rewards, if any."""
    section = config.algo.kl.reward
    if not section.coef:
        return None
    assert values.policy is not None
    assert values.reference is not None
    policy, reference = (
        torch.from_numpy(arrays.gather(rows)) for rows in (values.policy, values.reference)
    )
    mask = torch.ones(len(policy), dtype=torch.bool)
    return kl.per_token(section.estimator, policy, reference, mask).numpy()


def _distribution(arrays: RolloutArrays, values: StepValues) -> dict[str, Reals]:  # [N] each
    """Return the statistics of the policy's distribution at every sampled token."""
    if values.squared_probabilities is None:
        return {}
    assert values.policy is not None
    return {
        "logprobs": arrays.gather(values.policy),
        "squared_probabilities": arrays.gather(values.squared_probabilities),
    }


def _domains(config: Config, prompts: Sequence[Prompt]) -> NDArray[np.int64] | None:  # [P]
    """Return the domains within which advantages are whitened; None for one domain."""
    if config.algo.advantage.whiten_scope == "batch":
        return None
    return np.unique(domains(config.reward, prompts), return_inverse=True)[1].ravel()
