"""Split of tokens over context-parallel ranks: every token once, equal shares and equal work.

Attention is exact for every exchange between the ranks.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from msrl.trainer.launch import run_ranks
from msrl.trainer.model.attention import _attend, _Traits
from msrl.trainer.model.context import (
    exchange_order,
    padded_lengths,
    rank_positions,
    unpadded_positions,
)
from msrl.trainer.model.ring_attention import tiles
from support import python_path


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
    traits = _Traits(None, window, softcap, sinks)
    expected = _attend(query, key, value, traits)
    for first, stop in ((0, 8), (5, 20), (12, 15)):
        actual = _attend(
            query[:, :, first:stop], key[:, :, :stop], value[:, :, :stop], traits, first
        )
        torch.testing.assert_close(actual, expected[:, :, first:stop])


@pytest.mark.parametrize(("num_ranks", "exchanging"), [(2, 2), (4, 2), (6, 3), (4, 1), (3, 3)])
def test_ranks_that_exchange_heads_get_the_share_of_a_rank_of_a_smaller_group(
    num_ranks: int, exchanging: int
) -> None:
    padded = padded_lengths([1, 24, 13, 13], num_ranks, 1)
    for rank in range(num_ranks):
        first = rank // exchanging * exchanging
        members = range(first, first + exchanging)
        arriving = np.concatenate([rank_positions(padded, each, num_ranks) for each in members])
        order = exchange_order(padded, rank, num_ranks, exchanging)
        expected = rank_positions(padded, rank // exchanging, num_ranks // exchanging)
        assert arriving[order].tolist() == expected.tolist()
        if exchanging == num_ranks:
            assert expected.tolist() == [*range(sum(padded))]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_tiles_of_all_ranks_have_every_visible_pair_once(
    window: int | None, num_ranks: int
) -> None:
    lengths = padded_lengths([5, 12, 12], num_ranks, 1)
    pairs = np.zeros((sum(lengths), sum(lengths)), int)
    for rank in range(num_ranks):
        for source in range(num_ranks):
            queries, keys = (
                torch.from_numpy(rank_positions(lengths, each, num_ranks))[:, None, None]
                for each in (rank, source)
            )
            for tile in tiles(lengths, rank, source, num_ranks, window):
                rows = tile.select_queries(queries, 1).flatten(1)
                columns = tile.select_keys(keys).flatten(1)
                for row, column in zip(rows, columns, strict=True):
                    distance = row[:, None] - column
                    assert (distance[0, 0] - tile.distance) == 0
                    pairs[row[:, None], column] += 1
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    position = np.arange(sum(lengths))
    distance = position[:, None] - position
    visible = (starts[:, None] == starts) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    assert (pairs[visible] == 1).all() and pairs.max() == 1
    assert not pairs[starts[:, None] != starts].any()


@pytest.mark.slow
@pytest.mark.full
def test_attention_and_its_gradient_are_exact_for_every_exchange() -> None:
    """With grouped heads, windows, softcaps, sinks and values narrower than keys."""
    from msrl.platforms import get

    reports = run_ranks(
        "context_ranks:main",
        None,
        num_ranks=4,
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    assert len(reports) == 4
    for errors in reports:
        assert len(errors) == 4 * 3 * 4
        assert max(errors.values()) < 2e-6, errors
