"""Rank code of the tests that invalid values in one place do not affect others.

The invalid values are in padding, in masked positions and in other samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msrl.algorithms.packing import Sequences, micro_batch
from msrl.config.sections.train import OptimizerConfig
from msrl.trainer.launch import RankContext
from msrl.trainer.objective.batches import num_loss_tokens, with_weights
from msrl.trainer.objective.requests import TokenRequest, UpdateRequest
from msrl.trainer.settings import Layout, RankSettings, ReplicaSettings
from support import HANG_S

# Token ids that trained samples do not use: of padding, and of samples that are masked out.
PADDING, GARBAGE = 0, 150
# The sum is odd and no length is divisible by the number of pieces under context parallelism, so
# that every layout with several ranks pads.
LENGTHS = (11, 7, 17, 3, 9)
MASKED_OUT = (1, 3)


@dataclass(frozen=True)
class Poisoned:
    """Case with one micro-batch of samples, two of which are masked out."""

    name: str
    model: Path
    layout: Layout = field(default_factory=Layout)
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.layout.replica_size


@dataclass(frozen=True)
class StepResult:
    """Loss, gradients and log-probabilities of all tokens of a step."""

    loss: float
    gradients: Mapping[str, np.ndarray]
    logprobs: np.ndarray


@dataclass(frozen=True)
class PoisonedResult:
    """Results of the steps of a case by modification of the batch."""

    name: str
    steps: Mapping[str, StepResult]


def run_poisoned(context: RankContext, case: Poisoned, init_method: str) -> PoisonedResult:
    """Run a step on the unmodified batch and with each kind of invalid values."""
    from msrl.trainer.rank import TrainingRank

    policy = ReplicaSettings(
        case.model, optimizer=OptimizerConfig(lr=1e-3, grad_clip=None), **case.more
    )
    settings = RankSettings("cpu", case.layout, "float32", seed=0, timeout_s=HANG_S, policy=policy)
    worker = TrainingRank(settings, context.rank, case.world, init_method)
    clean, garbage = _batch(), _batch(neighbors=GARBAGE)
    steps = {"clean": _step(worker, clean), "clean policy": _step(worker, clean, "policy")}
    steps["masked fields nan"] = _step(worker, _with_nan_where_masked(clean), "policy")
    with _embedding(worker, GARBAGE, 1e4):
        steps["neighbors large"] = _step(worker, garbage)
    with _embedding(worker, GARBAGE, float("nan")):
        steps["neighbors nan"] = _step(worker, garbage)
    with _embedding(worker, PADDING, float("nan")):
        steps["padding nan"] = _step(worker, clean)
    worker.close()
    return PoisonedResult(case.name, steps)


def _batch(neighbors: int | None = None) -> Sequences:
    """Return the samples. Masked-out samples consist of the token `neighbors`, if set."""
    random = np.random.default_rng(3)
    ids = [random.integers(PADDING + 1, GARBAGE, length).astype(np.int64) for length in LENGTHS]
    masks = [np.arange(length) >= 2 for length in LENGTHS]
    advantages, old_logprobs = (
        tuple(random.normal(at, 0.3, n).astype(np.float32) for n in LENGTHS) for at in (0.0, -5.3)
    )
    for number in MASKED_OUT:
        masks[number][:] = False
        if neighbors is not None:
            ids[number][:] = neighbors
    return Sequences(
        tuple(ids), tuple(masks), {"advantages": advantages, "old_logprobs": old_logprobs}
    )


def _with_nan_where_masked(pack: Sequences) -> Sequences:
    fields = {
        name: tuple(
            np.where(mask, row, np.float32("nan"))
            for mask, row in zip(pack.loss_masks, rows, strict=True)
        )
        for name, rows in pack.fields.items()
    }
    return pack._replace(fields=fields)


@contextmanager
def _embedding(worker: Any, token: int, scale: float) -> Iterator[None]:
    """Set the embedding of a token to large values or NaN within the context."""
    weight: Tensor = dict(worker.policy.model.named_parameters())[
        "embedding.word_embeddings.weight"
    ].data
    row = token - worker.position.tp_rank * len(weight)
    if not 0 <= row < len(weight):
        yield
        return
    original = weight[row].clone()
    weight[row] = torch.linspace(-1, 2, len(original)) * scale
    yield
    weight[row] = original


def _step(worker: Any, pack: Sequences, kind: str = "sft") -> StepResult:
    """Run a step with a learning rate of 0, which changes no weights."""
    from gradients import gathered_gradients
    from msrl.trainer.objective.losses import PolicyLoss, SftLoss

    if kind != "sft":
        pack = with_weights(pack, "token-mean")
    batch = micro_batch(*pack, pad_to_multiple=worker.sequence_multiple)
    loss = SftLoss() if kind == "sft" else PolicyLoss(0.7)
    report = worker.update([batch], UpdateRequest(loss, 0.0, divisor=num_loss_tokens(pack)))
    gradients = {name: tensor.numpy() for name, tensor in gathered_gradients(worker.policy).items()}
    all_tokens = replace(
        batch, loss_mask=np.arange(len(batch.token_ids)) + 1 < sum(LENGTHS), fields={}
    )
    (logprobs,) = worker.policy.forward([all_tokens], TokenRequest()).by_name["logprobs"]
    return StepResult(report["loss"], gradients, logprobs[: sum(LENGTHS)])
