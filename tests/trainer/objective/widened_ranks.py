"""Rank code of `test_widened.py`: passes with a float32 output layer, and passes in float32.

A rank process imports it by name (`widened_ranks:main`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from msrl.algorithms.packing import micro_batch
from msrl.config.sections.train import OptimizerConfig
from msrl.trainer.launch import RankContext
from msrl.trainer.objective.batches import num_loss_tokens
from msrl.trainer.objective.requests import TokenRequest, UpdateRequest
from msrl.trainer.settings import Layout, RankSettings, ReplicaSettings
from msrl.types import MicroBatch
from support import HANG_S
from training_ranks import sequences

if TYPE_CHECKING:
    from msrl.trainer.language_model import LanguageModelReplica
    from msrl.trainer.rank import TrainingRank


@dataclass(frozen=True)
class Case:
    """A model in bfloat16 in a layout, with further settings of the policy."""

    name: str
    model: Path
    layout: Layout = field(default_factory=Layout)
    logits_dtype: str | None = "float32"
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """Measurements of the last stage.

    Attributes:
        name: Name of the case.
        product_error: Largest difference of the logits from the float32 product of the hidden
            states.
        is_rounded: True if all logits are numbers of bfloat16.
        hidden_dtype: dtype of the hidden states that the output layer gets.
        logprobs: Log-probabilities of the labels of the first sequence, at temperature 1.
        in_float32: The same in float32.
        is_unchanged: True if a pass in float32 leaves weights and later passes as they were.
        loss: Loss of an update.
        grad_norm: Norm of its gradient.
        norm_before: The same before any pass in float32.
    """

    name: str
    product_error: float
    is_rounded: bool
    hidden_dtype: str
    logprobs: np.ndarray
    in_float32: np.ndarray
    is_unchanged: bool
    loss: float
    grad_norm: float
    norm_before: float


def main(context: RankContext, cases: list[Case]) -> None:
    """Run every case that includes this rank; its last rank reports the result."""
    for number, case in enumerate(cases):
        if context.rank < case.layout.replica_size:
            result = _run(context, case, f"{context.init_method}-{number}")
            if context.rank == case.layout.replica_size - 1:
                context.report(result)


def _run(context: RankContext, case: Case, init_method: str) -> Result | None:
    from msrl.trainer.rank import TrainingRank

    settings = RankSettings(
        "cpu",
        case.layout,
        "bfloat16",
        seed=0,
        timeout_s=HANG_S,
        logits_dtype=case.logits_dtype,
        policy=ReplicaSettings(case.model, optimizer=OptimizerConfig(lr=1e-3), **case.more),
    )
    rank = TrainingRank(settings, context.rank, case.layout.replica_size, init_method)
    try:
        return _measure(rank, case)
    finally:
        rank.close()


def _measure(rank: TrainingRank, case: Case) -> Result | None:
    from msrl.trainer.model.build import named_weights
    from msrl.trainer.objective.losses import SftLoss

    policy, batch = rank.policy, first_batch(rank.policy.sequence_multiple)
    request = UpdateRequest(SftLoss(), 1e-9, divisor=num_loss_tokens(sequences(0)))
    norm_before = rank.update([batch], request)["grad_norm"]
    products = _products(policy, batch)
    weights = {name: each.detach().clone() for name, each in named_weights(policy.model).items()}
    plain, wide, again = (
        _logprobs(policy, batch, in_float32=in_float32) for in_float32 in (False, True, False)
    )
    is_unchanged = all(
        torch.equal(weights[name], each) for name, each in named_weights(policy.model).items()
    )
    report = rank.update([batch], request)
    if not policy.position.is_last_stage:
        return None
    return Result(
        case.name,
        *products,
        plain,
        wide,
        is_unchanged and np.array_equal(plain, again),
        report["loss"],
        report["grad_norm"],
        norm_before,
    )


def first_batch(multiple: int) -> MicroBatch:
    """Return all sequences in one micro-batch."""
    ids, masks, fields = sequences(0)[:3]
    return micro_batch(ids, masks, fields, pad_to_multiple=multiple)


def _products(policy: LanguageModelReplica, batch: MicroBatch) -> tuple[float, bool, str]:
    """Compare the logits with a product of the hidden states and the weight in float32."""
    outputs: list[Any] = []

    def keep(output: Any, _: object) -> dict[str, Any]:
        outputs.append(output)
        return {}

    policy.run([batch], keep, gives_hidden=True)
    policy.run([batch], keep)
    if not policy.position.is_last_stage:
        return 0.0, False, ""
    hidden, logits = outputs
    expected = hidden.values.float() @ hidden.output_weight.float().t()
    assert torch.equal(hidden.values.bfloat16().float(), hidden.values.float())
    return (
        float((logits.float() - expected).abs().max()),
        torch.equal(logits.bfloat16().float(), logits.float()),
        str(hidden.values.dtype),
    )


def _logprobs(policy: LanguageModelReplica, batch: MicroBatch, *, in_float32: bool) -> np.ndarray:
    values = policy.forward([batch], TokenRequest(in_float32=in_float32)).by_name
    return np.zeros(0) if values is None else values["logprobs"][0][batch.loss_mask]
