"""Samplers of a curriculum: their pools, and draws from pools."""

from __future__ import annotations

import numpy as np
import pytest

import golden
from msrl import registry
from msrl.data.samplers.base import Pool, draw


@pytest.mark.parametrize("name", golden.SAMPLERS)
def test_a_sampler_has_its_golden_pools(name: str):
    plugin = registry.load(registry.SAMPLERS, name, key="data.curriculum.sampler")
    pools = plugin.pools(golden.SUCCESS)
    members = [(np.flatnonzero(pool.is_member).tolist(), pool.share) for pool in pools]
    assert members == golden.SAMPLERS[name]


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def halves(share: float) -> list[Pool]:
    """Return pools of the even and the odd ones of eight prompts."""
    is_even = np.arange(8) % 2 == 0
    return [Pool(is_even, share), Pool(~is_even, 1 - share)]


def test_draws_follow_the_shares_of_the_pools():
    closed, none = np.zeros(8, np.bool_), np.zeros(8, np.int64)
    firsts = [draw(halves(0.8), none, closed, 1, random(seed))[0] for seed in range(400)]
    assert np.mean(np.array(firsts) % 2 == 0) == pytest.approx(0.8, abs=0.06)
    assert {*firsts} == {*range(8)}


def test_prompts_that_were_drawn_least_often_come_first():
    closed, num_draws = np.zeros(8, np.bool_), np.array([2, 0, 1, 0, 0, 0, 1, 0])
    assert draw(halves(1.0), num_draws, closed, 4, random()).tolist()[0] == 4
    assert {*draw(halves(1.0), num_draws, closed, 3, random()).tolist()} == {4, 2, 6}


def test_an_exhausted_pool_passes_its_draws_on_and_open_prompts_come_last():
    num_draws, is_open = np.zeros(8, np.int64), np.arange(8) < 2
    drawn = draw(halves(1.0), num_draws, is_open, 8, random()).tolist()
    assert {*drawn[:3]} == {2, 4, 6} and {*drawn[3:6]} == {3, 5, 7} and {*drawn[6:]} == {0, 1}
