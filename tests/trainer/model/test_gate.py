"""Gradient of the gated MLP activation, compared with autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def test_the_gradient_of_the_gate_agrees_with_autograd_in_both_implementations():
    from msrl.trainer.model.layers import _SwiGlu, gate_gradient

    torch.manual_seed(0)
    gate_up, output_grad = (
        torch.randn(5, 1, 12, dtype=torch.float64, requires_grad=True),
        torch.randn(5, 1, 6, dtype=torch.float64),
    )
    gate, up = gate_up.chunk(2, -1)
    plain = F.silu(gate) * up
    (expected,) = torch.autograd.grad((plain * output_grad).sum(), gate_up)
    actual = _SwiGlu.apply(gate_up)
    torch.testing.assert_close(actual, plain)
    torch.testing.assert_close(
        torch.autograd.grad((actual * output_grad).sum(), gate_up)[0], expected
    )
    torch.testing.assert_close(gate_gradient(gate.detach(), up.detach(), output_grad), expected)
