"""Mixtures of experts: the router of ours, and where it stands in Megatron's MoE layer.

Megatron dispatches tokens to the ranks that hold the experts (all-to-all) and runs the experts; what decides is here, exact to the models'
own definitions. No load-balancing loss is added unless a training asks for it (`balance.py`): the router learns from the task alone, as in
transformers without `output_router_logits`. Letters: N tokens, E experts, k experts per token, g groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_size
from torch import Tensor

from msrl.models.shape import Moe


def choose_experts(
    logits: Tensor,  # [N, E]
    moe: Moe,
    bias: Tensor | None = None,  # [E]
) -> tuple[Tensor, Tensor]:  # [N, k] weights, [N, k] experts
    """The experts of every token and their weights, in float32 (see `Moe`)."""
    scores = logits.float().softmax(-1) if moe.score == "softmax" else logits.float().sigmoid()
    merit = scores.detach() if bias is None else scores.detach() + bias
    if moe.num_chosen_groups < moe.num_groups:
        merit = merit.masked_fill(~_in_chosen_groups(merit, moe), -torch.inf)
    experts = merit.topk(moe.experts_per_token, dim=-1).indices
    weights = scores.gather(-1, experts)
    if moe.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * moe.scaling_factor, experts


def _in_chosen_groups(merit: Tensor, moe: Moe) -> Tensor:
    """Which experts are in one of the best groups, [N, E] bool."""
    best = merit.unflatten(-1, (moe.num_groups, -1)).topk(1 if moe.group_score == "max" else 2, dim=-1).values.sum(-1)  # [N, g]
    chosen = best.topk(moe.num_chosen_groups, dim=-1).indices
    return torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True).repeat_interleave(moe.num_experts // moe.num_groups, -1)


class Router(TopKRouter):
    """Megatron's router with the choice of `choose_experts`; scores are computed in float32 whatever the type of the weights."""

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None, *, moe: Moe) -> None:
        super().__init__(config, pg_collection)
        self.moe = moe
        self.attach: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None  # what a training adds (`balance.py`)

    def gating(self, input: Tensor) -> Tensor:  # [n, 1, c] -> [n, 1, E]
        return F.linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[n, 1, E] logits -> [n, E] weights, 0 for experts that were not chosen, and [n, E] whether they were.

        What Megatron passes on as `padding_mask` is here [n, G], which group of tokens each belongs to (`balance.py`).
        """
        logits = logits.flatten(0, 1)
        weights, experts = choose_experts(logits, self.moe, self.expert_bias)
        probs = torch.zeros_like(logits).scatter(-1, experts, weights)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, experts, True)
        if self.attach is not None and padding_mask is not None and torch.is_grad_enabled():  # not in a pass that is made again
            probs = self.attach(probs, logits, chosen, padding_mask)
        return probs, chosen


class ExpertOutput(RowParallelLinear):
    """The second matrix of an expert. Where an expert is cut, each part adds its share of the bias, since their outputs are summed.

    The share has the gradient of the whole bias, so that the copies on the ranks stay equal.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True  # the dispatcher sums; where there is nothing to sum, a view would come that no bias goes into

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:  # [n, f] -> [n, c]
        output, bias = super().forward(input_)
        parts = get_pg_size(self.tp_group)
        return output, bias if bias is None or parts == 1 else bias + (bias / parts - bias).detach()


def mixture_spec(moe: Moe) -> ModuleSpec:
    """The feed-forward part of a layer that is a mixture."""
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertOutput)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            router=functools.partial(Router, moe=moe),  # pyright: ignore[reportArgumentType]
            experts=ModuleSpec(module=SequentialMLP, submodules=experts),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linears),
        ),
    )
