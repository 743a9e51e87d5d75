"""Gated delta networks against the recurrence of the paper, one token at a time."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from msrl.models.shape import DeltaNet
from msrl.platforms import cuda, get
from msrl.platforms.cuda import chunked_delta_rule
from msrl.trainer.model.mixers import gated_delta
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
    sizes = (*value.shape[1:3], key.shape[-1], value.shape[-1])
    state, outputs = torch.zeros(sizes, dtype=torch.float64), list[Tensor]()
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


def _fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Compute flash-linear-attention's function, with its signature, one sequence at a time."""
    assert scale is None and initial_state is None and not output_final_state
    assert use_qk_l2norm_in_kernel and cu_seqlens is not None and cu_seqlens.dtype == torch.int64
    assert q.shape == k.shape and v.shape[:3] == q.shape[:3] == g.shape == beta.shape
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and g.dtype == torch.float32
    query, key = (F.normalize(x[0].double(), dim=-1, eps=0) for x in (q, k))
    lengths = cu_seqlens.diff().tolist()
    tensors = (
        query * q.shape[-1] ** -0.5,
        key,
        v[0][:, :, None],
        beta[0, ..., None],
        g[0, ..., None],
    )
    rows = zip(*(x.split(lengths) for x in tensors), strict=True)
    outputs = [recurrence(*row) for row in rows]
    return torch.cat(outputs)[None, :, :, 0].to(q.dtype), None


def test_the_fused_kernel_of_cuda_has_the_outputs_and_gradients_of_the_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        sys.modules, "fla.ops.gated_delta_rule", SimpleNamespace(chunk_gated_delta_rule=_fla)
    )
    torch.manual_seed(0)
    delta = DeltaNet(HEADS, HEADS * RATIO, KEY, VALUE, WIDTH)
    mixed = 2 * KEY + RATIO * VALUE
    sizes = (
        (sum(LENGTHS), HEADS, mixed + 2 * RATIO),
        (HEADS, mixed, 1, WIDTH),
        *[(HEADS, RATIO)] * 2,
    )
    leaves = [torch.randn(size).bfloat16().requires_grad_() for size in sizes]
    results = list[list[Tensor]]()
    for kernel in (None, chunked_delta_rule):
        monkeypatch.setattr(gated_delta, "_fused_rule", lambda *_, kernel=kernel: kernel)
        output = gated_delta._mix(*leaves, LENGTHS, delta)
        weights = torch.linspace(-1, 1, output.numel()).view_as(output)
        results.append([output, *torch.autograd.grad((output * weights).sum(), leaves)])
    for ours, fused in zip(*results, strict=True):
        assert ours.dtype == fused.dtype
        error = (ours.double() - fused.double()).norm() / ours.double().norm()
        assert error < 0.02


def test_kernels_of_cuda_are_used_if_they_are_installed_and_repeat_their_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = get("cuda").delta_rule
    assert rule(torch.bfloat16, 128) is None and get("cpu").delta_rule(torch.bfloat16, 128) is None
    monkeypatch.setattr(cuda, "is_installed", lambda name: name == "fla")
    assert rule(torch.bfloat16, 128) is chunked_delta_rule
    assert rule(torch.float32, 128) is None and rule(torch.bfloat16, 512) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert rule(torch.bfloat16, 128) is None
