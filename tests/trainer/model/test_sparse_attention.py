"""Keys that an indexer chooses, attention to them, and the loss of the indexer.

They are compared with complete matrices of scores, and with megatron-core's loss of an indexer.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from msrl.models.shape import Indexer, Rotary
from msrl.trainer.model import attention, indexer_loss
from msrl.trainer.model.mixers import sparse_attention

# Shorter and longer than the number of chosen keys, and equal to it.
LENGTHS, TOP_K, HEADS, WIDTH = (7, 2, 5, 11, 11), 5, 6, 8
INDEXER = Indexer(HEADS, WIDTH, TOP_K, Rotary(1e4, None, 4))
COUNT = sum(LENGTHS)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, weights and keys of an indexer."""
    torch.manual_seed(0)
    return torch.randn(COUNT, HEADS, WIDTH), torch.randn(COUNT, HEADS), torch.randn(COUNT, WIDTH)


def chosen(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return which of its keys each query of one sequence chooses, from the definition."""
    scores = torch.einsum("nhd,td->nht", query, keys).relu().mul(weights[..., None]).sum(1)
    result = torch.zeros_like(scores, dtype=torch.bool)
    for position, row in enumerate(scores):
        best = row[: position + 1].topk(min(TOP_K, position + 1)).indices
        result[position, best] = True
    return result


def visible(choice: Tensor, length: int) -> Tensor:
    """Return which keys the rows of a choice contain, without those that are not visible."""
    return torch.zeros(len(choice), length).scatter(-1, choice.long(), 1.0).bool().tril()


@pytest.mark.parametrize("elements", [1, 200, 1 << 26])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_every_rank_chooses_the_best_visible_keys_of_its_tokens(
    monkeypatch: pytest.MonkeyPatch, elements: int, num_parts: int
) -> None:
    monkeypatch.setattr(sparse_attention, "_ELEMENTS", elements)
    query, weights, keys = inputs()
    size = COUNT // num_parts
    parts = [
        sparse_attention.choose_keys(
            *(x[start : start + size] for x in (query, weights)), keys, LENGTHS, (0, 1, start),
            INDEXER,
        )
        for start in range(0, COUNT, size)
    ]  # fmt: skip
    choices = torch.cat(parts).split(LENGTHS)
    rows = zip(*(x.split(LENGTHS) for x in (query, weights, keys)), strict=True)
    for length, choice, row in zip(LENGTHS, choices, rows, strict=True):
        if length > TOP_K:
            assert torch.equal(visible(choice, length), chosen(*row))


def test_context_parallel_ranks_choose_for_their_pieces_of_every_sequence() -> None:
    query, weights, keys = inputs()
    lengths, num_ranks = (8, 28), 2
    whole = sparse_attention.choose_keys(query, weights, keys, lengths, (0, 1, 0), INDEXER)
    for rank in range(num_ranks):
        own = torch.from_numpy(sparse_attention.rank_positions(lengths, rank, num_ranks))
        for first, tokens in ((0, own[:9]), (9, own[9:])):  # two tensor-parallel ranks
            choice = sparse_attention.choose_keys(
                query[tokens], weights[tokens], keys, lengths, (rank, num_ranks, first), INDEXER
            )
            assert torch.equal(choice, whole[tokens])


@pytest.mark.parametrize("block", [3, 512])
def test_attention_to_chosen_keys_has_outputs_and_gradients_of_a_masked_softmax(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(attention, "_BLOCK", block)
    choice = sparse_attention.choose_keys(*inputs(), LENGTHS, (0, 1, 0), INDEXER)
    torch.manual_seed(1)
    sizes = (8, 8, 6)  # values are narrower than keys
    leaves = [torch.randn(COUNT, 3, size, requires_grad=True) for size in sizes]
    actual = attention.block_diagonal_attention(*leaves, LENGTHS, 0.3, choice=choice)
    outputs: list[Tensor] = []
    rows = zip(*(leaf.split(LENGTHS) for leaf in leaves), choice.split(LENGTHS), strict=True)
    for q, k, v, own in rows:
        length = len(q)
        mask = torch.ones(length, length).tril().bool()
        mask = visible(own, length) if length > TOP_K else mask
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    expected = torch.cat(outputs)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    factors = torch.randn_like(expected)
    gradients = [torch.autograd.grad((x * factors).sum(), leaves) for x in (actual, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_equal_scores_are_chosen_as_in_a_complete_row() -> None:
    query, weights, keys = inputs()
    nothing = torch.zeros_like(weights)
    choice = sparse_attention.choose_keys(query, nothing, keys, (COUNT,), (0, 1, 0), INDEXER)
    later = torch.ones(COUNT, COUNT).triu(1).bool()
    scores = torch.zeros(COUNT, COUNT).masked_fill(later, -torch.inf)
    assert torch.equal(choice.long(), scores.topk(TOP_K).indices)


def megatron_loss(leaves: list[Tensor], query: Tensor, key: Tensor) -> Tensor:
    """Return the loss of an indexer by megatron-core, summed over the tokens of all sequences."""
    from megatron.core.transformer.experimental_attention_variant.dsa import (
        compute_dsa_indexer_loss,
    )

    one_rank = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    total = torch.zeros(())
    for rows in torch.arange(COUNT).split(LENGTHS):
        products = torch.einsum("nhd,td->nht", leaves[0][rows], leaves[2][rows])
        scores = (products.relu() * leaves[1][rows][..., None]).sum(1)
        length = len(rows)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        best = scores.topk(min(TOP_K, length)).indices
        heads = (x[rows].unsqueeze(1) for x in (query, key))
        total = total + length * compute_dsa_indexer_loss(
            scores[None].clone(), best[None], *heads, 0.3, 1.0, True, one_rank
        )
    return total


@pytest.mark.parametrize("elements", [1, 200, 1 << 26])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_the_loss_of_an_indexer_agrees_with_megatrons(
    monkeypatch: pytest.MonkeyPatch, elements: int, num_parts: int
) -> None:
    """Tokens may be those of one of several tensor-parallel ranks. Scores are small, since Megatron
    adds 1e-10 to probabilities.
    """
    monkeypatch.setattr(indexer_loss, "_ELEMENTS", elements)
    leaves = [
        (x * factor).requires_grad_() for x, factor in zip(inputs(), (1, 0.1, 1), strict=True)
    ]
    torch.manual_seed(1)
    query, key = torch.randn(COUNT, 3, 8), torch.randn(COUNT, 3, 8)
    with torch.no_grad():
        choice = sparse_attention.choose_keys(*leaves, LENGTHS, (0, 1, 0), INDEXER)
        chosen = indexer_loss.Chosen(LENGTHS, choice, TOP_K)
        target = indexer_loss.attention_to_chosen(query, key, 0.3, chosen)
    assert torch.allclose(target.sum(-1), torch.full((COUNT,), 3.0))
    target, size = target / 3, COUNT // num_parts
    losses: list[Tensor] = []
    for start in range(0, COUNT, size):
        own = slice(start, start + size)
        products = sparse_attention.IndexerProducts(
            leaves[0][own], leaves[1][own], leaves[2], (0, 1, start)
        )
        losses.append(indexer_loss.divergences(products, target[own], chosen))
    actual, expected = torch.cat(losses).sum(), megatron_loss(leaves, query, key)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(x, leaves) for x in (actual, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
