"""Sampling by the inverse distribution function, compared with exact sums and with frequencies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from msrl.rollout.inverse_cdf import draw_uniform, sample_tokens

ALMOST_ONE = 1 - 2**-53


def probabilities(count: int, vocab_size: int, scale: float = 3.0) -> torch.Tensor:
    logits = scale * torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(0))
    return logits.softmax(-1)


def sample(probabilities: torch.Tensor, *uniform: float) -> list[int]:
    return sample_tokens(probabilities, torch.tensor(uniform, dtype=torch.float64)).tolist()


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 8064, 50_257])
def test_a_token_is_where_the_exact_sums_exceed_the_random_number(vocab_size):
    shares = probabilities(256, vocab_size)
    uniform = draw_uniform(256, {})
    exact = shares.double().numpy()
    sums = exact.cumsum(-1)
    goals = uniform.numpy() * sums[:, -1]
    for row, token in enumerate(sample_tokens(shares, uniform).tolist()):
        before = sums[row, token - 1] if token else 0.0
        assert before - 1e-6 <= goals[row] <= sums[row, token] + 1e-6
        assert exact[row, token] > 0


def test_tokens_are_as_frequent_as_their_probabilities():
    count, vocab_size = 50_000, 300
    shares = probabilities(1, vocab_size, scale=1.0)
    tokens = sample_tokens(shares.expand(count, -1), draw_uniform(count, {}))
    drawn = np.bincount(tokens.numpy(), minlength=vocab_size)
    expected = count * shares[0].double().numpy()
    square = ((drawn - expected) ** 2 / expected).sum()
    assert abs(square - (vocab_size - 1)) < 5 * np.sqrt(2 * (vocab_size - 1))


@pytest.mark.parametrize("share", [0.25, 1e-12, 1e-30])
@pytest.mark.parametrize("places", [[0], [299], [127, 128], [5, 130, 298]])
def test_impossible_tokens_are_never_sampled(places, share):
    shares = torch.zeros(1, 300)
    shares[0, places] = share
    for uniform in (0.0, 2**-53, 0.3, 0.5, 2 / 3, ALMOST_ONE):
        assert sample(shares, uniform)[0] in places
    assert sample(shares, 0.0) == places[:1]
    assert sample(shares, ALMOST_ONE) == places[-1:]


def test_a_rare_token_is_as_rare_as_its_probability():
    shares = torch.full((1, 8064), 1 / 8063)
    shares[0, 8063] = 1e-12  # in float32, the sums before it and after it are equal
    total = 1 + 1e-12
    assert sample(shares, (1 - 1e-6) / total) != [8063]
    assert sample(shares, ALMOST_ONE) in ([8062], [8063])


def test_equal_weights_of_any_size_divide_the_interval_equally():
    for size in (4, 128, 1000):
        uniform = (torch.arange(size, dtype=torch.float64) + 0.5) / size
        tokens = sample_tokens(torch.full((size, size), 0.01), uniform)
        assert tokens.tolist() == list(range(size))


def test_not_a_number_gives_some_token():
    shares = torch.full((2, 300), float("nan"))
    assert all(0 <= token < 300 for token in sample(shares, 0.5, 0.0))


def test_a_request_with_a_generator_gets_the_same_numbers_in_any_batch():
    def numbers(count: int, *places: int) -> list[list[float]]:
        generators = {place: torch.Generator().manual_seed(7 + place) for place in places}
        drawn = [draw_uniform(count, generators) for _ in range(3)]
        return [[float(step[place]) for step in drawn] for place in places]

    assert numbers(4, 1, 3) == [*numbers(9, 1), *numbers(7, 3)]
    torch.manual_seed(5)
    first = draw_uniform(3, {})
    torch.manual_seed(5)
    assert draw_uniform(3, {}).tolist() == first.tolist()
    assert first.dtype == torch.float64 and bool(((first >= 0) & (first < 1)).all())
