"""Grouped products of experts equal a loop over the experts, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from msrl import platforms
from msrl.trainer.model.grouped_experts import grouped_linear, weighted_swiglu

COUNTS = [5, 0, 7, 1, 3]  # an expert without tokens too
N, INPUTS, OUTPUTS = sum(COUNTS), 12, 8


def _leaf(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size).to(dtype).requires_grad_()


def _assert_same_gradients(actual: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    grad = torch.randn(actual.shape).to(actual.dtype)
    gradients, expected_gradients = (
        torch.autograd.grad(output, leaves, grad) for output in (actual, expected)
    )
    torch.testing.assert_close(gradients, expected_gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_all_experts_equal_those_of_a_loop(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = _leaf(N, INPUTS, dtype=dtype)
    weights = [_leaf(OUTPUTS, INPUTS, dtype=dtype) for _ in COUNTS]
    rows = zip(x.split(COUNTS), weights, strict=True)
    expected = torch.cat([F.linear(tokens, weight) for tokens, weight in rows])
    actual = grouped_linear(x, COUNTS, weights)
    assert torch.equal(actual, expected)
    _assert_same_gradients(actual, expected, [x, *weights])


def test_products_equal_those_of_torch_in_one_call() -> None:
    """torch's grouped product needs the weights in one tensor."""
    torch.manual_seed(0)
    x = _leaf(N, INPUTS, dtype=torch.float32)
    weights = [_leaf(OUTPUTS, INPUTS, dtype=torch.float32) for _ in COUNTS]
    ends = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    expected = F.grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)
    actual = grouped_linear(x, COUNTS, weights)
    torch.testing.assert_close(actual, expected)
    _assert_same_gradients(actual, expected, [x, *weights])


def test_devices_with_a_kernel_compute_all_products_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CPU stands in for such a device. Rows of operands need a multiple of 16 bytes there."""
    torch.manual_seed(0)
    x = _leaf(N, INPUTS, dtype=torch.float32)
    weights = [_leaf(OUTPUTS, INPUTS, dtype=torch.float32) for _ in COUNTS]
    odd = [_leaf(OUTPUTS + 1, INPUTS, dtype=torch.float32) for _ in COUNTS]
    expected, loop = grouped_linear(x, COUNTS, weights), grouped_linear(x, COUNTS, odd)
    calls: list[int] = []
    kernel = F.grouped_mm

    def counted(*arguments: Any, **options: Any) -> Tensor:
        calls.append(1)
        return kernel(*arguments, **options)

    monkeypatch.setattr(F, "grouped_mm", counted)
    platform = platforms.get("cpu")
    monkeypatch.setattr(platform, "grouped_product_dtypes", frozenset({"float32"}))
    actual = grouped_linear(x, COUNTS, weights)
    torch.testing.assert_close(actual, expected)
    _assert_same_gradients(actual, expected, [x, *weights])
    assert len(calls) == 3  # forward, and the gradients of x in two backward passes
    assert torch.equal(grouped_linear(x, COUNTS, odd), loop)
    assert len(calls) == 3


def test_frozen_experts_have_no_gradient_and_save_no_tokens() -> None:
    x = _leaf(N, INPUTS, dtype=torch.float32)
    weights = [torch.randn(OUTPUTS, INPUTS) for _ in COUNTS]
    weights[2].requires_grad_()
    output = grouped_linear(x, COUNTS, weights)
    output.sum().backward()
    assert [weight.grad is not None for weight in weights] == [False, False, True, False, False]
    frozen = [weight.detach() for weight in weights]
    saved = grouped_linear(x, COUNTS, frozen).grad_fn
    assert all(tensor is not x for tensor in saved.saved_tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weighted_gate_equals_its_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up, weights = _leaf(N, 2 * OUTPUTS, dtype=dtype), _leaf(N, dtype=torch.float32)
    gate, up = gate_up.chunk(2, -1)
    expected = (F.silu(gate) * up * weights[:, None]).to(dtype)
    actual = weighted_swiglu(gate_up, weights)
    assert torch.equal(actual, expected)
    _assert_same_gradients(actual, expected, [gate_up, weights])
