"""Gated delta networks against the recurrence of the paper, one token at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from msrl.trainer.model.mixers.gated_delta import _chunks, causal_convolution, delta_rule

# Shorter and longer than a chunk of 64, and exactly one and two chunks.
LENGTHS = (3, 70, 1, 128, 64)
HEADS, RATIO, KEY, VALUE, WIDTH = 2, 3, 5, 4, 4


def inputs(seed: int = 0) -> list[Tensor]:
    """Return queries, keys, values, strengths and decays of packed sequences."""
    torch.manual_seed(seed)
    count = sum(LENGTHS)
    query, key = (F.normalize(torch.randn(count, HEADS, KEY), dim=-1) for _ in range(2))
    value, strength = torch.randn(count, HEADS, RATIO, VALUE), torch.rand(count, HEADS, RATIO)
    decay = -torch.rand(count, HEADS, RATIO)
    return [x.requires_grad_() for x in (query, key, value, strength, decay)]


def recurrence(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, log_decay: Tensor
) -> Tensor:
    """Return the outputs of one sequence in float64 (arXiv:2412.06464, equation 10)."""
    state, outputs = torch.zeros(HEADS, RATIO, KEY, VALUE, dtype=torch.float64), list[Tensor]()
    for q, k, v, b, g in zip(
        *(x.double() for x in (query, key, value, strength, log_decay)), strict=True
    ):
        state = state * g.exp()[..., None, None]
        remembered = torch.einsum("hrkv,hk->hrv", state, k)
        state = state + torch.einsum("hk,hrv,hr->hrkv", k, v - remembered, b)
        outputs.append(torch.einsum("hrkv,hk->hrv", state, q))
    return torch.stack(outputs)


def test_chunks_have_the_outputs_and_gradients_of_the_recurrence_in_every_sequence() -> None:
    leaves = inputs()
    actual = delta_rule(*leaves, LENGTHS)
    rows = zip(*(leaf.split(LENGTHS) for leaf in leaves), strict=True)
    expected = torch.cat([recurrence(*row) for row in rows])
    torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(actual)
    gradients = (torch.autograd.grad((x * weights).sum(), leaves) for x in (actual, expected))
    for name, ours, theirs in zip("qkvbg", *gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=name)


def test_packed_sequences_have_the_outputs_of_single_ones() -> None:
    leaves = [leaf.detach() for leaf in inputs()]
    packed = delta_rule(*leaves, LENGTHS).split(LENGTHS)
    rows = zip(*(leaf.split(LENGTHS) for leaf in leaves), strict=True)
    for length, row, output in zip(LENGTHS, rows, packed, strict=True):
        torch.testing.assert_close(output, delta_rule(*row, [length]), rtol=1e-6, atol=1e-6)


def test_the_convolution_starts_again_at_every_border() -> None:
    torch.manual_seed(0)
    x = torch.randn(sum(LENGTHS), HEADS, KEY)
    weight = torch.randn(HEADS, KEY, WIDTH)
    actual = causal_convolution(x, weight, _chunks(LENGTHS, x.device).positions)
    for row, output in zip(x.split(LENGTHS), actual.split(LENGTHS), strict=True):
        padded = F.pad(row.flatten(1).T, (WIDTH - 1, 0))
        expected = F.conv1d(padded[None], weight.flatten(0, 1)[:, None], groups=HEADS * KEY)
        torch.testing.assert_close(output.flatten(1), expected[0].T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 64, 65])
def test_a_token_does_not_depend_on_later_ones(length: int) -> None:
    leaves = [leaf.detach() for leaf in inputs()]
    whole = delta_rule(*[leaf[:130] for leaf in leaves], [130])[:length]
    torch.testing.assert_close(
        delta_rule(*[leaf[:length] for leaf in leaves], [length]), whole, rtol=1e-6, atol=1e-6
    )
