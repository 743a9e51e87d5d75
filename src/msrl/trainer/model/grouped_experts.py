"""Experts of a rank in grouped products: one autograd node for the products of all experts.

Megatron's SequentialMLP calls one module per expert, each with about ten autograd nodes. Its own
grouped GEMM needs a package that is not available and stores all experts in one tensor. The experts
here keep their own parameters, under the names of SequentialMLP.

Letters: n routed tokens of this rank, sorted by expert, E experts of this rank, c channels, f
feed-forward channels of this rank, i inputs and o outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.utils import get_pg_size
from torch import Tensor

from msrl.trainer.model.grouped_products import grouped_linear, weighted_swiglu


class GroupedExperts(SequentialMLP):
    """Megatron's experts with grouped products.

    Experts with adapters run one after the other, since adapters are hooks of their layers.
    """

    def forward(
        self,
        permuted_local_hidden_states: Tensor,  # [n, c]
        tokens_per_expert: Tensor,  # [E]
        permuted_probs: Tensor,  # [n]
    ) -> tuple[Tensor, Tensor | None]:  # [n, c]
        """Replace SequentialMLP.forward of megatron-core 0.16.1."""
        experts = cast("list[MLP]", list(self.local_experts))
        if len(experts) == 1 or any(map(_has_hooks, experts)):
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        counts = cast("list[int]", tokens_per_expert.tolist())
        first, second = [e.linear_fc1 for e in experts], [e.linear_fc2 for e in experts]
        gate_up = _multiply(permuted_local_hidden_states, counts, first)
        mixed = self._activate(_add_bias(gate_up, counts, first), permuted_probs)
        output = _multiply(mixed, counts, second)
        return _add_bias(output, counts, second, permuted_probs), None

    def _activate(
        self,
        gate_up: Tensor,  # [n, 2 f]
        probs: Tensor,  # [n]
    ) -> Tensor:  # [n, f]
        """Return the activated gates times up times the router's weights."""
        config = self.config
        limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
        if config.activation_func is F.silu and limit is None and not offset:
            return weighted_swiglu(gate_up, probs)
        gate, up = gate_up.chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        mixed = cast("Tensor", config.activation_func(gate)) * (up + offset)
        return (mixed * probs.unsqueeze(-1)).to(gate_up.dtype)


def _has_hooks(expert: MLP) -> bool:
    """Return True if a module of an expert has a hook, which a grouped product would skip."""
    modules = cast("list[torch.nn.Module]", [expert, expert.linear_fc1, expert.linear_fc2])
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def _multiply(x: Tensor, counts: Sequence[int], linears: Sequence[Any]) -> Tensor:
    """Return the products with the weights of all experts, [n, i] -> [n, o]."""
    assert all(
        linear.explicit_expert_comm or get_pg_size(linear.tp_group) == 1 for linear in linears
    )
    return grouped_linear(x, counts, [linear.weight for linear in linears])


def _add_bias(
    x: Tensor,  # [n, o]
    counts: Sequence[int],
    linears: Sequence[Any],
    probs: Tensor | None = None,  # [n]
) -> Tensor:  # [n, o]
    """Add the bias of its expert to each token, times the router's weight if it is passed."""
    if linears[0].bias is None:
        return x
    biases = torch.stack([_effective_bias(linear) for linear in linears])
    repeats = torch.tensor(counts, device=x.device)
    rows = biases.repeat_interleave(repeats, 0, output_size=len(x))
    return x + rows if probs is None else x + (rows * probs.unsqueeze(-1)).to(x.dtype)


def _effective_bias(linear: Any) -> Tensor:
    """Return the bias that a layer adds to its output on this rank."""
    shared = getattr(linear, "shared_bias", None)
    return linear.bias if shared is None else shared()
