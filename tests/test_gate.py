"""The gate of feed-forward parts, against autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from msrl.trainer.model.layers import _SwiGlu, gate_gradient


def test_the_gates_gradient_is_that_of_autograd_on_cpu_and_from_what_other_devices_have():
    torch.manual_seed(0)
    gate_up, slope = (
        torch.randn(5, 1, 12, dtype=torch.float64, requires_grad=True),
        torch.randn(5, 1, 6, dtype=torch.float64),
    )
    gate, up = gate_up.chunk(2, -1)
    plain = F.silu(gate) * up
    (expected,) = torch.autograd.grad((plain * slope).sum(), gate_up)
    mine = _SwiGlu.apply(gate_up)
    torch.testing.assert_close(mine, plain)
    torch.testing.assert_close(torch.autograd.grad((mine * slope).sum(), gate_up)[0], expected)
    torch.testing.assert_close(gate_gradient(gate.detach(), up.detach(), slope), expected)
