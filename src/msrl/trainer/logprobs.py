"""Log-probabilities and entropies from logits whose vocabulary is cut over tensor-parallel ranks.

Letters: M positions, V vocabulary columns of this rank. Numbers are float32 whatever the logits are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _all_reduce(x: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Tensor:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(x, op=op, group=group)
    return x


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, first: int, num_valid: int, temperature: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        scaled = logits.float().div_(temperature) if logits.dtype != torch.float32 else logits / temperature
        if num_valid < scaled.shape[-1]:
            scaled[:, num_valid:] = -torch.inf
        top = _all_reduce(scaled.amax(-1), dist.ReduceOp.MAX, group)
        scaled -= top[:, None]
        local = labels - first
        is_here = (local >= 0) & (local < num_valid)
        picked = scaled.gather(-1, local.clamp(0, max(num_valid - 1, 0))[:, None]).squeeze(-1).masked_fill(~is_here, 0.0)
        probabilities = scaled.exp()
        weighted = (probabilities * scaled[:, : probabilities.shape[-1]].clamp_min(-1e30)).sum(-1)
        sums = _all_reduce(torch.stack((probabilities.sum(-1), picked, weighted)), dist.ReduceOp.SUM, group)
        total, picked, weighted = sums
        log_total = total.log()
        probabilities /= total[:, None]
        entropy = log_total - weighted / total
        ctx.save_for_backward(probabilities, local, is_here, entropy, log_total)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return picked - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        probabilities, local, is_here, entropy, _ = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        grad = torch.zeros_like(probabilities)
        if grad_logprobs is not None:
            grad = probabilities * -grad_logprobs[:, None]
            rows = is_here.nonzero().squeeze(-1)
            grad[rows, local[rows]] += grad_logprobs[rows]
        if grad_entropy is not None:
            # dH/dz_j = -p_j (log p_j + H); log p is taken from p, where p = 0 the product is 0.
            surprise = torch.xlogy(probabilities, probabilities) + probabilities * entropy[:, None]
            grad = grad - surprise * grad_entropy[:, None]
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None, None, None


def vocab_parallel_logprobs(
    logits: Tensor,  # [M, V]
    labels: Tensor,  # [M], token ids of the whole vocabulary
    *,
    vocab_size: int,
    tp_rank: int,
    temperature: float,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:  # [M], [M]
    """Log-probability of each label and entropy of each distribution, of softmax(logits / temperature) over the true vocabulary.

    Columns that pad the vocabulary are left out, so that the numbers are those of the Hugging Face model.
    """
    first = tp_rank * logits.shape[-1]
    num_valid = min(max(vocab_size - first, 0), logits.shape[-1])
    return _VocabParallelLogprobs.apply(logits, labels, first, num_valid, temperature, group)  # pyright: ignore[reportReturnType]
