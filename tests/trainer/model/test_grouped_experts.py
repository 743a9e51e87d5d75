"""Grouped products of experts equal a loop over the experts, forward and backward."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from msrl.platforms import get
from msrl.trainer.model.grouped_products import grouped_linear, weighted_swiglu

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
    """The CPU replaces such a device."""
    torch.manual_seed(0)
    x = _leaf(N, INPUTS, dtype=torch.float32)
    weights = [_leaf(OUTPUTS, INPUTS, dtype=torch.float32) for _ in COUNTS]
    expected = grouped_linear(x, COUNTS, weights)
    calls: list[list[int]] = []

    def kernel(x: Tensor, matrices: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
        calls.append(list(counts))
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
        return F.grouped_mm(x, torch.stack(list(matrices)), offs=ends)

    monkeypatch.setattr(get("cpu"), "grouped_product", kernel)
    actual = grouped_linear(x, COUNTS, weights)
    torch.testing.assert_close(actual, expected)
    _assert_same_gradients(actual, expected, [x, *weights])
    assert calls == [COUNTS] * 3  # forward, and the gradients of x in two backward passes


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


@pytest.mark.parametrize("width", [16, 12])
def test_gpus_compute_aligned_products_in_one_call(width: int) -> None:
    x = torch.randn(N, width, dtype=torch.bfloat16)
    weights = [torch.randn(OUTPUTS, width, dtype=torch.bfloat16) for _ in COUNTS]
    actual = get("cuda").grouped_product(x, [weight.t() for weight in weights], COUNTS)
    assert (actual is not None) == (width == 16)
    if actual is not None:
        torch.testing.assert_close(actual, grouped_linear(x, COUNTS, weights))


def _grouped_matmul(x: list[Tensor], weight: list[Tensor], **options: Any) -> list[Tensor]:
    """Compute torch_npu's operator with one tensor of tokens and one of results."""
    ends = options.pop("group_list")
    assert ends.dtype == torch.int64 and options == {"split_item": 3, "group_type": 0}
    (tokens,) = x
    starts = [0, *ends.tolist()]
    rows = [tokens[a:b] for a, b in pairwise(starts)]
    return [torch.cat([a @ w for a, w in zip(rows, weight, strict=True)])]


def test_npus_compute_products_of_all_experts_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = SimpleNamespace(npu_grouped_matmul=_grouped_matmul)
    monkeypatch.setitem(sys.modules, "torch_npu", operators)  # type: ignore[arg-type]
    x = torch.randn(N, INPUTS, dtype=torch.bfloat16)
    matrices = [torch.randn(INPUTS, OUTPUTS, dtype=torch.bfloat16) for _ in COUNTS]
    expected = grouped_linear(x, COUNTS, [matrix.t() for matrix in matrices])
    actual = get("npu").grouped_product(x, matrices, COUNTS)
    assert actual is not None
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("rows", "width", "num_experts", "dtype"),
    [
        (4, 8, 2, torch.float32),  # separate matrices have 16 bits
        (4, 8, 129, torch.bfloat16),
        (4, 65536, 2, torch.bfloat16),
        (0, 8, 2, torch.bfloat16),
    ],
)
def test_npus_have_no_kernel_for_other_products(
    rows: int, width: int, num_experts: int, dtype: torch.dtype
) -> None:
    x = torch.zeros(rows, width, dtype=dtype)
    matrices = [torch.zeros(width, 1, dtype=dtype)] * num_experts
    counts = [rows, *[0] * (num_experts - 1)]
    assert get("npu").grouped_product(x, matrices, counts) is None
