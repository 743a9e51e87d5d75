"""Memory of chunked log-probabilities with Qwen's vocabulary.

`test_training.py` and `test_logprobs.py` check the values.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support import python_path

SCRIPT = """
import tempfile
from live_memory import LiveMemory
import torch, torch.distributed as dist
from msrl.trainer.objective.chunked import chunked_logprobs
from msrl.trainer.objective.logprobs import make_columns, vocab_parallel_logprobs

vocab, channels = 151936, 32
store = f"file://{tempfile.mkdtemp()}/store"
dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
options = {"tp_rank": 0, "temperature": 1.0, "with_entropy": True, "elements_at_once": 1 << 18}
columns = make_columns(vocab, vocab_size=vocab, group=dist.group.WORLD, **options)
weight = torch.randn(vocab, channels, requires_grad=True)

def backward(rows, num_rows):
    hidden, labels = torch.randn(rows, channels, requires_grad=True), torch.arange(rows)
    if num_rows:
        logprobs, entropy, _ = chunked_logprobs(hidden, weight, labels, columns, num_rows=num_rows)
    else:
        logprobs, entropy, _ = vocab_parallel_logprobs(hidden @ weight.t(), labels, columns)
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    return hidden.grad

def peak(rows, num_rows):
    before = LiveMemory.live_bytes()
    with LiveMemory() as memory:
        backward(rows, num_rows)
    return (memory.peak - before) / 2**20

grads = []
for num_rows in (32, None):
    torch.manual_seed(1)
    grads.append(backward(512, num_rows))
torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
print(peak(128, 32), peak(512, 32), peak(512, None))
"""


@pytest.mark.full
@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_positions():
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    # Live tensors in MiB: logits of a chunk and gradient of the output weight (18.5 each), rows in
    # float32; hidden states of 384 positions take 0.05, logits of 512 positions 297.
    short, long, unchunked = map(float, done.stdout.split())
    assert long - short < 0.5 and long < 60, done.stdout
    assert unchunked - long > 200, done.stdout
