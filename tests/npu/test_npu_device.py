"""One simulated NPU: memory, copies, streams, random numbers and training with the real torch_npu.

The operators are those of the CPU, so results must be equal bit for bit.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from msrl.platforms import get


@pytest.fixture(autouse=True)
def device() -> torch.device:
    return get("npu").device(0)


def test_the_platform_describes_the_device():
    npu = get("npu")
    assert npu.missing() is None
    assert npu.device_count() == 8 and npu.memory_bytes() == 64 << 30
    assert npu.peak_flops("bfloat16") == 354e12 and npu.peak_flops("float32") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_copies_keep_all_bits(device: torch.device, dtype: torch.dtype):
    values = torch.randint(0, 2, (5, 7)).to(dtype)
    assert values.to(device).cpu().equal(values)
    assert values.to(device).t().cpu().equal(values.t())
    assert values.t().to(device).cpu().equal(values.t())
    assert values.to(device).float().cpu().equal(values.float())
    pinned = values.pin_memory().to(device, non_blocking=True)
    torch.npu.synchronize()
    assert pinned.cpu().equal(values)


def test_memory_is_counted_and_runs_out():
    before = torch.npu.memory_allocated()
    block = torch.empty(1 << 20, device="npu")
    assert torch.npu.memory_allocated() - before >= 4 << 20
    del block
    assert torch.npu.memory_allocated() == before
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 36, device="npu")


def test_a_saved_random_state_repeats_the_numbers():
    npu = get("npu")
    npu.seed(3)
    host = torch.rand(4)
    state = npu.random_state()
    first, second = torch.rand(9, device="npu"), torch.rand(9, device="npu")
    npu.set_random_state(state)
    assert torch.rand(9, device="npu").equal(first) and not second.equal(first)
    npu.seed(3)
    assert torch.rand(4).equal(host)  # the generator of the CPU is not involved


def _train(model: nn.Module, batch: Tensor, labels: Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_equals_that_on_the_cpu(device: torch.device):
    torch.manual_seed(0)
    layers = (nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    model = nn.Sequential(*layers)
    batch, labels = torch.randn(64, 16), torch.randint(0, 4, (64,))
    on_device = copy.deepcopy(model).to(device)
    assert _train(on_device, batch.to(device), labels.to(device)) == _train(model, batch, labels)
    pairs = zip(on_device.parameters(), model.parameters(), strict=True)
    assert all(ours.cpu().equal(theirs) for ours, theirs in pairs)


def test_float64_products_are_refused(device: torch.device):
    matrix = torch.ones(3, 3, dtype=torch.float64, device=device)
    with pytest.raises(RuntimeError, match="float64"):
        matrix @ matrix


@pytest.mark.parametrize("window", [None, 4])
def test_fused_attention_passes_the_operators_schema(device: torch.device, window: int | None):
    torch.manual_seed(1)
    tensors = [torch.randn(10, heads, 32) for heads in (4, 2, 2)]
    inputs = [tensor.to(device).requires_grad_() for tensor in tensors]
    attention = get("npu").varlen_attention(torch.float32, 32)
    assert not isinstance(attention, str)
    output = attention(*inputs, (3, 10), (3, 10), 32**-0.5, window)
    weights = torch.randn(10, 4, 32)
    (output * weights.to(device)).sum().backward()
    references = [tensor.double().requires_grad_() for tensor in tensors]
    expected = _attend(*references, (3, 10), window)
    (expected * weights).sum().backward()
    torch.testing.assert_close(output.cpu().double(), expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(inputs, references, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.cpu().double(), theirs.grad, atol=1e-5, rtol=1e-5)


def _attend(q: Tensor, k: Tensor, v: Tensor, ends: tuple[int, ...], window: int | None) -> Tensor:
    """Return causal attention with torch's own function, one sequence after another."""
    parts: list[Tensor] = []
    for start, end in pairwise((0, *ends)):
        q_, k_, v_ = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        mask = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        if window is not None:
            mask = mask.triu(1 - window)
        output = nn.functional.scaled_dot_product_attention(
            q_, k_, v_, attn_mask=mask, enable_gqa=True
        )
        parts.append(output[0].transpose(0, 1))
    return torch.cat(parts)


_UNWAITED = """
import torch
values = torch.arange(4.0, device="npu") + 1
copy = torch.zeros(4).pin_memory()
copy.copy_(values, non_blocking=True)
early = copy.clone()
torch.npu.synchronize()
print(early.equal(copy), copy.tolist())
"""


def test_deferred_tasks_reveal_a_missing_synchronization():
    environment = {**os.environ, "NPU_SIM_DEFER": "1"}
    command = [sys.executable, "-W", "ignore", "-c", _UNWAITED]
    output = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=True
    ).stdout
    assert output.strip() == "False [1.0, 2.0, 3.0, 4.0]"
