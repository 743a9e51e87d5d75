"""Advantage estimators against hand calculation, plain loops and edge cases."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import golden
from msrl import registry
from msrl.algorithms import kl_controller
from msrl.algorithms.rollout_arrays import group_arrays, rollout_arrays
from msrl.algorithms.selection import sample_weights, trained_samples
from msrl.algorithms.token_rewards import TokenRewards, discounted, whiten
from msrl.errors import MsrlError
from msrl.trainer.objective.losses import required_arguments
from msrl.types import Prompt
from prepared_steps import make_step, scored_group
from support import mentions
from turn_arrays import make_turns

PACKAGE = "msrl.algorithms.advantages"
ESTIMATORS = registry.names(PACKAGE)
TURNS = [
    name
    for name in ESTIMATORS
    if getattr(registry.load(PACKAGE, name, key=""), "NEEDS_TURNS", False)
]
COMPARING = [
    name
    for name in ESTIMATORS
    if getattr(registry.load(PACKAGE, name, key=""), "COMPARES_GROUPS", False)
]
LENGTHS = [[1, 2, 1, 1]]


def estimate(name: str, rewards: TokenRewards, **options: Any) -> np.ndarray:
    """Return the advantages of an estimator.

    By default, values are 0.1, 0.2 and so on, every response is one turn, and greedy
    responses have 0.25.
    """
    function = registry.load(PACKAGE, name, key="algo.advantage.estimator").advantages
    sizes = rewards.lengths
    states = np.repeat(np.arange(len(sizes)), sizes.shape[1])
    turns = make_turns(np.ones_like(sizes), sizes.ravel(), states, complete=rewards.decided)
    values = {
        "eps": 1e-9,
        "gamma": 0.5,
        "lam": 0.5,
        "values": np.arange(1, sizes.sum() + 1) / 10,
        "turns": turns,
        "logprobs": np.full(sizes.sum(), math.log(0.5)),
        "squared_probabilities": np.full(sizes.sum(), 0.5),
        "greedy_rewards": np.full(len(sizes), 0.25),
        **options,
    }
    return function(
        rewards,
        **required_arguments(function, values),
        **{k: v for k, v in options.items() if k in registry.plugin_options(function)},
    )


def rewards(scores, lengths=None, extra=None) -> TokenRewards:
    scores = np.asarray(scores, dtype=np.float64)
    return TokenRewards(
        scores,
        np.ones(scores.shape, np.int64) if lengths is None else np.asarray(lengths, np.int64),
        extra,
    )


@pytest.mark.parametrize("name", golden.ESTIMATORS)
def test_an_estimator_reproduces_its_golden_row(name):
    result = estimate(name, rewards([[1, 0, 0, 1]], LENGTHS))
    np.testing.assert_allclose(result, golden.ESTIMATORS[name], rtol=0, atol=1e-8)


@dataclass(frozen=True)
class Group:
    """Responses of a prompt in plain lists. `start` is the number of tokens before the group."""

    tokens: list[list[float]]  # rewards of the tokens of each response
    start: int
    gamma: float

    @property
    def totals(self) -> list[float]:
        return [sum(response) for response in self.tokens]

    @property
    def mean(self) -> float:
        return sum(self.totals) / len(self.totals)

    @property
    def deviation(self) -> float:
        squares = [(total - self.mean) ** 2 for total in self.totals]
        return math.sqrt(sum(squares) / (len(squares) - 1))

    def each(self, values: list[float]) -> list[float]:
        """Return one value per response for each of its tokens."""
        pairs = zip(values, self.tokens, strict=True)
        return [value for value, response in pairs for _ in response]

    def returns(self) -> list[float]:
        return [
            sum(self.gamma ** (k - t) * response[k] for k in range(t, len(response)))
            for response in self.tokens
            for t in range(len(response))
        ]

    def z_scores(self) -> list[float]:
        return self.each([(t - self.mean) / (self.deviation + 1e-9) for t in self.totals])

    def distances(self) -> list[float]:
        return self.each([total - self.mean for total in self.totals])

    def leave_one_out(self) -> list[float]:
        num_others = len(self.totals) - 1
        return self.each([t - (sum(self.totals) - t) / num_others for t in self.totals])

    def optimal_baseline(self) -> list[float]:
        """Return the distances from the mean weighted by length."""
        weighted = sum(map(operator.mul, self.totals, map(len, self.tokens)))
        baseline = weighted / sum(map(len, self.tokens))
        return self.each([total - baseline for total in self.totals])

    def lead(self) -> list[float]:
        best, second = sorted(self.totals)[:-3:-1]
        lead = (best - second) / (self.deviation + 1e-9)
        return self.each([lead if total == best else 0.0 for total in self.totals])

    def token_baseline(self) -> list[float]:
        """Return the advantages for norms of 0.5, so that responses have equal weights."""
        return [
            sum(response[t:]) - self.mean_return(t)
            for response in self.tokens
            for t in range(len(response))
        ]

    def mean_return(self, t: int) -> float:
        returns = [sum(response[t:]) for response in self.tokens if len(response) > t]
        return sum(returns) / len(returns) if len(returns) > 1 else 0.0

    def from_greedy(self) -> list[float]:
        """Return the distances of the undiscounted returns from a greedy reward of 0.25."""
        return [sum(tokens[t:]) - 0.25 for tokens in self.tokens for t in range(len(tokens))]

    def gae(self) -> list[float]:
        """Return the advantages for lambda 0.5 and values 0.1, 0.2 and so on."""
        rows: list[float] = []
        for response in self.tokens:
            first = self.start + len(rows) + 1
            values = [(first + t) / 10 for t in range(len(response))] + [0.0]
            deltas = [r + self.gamma * values[t + 1] - values[t] for t, r in enumerate(response)]
            rows += [
                sum((self.gamma * 0.5) ** (k - t) * deltas[k] for k in range(t, len(deltas)))
                for t in range(len(deltas))
            ]
        return rows


def normalize(rows: list[float]) -> list[float]:
    """Return z-scores over all tokens."""
    mean = sum(rows) / len(rows)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in rows) / (len(rows) - 1))
    return [(x - mean) / (deviation + 1e-9) for x in rows]


# Formulas in plain Python over nested lists: of a group, and of all tokens.
BY_LOOPS: dict[str, tuple[Callable[[Group], list[float]], bool]] = {
    "group_norm": (Group.z_scores, False),
    "gigpo": (lambda group: [2 * x for x in group.z_scores()], False),
    "step_reinforce": (lambda group: group.each(group.totals), False),
    "agentic_reinforce": (lambda group: group.each(group.totals), False),
    "gae": (Group.gae, False),
    "rloo": (Group.leave_one_out, False),
    "reinforce": (Group.returns, False),
    "reinforce_pp": (Group.returns, True),
    "reinforce_baseline": (Group.distances, True),
    "dr_grpo": (Group.distances, False),
    "cpgd": (Group.distances, False),
    "gpg": (Group.distances, False),
    "opo": (Group.optimal_baseline, False),
    "remax": (Group.from_greedy, False),
    "pass_at_k": (Group.lead, False),
    "optimal_token_baseline": (Group.token_baseline, False),
}


def by_loops(name: str, scores, lengths, extra, gamma: float) -> list[float]:
    """Return the advantages of all groups by the formula of `BY_LOOPS`."""
    formula, is_normalized = BY_LOOPS[name]
    rows: list[float] = []
    for group, sizes in zip(scores, lengths, strict=True):
        tokens, start = [], len(rows)
        for score, size in zip(group, sizes, strict=True):
            response = [float(x) for x in extra[start : start + size]]
            response[-1] += float(score)
            tokens.append(response)
            start += size
        rows += formula(Group(tokens, len(rows), gamma))
    return normalize(rows) if is_normalized else rows


@pytest.mark.parametrize("name", BY_LOOPS)
def test_an_estimator_equals_plain_loops_with_penalties_on_tokens(name):
    random = np.random.default_rng(0)
    scores, lengths = random.normal(size=(5, 4)), random.integers(1, 9, (5, 4))
    extra = random.normal(size=int(lengths.sum()))
    got = estimate(name, rewards(scores, lengths, extra), gamma=0.9)
    np.testing.assert_allclose(
        got, by_loops(name, scores, lengths, extra, 0.9), rtol=1e-10, atol=1e-12
    )


@pytest.mark.sample(16)
@pytest.mark.parametrize("value", [0.0, 0.1, 1.1, -1e9, 1e-30])
@pytest.mark.parametrize("name", COMPARING)
def test_equal_rewards_give_exactly_zero_where_completions_are_compared(name, value):
    assert not estimate(name, rewards(np.full((2, 3), value))).any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_no_estimator_returns_nan_for_equal_rewards_or_single_completions(name):
    assert np.isfinite(estimate(name, rewards(np.full((2, 3), 0.1)))).all()
    if name in COMPARING:
        with pytest.raises(MsrlError, match=mentions("samples_per_prompt=1", name)):
            estimate(name, rewards(np.zeros((4, 1))))
    else:
        assert np.isfinite(estimate(name, rewards([[1.0], [0.0]]))).all()


@pytest.mark.parametrize("name", COMPARING)
def test_groups_are_independent_and_precision_is_kept(name):
    got = estimate(name, rewards([[1e6, 1e6 + 1, 1e6, 1e6], [0.0, 1.0, 0.0, 0.0]])).reshape(2, 4)
    np.testing.assert_allclose(got[0], got[1], rtol=1e-9)


def test_gae_is_the_exponentially_weighted_mean_of_all_n_step_advantages():
    """GAE equals its definition (arXiv:1506.02438, equation 16): a mean of n-step advantages.

    The definition is (1 - l) sum over n of l^(n-1) A^(n).
    """
    random = np.random.default_rng(3)
    lengths, gamma, lam = np.array([[7, 1, 4]]), 0.9, 0.8
    token_rewards = rewards(random.normal(size=(1, 3)), lengths, random.normal(size=12))
    values = random.normal(size=12)
    got, start = estimate("gae", token_rewards, gamma=gamma, lam=lam, values=values), 0
    for size in lengths.ravel():
        r, v = (
            token_rewards.per_token()[start : start + size],
            np.append(values[start : start + size], 0.0),
        )
        for t in range(size):
            n_step = [
                sum(gamma**k * r[t + k] for k in range(n)) + gamma**n * v[t + n] - v[t]
                for n in range(1, size - t + 1)
            ]
            weights = [(1 - lam) * lam ** (n - 1) for n in range(1, size - t)] + [
                lam ** (size - t - 1)
            ]
            assert got[start + t] == pytest.approx(
                sum(w * a for w, a in zip(weights, n_step, strict=True)), rel=1e-12
            )
        start += size


def test_gae_needs_one_completion_and_lambda_weighs_rewards_against_the_critic():
    token_rewards = rewards([[1.0], [0.0]], [[2], [1]])
    values = np.array([0.5, 0.25, 0.125])
    from_rewards = estimate("gae", token_rewards, gamma=1.0, lam=1.0, values=values)
    assert from_rewards.tolist() == [0.5, 0.75, -0.125]  # R - V
    from_critic = estimate("gae", token_rewards, gamma=1.0, lam=0.0, values=values)
    assert from_critic.tolist() == [-0.25, 0.75, -0.125]  # r + V' - V


def test_pass_at_k_pays_the_best_completion_by_its_lead():
    got = estimate("pass_at_k", rewards([[0.0, 3.0, 1.0]], [[1, 2, 1]]), normalize=False)
    assert got.tolist() == [0.0, 2.0, 2.0, 0.0]
    got = estimate("pass_at_k", rewards([[0.0, 1.0, 0.0, 0.0]]))
    assert got.tolist() == pytest.approx([0.0, 2.0, 0.0, 0.0])  # unbiased deviation 0.5


def test_the_optimal_token_baseline_weighs_returns_by_cumulated_norms():
    """Norms 1 - 2 p + sum p^2 of two responses: 0.5, then 0.1 more, and 0.25, then 0.5 more."""
    logprobs = np.log([0.5, 0.8, 0.5, 0.25])
    squares = np.array([0.5, 0.7, 0.25, 0.0])
    got = estimate(
        "optimal_token_baseline",
        rewards([[1.0, 3.0]], [[2, 2]]),
        logprobs=logprobs,
        squared_probabilities=squares,
    )
    first, second = (0.5 * 1 + 0.25 * 3) / 0.75, (0.6 * 1 + 0.75 * 3) / 1.35
    assert got.tolist() == pytest.approx([1 - first, 1 - second, 3 - first, 3 - second], abs=1e-6)


def test_remax_compares_each_prompt_with_its_own_greedy_response():
    got = estimate(
        "remax",
        rewards([[1.0, 0.0], [3.0, 2.0]], [[2, 1], [1, 1]]),
        greedy_rewards=np.array([1.0, 2.5]),
    )
    assert got.tolist() == [0.0, 0.0, -1.0, 0.5, -0.5]


def test_gpg_scales_for_groups_without_gradient_or_for_rewards_of_zero():
    scores = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert estimate("gpg", rewards(scores)).tolist() == [2.0, -2.0] + [0.0] * 6
    by_rewards = estimate("gpg", rewards(scores), count="rewards")
    assert by_rewards.tolist() == pytest.approx([4 / 3, -4 / 3] + [0.0] * 6)
    with pytest.raises(ValueError, match=mentions("count=all", "groups")):
        estimate("gpg", rewards(scores), count="all")


def test_gigpo_by_hand_over_anchor_states_of_several_episodes():
    """Two prompts of two episodes each.

    State 5 occurs three times under the first prompt, twice in the first episode. Under the second
    prompt it is another state. Rewards are 1, 0 and 1, 1. Turns have 1, 2, 1 | 2 and 1 | 1, 1
    tokens. step_gamma is 0.5.
    """
    turns = make_turns([[3, 1], [1, 2]], [1, 2, 1, 2, 1, 1, 1], [5, 6, 5, 5, 5, 5, 7])
    token_rewards = rewards([[1.0, 0.0], [1.0, 1.0]], [[4, 2], [1, 2]])
    episode = 1 / math.sqrt(2)  # (1 - 0.5) / sqrt(0.5)
    # Returns of the first prompt's turns: 0.25, 0.5, 1 and 0. In state 5: 0.25, 1, 0, mean 5/12.
    # State 6 has one turn.
    deviation = math.sqrt(sum((x - 5 / 12) ** 2 for x in (0.25, 1.0, 0.0)) / 2)
    state = [(x - 5 / 12) / deviation for x in (0.25, 1.0, 0.0)]
    # Returns of the second prompt's turns: 1, 0.5, 1. In state 5: 1, 0.5. Equal rewards of its
    # episodes give 0.
    other = 0.25 / math.sqrt(0.125)
    omega = 0.3
    expected = [
        episode + omega * state[0],
        episode,
        episode,
        episode + omega * state[1],
        *[-episode + omega * state[2]] * 2,
    ]
    expected += [omega * other, -omega * other, 0.0]
    got = estimate("gigpo", token_rewards, turns=turns, omega=omega, step_gamma=0.5)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-7)
    plain = estimate(
        "gigpo", token_rewards, turns=turns, omega=omega, step_gamma=0.5, normalize=False
    )
    np.testing.assert_allclose(plain[:2], [0.5 + omega * (0.25 - 5 / 12), 0.5], atol=1e-12)


def test_returns_of_turns_discount_by_turn_and_not_by_token():
    turns = make_turns([[3]], [2, 1, 2], [0, 1, 2])
    token_rewards = rewards([[1.0]], [[5]], np.array([0.0, 0.5, 0.0, 0.0, 0.0]))
    got = estimate("step_reinforce", token_rewards, turns=turns, step_gamma=0.5)
    np.testing.assert_allclose(
        got, [0.75, 0.75, 0.5, 1.0, 1.0]
    )  # 0.5 + 0.5 (0 + 0.5 * 1), 0.5 * 1, 1


# Returns of the turns of two prompts with two episodes each, and the turns of each scope.
TURN_RETURNS = [1.0, 2.0, 4.0, 8.0, 3.0, 5.0]
SCOPES = {
    "batch": [range(6)],
    "tag": [range(6)],  # both prompts have the same tag
    "group": [range(3), range(3, 6)],
    "state": [[0, 2], [1], [3, 4, 5]],
}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("scaled", [False, True])
def test_returns_of_turns_are_normalized_within_their_scope(scope, scaled):
    """With step_gamma 0, the return of a turn is its reward."""
    states = [5, 6, 5, 5, 5, 5]
    counts = np.array([[2, 1], [1, 2]])
    turns = make_turns(counts, [1] * 6, states)
    token_rewards = rewards([[0.0, 0.0], [0.0, 0.0]], counts.tolist(), np.array(TURN_RETURNS))
    got = estimate(
        "step_reinforce",
        token_rewards,
        turns=turns,
        step_gamma=0.0,
        center=scope,
        scale=scope if scaled else "none",
    )
    expected = np.zeros(6)
    for members in SCOPES[scope]:
        values = np.array([TURN_RETURNS[k] for k in members])
        deviation = values.std(ddof=1) if len(values) > 1 else math.inf
        expected[list(members)] = (values - values.mean()) / (deviation if scaled else 1.0)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def with_fault(lengths: list[list[int]], turn_rewards: list[float], states: list[int]):
    """Return rewards and turns of one token; the last episode of each prompt has a fault."""
    counts = np.array(lengths)
    complete = np.ones(counts.shape, np.bool_)
    complete[:, -1] = False
    token_rewards = rewards(np.zeros(counts.shape), lengths, np.array(turn_rewards))
    turns = make_turns(counts, [1] * len(states), states, complete=complete)
    return token_rewards, turns


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *[("gigpo", {"grouping": grouping}) for grouping in ("group", "batch", "tag")],
        *[("step_reinforce", {"center": scope, "scale": scope}) for scope in SCOPES],
        ("step_reinforce", {}),
    ],
)
def test_turns_of_a_faulted_episode_do_not_change_those_of_others(name, options):
    states = [5, 6, 5, 6]
    others = rewards(np.zeros((1, 2)), [[2, 2]], np.array([1.0, 0.0, 0.0, 3.0]))
    alone = estimate(
        name, others, turns=make_turns([[2, 2]], [1] * 4, states), step_gamma=0.5, **options
    )
    faulted, turns = with_fault([[2, 2, 2]], [1.0, 0.0, 0.0, 3.0, 7.0, -5.0], [*states, 5, 6])
    together = estimate(name, faulted, turns=turns, step_gamma=0.5, **options)
    np.testing.assert_allclose(together, [*alone, 0.0, 0.0], rtol=0, atol=1e-12)
    assert np.abs(alone).max() > 0.1


@pytest.mark.parametrize("grouping", ["batch", "tag"])
def test_gigpo_may_compare_episodes_of_several_prompts(grouping):
    counts = np.ones((3, 2), np.int64)
    turns = make_turns(counts, [1] * 6, np.arange(6), [0, 1, 0])
    totals = np.array([[1.0, 0.0], [4.0, 2.0], [0.0, 2.0]])
    got = estimate(
        "gigpo", rewards(totals.tolist(), counts.tolist()), turns=turns, grouping=grouping
    ).reshape(3, 2)
    if grouping == "batch":
        expected = (totals - 1.5) / totals.std(ddof=1)
    else:
        first = totals[[0, 2]]
        expected = (totals - first.mean()) / first.std(ddof=1)
        expected[1] = [1 / math.sqrt(2), -1 / math.sqrt(2)]
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("name", TURNS)
def test_estimators_that_compare_turns_require_several(name):
    with pytest.raises(MsrlError, match=mentions(f"estimator={name}", "turns")):
        estimate(name, rewards([[1.0, 0.0]]), turns=None)
    with pytest.raises(ValueError, match=mentions("rewards", "turns", "3")):
        estimate(name, rewards([[1.0, 0.0]]), turns=make_turns([[1, 1]], [1, 2], [0, 0]))


def test_discounting_stays_within_a_sequence():
    got = discounted(np.array([1.0, 2.0, 4.0, 8.0, 16.0]), np.array([2, 0, 3]), 0.5)
    assert got.tolist() == [2.0, 2.0, 12.0, 16.0, 16.0]


def test_rewards_of_tokens_and_of_responses_add_up():
    both = rewards([[1.0, 2.0]], [[2, 1]], np.array([0.5, 0.25, -1.0]))
    assert both.per_token().tolist() == [0.5, 1.25, 1.0]
    assert both.totals().tolist() == [[1.75, 1.0]]
    with pytest.raises(ValueError, match=mentions("rewards", "3")):
        rewards([[1.0, 2.0]], [[2, 1]], np.zeros(2))


def test_whitening_has_mean_zero_and_deviation_one_and_maps_equal_numbers_to_zero():
    got = whiten(np.array([1.0, 2.0, 6.0]), 0.0)
    assert got.mean() == pytest.approx(0) and got.std(ddof=1) == pytest.approx(1)
    some = whiten(np.array([1.0, 100.0, 3.0]), 0.0, np.array([True, False, True]))
    np.testing.assert_allclose(some, [-1 / math.sqrt(2), 0.0, 1 / math.sqrt(2)])
    assert not whiten(np.array([1.0, 5.0, 1.0]), 0.0, np.array([True, False, True])).any()
    assert not whiten(np.full(4, 0.3), 0.0).any() and not whiten(np.array([7.0]), 0.0).any()
    assert rewards([[1.0, 0.0]], [[2, 2]]).whitened(0.0).per_token().mean() == pytest.approx(0)


def test_a_correction_of_one_half_is_that_of_values_which_are_all_counted_twice():
    scores = np.array([[1.0, 3.0, 7.0], [0.0, 1.0, 1.0]])
    twice = estimate("group_norm", rewards(np.tile(scores, 2)))
    half = TokenRewards(scores, np.ones((2, 3), np.int64), correction=0.5)
    expected = twice.reshape(2, -1)[:, :3].ravel()
    np.testing.assert_allclose(estimate("group_norm", half), expected, rtol=1e-12)
    values = np.array([1.0, 2.0, 6.0])
    np.testing.assert_allclose(half.whiten(scores.ravel(), 0.0)[:3], whiten(
        np.tile(scores.ravel(), 2), 0.0)[:3], rtol=1e-12)  # fmt: skip
    assert whiten(values, 0.0, correction=0.0).std() == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_baseline"])
def test_z_scores_over_the_step_are_those_of_trained_samples(name):
    """Samples that are not trained on do not change mean and deviation, and get 0."""
    random = np.random.default_rng(2)
    scores, lengths = random.normal(size=(4, 3)), random.integers(1, 5, (4, 3))
    trained = np.ones((4, 3), bool)
    trained[1] = False
    scores[1] = [50.0, -50.0, 0.0]
    selected = rewards(scores[trained].reshape(3, 3), lengths[trained].reshape(3, 3))
    all_of_them = TokenRewards(scores, lengths, trained=trained)
    got, here = estimate(name, all_of_them), all_of_them.everywhere(trained)
    np.testing.assert_allclose(got[here], estimate(name, selected), rtol=1e-12)
    assert got[here].std(ddof=1) == pytest.approx(1.0) and not got[~here].any()


def test_masks_exclude_truncated_equal_and_too_easy_or_hard_samples():
    scores = np.array([[1.0, 0.0], [1.0, 1.0], [0.9, 0.8]])
    truncated = np.array([[False, True], [False, False], [False, False]])
    decided = np.ones((3, 2), np.bool_)
    everything = {"decided": decided, "drop_truncated": False, "drop_equal_groups": False}
    assert trained_samples(scores, truncated, **everything).all()
    assert trained_samples(
        scores, truncated, **{**everything, "drop_truncated": True}
    ).tolist() == [
        [True, False],
        [True, True],
        [True, True],
    ]
    assert trained_samples(
        scores, truncated, **{**everything, "drop_equal_groups": True}
    ).tolist() == [
        [True, True],
        [False, False],
        [True, True],
    ]
    assert trained_samples(scores, truncated, **everything, difficulty=(0.1, 0.85)).tolist() == [
        [True, True],
        [False, False],
        [False, False],
    ]


def test_sample_weights_by_hand_have_mean_one_over_selected_samples():
    lengths, keep = np.array([[2, 4], [6, 100]]), np.array([[True, True], [True, False]])
    by_length = sample_weights(lengths, keep, by_length=True)
    np.testing.assert_allclose(by_length[keep], [1.5, 1.0, 0.5])
    both = sample_weights(lengths, keep, by_length=True, difficulties=np.array([0.0, 2.0]))
    np.testing.assert_allclose(both[keep], np.array([0.75, 0.5, 1.0]) / 0.75)
    assert sample_weights(lengths, np.zeros_like(keep), by_length=True).shape == (2, 2)
    assert np.isfinite(
        sample_weights(np.full((1, 2), 3), np.ones((1, 2), bool), by_length=True)
    ).all()


def test_the_adaptive_controller_changes_by_at_most_a_fifth_towards_the_target():
    rule = {"target": 0.1, "horizon": 100}
    assert kl_controller.adapted(1.0, 0.1, 50, **rule) == 1.0
    assert kl_controller.adapted(1.0, 0.11, 50, **rule) == pytest.approx(1.05)
    assert kl_controller.adapted(2.0, 9.0, 50, **rule) == pytest.approx(2.0 * 1.1)
    assert kl_controller.adapted(1.0, -1.0, 100, **rule) == pytest.approx(0.8)


PROMPT = Prompt(index=0, token_ids=np.array([7, 8]))


def test_every_completion_becomes_a_sample_with_its_own_advantages():
    groups = [
        scored_group(PROMPT, [1.0, 0.0], [2, 3]),
        scored_group(PROMPT, [0.5, 0.25], [1, 4], logprob=-0.5, finish_reason="length"),
    ]
    arrays = rollout_arrays(groups)
    assert arrays.rewards.tolist() == [[1.0, 0.0], [0.5, 0.25]]
    assert arrays.lengths.tolist() == [[2, 3], [1, 4]]
    assert arrays.truncated.tolist() == [[False, False], [True, True]]
    step = make_step(groups, np.arange(10.0), np.array([[True, True], [False, True]]))
    fields, masks = step.sequences.fields, step.sequences.loss_masks
    responses = [row[2:].tolist() for row in fields["advantages"]]
    assert responses == [[0, 1], [2, 3, 4], [5], [6, 7, 8, 9]]
    assert [mask.tolist() for mask in masks] == [
        [False, False, *flags] for flags in ([True] * 2, [True] * 3, [False], [True] * 4)
    ]
    assert fields["sampler_logprobs"][3].tolist() == [0.0] * 2 + [-0.5] * 4


def test_groups_of_different_size_and_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=mentions("groups", "[1, 2]", "completions")):
        group_arrays([scored_group(PROMPT, [1.0], [1]), scored_group(PROMPT, [1.0, 2.0], [1, 1])])
    with pytest.raises(ValueError, match=mentions("(3,)", "2 tokens")):
        make_step([scored_group(PROMPT, [1.0, 0.0], [1, 1])], np.zeros(3))


@pytest.mark.parametrize("name", golden.ESTIMATORS)
def test_every_estimator_ignores_responses_without_a_real_score(name):
    """Other scores and lengths of undecided responses change nothing; their groups are smaller."""
    random = np.random.default_rng(3)
    decided = np.array([[True, False, True, True], [True, True, False, False], [False] * 4])
    scores, lengths = random.normal(size=(3, 4)), random.integers(1, 5, (3, 4))
    baseline = None
    for wrong in (0.0, 50.0):
        scores[~decided] = wrong
        values = estimate(name, TokenRewards(scores, lengths, decided=decided))
        counted = values[np.repeat(decided.ravel(), lengths.ravel())]
        baseline = counted if baseline is None else baseline
        np.testing.assert_allclose(counted, baseline, rtol=1e-12)
    assert np.isfinite(values).all()


@pytest.mark.parametrize(
    "name", [name for name in golden.ESTIMATORS if name not in ("gae", "remax", "reinforce")]
)
def test_a_group_with_undecided_responses_is_the_group_without_them(name):
    """Rewards 1 and 0 among six undecided ones have the advantages of the two alone."""
    lengths = np.array([[2, 3, 1, 1, 1, 1, 1, 1]])
    decided = np.array([[True, True, *[False] * 6]])
    scores = np.where(decided, [[1.0, 0.0, *[0.5] * 6]], 0.5)
    values = estimate(name, TokenRewards(scores, lengths, decided=decided))
    alone = estimate(name, TokenRewards(scores[:, :2], lengths[:, :2]))
    np.testing.assert_allclose(values[:5], alone, rtol=1e-12)
