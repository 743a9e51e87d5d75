"""What the ranks of the training tests do to show that garbage stays where it is: in padding, in masked places, in other samples."""

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
from msrl.trainer.settings import Layout, RankSettings, ReplicaSettings

PADDING, GARBAGE = (
    0,
    150,
)  # token ids that no sample uses, but padding, and the samples that are masked out
LENGTHS = (
    11,
    7,
    17,
    3,
    9,
)  # odd in sum, and none divides into the pieces of context-parallel ranks: all layouts but the whole one pad
MASKED_OUT = (1, 3)


@dataclass(frozen=True)
class Poisoned:
    """One pack of samples, of which two are masked out, looked at with and without garbage in it."""

    name: str
    model: Path
    layout: Layout = field(default_factory=Layout)
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.layout.replica_size


@dataclass(frozen=True)
class Seen:
    """What a look at the pack gave: the loss, its gradients, and the log-probability of every token."""

    loss: float
    gradients: Mapping[str, np.ndarray]
    logprobs: np.ndarray


@dataclass(frozen=True)
class PoisonedResult:
    """By what was done to the pack."""

    name: str
    seen: Mapping[str, Seen]


def look(context: RankContext, case: Poisoned, init_method: str) -> PoisonedResult:
    """The pack as it should be, then with each kind of garbage."""
    from msrl.trainer.rank import TrainingRank

    policy = ReplicaSettings(
        case.model, optimizer=OptimizerConfig(lr=1e-3, grad_clip=None), **case.more
    )
    settings = RankSettings("cpu", case.layout, "float32", seed=0, timeout_s=120, policy=policy)
    worker = TrainingRank(settings, context.rank, case.world, init_method)
    clean, garbage = _pack(), _pack(neighbours=GARBAGE)
    seen = {"clean": _look(worker, clean), "clean policy": _look(worker, clean, "policy")}
    seen["masked fields nan"] = _look(worker, _with_nan_where_masked(clean), "policy")
    with _embedding(worker, GARBAGE, 1e4):
        seen["neighbours large"] = _look(worker, garbage)
    with _embedding(worker, GARBAGE, float("nan")):
        seen["neighbours nan"] = _look(worker, garbage)
    with _embedding(worker, PADDING, float("nan")):
        seen["padding nan"] = _look(worker, clean)
    worker.close()
    return PoisonedResult(case.name, seen)


def _pack(neighbours: int | None = None) -> Sequences:
    """The samples; those that are masked out are of the token `neighbours`, where there is one."""
    random = np.random.default_rng(3)
    ids = [random.integers(PADDING + 1, GARBAGE, length).astype(np.int64) for length in LENGTHS]
    masks = [np.arange(length) >= 2 for length in LENGTHS]
    advantages, old_logprobs = (
        tuple(random.normal(at, 0.3, n).astype(np.float32) for n in LENGTHS) for at in (0.0, -5.3)
    )
    for number in MASKED_OUT:
        masks[number][:] = False
        if neighbours is not None:
            ids[number][:] = neighbours
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
    """The embedding of a token made large, or NaN, as long as the block lasts."""
    weight: Tensor = dict(worker.policy.model.named_parameters())[
        "embedding.word_embeddings.weight"
    ].data
    row = token - worker.position.tp_rank * len(weight)
    if not 0 <= row < len(weight):
        yield
        return
    kept = weight[row].clone()
    weight[row] = torch.linspace(-1, 2, len(kept)) * scale
    yield
    weight[row] = kept


def _look(worker: Any, pack: Sequences, kind: str = "sft") -> Seen:
    """One step that moves nothing: its learning rate is 0."""
    from gradients import whole_gradients
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
    gradients = {name: tensor.numpy() for name, tensor in whole_gradients(worker.policy).items()}
    everything = replace(
        batch, loss_mask=np.arange(len(batch.token_ids)) + 1 < sum(LENGTHS), fields={}
    )
    logprobs = worker.logprobs([everything], 1.0)
    return Seen(report["loss"], gradients, logprobs[0][: sum(LENGTHS)])
