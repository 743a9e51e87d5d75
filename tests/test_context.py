"""Split of tokens over context-parallel ranks: every token once, equal shares and equal work."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from msrl.trainer.model.attention import _attend
from msrl.trainer.model.context import padded_lengths, rank_positions, unpadded_positions


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("multiple", [1, 2, 3])
def test_every_token_is_computed_by_one_rank_and_shares_are_equal(num_ranks, multiple):
    lengths = [1, 7, 24, 13, 13]
    padded = padded_lengths(lengths, num_ranks, multiple)
    shares = [rank_positions(padded, rank, num_ranks) for rank in range(num_ranks)]
    assert len({len(share) for share in shares}) == 1 and len(shares[0]) % multiple == 0
    rows = np.concatenate([unpadded_positions(lengths, padded)[share] for share in shares])
    assert sorted(rows[rows >= 0].tolist()) == list(range(sum(lengths)))


def test_a_rank_has_an_early_and_a_late_piece_and_all_ranks_see_equally_many_keys():
    # By hand: 12 tokens on 3 ranks are 6 pieces of 2; rank 0 has the first and the last.
    padded = padded_lengths([12], 3, 1)
    shares = [rank_positions(padded, rank, 3).tolist() for rank in range(3)]
    assert shares == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert {sum(position + 1 for position in share) for share in shares} == {26}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_of_some_queries_equals_that_of_all_queries(window, softcap):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 20, 8), torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 8)
    sinks = torch.randn(4) if softcap is None else None
    expected = _attend(query, key, value, None, window, softcap, sinks)
    for first, stop in ((0, 8), (5, 20), (12, 15)):
        actual = _attend(
            query[:, :, first:stop],
            key[:, :, :stop],
            value[:, :, :stop],
            None,
            window,
            softcap,
            sinks,
            first,
        )
        torch.testing.assert_close(actual, expected[:, :, first:stop])
