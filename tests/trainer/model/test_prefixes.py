"""Common prefixes of sequences: which tokens share a row, and gradients of the selections."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from msrl.trainer.model.prefixes import SharedRows, find_shared_rows

CPU = torch.device("cpu")


def shared_rows(*sequences: list[int], multiple: int = 1) -> SharedRows | None:
    ends = np.cumsum([0, *map(len, sequences)]).tolist()
    return find_shared_rows(np.concatenate(sequences), ends, multiple, CPU)


def test_a_sequence_shares_the_rows_of_the_one_before_up_to_the_first_difference():
    shared = shared_rows([5, 6, 7, 8], [5, 6, 9], [5, 6, 9, 7], [4, 6, 9])
    assert shared is not None
    assert shared.of_tokens.tolist() == [0, 1, 2, 3, 0, 1, 4, 0, 1, 4, 5, 6, 7, 8]
    assert shared.first_tokens.tolist() == [0, 1, 2, 3, 6, 10, 11, 12, 13]


def test_equal_sequences_share_all_rows():
    shared = shared_rows([1, 2, 3], [1, 2, 3])
    assert shared is not None
    assert shared.of_tokens.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    "sequences",
    [
        pytest.param([[1, 2, 3], [2, 2, 3], [3, 2, 3]], id="no common prefix"),
        pytest.param([[0, *range(1, 30)], [0, *range(30, 60)]], id="too short"),
        pytest.param([[1, 2, 3, 4]], id="one sequence"),
    ],
)
def test_sequences_with_little_in_common_share_nothing(sequences):
    assert shared_rows(*sequences) is None


def test_rows_are_padded_to_a_multiple_unless_that_leaves_no_gain():
    shared = shared_rows([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], multiple=4)
    assert shared is not None
    assert (len(shared.first_tokens), shared.num_padding) == (8, 1)
    assert shared_rows([1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], multiple=16) is None


@pytest.mark.parametrize("multiple", [1, 4])
def test_gradients_are_those_of_torchs_selection(multiple):
    shared = shared_rows([5, 6, 7, 8], [5, 6, 9], [5, 6, 9, 7], [4, 6, 9], multiple=multiple)
    assert shared is not None
    num_rows = len(shared.first_tokens) - shared.num_padding
    x = torch.randn(len(shared.first_tokens), 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(len(shared.of_tokens), 3, dtype=torch.float64)
    (grad,) = torch.autograd.grad((shared.expand(x) * weights).sum(), x)
    (expected,) = torch.autograd.grad((x[shared.of_tokens] * weights).sum(), x)
    torch.testing.assert_close(grad, expected)

    y = torch.randn(len(shared.of_tokens), 3, dtype=torch.float64, requires_grad=True)
    row_weights = torch.randn(len(x), 3, dtype=torch.float64)
    (grad,) = torch.autograd.grad((shared.reduce(y) * row_weights).sum(), y)
    real = shared.reduce(y)[:num_rows] * row_weights[:num_rows]
    (expected,) = torch.autograd.grad(real.sum(), y)
    torch.testing.assert_close(grad, expected)
