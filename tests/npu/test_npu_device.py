"""One simulated NPU: memory, copies, streams, random numbers and training with the real torch_npu.

The operators run on the CPU, so results must be equal bit for bit.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from msrl.platforms import get
from msrl.platforms.npu import fusion_attention
from msrl.trainer.model.grouped_products import grouped_linear
from test_vllm_ascend import Absorbed, Worker


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


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_training_equals_that_on_the_cpu(
    device: torch.device, is_deterministic: bool, request: pytest.FixtureRequest
):
    torch.use_deterministic_algorithms(is_deterministic)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.manual_seed(0)
    layers = (nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    model = nn.Sequential(*layers)
    batch, labels = torch.randn(64, 16), torch.randint(0, 4, (64,))
    on_device = copy.deepcopy(model).to(device)
    assert _train(on_device, batch.to(device), labels.to(device)) == _train(model, batch, labels)
    pairs = zip(on_device.parameters(), model.parameters(), strict=True)
    assert all(ours.cpu().equal(theirs) for ours, theirs in pairs)


@pytest.mark.parametrize(
    ("left", "right"), [((2, 5, 3), (3, 4)), ((5, 3), (2, 3, 4)), ((3,), (2, 3, 4)), ((5, 3), (3,))]
)
def test_gradients_of_products_equal_those_of_the_cpu(
    device: torch.device, left: tuple[int, ...], right: tuple[int, ...]
):
    torch.manual_seed(0)
    references = [torch.randn(shape).requires_grad_() for shape in (left, right)]
    inputs = [tensor.detach().to(device).requires_grad_() for tensor in references]
    output, expected = torch.matmul(*inputs), torch.matmul(*references)
    torch.testing.assert_close(output.cpu(), expected)
    ours, theirs = _gradients(output, inputs), _gradients(expected, references)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("compute", [lambda x: x @ x, torch.sum, lambda x: x.softmax(-1)])
def test_float64_products_and_reductions_are_refused(
    device: torch.device, compute: Callable[[Tensor], Tensor]
):
    matrix = torch.ones(3, 3, dtype=torch.float64, device=device)
    with pytest.raises(RuntimeError, match="float64"):
        compute(matrix)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_types_without_operators_can_only_be_copied(device: torch.device, dtype: torch.dtype):
    values = torch.zeros(3, dtype=torch.uint8).view(torch.uint8).to(dtype).to(device)
    with pytest.raises(RuntimeError, match="not supported"):
        values.fill_(0)


@pytest.mark.parametrize("head_dim", [24, 1024])
def test_attention_refuses_head_sizes_that_the_operator_lacks(device: torch.device, head_dim: int):
    query = torch.zeros(4, 2, head_dim, device=device)
    reason = get("npu").varlen_attention(torch.float32, head_dim)
    assert isinstance(reason, str) and str(head_dim) in reason
    with pytest.raises(RuntimeError, match="shape"):
        fusion_attention(query, query, query, (4,), (4,), 1.0, None)


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
    outputs: list[Tensor] = []
    for start, end in pairwise((0, *ends)):
        q_, k_, v_ = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        mask = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        if window is not None:
            mask = mask.triu(1 - window)
        output = nn.functional.scaled_dot_product_attention(
            q_, k_, v_, attn_mask=mask, enable_gqa=True
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def _gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    (output * weights.to(output.device)).sum().backward()
    return [cast(Tensor, tensor.grad).cpu() for tensor in inputs]


def _rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turns = torch.complex(cos[..., ::2].contiguous(), sin[..., ::2].contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)


OPERATORS: dict[str, tuple[list[tuple[int, ...]], Callable[..., Any], Callable[..., Any]]] = {
    "npu_rms_norm": (
        [(5, 3, 32), (32,)],
        lambda x, w: torch.ops.npu.npu_rms_norm(x, w, epsilon=1e-5)[0],
        lambda x, w: nn.functional.rms_norm(x, w.shape, w, 1e-5),
    ),
    "npu_swiglu": (
        [(6, 2, 8)],
        lambda x: torch.ops.npu.npu_swiglu(x, dim=-1),
        lambda x: nn.functional.silu(x[..., :4]) * x[..., 4:],
    ),
    "npu_rotary_mul": (
        [(5, 1, 4, 16)],
        lambda x: torch.ops.npu.npu_rotary_mul(x, *(a.to(x.device) for a in ANGLES), "interleave"),
        lambda x: _rotate_interleaved(x, *ANGLES),
    ),
}
_STEPS = torch.arange(5.0)[:, None, None, None] * torch.arange(8).repeat_interleave(2)
ANGLES = (_STEPS.cos(), _STEPS.sin())


@pytest.mark.parametrize("name", OPERATORS)
def test_fused_operators_have_the_values_and_gradients_of_their_formulas(
    device: torch.device, name: str
):
    torch.manual_seed(2)
    shapes, fused, formula = OPERATORS[name]
    references = [torch.randn(shape).requires_grad_() for shape in shapes]
    inputs = [tensor.detach().to(device).requires_grad_() for tensor in references]
    output, expected = fused(*inputs), formula(*references)
    torch.testing.assert_close(output.cpu(), expected, atol=1e-5, rtol=1e-5)
    ours, theirs = _gradients(output, inputs), _gradients(expected, references)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_grouped_products_are_those_of_each_expert(device: torch.device):
    torch.manual_seed(2)
    tokens, weight, ends = torch.randn(9, 4), torch.randn(3, 4, 5), (2, 2, 9)
    arguments = {"group_list": torch.tensor(ends, device=device), "split_item": 3, "group_type": 0}
    (output,) = torch.ops.npu.npu_grouped_matmul(
        [tokens.to(device)], [weight.to(device)], **arguments
    )
    products = [tokens[a:b] @ w for (a, b), w in zip(pairwise((0, *ends)), weight, strict=True)]
    torch.testing.assert_close(output.cpu(), torch.cat(products))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_experts_equal_those_of_the_cpu(device: torch.device, dtype: torch.dtype):
    torch.manual_seed(3)
    counts = [5, 0, 3, 1]
    shapes = [(sum(counts), 16), *[(8, 16)] * len(counts)]
    references = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    inputs = [tensor.detach().to(device).requires_grad_() for tensor in references]
    output = grouped_linear(inputs[0], counts, inputs[1:])
    expected = grouped_linear(references[0], counts, references[1:])
    torch.testing.assert_close(output.cpu(), expected)
    ours, theirs = _gradients(output, inputs), _gradients(expected, references)
    torch.testing.assert_close(ours, theirs)
    matrices = [tensor.detach().t() for tensor in inputs[1:]]
    product = get("npu").grouped_product(inputs[0].detach(), matrices, counts)
    assert (product is not None) == (dtype == torch.bfloat16)


_UNWAITED = """
import torch
values = torch.arange(4.0, device="npu") + 1
copy = torch.zeros(4).pin_memory()
copy.copy_(values, non_blocking=True)
early = copy.clone()
torch.npu.synchronize()
print(early.equal(copy), copy.tolist())
"""


def _output(program: str, **variables: str) -> str:
    """Return the output of a Python program in a process with these variables."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **variables}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_deferred_tasks_reveal_a_missing_synchronization():
    assert _output(_UNWAITED, NPU_SIM_DEFER="1") == "False [1.0, 2.0, 3.0, 4.0]"


_PREPARING = """
import warnings
from msrl.platforms import get
filters = list(warnings.filters)
get("npu").prepare()
print(warnings.filters == filters)
"""


def test_preparing_a_process_leaves_the_filters_of_warnings():
    assert _output(_PREPARING).splitlines()[-1] == "True"


_SECOND_DEVICE = """
import torch
values = torch.ones(3, device="npu:1", requires_grad=True)
(values * values).sum().backward()
print(values.grad.device, values.grad.cpu().tolist(), torch.npu.current_device())
"""


def test_gradients_are_computed_on_a_second_device():
    assert _output(_SECOND_DEVICE) == "npu:1 [2.0, 2.0, 2.0] 0"


_PROFILED = """
import sys
from pathlib import Path
from msrl.platforms import get
npu = get("npu")
npu.prepare()
npu.device(0)
folder = Path({folder!r})
with npu.profiler(folder / "rank_00000"):
    pass
print(*(path.name for path in folder.rglob("*.json")))
"""


def test_the_profiler_writes_its_folder(tmp_path: Path):
    """The calls and arguments are right. The simulated device has no profiler of CANN."""
    output = _output(_PROFILED.format(folder=str(tmp_path)))
    assert {"profiler_info.json", "profiler_metadata.json"} <= set(output.split())


_FAILING = """
import os, torch
small = torch.empty(1 << 17, device="npu")
try:
    torch.empty(1 << 20, device="npu")
except torch.OutOfMemoryError:
    print("out of memory", end=" ")
copy = torch.zeros(4).pin_memory()
os.environ["NPU_SIM_FAIL"] = "1"
copy.copy_(small[:4], non_blocking=True)
print("returned", end=" ")
try:
    torch.npu.synchronize()
except RuntimeError:
    print("failed", flush=True)
os._exit(0)
"""


def test_memory_runs_out_and_errors_arrive_with_the_synchronization():
    size = str(4 << 20)
    assert _output(_FAILING, NPU_SIM_MEMORY_BYTES=size) == "out of memory returned failed"


@pytest.mark.parametrize(
    ("moves", "names"), [("", []), ("weight", ["weight"]), ("transposed", ["weight"])]
)
@pytest.mark.parametrize("load", [1, 2])
def test_a_load_that_moves_a_tensor_of_the_device_is_noticed(
    device: torch.device, moves: str, names: list[str], load: int
):
    """Captured graphs would read the old weights, after the first load or a later one."""
    model = Absorbed().to(device)
    worker = Worker(model)
    worker.record_addresses()
    for _ in range(load - 1):
        model.load("")
        assert worker.moved_tensors() == []
    old = model.weight  # as in a graph, its memory is not free for the new tensor
    model.load(moves)
    assert worker.moved_tensors() == names
    assert model.weight.cpu().eq(1).all() and (old is model.weight) == (moves != "weight")
