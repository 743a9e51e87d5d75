"""Messages to worker processes whose arrays are sent without copies."""

from __future__ import annotations

import io

import numpy as np

from msrl.rewards.worker import pickled, read_arrays


def sent(*messages: object) -> io.BytesIO:
    stream = io.BytesIO()
    for message in messages:
        stream.writelines(pickled(message))
    stream.seek(0)
    return stream


def test_messages_arrive_in_order_until_the_input_ends() -> None:
    stream = sent([{"a": np.arange(5), "b": "text"}], "second", None, [])
    (first,) = read_arrays(stream)
    assert first["b"] == "text" and first["a"].tolist() == [0, 1, 2, 3, 4]
    assert read_arrays(stream) == "second"
    assert read_arrays(stream) is None
    assert read_arrays(stream) == []
    assert read_arrays(stream) is None


def test_arrays_of_every_form_arrive() -> None:
    table = np.arange(12.0).reshape(3, 4)
    arrays = [
        np.zeros(0, np.float32),
        np.array(7),
        table.T,
        table[:, ::2],
        np.array(["text", None], object),
        np.zeros(100_000, np.bool_),
        np.broadcast_to(np.float32(2), (3,)),
    ]
    for array, other in zip(arrays, read_arrays(sent(arrays)), strict=True):
        assert array.dtype == other.dtype and np.array_equal(array, other)


def test_more_arrays_arrive_than_one_system_call_writes() -> None:
    arrays = [np.full(number % 3, number) for number in range(5000)]
    for array, other in zip(arrays, read_arrays(sent(arrays)), strict=True):
        assert np.array_equal(array, other)


def test_an_array_that_occurs_twice_is_sent_once() -> None:
    array = np.ones(100_000)
    stream = sent([array, array])
    assert len(stream.getvalue()) < 2 * array.nbytes
    first, second = read_arrays(stream)
    assert first is second
