"""Offload of tensors to the machine's memory."""

from __future__ import annotations

import torch

from msrl.trainer.offload import HostMemory


def test_offloaded_tensors_hold_no_memory_and_come_back_with_their_values():
    tensors = [torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)]
    gradients = [torch.full((3,), 7.0)]
    kinds = {"params": lambda: tensors, "grads": lambda: gradients}
    memory = HostMemory(kinds, discarded=frozenset({"grads"}))
    memory.offload()
    assert [t.untyped_storage().nbytes() for t in (*tensors, *gradients)] == [0, 0, 0]
    memory.onload()
    assert torch.equal(tensors[0], torch.arange(6.0).view(2, 3))
    assert torch.equal(tensors[1], torch.ones(4, dtype=torch.bfloat16))
    assert torch.equal(gradients[0], torch.zeros(3))


def test_a_tensor_in_main_memory_that_an_array_shares_stays_where_it_is():
    """Saving and exporting weights on CPU make such arrays, and torch resizes no shared storage."""
    shared, other = torch.arange(3.0), torch.arange(2.0)
    array = shared.numpy()
    memory = HostMemory({"params": lambda: [shared, other]})
    memory.offload()
    assert array.tolist() == [0, 1, 2] and other.untyped_storage().nbytes() == 0
    memory.onload()
    assert torch.equal(shared, torch.arange(3.0)) and torch.equal(other, torch.arange(2.0))
