"""Shaping, clipping and normalization of rewards.

Golden values are calculated by hand from the papers' formulas. Running moments are compared with
numpy.
"""

import json

import numpy as np
import pytest

from msrl.config.schema import LengthConfig, OverlongConfig, RewardConfig, RewardNormConfig
from msrl.rewards.normalize import Moments, normalize
from msrl.rewards.process import RewardSteps
from msrl.rewards.shaping import format_penalty, length_reward, overlong_penalty
from msrl.types import Completion, Prompt, Reward, RolloutGroup, ScoredGroup

EPS = 1e-6
NONE = Moments()


def score(totals, lengths=None, texts=None):
    """Return groups with these totals [P, G], response lengths and texts."""
    groups = []
    for p, row in enumerate(totals):
        completions = []
        for g in range(len(row)):
            length = lengths[p][g] if lengths else 1
            text = texts[p][g] if texts else ""
            completions.append(
                Completion(
                    np.zeros(length, np.int64), np.zeros(length, np.float32), "stop", 0, text
                )
            )
        rollout = RolloutGroup(Prompt(p, np.zeros(1, np.int64)), tuple(completions))
        groups.append(ScoredGroup(rollout, tuple(Reward(total, {"acc": total}) for total in row)))
    return groups


def test_overlong_responses_are_penalized_as_in_dapo():
    lengths = np.array([[0, 12, 16, 18, 20, 25]], dtype=float)
    assert overlong_penalty(lengths, limit=20, buffer=4, factor=1.0).tolist() == [
        [0, 0, 0, -0.5, -1, -1]
    ]
    assert overlong_penalty(lengths, limit=20, buffer=20, factor=0.5).tolist() == [
        [0, -0.3, -0.4, -0.45, -0.5, -0.5]
    ]
    assert overlong_penalty(lengths, limit=20, buffer=0, factor=1.0).tolist() == [[0] * 6]


def test_short_responses_are_rewarded_as_in_kimi():
    lengths = np.array([[10, 20, 30], [5, 5, 5]], dtype=float)
    right = np.array([[True, True, True], [True, True, True]])
    assert length_reward(lengths, right, right, coef=1.0).tolist() == [[0.5, 0, -0.5], [0, 0, 0]]
    assert length_reward(lengths, ~right, right, coef=2.0).tolist() == [[0, 0, -1.0], [0, 0, 0]]


def test_a_response_without_the_format_is_penalized():
    good = "<think>a</think><answer>b</answer>"
    assert format_penalty([[good, "b"]], penalty=0.5).tolist() == [[0, -0.5]]


REWARDS = np.array([[1.0, 3.0], [5.0, 7.0]])


@pytest.mark.parametrize(
    ("center", "scale", "expected"),
    [
        ("none", "none", REWARDS),
        ("batch", "none", [[-3, -1], [1, 3]]),
        ("group", "none", [[-1, 1], [-1, 1]]),
        ("running", "none", [[-9, -7], [-5, -3]]),
        ("none", "batch", REWARDS / ((20 / 3) ** 0.5 + EPS)),
        ("batch", "batch", (REWARDS - 4) / ((20 / 3) ** 0.5 + EPS)),
        ("group", "group", np.array([[-1, 1], [-1, 1]]) / (2**0.5 + EPS)),
        ("group", "batch", np.array([[-1, 1], [-1, 1]]) / ((20 / 3) ** 0.5 + EPS)),
        ("none", "running", REWARDS / (2 + EPS)),
    ],
)
def test_mean_and_deviation_are_configured_separately(center, scale, expected):
    running = Moments(5, 10.0, 16.0)
    np.testing.assert_allclose(
        normalize(REWARDS, REWARDS > 0, center=center, scale=scale, eps=EPS, running=running),
        expected,
        rtol=1e-12,
    )


@pytest.mark.parametrize("scope", ["batch", "group", "running"])
def test_equal_and_single_rewards_stay_finite_and_small(scope):
    equal = np.full((2, 4), 0.7)
    running = NONE.with_more(equal)
    np.testing.assert_allclose(
        normalize(equal, equal > 0, center="none", scale=scope, eps=EPS, running=running), equal
    )
    np.testing.assert_allclose(
        normalize(equal, equal > 0, center=scope, scale=scope, eps=EPS, running=running),
        0.0,
        atol=1e-15,
    )
    single = np.array([[3.0]])
    assert normalize(
        single, single > 0, center="none", scale=scope, eps=EPS, running=NONE.with_more(single)
    ).tolist() == [[3.0]]


def test_running_moments_do_not_depend_on_the_split_into_steps():
    values = np.random.default_rng(0).normal(1e3, 2.0, size=240)
    for sizes in ([240], [1, 1, 238], [60, 60, 60, 60]):
        moments, start = NONE, 0
        for size in sizes:
            moments, start = moments.with_more(values[start : start + size]), start + size
        assert moments.count == 240
        assert moments.mean == pytest.approx(values.mean(), rel=1e-12)
        assert moments.std == pytest.approx(values.std(ddof=1), rel=1e-9)


def test_the_processing_steps_run_in_the_documented_order():
    config = RewardConfig(
        format_penalty=0.5,
        length=LengthConfig(coef=1.0, right_above=0.5),
        overlong=OverlongConfig(buffer=10, factor=2.0),
        clip=1.2,
        norm=RewardNormConfig(center="group", scale="batch"),
    )
    form = "<think>a</think><answer>b</answer>"
    groups = score([[1.0, 0.0], [1.0, 1.0]], [[10, 20], [15, 15]], [[form, "x"], [form, form]])
    processed = RewardSteps(config, 20, {}).apply(groups)
    shaped = np.array([[1.0 + 0.5 + 0.0, 0.0 - 0.5 - 0.5 - 2.0], [1.0 - 1.0, 1.0 - 1.0]])
    clipped = shaped.clip(-1.2, 1.2)
    np.testing.assert_allclose(
        processed.rewards,
        (clipped - clipped.mean(axis=1, keepdims=True)) / (clipped.std(ddof=1) + EPS),
    )
    assert processed.metrics == pytest.approx(
        {
            "format_penalty": -0.125,
            "length_reward": 0.0,
            "overlong_penalty": -1.0,
            "shaped_reward": -0.375,
            "clipped_rewards": 0.5,
        }
    )
    assert [[r.total for r in g.rewards] for g in groups] == [[1.0, 0.0], [1.0, 1.0]]


def test_without_processing_steps_the_sum_of_the_sources_is_the_training_reward():
    processed = RewardSteps(RewardConfig(), 20, {}).apply(score([[0.25, 1e9]]))
    assert (processed.rewards.tolist(), processed.metrics) == ([[0.25, 1e9]], {})


def test_running_moments_survive_a_checkpoint():
    config = RewardConfig(norm=RewardNormConfig(center="running", scale="running"))
    steps, rng = RewardSteps(config, 20, {}), np.random.default_rng(1)
    first, second = (score(rng.normal(size=(3, 4)).tolist()) for _ in range(2))
    steps.apply(first)
    resumed = RewardSteps(config, 20, json.loads(json.dumps(steps.state())))
    a, b = steps.apply(second), resumed.apply(second)
    np.testing.assert_array_equal(a.rewards, b.rewards)
    assert (
        a.metrics
        == b.metrics
        == pytest.approx(
            {"running_mean": steps.state()["mean"], "running_std": a.metrics["running_std"]}
        )
    )
    assert not np.array_equal(RewardSteps(config, 20, {}).apply(second).rewards, b.rewards)


def test_rewards_are_normalized_over_the_rows_of_a_tag():
    rewards = np.array([[0.0, 1.0], [5.0, 5.0], [2.0, 3.0]])
    tags = ["a", "b", "a"]
    arguments = {"decided": rewards >= 0, "eps": EPS, "running": NONE, "tags": tags}
    centered = normalize(rewards, center="tag", scale="none", **arguments)
    assert centered.tolist() == [[-1.5, -0.5], [0.0, 0.0], [0.5, 1.5]]
    deviation = np.std([0, 1, 2, 3], ddof=1) + EPS
    both = normalize(rewards, center="tag", scale="tag", **arguments)
    np.testing.assert_allclose(both, np.array([[-1.5, -0.5], [0, 0], [0.5, 1.5]]) / deviation)
    mixed = normalize(rewards, center="batch", scale="tag", **arguments)
    assert mixed[1].tolist() == pytest.approx([5 - 16 / 6] * 2)
    config = RewardConfig(norm=RewardNormConfig(center="tag"))
    groups = score([[0.0, 1.0], [5.0, 5.0], [2.0, 3.0]])
    steps = RewardSteps(config, 10, {})
    assert steps.apply(groups).rewards.sum() == pytest.approx(0.0)  # one tag: the batch
