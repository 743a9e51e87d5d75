"""Load balancing of experts: a load-balancing loss, a router z-loss, and updated biases.

Both losses are sums over tokens with a global denominator, so they do not depend on how the batch
is split over ranks or passes. Padding counts for nothing, and every layer of experts adds its own
losses.

Letters: n tokens of a micro-batch on this rank, G groups of tokens that are each balanced
(sequences, or one group of all tokens), E experts, T tokens of the global batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from msrl.config.sections.train import RouterConfig
from msrl.models.shape import Moe
from msrl.trainer import groups
from msrl.trainer.model.experts import Router, choose_experts
from msrl.trainer.model.packed import PackedSequences
from msrl.types import MicroBatch


def aux_loss_coef(settings: RouterConfig, moe: Moe) -> float:
    """Return the coefficient of the load-balancing loss.

    The default is the coefficient in the model's config.json.
    """
    return (
        (moe.aux_loss_coef or 0.0) if settings.aux_loss_coef == "model" else settings.aux_loss_coef
    )


def balances_experts(settings: RouterConfig, moe: Moe) -> bool:
    """Return True if the settings enable a loss or updates of biases."""
    return bool(aux_loss_coef(settings, moe) or settings.z_loss_coef or settings.bias_update_rate)


def count_tokens(micro_batches: Sequence[MicroBatch], device: torch.device) -> float:
    """Return the number of tokens of all data-parallel ranks, without padding.

    All ranks must call it.
    """
    own = sum(len(batch.token_ids) - batch.num_padding for batch in micro_batches)
    total = torch.tensor(float(own), device=device)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return total.item()


class ExpertBalance:
    """Balance of the experts of one model on this rank.

    Its routers call `_add_losses` in training passes.
    """

    def __init__(
        self,
        settings: RouterConfig,
        moe: Moe,
        num_layers: int,  # mixtures of the model
        model: torch.nn.Module,
        device: torch.device,
    ) -> None:
        self.settings, self.moe, self.device = settings, moe, device
        self._num_layers = num_layers
        self._aux_loss_coef = aux_loss_coef(settings, moe)
        self._routers = [module for module in model.modules() if isinstance(module, Router)]
        for number, router in enumerate(self._routers):
            router.hook = functools.partial(self._add_losses, number)
        self._num_tokens = 1.0
        # Balance loss and z-loss, over layers and tokens of this rank.
        self._sums = torch.zeros(2, device=device)
        # Tokens of this rank per expert.
        self._load = torch.zeros(len(self._routers), moe.num_experts, device=device)

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Begin a step over this data-parallel rank's micro-batches. All ranks must call it."""
        self._num_tokens = count_tokens(micro_batches, self.device)
        self._sums.zero_()
        self._load.zero_()

    def expert_groups(self, batch: MicroBatch, packed: PackedSequences) -> Tensor:
        """Return which of this rank's tokens belong to which group, [n, G] bool.

        Padding belongs to no group.
        """
        numbers = np.repeat(np.arange(len(batch.cu_seqlens) - 1), np.diff(batch.cu_seqlens))
        if self.settings.aux_loss_over == "micro_batch":
            numbers = np.zeros_like(numbers)
        numbers[len(numbers) - batch.num_padding :] = -1
        num_groups = max(int(numbers.max()) + 1, 1)
        group_numbers = torch.from_numpy(numbers).to(self.device)
        if packed.context is not None:
            rows = packed.context.rows
            group_numbers = torch.where(rows >= 0, group_numbers[rows.clamp(min=0)], -1)
        group = groups.tp_group()
        # Mixtures of experts train under sequence parallelism.
        local = group_numbers.chunk(group.size())[group.rank()]
        return (local == torch.arange(num_groups, device=self.device)[:, None]).T

    def _add_losses(
        self,
        number: int,  # of the router on this rank
        probs: Tensor,  # [n, E]
        logits: Tensor,  # [n, E]
        chosen: Tensor,  # [n, E]
        members: Tensor,  # [n, G] bool
    ) -> Tensor:  # [n, E]
        """Return the same probs; a backward pass through them also goes through the losses."""
        is_real = members.any(-1)
        self._load[number] += chosen[is_real].sum(0)
        terms = logits.new_zeros(2)
        if self._aux_loss_coef:
            terms = terms + torch.stack([self._imbalance(logits, members), logits.new_zeros(())])
        if self.settings.z_loss_coef:
            large = logits[is_real].logsumexp(-1).square().sum() / self._num_tokens
            terms = terms + torch.stack([large.new_zeros(()), large])
        self._sums += terms.detach()
        coefs = terms.new_tensor([self._aux_loss_coef, self.settings.z_loss_coef])
        return MoEAuxLossAutoScaler.apply(probs, (coefs * terms).sum())  # pyright: ignore[reportReturnType]

    def _imbalance(self, logits: Tensor, members: Tensor) -> Tensor:
        """Return this rank's part of the load-balancing loss.

        The loss is the sum over groups g of (tokens of g / T) E sum_i f_i P_i (arXiv:2101.03961,
        section 2.2). f_i is the share of the group's choices that fell on expert i, chosen without
        biases. P_i is the mean of its scores, which sum to 1 (DeepSeek V3, arXiv:2412.19437,
        equations 17 to 20, whose alpha is `aux_loss_coef`).
        """
        scores = logits.softmax(-1) if self.moe.score == "softmax" else logits.sigmoid()
        scores = scores if self.moe.score == "softmax" else scores / scores.sum(-1, keepdim=True)
        with torch.no_grad():
            picked = torch.zeros_like(scores).scatter(-1, choose_experts(logits, self.moe)[1], 1.0)
            counts = members.T.to(picked.dtype) @ picked  # [G, E]
            dist.all_reduce(counts, group=_token_group())
            shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
        sums = members.T.to(scores.dtype) @ scores  # [G, E]
        return self.moe.num_experts * (shares * sums).sum() / self._num_tokens

    def end(self, *, is_skipped: bool) -> dict[str, float]:
        """Update the biases, unless the update was skipped, and return the metrics.

        The metrics are the losses, averaged over layers and without their coefficients, and the
        highest load of an expert in any layer as a multiple of the mean load. All ranks must call
        it and get the same result.
        """
        dist.all_reduce(self._sums)
        busiest = torch.zeros((), device=self.device)
        if self._routers:
            dist.all_reduce(
                self._load,
                group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
            )
            mean = self._load.mean(-1, keepdim=True)
            busiest = (self._load / mean.clamp(min=1e-9)).max()
            if not is_skipped:
                self._update_biases(mean)
        dist.all_reduce(busiest, op=dist.ReduceOp.MAX, group=groups.pp_group())
        aux, large = (self._sums / self._num_layers).tolist()
        metrics = {"router_aux_loss": aux} if self._aux_loss_coef else {}
        if self.settings.z_loss_coef:
            metrics["router_z_loss"] = large
        return {**metrics, "busiest_expert": busiest.item()}

    def _update_biases(self, mean: Tensor) -> None:
        """Raise the biases of experts with fewer tokens than the mean and lower the others.

        Source: arXiv:2408.15664, algorithm 1.
        """
        if self.settings.bias_update_rate:
            for router, load, average in zip(self._routers, self._load, mean, strict=True):
                assert isinstance(router.expert_bias, Tensor), "checked before launch"
                router.expert_bias += self.settings.bias_update_rate * (average - load).sign()


def _token_group() -> dist.ProcessGroup:
    """Return the ranks that share the tokens of a micro-batch."""
    return cast("dist.ProcessGroup", parallel_state.get_tensor_and_context_parallel_group())
