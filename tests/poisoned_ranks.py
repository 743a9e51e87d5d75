"""Ranks that train with invalid values in padding, masked tokens and other samples of a pack."""

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
from msrl.trainer.launch import RankContext
from msrl.trainer.objective.batches import num_loss_tokens, with_weights
from msrl.trainer.settings import Layout, OptimizerSettings, WorkerSettings

# Token ids that only padding and fully masked samples use.
PADDING, GARBAGE = 0, 150
# No length and not their sum is divisible by the number of pieces: every parallel layout pads.
LENGTHS = (11, 7, 17, 3, 9)
MASKED_OUT = (1, 3)


@dataclass(frozen=True)
class PoisonedCase:
    """A pack of samples, two of them fully masked, to train on with and without invalid values."""

    name: str
    model: Path
    layout: Layout = field(default_factory=Layout)
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.layout.replica_size


@dataclass(frozen=True)
class Observation:
    """Loss, gradients and per-token log-probabilities of one step."""

    loss: float
    gradients: Mapping[str, np.ndarray]
    logprobs: np.ndarray


@dataclass(frozen=True)
class PoisonedResult:
    """Observations by kind of invalid value."""

    name: str
    observations: Mapping[str, Observation]


def run_case(context: RankContext, case: PoisonedCase, init_method: str) -> PoisonedResult:
    """Train on the valid pack, then with each kind of invalid value."""
    from msrl.trainer.rank import TrainWorker

    optimizer = OptimizerSettings(lr=1e-3, grad_clip=None)
    settings = WorkerSettings(
        "cpu",
        case.model,
        case.layout,
        "float32",
        seed=0,
        timeout_s=120,
        optimizer=optimizer,
        **case.more,
    )
    worker = TrainWorker(settings, context.rank, case.world, init_method)
    clean, garbage = _pack(), _pack(masked_token=GARBAGE)
    observations = {
        "clean": _train_once(worker, clean),
        "clean policy": _train_once(worker, clean, "policy"),
    }
    observations["masked fields nan"] = _train_once(worker, _with_nan_where_masked(clean), "policy")
    with _embedding(worker, GARBAGE, 1e4):
        observations["masked samples large"] = _train_once(worker, garbage)
    with _embedding(worker, GARBAGE, float("nan")):
        observations["masked samples nan"] = _train_once(worker, garbage)
    with _embedding(worker, PADDING, float("nan")):
        observations["padding nan"] = _train_once(worker, clean)
    worker.close()
    return PoisonedResult(case.name, observations)


def _pack(masked_token: int | None = None) -> Sequences:
    """Return the samples; `masked_token` replaces all tokens of the fully masked samples."""
    random = np.random.default_rng(3)
    ids = [random.integers(PADDING + 1, GARBAGE, length).astype(np.int64) for length in LENGTHS]
    masks = [np.arange(length) >= 2 for length in LENGTHS]
    advantages, old_logprobs = (
        tuple(random.normal(mean, 0.3, n).astype(np.float32) for n in LENGTHS)
        for mean in (0.0, -5.3)
    )
    for number in MASKED_OUT:
        masks[number][:] = False
        if masked_token is not None:
            ids[number][:] = masked_token
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
    """Make a token's embedding large or NaN inside the block."""
    weight: Tensor = dict(worker.model.named_parameters())["embedding.word_embeddings.weight"].data
    row = token - worker.tp_rank * len(weight)
    if not 0 <= row < len(weight):
        yield
        return
    original = weight[row].clone()
    weight[row] = torch.linspace(-1, 2, len(original)) * scale
    yield
    weight[row] = original


def _train_once(worker: Any, pack: Sequences, kind: str = "sft") -> Observation:
    """Run one step with a learning rate of 0."""
    from gradients import full_gradients
    from msrl.trainer.objective.losses import PolicyLoss, SftLoss

    if kind != "sft":
        pack = with_weights(pack, "token-mean")
    batch = micro_batch(*pack, pad_to_multiple=worker.sequence_multiple)
    report = worker.train_step(
        [batch],
        SftLoss() if kind == "sft" else PolicyLoss(0.7),
        num_tokens=num_loss_tokens(pack),
        lr=0.0,
    )
    gradients = {name: tensor.numpy() for name, tensor in full_gradients(worker).items()}
    all_tokens = replace(
        batch, loss_mask=np.arange(len(batch.token_ids)) + 1 < sum(LENGTHS), fields={}
    )
    logprobs = worker.logprobs([all_tokens], 1.0)
    return Observation(report["loss"], gradients, logprobs[0][: sum(LENGTHS)])
