"""Advantages and losses of an imported configuration, by the functions of the driver.

P prompts with G samples; N tokens of all responses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from msrl.algorithms.aggregate import sequence_weights
from msrl.algorithms.rollout_arrays import rollout_arrays
from msrl.config.schema import Config
from msrl.rewards.process import RewardSteps
from msrl.trainer.objective.losses import Outputs
from msrl.types import Prompt, ScoredGroup
from msrl.workflows.rl.update.advantages import compute_advantages
from msrl.workflows.rl.update.updater import policy_loss
from msrl.workflows.rl.update.values import StepValues
from prepared_steps import scored_group


def scored_groups(scores: Tensor, lengths: Sequence[int], tags: Sequence[str]) -> list[ScoredGroup]:
    """Return the groups of samples with these scores and numbers of tokens; a tag per prompt."""
    rewards = scores.reshape(len(tags), -1).tolist()
    counts = np.array(lengths).reshape(len(tags), -1).tolist()
    prompts = [Prompt(i, np.array([1]), "", {"tag": tag}) for i, tag in enumerate(tags)]
    return [scored_group(*values) for values in zip(prompts, rewards, counts, strict=True)]


def step_advantages(
    config: Config,
    groups: Sequence[ScoredGroup],
    logprobs: Tensor,  # [N]
    reference_logprobs: Tensor,  # [N]
    values: Tensor | None = None,  # [N]
) -> np.ndarray:  # [N]
    """Return the advantages of a step of scored groups."""
    arrays = rollout_arrays(groups)
    rewards = RewardSteps(config.reward, 64, {}).apply(groups).rewards
    policy, reference = (arrays.scatter(rows.numpy()) for rows in (logprobs, reference_logprobs))
    critic = None if values is None else values.numpy()
    computed = StepValues(policy, reference, critic=critic)
    is_trained = np.ones_like(arrays.decided)
    return compute_advantages(arrays, is_trained, rewards, computed, config).advantages


def loss_and_gradient(
    config: Config,
    lengths: Sequence[int],
    logprobs: Tensor,  # [N]
    entropies: Tensor,  # [N]
    fields: Mapping[str, Tensor],  # [N] each, besides the weights
) -> tuple[float, Tensor]:
    """Return value and gradient [N] of the policy's loss."""
    leaf = logprobs.clone().requires_grad_()
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    aggregate = config.algo.aggregate
    weights = sequence_weights(lengths, aggregate.mode, constant=aggregate.constant)
    all_fields = {"weights": torch.from_numpy(weights)[sequences], **fields}
    outputs = Outputs(leaf, sequences, entropies)
    value, _ = policy_loss(config)(outputs, all_fields, len(leaf))
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad
