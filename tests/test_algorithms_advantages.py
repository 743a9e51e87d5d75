"""Group-relative advantages against hand-made numbers and numpy, and one golden row for every estimator there is."""

import numpy as np
import pytest
import torch

from msrl import registry
from msrl.algorithms.samples import reward_matrix, training_samples
from msrl.errors import MsrlError
from msrl.types import Completion, Prompt, Reward, RolloutGroup, ScoredGroup

PACKAGE = "msrl.algorithms.advantages"
# rewards -> advantages, by hand: mean 0.5, unbiased deviation sqrt(4 * 0.25 / 3) = 0.5773503
GOLDEN = {"group_norm": ([[1.0, 0.0, 0.0, 1.0]], [[0.8660239, -0.8660239, -0.8660239, 0.8660239]])}


@pytest.mark.parametrize("name", registry.names(PACKAGE))
def test_every_estimator_has_a_golden_row_and_reproduces_it(name):
    assert name in GOLDEN, f"algorithms/advantages/{name}.py has no golden row in this test"
    rewards, expected = GOLDEN[name]
    module = registry.load(PACKAGE, name, key="algo.advantage.estimator")
    got = module.advantages(torch.tensor(rewards, dtype=torch.float64))
    np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-7)


def group_norm(rewards, **options):
    return registry.load(PACKAGE, "group_norm", key="").advantages(rewards, **options)


def test_group_norm_equals_the_formula_in_numpy():
    rewards = np.random.default_rng(0).normal(size=(5, 8))
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(group_norm(torch.from_numpy(rewards)).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, 1.1, -1e9, 1e-30])
def test_equal_rewards_give_exactly_zero(value):
    assert torch.equal(group_norm(torch.full((2, 3), value, dtype=torch.float64)), torch.zeros(2, 3, dtype=torch.float64))


def test_one_group_does_not_touch_another_and_precision_is_kept():
    rewards = torch.tensor([[1e6, 1e6 + 1, 1e6, 1e6], [0.0, 1.0, 0.0, 0.0]])
    got = group_norm(rewards)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[0], got[1])


def test_a_group_of_one_is_refused_with_what_to_do():
    with pytest.raises(MsrlError, match=r"samples_per_prompt=1.*set 2 or more"):
        group_norm(torch.zeros(4, 1))


def scored_group(totals, lengths):
    completions = tuple(
        Completion(np.arange(n, dtype=np.int64), np.full(n, -0.5, np.float32), finish_reason="stop", policy_version=0, text="")
        for n in lengths
    )
    prompt = Prompt(index=0, token_ids=np.array([7, 8], dtype=np.int64))
    return ScoredGroup(RolloutGroup(prompt, completions), tuple(Reward(total, {}) for total in totals))


def test_every_completion_becomes_a_sample_with_its_own_advantage_on_every_token():
    groups = [scored_group([1.0, 0.0], [2, 3]), scored_group([0.5, 0.25], [1, 4])]
    assert reward_matrix(groups).tolist() == [[1.0, 0.0], [0.5, 0.25]]
    samples = training_samples(groups, np.array([[1.0, -1.0], [2.0, -2.0]]))
    assert [s.advantages.tolist() for s in samples] == [[1, 1], [-1, -1, -1], [2], [-2, -2, -2, -2]]
    assert [len(s.response_ids) for s in samples] == [2, 3, 1, 4]
    assert samples[3].sampler_logprobs.tolist() == [-0.5] * 4


def test_groups_of_different_size_and_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="cannot stand in one batch"):
        reward_matrix([scored_group([1.0], [1]), scored_group([1.0, 2.0], [1, 1])])
    with pytest.raises(ValueError, match="shape"):
        training_samples([scored_group([1.0, 0.0], [1, 1])], np.zeros((2, 1)))
