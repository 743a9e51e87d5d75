"""Means over micro-batches in train-sft, beside a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from msrl.algorithms.packing import Sequences
from msrl.config.sections.algo import AggregateConfig
from msrl.trainer.objective.losses import Outputs, SftLoss
from msrl.workflows.sft.batches import make_batch, with_aggregation


@pytest.mark.parametrize(("size", "is_packed"), [(1, False), (2, False), (4, True), (6, False)])
def test_the_mean_over_micro_batches_is_that_of_mindspeed(size: int, is_packed: bool) -> None:
    """MindSpeed-LLM divides the loss of each micro-batch by its tokens, then by their number."""
    generator = np.random.default_rng(0)
    batches: list[Sequences] = []
    for row in range(12):
        lengths = [5, 3] if is_packed else [3 + row]
        masks = tuple(generator.random(n) < 0.7 for n in lengths)
        masks = tuple(
            np.r_[False, mask[1:-1], True] for mask in masks
        )  # no model predicts the first
        batches.append(Sequences(tuple(np.zeros(n, np.int64) for n in lengths), masks, {}))
    batch = make_batch(batches)
    aggregate = AggregateConfig(mode="micro-batch-mean", samples_per_group=size)
    weights = with_aggregation(batch, aggregate).fields["weights"]
    losses = [generator.random(len(ids)) for ids in batch.sequences.token_ids]
    pairs = zip(losses, batch.sequences.loss_masks, weights, strict=True)
    ours = sum(float((loss * mask * weight).sum()) for loss, mask, weight in pairs)
    means: list[float] = []
    for first in range(0, len(batch.rows), size):
        members = [index for rows in batch.rows[first : first + size] for index in rows]
        total = sum((losses[i] * batch.sequences.loss_masks[i]).sum() for i in members)
        means.append(total / sum(batch.sequences.loss_masks[i].sum() for i in members))
    assert ours == pytest.approx(float(np.mean(means)), rel=1e-6)


def test_a_loss_with_weights_is_their_sum() -> None:
    outputs = Outputs(torch.tensor([-1.0, -2.0, -4.0]), torch.zeros(3, dtype=torch.long))
    weights = {"weights": torch.tensor([0.5, 0.25, 0.125])}
    loss, sums = SftLoss()(outputs, weights, 3.0)
    assert (float(loss), float(sums["loss"])) == (1.5, 7.0)
    assert float(SftLoss()(outputs, {}, 3.0)[0]) == pytest.approx(7 / 3)
