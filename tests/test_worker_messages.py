"""Messages of several parts to worker processes, and the encoding of rollouts."""

from __future__ import annotations

import io
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from msrl.rewards.worker import read_parts, with_lengths
from msrl.tracking.rollouts import TokenArrays
from msrl.workflows.rl.rollout_log.message import UpdateMessage, decoded_update, encoded


def test_messages_arrive_in_order_until_the_input_ends() -> None:
    messages = [[b"a", b"", b"bc"], [], [b"x" * 100_000]]
    stream = io.BytesIO(b"".join(part for parts in messages for part in with_lengths(parts)))
    assert [read_parts(stream) for _ in messages] == messages
    assert read_parts(stream) is None


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int64, np.bool_])
def test_arrays_of_every_form_arrive(dtype: type) -> None:
    table = np.arange(12).reshape(3, 4).astype(dtype)
    arrays = [table[0], table[0, :0], table[:, 1], np.broadcast_to(table[0, 1], (3,))]
    lengths = np.array([1, 2])
    values = {str(number): TokenArrays(array, lengths) for number, array in enumerate(arrays)}
    decoded = decoded_update(encoded(UpdateMessage(values, {})))
    for number, array in enumerate(arrays):
        column = decoded.values[str(number)]
        assert column.values.dtype == dtype and np.array_equal(column.values, array)
        assert column.lengths.tolist() == [1, 2]


def test_numbers_of_numpy_and_other_mappings_are_encoded() -> None:
    times: Any = MappingProxyType({"update": np.float32(0.5), "weights": np.float64(0.25)})
    assert decoded_update(encoded(UpdateMessage({}, times))).times == {
        "update": 0.5,
        "weights": 0.25,
    }
