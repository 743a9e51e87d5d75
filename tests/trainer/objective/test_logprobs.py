"""Log-probabilities, entropies and exact divergences of one rank agree with torch in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from msrl.algorithms.divergences.reverse_kl import divergence as reverse_kl
from msrl.trainer.objective.chunked import chunked_logprobs
from msrl.trainer.objective.logprobs import (
    Distribution,
    DistributionComparison,
    VocabColumns,
    make_columns,
    vocab_parallel_logprobs,
)

ROWS, HIDDEN, VOCAB, PADDED, TEMPERATURE = 7, 5, 11, 16, 0.7


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def columns(
    group: dist.ProcessGroup, elements_at_once: int, *, with_entropy: bool = True
) -> VocabColumns:
    return make_columns(
        PADDED,
        vocab_size=VOCAB,
        tp_rank=0,
        temperature=TEMPERATURE,
        with_entropy=with_entropy,
        elements_at_once=elements_at_once,
        group=group,
    )


def other_model(vocab: VocabColumns, rows: int = ROWS) -> tuple[Distribution, torch.Tensor]:
    """Return a random distribution and its logits."""
    hidden, weight = torch.randn(rows, HIDDEN), torch.randn(PADDED, HIDDEN)
    logits = hidden @ weight.t()
    normalizer = vocab.normalizer(logits)
    return Distribution(hidden, lambda chunk: chunk @ weight.t(), normalizer), logits


def plain(
    logits: torch.Tensor, reference: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    p, q = ((x[:, :VOCAB] / TEMPERATURE).log_softmax(-1) for x in (logits, reference))
    return p.gather(1, labels[:, None])[:, 0], -(p.exp() * p).sum(-1), (p.exp() * (p - q)).sum(-1)


@pytest.mark.sample(12)
@pytest.mark.parametrize("elements_at_once", [16, 40, 10_000])
@pytest.mark.parametrize("num_rows", [None, 3, 7])
@pytest.mark.parametrize(
    "weights", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (1.0, -0.3, 0.2)]
)
def test_values_and_gradients_agree_with_torch_for_any_chunk_size(
    group, elements_at_once, num_rows, weights
):
    torch.manual_seed(0)
    vocab = columns(group, elements_at_once)
    hidden, head, labels, factors = (
        torch.randn(ROWS, HIDDEN),
        2 * torch.randn(PADDED, HIDDEN),
        torch.randint(0, VOCAB, (ROWS,)),
        torch.randn(ROWS),
    )
    other, reference = other_model(vocab)
    comparisons = [DistributionComparison(other, reverse_kl)]

    exact = hidden.double().requires_grad_()
    expected = plain(exact @ head.double().t(), reference.double(), labels)
    sum(w * (x * factors).sum() for w, x in zip(weights, expected, strict=True)).backward()

    leaf = hidden.clone().requires_grad_()
    if num_rows is None:
        actual = vocab_parallel_logprobs(leaf @ head.t(), labels, vocab, comparisons)
    else:
        actual = chunked_logprobs(
            leaf, head, labels, vocab, num_rows=num_rows, comparisons=comparisons
        )
    actual = (*actual[:2], actual[2].squeeze(-1))
    for value, exact_value in zip(actual, expected, strict=True):
        assert value is not None
        torch.testing.assert_close(value.double(), exact_value, rtol=1e-4, atol=1e-5)
    sum(w * (x * factors).sum() for w, x in zip(weights, actual, strict=True) if w).backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(6)
@pytest.mark.parametrize("elements_at_once", [16, 40, 10_000])
@pytest.mark.parametrize("scale", [1.0, 60.0])  # with 60, most exponentials are 0 in float32
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)])
def test_gradients_from_the_exponentials_of_the_forward_pass_agree_with_torch(
    group, elements_at_once, scale, weights
):
    torch.manual_seed(0)
    vocab = columns(group, elements_at_once)
    start, labels = scale * torch.randn(ROWS, PADDED), torch.randint(0, VOCAB, (ROWS,))
    factors = torch.randn(ROWS)

    exact = start.double().requires_grad_()
    expected = plain(exact, exact.detach(), labels)[:2]
    sum(w * (x * factors).sum() for w, x in zip(weights, expected, strict=True)).backward()

    leaf = start.clone().requires_grad_()
    actual = vocab_parallel_logprobs(leaf * 1.0, labels, vocab)[:2]
    for value, exact_value in zip(actual, expected, strict=True):
        torch.testing.assert_close(value.double(), exact_value, rtol=1e-5, atol=1e-5)
    sum(w * (x * factors).sum() for w, x in zip(weights, actual, strict=True) if w).backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    assert not leaf.grad[:, VOCAB:].any()


def test_logits_without_a_gradient_are_kept(group):
    logits = torch.randn(ROWS, PADDED)
    labels = torch.zeros(ROWS, dtype=torch.int64)
    before = logits.clone()
    vocab_parallel_logprobs(logits, labels, columns(group, 40))
    with torch.no_grad():
        vocab_parallel_logprobs(logits.requires_grad_(), labels, columns(group, 40))
    assert torch.equal(logits, before)


def test_the_divergence_from_itself_is_zero_and_is_only_computed_on_request(group):
    vocab = columns(group, 100, with_entropy=False)
    other, logits = other_model(vocab)
    labels = torch.zeros(ROWS, dtype=torch.int64)
    comparisons = [DistributionComparison(other, reverse_kl)]
    _, entropy, divergence = vocab_parallel_logprobs(logits, labels, vocab, comparisons)
    assert entropy is None and divergence is not None
    assert divergence.abs().max() < 1e-5
    assert vocab_parallel_logprobs(logits, labels, vocab)[2] is None


@pytest.mark.parametrize("elements_at_once", [16, 10_000])
def test_the_sum_of_squared_probabilities_follows_from_two_normalizers(group, elements_at_once):
    """Z(T / 2) / Z(T)^2, as in `LanguageModelReplica.forward`."""
    torch.manual_seed(0)
    shard, logits = columns(group, elements_at_once), 5 * torch.randn(ROWS, PADDED)
    half = replace(shard, temperature=TEMPERATURE / 2)
    squares = (half.normalizer(logits) - 2 * shard.normalizer(logits)).exp()
    expected = (logits[:, :VOCAB].double() / TEMPERATURE).softmax(-1).square().sum(-1)
    torch.testing.assert_close(squares.double(), expected, rtol=1e-5, atol=0.0)
