"""Log-probabilities, entropies and divergences of vocabulary-parallel logits.

Logits are the largest tensors of a step, so no second tensor of their size is allocated: rows are
processed R at a time, probabilities are recomputed in the backward pass, and the gradient
overwrites the logits. Results are float32 for every dtype of the logits. Letters: M positions, V
vocabulary columns of this rank, c channels, R rows that are processed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_LEAST = torch.finfo(torch.float32).min  # maximum over no columns


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of another model at the same positions, stored as its last hidden states.

    Logits are recomputed, R rows at a time.
    """

    hidden: Tensor  # [M, c], on any device
    project: Callable[[Tensor], Tensor]  # [R, c] -> [R, V], logits of this rank's vocabulary shard
    normalizer: Tensor  # [M], log of the sum of exp(logits / temperature) over the full vocabulary

    def logprobs(self, rows: slice, columns: VocabColumns) -> Tensor:  # [R, V], float32
        """Return the log-probabilities of this rank's vocabulary shard."""
        return columns.shifted(
            self.project(self.hidden[rows].to(self.normalizer.device)), self.normalizer[rows]
        )

    def select(self, rows: slice) -> Distribution:
        """Return the distribution at some of the positions."""
        return Distribution(self.hidden[rows], self.project, self.normalizer[rows])


@dataclass(frozen=True, slots=True)
class VocabColumns:
    """Columns of softmax(logits / temperature) on this rank.

    They are the token ids from `first` on; those after the first `num_valid` are padding.
    """

    first: int
    num_valid: int
    temperature: float
    rows_at_once: int
    with_entropy: bool
    group: dist.ProcessGroup

    def row_slices(self, num_rows: int) -> Iterator[slice]:
        """Return slices of R rows each; none if this rank holds only padding."""
        starts = range(0, num_rows, self.rows_at_once) if self.num_valid else ()
        return (slice(start, min(start + self.rows_at_once, num_rows)) for start in starts)

    def shifted(self, logits: Tensor, by: Tensor) -> Tensor:
        """Return logits / temperature - by, of [R, V] and [R], as a new float32 tensor."""
        return torch.add(-by[:, None], logits[:, : self.num_valid], alpha=1 / self.temperature)

    def locate(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the column of each label, [M, 1], and True where this rank holds it, [M]."""
        local = labels - self.first
        is_here = (local >= 0) & (local < self.num_valid)
        return local.clamp(0, max(self.num_valid - 1, 0))[:, None], is_here

    def sums(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return max x, sum exp(x - max) and sum exp(x - max) (x - max) on this rank, [M] each.

        Here x = logits / temperature.
        """
        top, total, weighted = logits.new_full((3, len(logits)), 0.0, dtype=torch.float32)
        top.fill_(_LEAST)
        for rows in self.row_slices(len(logits)):
            top[rows] = logits[rows, : self.num_valid].amax(-1).float() / self.temperature
            shifted = self.shifted(logits[rows], top[rows])
            grown = shifted.exp() if self.with_entropy else shifted.exp_()
            total[rows] = grown.sum(-1)
            if self.with_entropy:
                weighted[rows] = grown.mul_(shifted).sum(-1)
        return top, total, weighted

    def normalizer(self, logits: Tensor) -> Tensor:
        """Return the log of the sum of exp(logits / temperature) over the full vocabulary, [M]."""
        top, total, _ = self.sums(logits)
        highest = self.all_reduce(top.clone(), dist.ReduceOp.MAX)
        return highest + self.all_reduce(total * (top - highest).exp(), dist.ReduceOp.SUM).log()

    def divergence(self, logits: Tensor, normalizer: Tensor, other: Distribution) -> Tensor:
        """Return the sum over the vocabulary of p (log p - log q), [M]."""
        total = torch.zeros_like(normalizer)
        for rows in self.row_slices(len(logits)):
            surprise = self.shifted(logits[rows], normalizer[rows])
            ratio = other.logprobs(rows, self).neg_().add_(surprise)
            total[rows] = surprise.exp_().mul_(ratio).sum(-1)
        return self.all_reduce(total, dist.ReduceOp.SUM)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(x, op=op, group=self.group)
        return x


def measure(
    logits: Tensor, labels: Tensor, columns: VocabColumns
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return log-probability of each label, entropy and log normalizer, [M], equal on all ranks.

    The entropy is None unless `columns` requests it.
    """
    top, total, weighted = columns.sums(logits)
    highest = columns.all_reduce(top.clone(), dist.ReduceOp.MAX)
    # Rescale from the maximum of this rank to the maximum of all ranks.
    below = top - highest
    scale = below.exp()
    local, is_here = columns.locate(labels)
    at_label = logits.gather(-1, local).squeeze(-1).float() / columns.temperature
    picked = (at_label - highest).masked_fill_(~is_here, 0.0)
    sums = torch.stack((total * scale, picked, (weighted + total * below) * scale))
    total, picked, weighted = columns.all_reduce(sums, dist.ReduceOp.SUM)
    log_total = total.log()
    entropy = log_total - weighted / total if columns.with_entropy else None
    return picked - log_total, entropy, highest + log_total


def gradient_in_place(
    logits: Tensor,  # [M, V], overwritten
    labels: Tensor,  # [M]
    normalizer: Tensor,  # [M], from `measure`
    entropy: Tensor | None,  # [M], from `measure`
    columns: VocabColumns,
    for_logprobs: Tensor | None,  # [M]
    for_entropy: Tensor | None,  # [M]
    for_divergence: Tensor | None = None,  # [M]
    divergence: Tensor | None = None,  # [M], from `VocabColumns.divergence`
    other: Distribution | None = None,
) -> None:
    """Overwrite the logits with their gradient.

    It follows from the gradients of log-probabilities, entropies and divergences.
    """
    local, is_here = columns.locate(labels)
    slope = (
        torch.zeros_like(normalizer) if for_logprobs is None else for_logprobs / columns.temperature
    )
    at_label = slope.masked_fill(~is_here, 0.0)[:, None]
    for rows in columns.row_slices(len(logits)):
        surprise = columns.shifted(logits[rows], normalizer[rows])  # log p
        # With respect to a logit, the derivative of the entropy is -p (log p + H), and that of the
        # divergence is p (log p - log q - D).
        factor: Tensor = -slope[rows, None]
        if for_divergence is not None:
            assert divergence is not None and other is not None
            ratio = other.logprobs(rows, columns).neg_().add_(surprise).sub_(divergence[rows, None])
            factor = ratio.mul_(for_divergence[rows, None] / columns.temperature).add_(factor)
        if for_entropy is not None:
            assert entropy is not None
            weight = for_entropy[rows, None] / columns.temperature
            factor = torch.addcmul(factor, surprise + entropy[rows, None], weight, value=-1.0)
        grad = surprise.exp_().mul_(factor)
        logits[rows, : columns.num_valid] = grad.scatter_add_(-1, local[rows], at_label[rows])
    logits[:, columns.num_valid :] = 0.0


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, columns: VocabColumns, other: Distribution | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logprobs, entropy, normalizer = measure(logits, labels, columns)
        divergence = columns.divergence(logits, normalizer, other) if other else None
        ctx.save_for_backward(logits, labels, normalizer, entropy, divergence)
        ctx.columns, ctx.other = columns, other
        ctx.set_materialize_grads(False)
        return logprobs, entropy, divergence

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, labels, normalizer, entropy, divergence = ctx.saved_tensors
        for_logprobs, for_entropy, for_divergence = grads
        gradient_in_place(
            logits,
            labels,
            normalizer,
            entropy,
            ctx.columns,
            for_logprobs,
            for_entropy,
            for_divergence,
            divergence,
            ctx.other,
        )
        return logits, None, None, None


def make_columns(
    width: int,
    *,
    vocab_size: int,
    tp_rank: int,
    temperature: float,
    with_entropy: bool,
    elements_at_once: int,
    group: dist.ProcessGroup,
) -> VocabColumns:
    """Return the columns of a rank that has `width` of them with padding.

    Temporary tensors have about `elements_at_once` elements.
    """
    return VocabColumns(
        first=tp_rank * width,
        num_valid=min(max(vocab_size - tp_rank * width, 0), width),
        temperature=temperature,
        rows_at_once=max(1, elements_at_once // width),
        with_entropy=with_entropy,
        group=group,
    )


def vocab_parallel_logprobs(
    logits: Tensor,  # [M, V]; the backward pass writes its gradient over it
    labels: Tensor,  # [M], token ids of the full vocabulary
    columns: VocabColumns,
    other: Distribution | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # [M] each
    """Return log-probabilities, entropies and divergences over the unpadded vocabulary.

    The distribution is p = softmax(logits / temperature).

    Columns that pad the vocabulary are ignored, so the results equal those of the Hugging Face
    model.

    Returns:
        Log-probability of each label; entropy of each row if `columns` wants it; exact divergence,
        the sum of p (log p - log q), from the other distribution q if there is one.
    """
    return _VocabParallelLogprobs.apply(logits, labels, columns, other)  # pyright: ignore[reportReturnType]
