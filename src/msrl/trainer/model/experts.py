"""Mixtures of experts: the router, and the layer that passes it the groups of tokens to balance.

Megatron dispatches tokens to the ranks that hold the experts (all-to-all), which run them in
grouped products (`GroupedExperts`). The choice of experts is msrl's and follows the models'
definitions exactly. A load-balancing loss is added only if the training enables it (`balance.py`):
otherwise the router learns from the task alone, as in transformers without `output_router_logits`.

Letters: n tokens on this rank, c channels, E experts, k experts per token, g groups of experts, G
groups of tokens. In the products, n routed tokens of this rank, sorted by expert, f feed-forward
channels of this rank, i inputs and o outputs of a linear layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_pg_size
from torch import Tensor

from msrl.models.shape import Moe
from msrl.trainer.model.grouped_products import grouped_linear, weighted_swiglu
from msrl.trainer.model.packed import PackedSequences, TokenRoutes

RouteHook = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Called with weights [n, E], logits [n, E], chosen experts [n, E] and groups of tokens [n, G];
returns the weights [n, E].
"""


def choose_experts(
    logits: Tensor,  # [n, E]
    moe: Moe,
    bias: Tensor | None = None,  # [E]
    replace: Callable[[Tensor], Tensor] | None = None,  # [n, k] -> [n, k]
) -> tuple[Tensor, Tensor]:  # [n, k] weights, [n, k] experts
    """Return the weights and numbers of the experts of every token, in float32 (see `Moe`).

    `replace` may return other experts than the best ones.
    """
    scores = logits.float().softmax(-1) if moe.score == "softmax" else logits.float().sigmoid()
    merit = scores.detach() if bias is None else scores.detach() + bias
    if moe.num_chosen_groups < moe.num_groups:
        merit = merit.masked_fill(~_in_chosen_groups(merit, moe), -torch.inf)
    experts = merit.topk(moe.experts_per_token, dim=-1).indices
    if replace is not None:
        experts = replace(experts)
    weights = scores.gather(-1, experts)
    if moe.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * moe.scaling_factor, experts


def _in_chosen_groups(merit: Tensor, moe: Moe) -> Tensor:
    """Return which experts are in one of the best groups, [n, E] bool."""
    best = (
        merit.unflatten(-1, (moe.num_groups, -1))
        .topk(1 if moe.group_score == "max" else 2, dim=-1)
        .values.sum(-1)
    )  # [n, g]
    chosen = best.topk(moe.num_chosen_groups, dim=-1).indices
    return (
        torch.zeros_like(best, dtype=torch.bool)
        .scatter(-1, chosen, True)
        .repeat_interleave(moe.num_experts // moe.num_groups, -1)
    )


class Router(TopKRouter):
    """Megatron's router with the choice of `choose_experts`.

    Scores are computed in float32 for every dtype of the weights.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        moe: Moe,
        number: int,
        **options: Any,  # of versions after 0.16.1
    ) -> None:
        super().__init__(config, pg_collection, **options)
        self.moe = moe
        self.number = number  # among the mixture layers of the model
        # Set once by a training that balances experts (`balance.py`).
        self.hook: RouteHook | None = None

    def forward(
        self,
        input: Tensor,  # [n, 1, c]
        expert_groups: Tensor | None = None,  # [n, G] bool
        routes: TokenRoutes | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return weights [n, E], 0 for experts that were not chosen, and the choice [n, E] bool.

        Replaces TopKRouter.forward of megatron-core, whose second argument is a padding
        mask.
        """
        self._maintain_float32_expert_bias()
        logits = self.gating(input).flatten(0, 1)
        replace = None if routes is None else functools.partial(routes.choose, self.number)
        weights, experts = choose_experts(logits, self.moe, self.expert_bias, replace)
        probs = torch.zeros_like(logits).scatter(-1, experts, weights)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, experts, True)
        # Without gradients this is the first pass of a recomputed layer, whose second pass counts.
        if self.hook is not None and expert_groups is not None and torch.is_grad_enabled():
            probs = self.hook(probs, logits, chosen, expert_groups)
        return probs, chosen

    def gating(self, input: Tensor) -> Tensor:  # [n, 1, c] -> [n, 1, E]
        """Return the logits."""
        return F.linear(
            input.float(), self.weight.float(), None if self.bias is None else self.bias.float()
        )


class MixtureLayer(TransformerLayer):
    """Megatron's transformer layer that passes token groups and routes to its router."""

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: PackedSequences, **arguments: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Pass the token groups and the routes to the router.

        Replaces TransformerLayer.forward and MoELayer.forward of megatron-core, which pass
        only a padding mask.
        """
        arguments["packed_seq_params"] = packed_seq_params
        attended, context = self._forward_attention(hidden_states, **arguments)
        normed, moe = self._forward_pre_mlp_layernorm(attended), cast("MoELayer", self.mlp)
        run = functools.partial(_run_experts, moe, packed_seq_params.routes)
        if moe.moe_layer_recompute:
            output = tensor_parallel.checkpoint(run, False, normed, packed_seq_params.expert_groups)
        else:
            output = run(normed, packed_seq_params.expert_groups)
        return cast("Tensor", self._forward_post_mlp((output, None), attended)), context


def _run_experts(
    moe: MoELayer,
    routes: TokenRoutes | None,
    hidden: Tensor,  # [n, 1, c]
    expert_groups: Tensor | None,  # [n, G] bool
) -> Tensor:  # [n, 1, c]
    """Run the steps of MoELayer.forward of megatron-core, without partial CUDA graphs."""
    shared = moe.shared_experts_compute(hidden)
    probs, chosen = cast("Router", moe.router)(hidden, expert_groups, routes)
    dispatched, probs = moe.preprocess(hidden, probs, chosen)
    dispatched, probs = moe.dispatch(dispatched, probs)
    output, _ = moe.routed_experts_compute(dispatched, probs)
    return moe.postprocess(moe.combine(output), shared)


class ExpertOutput(RowParallelLinear):
    """Second matrix of an expert.

    If an expert is split, each shard adds a share of the bias, since their outputs are summed. The
    share has the gradient of the full bias, so that the copies on the ranks stay equal.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The dispatcher sums the outputs. Without it, the output would be a view if there is
        # nothing to sum, and a view cannot take the bias.
        self.explicit_expert_comm = True

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:  # [n, f] -> [n, c]
        output, bias = super().forward(input_)
        return output, None if bias is None else self.shared_bias()

    def shared_bias(self) -> Tensor:  # [c]
        """Return the share of the bias that this shard adds."""
        bias, num_shards = cast("Tensor", self.bias), get_pg_size(self.tp_group)
        return bias if num_shards == 1 else bias + (bias / num_shards - bias).detach()


def mixture_spec(moe: Moe, number: int) -> ModuleSpec:
    """Return the feed-forward part of a layer that is a mixture of experts.

    `layer` counts from 0 over the whole model.
    """
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertOutput)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            router=functools.partial(Router, moe=moe, number=number),  # pyright: ignore[reportArgumentType]
            experts=ModuleSpec(module=GroupedExperts, submodules=experts),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linears),
        ),
    )


class GroupedExperts(SequentialMLP):
    """Megatron's experts with grouped products: one autograd node for the products of all experts.

    Megatron's SequentialMLP calls one module per expert, each with about ten autograd nodes. Its
    own grouped GEMM needs a package that is not available and stores all experts in one tensor.
    The experts here keep their own parameters, under the names of SequentialMLP. Experts with
    adapters run one after the other, since adapters are hooks of their layers.
    """

    def forward(
        self,
        permuted_local_hidden_states: Tensor,  # [n, c]
        tokens_per_expert: Tensor,  # [E]
        permuted_probs: Tensor,  # [n]
    ) -> tuple[Tensor, Tensor | None]:  # [n, c]
        """Replace SequentialMLP.forward of megatron-core."""
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
