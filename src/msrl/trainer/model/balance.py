"""What keeps the experts of a mixture in use while it trains: a balance loss, a loss of large router logits, biases that move.

Both losses are sums over tokens with a denominator that is global, so that they depend on no split of the batch over ranks or passes.
Padding counts for nothing. Every layer of experts adds its own. Letters: n tokens of a micro-batch on this rank, G groups of tokens that
are each to be balanced (sequences, or one group of all), E experts, T tokens of the global batch.
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

from msrl.models.shape import Moe
from msrl.trainer import groups
from msrl.trainer.model.experts import Router, choose_experts
from msrl.trainer.model.packed import PackedSequences
from msrl.trainer.settings import Balance
from msrl.types import MicroBatch


class ExpertBalance:
    """Of one rank's model in training; its routers call `_attach` in passes of the training."""

    def __init__(self, settings: Balance, moe: Moe, model: torch.nn.Module, device: torch.device) -> None:
        self.settings, self.moe, self.device = settings, moe, device
        self._routers = [module for module in model.modules() if isinstance(module, Router)]
        for number, router in enumerate(self._routers):
            router.attach = functools.partial(self._attach, number)
        self._num_tokens = 1.0
        self._sums = torch.zeros(2, device=device)  # of the balance loss and the z-loss, over layers and tokens of this rank
        self._load = torch.zeros(len(self._routers), moe.num_experts, device=device)  # tokens of this rank that went to each expert

    def begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        """A new step over this data-parallel rank's micro-batches; all ranks take part."""
        own = sum(len(batch.token_ids) - batch.num_padding for batch in micro_batches)
        total = torch.tensor(float(own), device=self.device)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        self._num_tokens = total.item()
        self._sums.zero_()
        self._load.zero_()

    def members(self, batch: MicroBatch, packed: PackedSequences) -> Tensor:
        """Which of this rank's tokens belong to which group, [G, n] bool; padding belongs to none."""
        numbers = np.repeat(np.arange(len(batch.cu_seqlens) - 1), np.diff(batch.cu_seqlens))
        if self.settings.over == "micro_batch":
            numbers = np.zeros_like(numbers)
        numbers[len(numbers) - batch.num_padding :] = -1
        found = torch.from_numpy(numbers).to(self.device)
        if packed.context is not None:
            rows = packed.context.rows
            found = torch.where(rows >= 0, found[rows.clamp(min=0)], -1)
        group = groups.tp_group()
        mine = found.chunk(group.size())[group.rank()]  # mixtures train under sequence parallelism
        return mine == torch.arange(max(int(numbers.max()) + 1, 1), device=self.device)[:, None]

    def _attach(
        self,
        number: int,  # of the router on this rank
        probs: Tensor,  # [n, E]
        logits: Tensor,  # [n, E]
        chosen: Tensor,  # [n, E]
        members: Tensor,  # [n, G] bool
    ) -> Tensor:  # [n, E]
        """The same probs; a backward pass through them is one through the losses too."""
        is_real = members.any(-1)
        self._load[number] += chosen[is_real].sum(0)
        terms = logits.new_zeros(2)
        if self.settings.aux_loss_coef:
            terms = terms + torch.stack([self._imbalance(logits, members), logits.new_zeros(())])
        if self.settings.z_loss_coef:
            large = logits[is_real].logsumexp(-1).square().sum() / self._num_tokens
            terms = terms + torch.stack([large.new_zeros(()), large])
        self._sums += terms.detach()
        coefs = terms.new_tensor([self.settings.aux_loss_coef, self.settings.z_loss_coef])
        return MoEAuxLossAutoScaler.apply(probs, (coefs * terms).sum())  # pyright: ignore[reportReturnType]

    def _imbalance(self, logits: Tensor, members: Tensor) -> Tensor:
        """This rank's part of the sum over groups g of (tokens of g / T) E sum_i f_i P_i (arXiv:2101.03961, section 2.2).

        f_i is the share of the group's choices that fell on expert i (as its bias, if any, would not have changed them), P_i the mean of
        its scores, which have the sum 1 (DeepSeek V3, arXiv:2412.19437, equations 17 to 20, whose alpha is `aux_loss_coef`).
        """
        scores = logits.softmax(-1) if self.moe.score == "softmax" else logits.sigmoid()
        scores = scores if self.moe.score == "softmax" else scores / scores.sum(-1, keepdim=True)
        with torch.no_grad():
            picked = torch.zeros_like(scores).scatter(-1, choose_experts(logits, self.moe)[1], 1.0)
            counts = members.T.to(picked.dtype) @ picked  # [G, E]
            dist.all_reduce(counts, group=_sharing())
            shares = counts / counts.sum(-1, keepdim=True).clamp(min=1)
        sums = members.T.to(scores.dtype) @ scores  # [G, E]
        return self.moe.num_experts * (shares * sums).sum() / self._num_tokens

    def end(self, *, is_skipped: bool) -> dict[str, float]:
        """Moves biases unless the update was left out. The report: the losses, a layer's mean without their coefficients, and what the
        busiest expert of any layer had, as a multiple of the mean. All ranks take part and get the same.
        """
        dist.all_reduce(self._sums)
        busiest = torch.zeros((), device=self.device)
        if self._routers:
            dist.all_reduce(self._load, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
            mean = self._load.mean(-1, keepdim=True)
            busiest = (self._load / mean.clamp(min=1e-9)).max()
            if not is_skipped:
                self._move_biases(mean)
        dist.all_reduce(busiest, op=dist.ReduceOp.MAX, group=groups.pp_group())
        aux, large = (self._sums / sum(self.moe.layers)).tolist()
        named = {"router_aux_loss": aux} if self.settings.aux_loss_coef else {}
        return {**named, **({"router_z_loss": large} if self.settings.z_loss_coef else {}), "busiest_expert": busiest.item()}

    def _move_biases(self, mean: Tensor) -> None:
        """Experts with fewer tokens than the mean become likelier, others less likely (arXiv:2408.15664, algorithm 1)."""
        if self.settings.bias_update_rate:
            for router, load, average in zip(self._routers, self._load, mean, strict=True):
                assert isinstance(router.expert_bias, Tensor), "checked before launch"
                router.expert_bias += self.settings.bias_update_rate * (average - load).sign()


def _sharing() -> dist.ProcessGroup:
    """The ranks that share the tokens of a micro-batch."""
    return cast("dist.ProcessGroup", parallel_state.get_tensor_and_context_parallel_group())
