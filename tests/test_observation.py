"""Observations: sequences reach the data-parallel ranks, and their values come back in order."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from msrl.algorithms.packing import JoinedRows, Sequences, rl_sequences
from msrl.trainer.objective.batches import BatchLimits, select
from msrl.types import Floats, MicroBatch, TrainingSample
from msrl.workflows.training.observation import Observation, Observed
from msrl.workflows.training.train_worker import TrainWorker, WorkerPosition


def make_sequences(count: int) -> Sequences:
    """Return sequences of 3 tokens and more, with the tokens 10 n, 10 n + 1, ..."""
    samples = [
        TrainingSample(
            np.arange(10 * n, 10 * n + 2),
            np.arange(10 * n + 2, 10 * n + 3 + n % 4),
            *[np.zeros(1 + n % 4, np.float32)] * 2,
        )
        for n in range(count)
    ]
    return rl_sequences(samples)._replace(fields={})


def worker() -> Any:
    """Return a worker whose log-probability of a label is the label, and its entropy minus that."""

    def values(batches: list[MicroBatch], temperature: float) -> tuple[list[Floats], list[Floats]]:
        logprobs = [batch.labels.astype(np.float32) for batch in batches]
        return logprobs, [-row for row in logprobs]

    rank: Any = TrainWorker.__new__(TrainWorker)
    rank._training_rank = SimpleNamespace(logprobs_and_entropies=values)
    return rank


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("limits", [BatchLimits(2), BatchLimits(9, 12, pad_to_multiple=4)])
def test_values_return_in_the_order_of_the_sequences(dp_size: int, limits: BatchLimits):
    sequences = make_sequences(6)
    observation = Observation.of(sequences, dp_size, limits, 1.0)
    positions = [
        WorkerPosition(dp, reports, 1) for dp in range(dp_size) for reports in (False, True)
    ]
    results = [
        worker().observe(observation.sequences[position.dp_rank], limits, 1.0)
        if position.is_reporter
        else None
        for position in positions
    ]
    logprobs, entropies = Observed(observation, positions, results, 0.0).values()
    assert len(logprobs) == len(entropies) == 6
    rows = zip(sequences.token_ids, logprobs.split(), entropies.split(), strict=True)
    for ids, row, entropy in rows:
        assert row.tolist() == [0, *ids[1:]]  # nothing predicts the first token
        np.testing.assert_array_equal(entropy, -row)


def test_the_first_joined_rows_remain_joined():
    first = select(make_sequences(5), range(3))
    assert isinstance(first.token_ids, JoinedRows)
    assert first.token_ids.joined.tolist() == [int(i) for ids in first.token_ids for i in ids]
    assert [ids[0] for ids in first.token_ids] == [0, 10, 20]
    others = select(make_sequences(5), range(1, 3))
    assert [ids[0] for ids in others.token_ids] == [10, 20]


def test_joined_rows_are_pickled_as_one_array():
    rows = make_sequences(4).token_ids
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(rows, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 1
    copy = pickle.loads(data, buffers=buffers)
    assert isinstance(copy, JoinedRows) and copy.lengths == rows.lengths
    assert all(map(np.array_equal, copy, rows))
