"""The simulation of rollouts: times by hand, and the staleness bound of the real buffer."""

from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.simulation import (
    LENGTHS,
    MODES,
    Cluster,
    simulate,
)

from msrl.layouts.simulation import LogNormalLengths, Mode, SimulatedEngine, Workload

FIXED = LogNormalLengths("fixed", median=100, sigma=0.0, limit=1_000, source="")
TAIL = LogNormalLengths("tail", median=200, sigma=1.0, limit=8_000, source="")
CLUSTER = Cluster(num_devices=4, transfer_s=0.5)


def work(lengths: LogNormalLengths, **changes: float) -> Workload:
    return Workload(lengths, prompts=8, samples=4, num_steps=12, num_warmup_steps=4, **changes)  # pyright: ignore[reportArgumentType]


def test_sequences_of_an_engine_slow_each_other_down_until_one_ends() -> None:
    engine = SimulatedEngine(CLUSTER, context=50.0)
    engine.add(10, 0)
    engine.add(20, 1)
    first = engine.next_end()
    assert first == pytest.approx(10 * CLUSTER.token_s(2, 50.0))
    engine.advance(first)
    assert engine.pop() == 0
    assert engine.next_end() == pytest.approx(first + 10 * CLUSTER.token_s(1, 50.0))


def test_new_weights_stop_an_engine_for_the_transfer_and_the_keys_of_its_sequences() -> None:
    engine = SimulatedEngine(CLUSTER, context=50.0)
    engine.add(100, 0)
    half = 40 * CLUSTER.token_s(1, 50.0)
    engine.advance(half)
    end = engine.next_end()
    assert engine.load_weights() == pytest.approx(40)
    assert engine.next_end() == pytest.approx(end + 0.5 + CLUSTER.prefill_s(40))


def test_a_full_engine_queues_sequences() -> None:
    engine = SimulatedEngine(Cluster(max_running=1), context=1.0)
    engine.add(5, 0)
    engine.add(5, 1)
    token_s = Cluster().token_s(1, 1.0)
    assert engine.next_end() == pytest.approx(5 * token_s)
    engine.advance(engine.next_end())
    engine.pop()
    assert engine.next_end() == pytest.approx(10 * token_s)


def test_a_synchronous_step_takes_generation_reward_update_and_transfer() -> None:
    cluster = Cluster(num_devices=1, transfer_s=0.5)
    job = Workload(FIXED, prompts=1, samples=1, reward_s=2.0, num_steps=6, num_warmup_steps=2)
    result = simulate(cluster, job, Mode("synchronous", 0), 1)
    generation = 100 * cluster.token_s(1, context=50.0)
    step_s = generation + 2.0 + cluster.update_s(100, 1) + 0.5
    assert result.tokens_per_s == pytest.approx(100 / step_s)
    assert result.trainer_idle == pytest.approx(1 - cluster.update_s(100, 1) / step_s)
    assert result.max_staleness == 0


@pytest.mark.parametrize("mode", MODES, ids=[mode.name for mode in MODES])
def test_no_mode_exceeds_its_staleness_bound(mode: Mode) -> None:
    result = simulate(CLUSTER, work(TAIL), mode, 2 if mode.is_separate else 4)
    assert result.max_staleness <= mode.staleness
    fractions = (result.trainer_idle, result.engine_idle, result.device_idle)
    assert all(0 <= fraction <= 1 for fraction in fractions)


def test_staleness_hides_slow_rewards() -> None:
    job = work(FIXED, reward_s=20.0)
    modes = {mode.name: mode for mode in MODES}
    synchronous = simulate(CLUSTER, job, modes["synchronous"], 4)
    stale = simulate(CLUSTER, job, modes["S = 4"], 2)
    assert stale.tokens_per_s > 2 * synchronous.tokens_per_s


def test_a_simulation_is_reproducible_and_all_modes_have_the_same_lengths() -> None:
    first, second = (simulate(CLUSTER, work(TAIL), MODES[3], 2) for _ in range(2))
    assert first == second
    assert TAIL.draw(7, 4) == TAIL.draw(7, 4) != TAIL.draw(8, 4)


@pytest.mark.parametrize(
    ("name", "statistic", "expected"),
    [("GSM8K", np.mean, 468), ("GSM8K", np.std, 127), ("long tail", np.median, 500)],
)
def test_lengths_have_their_published_statistics(name, statistic, expected) -> None:
    lengths = next(item for item in LENGTHS if item.name == name)
    draws = np.array([length for number in range(500) for length in lengths.draw(number, 16)])
    assert statistic(draws) == pytest.approx(expected, rel=0.05)
    assert draws.max() <= lengths.limit


def test_the_99th_percentile_of_the_long_tail_is_5000() -> None:
    lengths = LENGTHS[2]
    assert lengths.median * math.exp(2.326 * lengths.sigma) == pytest.approx(5_000, rel=1e-6)
