"""Rank code of `test_replicas.py`: a rank with every kind of replica.

A rank process imports it by name (`replica_ranks:main`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from msrl.algorithms.packing import micro_batch
from msrl.config.sections.train import OffloadConfig, OptimizerConfig
from msrl.trainer.launch import RankContext
from msrl.trainer.objective.batches import select, with_weights
from msrl.trainer.objective.requests import TokenRequest, TokenValue, UpdateRequest
from msrl.trainer.settings import Layout, RankSettings, ReplicaSettings, critic_settings
from msrl.types import MicroBatch
from support import HANG_S
from training_ranks import sequences

if TYPE_CHECKING:
    from torch import Tensor

    from msrl.trainer.rank import TrainingRank

PARAMS = OffloadConfig(params=True)


def main(context: RankContext, models: tuple[Path, Path, Path]) -> None:
    """Report measurements of the replicas of one rank by name."""
    from msrl.trainer.rank import TrainingRank

    model, other, scored = models
    settings = RankSettings(
        "cpu",
        Layout(),
        "float32",
        seed=0,
        timeout_s=HANG_S,
        policy=ReplicaSettings(model, optimizer=OptimizerConfig(lr=1e-3), offload=PARAMS),
        reference=ReplicaSettings(other, offload=PARAMS),
        critic=critic_settings(scored, OptimizerConfig(lr=1e-3), offload=PARAMS),
        reward_models={"judge": ReplicaSettings(scored, offload=PARAMS)},
    )
    rank = TrainingRank(settings, context.rank, context.world_size, context.init_method)
    first, second = _batch([0, 1, 2]), _batch([3, 4, 5, 6, 7])
    before = rank.policy.logits([first])
    report = {
        "kl": {
            name: _kl(rank, batches)
            for name, batches in {"both": [first, second], "twice": [first, second, first]}.items()
        },
        "kl alone": [_kl(rank, [batch]) for batch in (first, second)],
        "tokens": [int(batch.loss_mask.sum()) for batch in (first, second)],
    }
    after = rank.policy.logits([first])  # after passes that returned hidden states
    assert before is not None and after is not None
    report["logits are the same"] = bool((before[0] == after[0]).all())
    report["statistics"] = {
        name: _statistic_error(rank, first, before[0], name)
        for name in ("entropies", "squared_probabilities")
    }
    critic, reward_model = (
        _values(rank, first, TokenRequest(("values",), model))["values"]
        for model in ("critic", "reward:judge")
    )
    report["values are the scores"] = np.array_equal(critic, reward_model)
    rank.offload()
    report["bytes after offload"] = [_bytes(replica) for replica in rank.replicas()]
    report["trained"] = [replica.settings.model.name for replica in rank.trained_replicas()]
    rank.close()
    context.report(report)


def _batch(indices: list[int]) -> MicroBatch:
    return micro_batch(*select(with_weights(sequences(0, with_fields=True), "token-mean"), indices))


def _kl(rank: TrainingRank, batches: list[MicroBatch]) -> float:
    """Return the exact divergence from the reference per token, from a step of learning rate 0."""
    from msrl.trainer.objective.losses import PolicyLoss

    loss = PolicyLoss(0.7, kl_coef=0.1, kl_estimator="full")
    num_tokens = sum(int(batch.loss_mask.sum()) for batch in batches)
    return rank.update(batches, UpdateRequest(loss, 0.0, divisor=num_tokens))["kl"]


def _statistic_error(
    rank: TrainingRank, batch: MicroBatch, logits: Tensor, name: TokenValue
) -> float:
    """Return the largest difference of a statistic from the logits' value, at temperature 0.7."""
    probabilities = (logits.double() / 0.7).softmax(-1)
    values = {
        "entropies": -(probabilities * probabilities.log()).sum(-1),
        "squared_probabilities": probabilities.square().sum(-1),
    }[name]
    expected = np.where(batch.loss_mask, values.numpy(), 0.0)
    statistic = _values(rank, batch, TokenRequest((name,), temperature=0.7))[name]
    # One pass may compute several values.
    several = TokenRequest(("logprobs", "squared_probabilities", "entropies"), temperature=0.7)
    values = _values(rank, batch, several)
    assert np.array_equal(values[name], statistic)
    logprobs = _values(rank, batch, TokenRequest(temperature=0.7))["logprobs"]
    np.testing.assert_allclose(values["logprobs"], logprobs, atol=1e-6)
    return float(np.abs(statistic - expected).max())


def _values(rank: TrainingRank, batch: MicroBatch, request: TokenRequest) -> dict[str, np.ndarray]:
    with rank.model(request.model) as model:
        by_name = model.forward([batch], request).by_name
    assert by_name is not None
    return {name: rows[0] for name, rows in by_name.items()}


def _bytes(replica) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in replica.model.parameters())
