"""Log-probabilities, entropies and divergences from logits whose vocabulary is cut over tensor-parallel ranks.

Letters: M positions, V vocabulary columns of this rank, c channels, R rows that are worked on at once. Numbers are float32 whatever the
logits are.

Logits are the largest tensors of a step, so no second tensor of their size is ever made: rows are taken a few at a time, the
probabilities are computed again in the backward pass, and the gradient is written over the logits, which nobody needs by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_LEAST = torch.finfo(torch.float32).min  # stands for the largest of no numbers


@dataclass(frozen=True, slots=True)
class Distribution:
    """What another model says at the same positions, kept as its last hidden states: logits are made again, R rows at a time."""

    hidden: Tensor  # [M, c], on any device
    project: Callable[[Tensor], Tensor]  # [R, c] -> [R, V]: logits of this rank's part of the vocabulary
    normaliser: Tensor  # [M], log of the sum over the whole vocabulary of exp(logits / temperature)

    def logprobs(self, rows: slice, columns: VocabColumns) -> Tensor:  # [R, V], float32
        """Log-probabilities of this rank's part of the vocabulary."""
        return columns.shifted(self.project(self.hidden[rows].to(self.normaliser.device)), self.normaliser[rows])

    def part(self, rows: slice) -> Distribution:
        """The same of some positions."""
        return Distribution(self.hidden[rows], self.project, self.normaliser[rows])


@dataclass(frozen=True, slots=True)
class VocabColumns:
    """What this rank holds of softmax(logits / temperature): token ids from `first` on, of which `num_valid` are no padding."""

    first: int
    num_valid: int
    temperature: float
    rows_at_once: int
    with_entropy: bool
    group: dist.ProcessGroup

    def parts(self, num_rows: int) -> Iterator[slice]:
        """The rows in runs of R; none where this rank has padding only."""
        starts = range(0, num_rows, self.rows_at_once) if self.num_valid else ()
        return (slice(start, min(start + self.rows_at_once, num_rows)) for start in starts)

    def shifted(self, logits: Tensor, by: Tensor) -> Tensor:
        """logits / temperature - by, of [R, V] and [R]; float32 and never a view of the logits."""
        return torch.add(-by[:, None], logits[:, : self.num_valid], alpha=1 / self.temperature)

    def place(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each label, [M, 1], and whether this rank has it, [M]."""
        local = labels - self.first
        is_here = (local >= 0) & (local < self.num_valid)
        return local.clamp(0, max(self.num_valid - 1, 0))[:, None], is_here

    def sums(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of x = logits / temperature over this rank's columns, [M] each: max x, sum exp(x - max) and sum exp(x - max) (x - max)."""
        top, total, weighted = logits.new_full((3, len(logits)), 0.0, dtype=torch.float32)
        top.fill_(_LEAST)
        for rows in self.parts(len(logits)):
            top[rows] = logits[rows, : self.num_valid].amax(-1).float() / self.temperature
            shifted = self.shifted(logits[rows], top[rows])
            grown = shifted.exp() if self.with_entropy else shifted.exp_()
            total[rows] = grown.sum(-1)
            if self.with_entropy:
                weighted[rows] = grown.mul_(shifted).sum(-1)
        return top, total, weighted

    def normaliser(self, logits: Tensor) -> Tensor:
        """Log of the sum over the whole vocabulary of exp(logits / temperature), [M]."""
        top, total, _ = self.sums(logits)
        highest = self.all_reduce(top.clone(), dist.ReduceOp.MAX)
        return highest + self.all_reduce(total * (top - highest).exp(), dist.ReduceOp.SUM).log()

    def divergence(self, logits: Tensor, normaliser: Tensor, other: Distribution) -> Tensor:
        """Sum over the vocabulary of p (log p - log q), [M]."""
        total = torch.zeros_like(normaliser)
        for rows in self.parts(len(logits)):
            surprise = self.shifted(logits[rows], normaliser[rows])
            ratio = other.logprobs(rows, self).neg_().add_(surprise)
            total[rows] = surprise.exp_().mul_(ratio).sum(-1)
        return self.all_reduce(total, dist.ReduceOp.SUM)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(x, op=op, group=self.group)
        return x


def measure(logits: Tensor, labels: Tensor, columns: VocabColumns) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probability of each label, entropy if `columns` asks for it, and log of the normaliser: [M] each, the same on every rank."""
    top, total, weighted = columns.sums(logits)
    highest = columns.all_reduce(top.clone(), dist.ReduceOp.MAX)
    # From "relative to the largest of this rank" to "relative to the largest of all".
    below = top - highest
    scale = below.exp()
    local, is_here = columns.place(labels)
    mine = logits.gather(-1, local).squeeze(-1).float() / columns.temperature
    picked = (mine - highest).masked_fill_(~is_here, 0.0)
    parts = torch.stack((total * scale, picked, (weighted + total * below) * scale))
    total, picked, weighted = columns.all_reduce(parts, dist.ReduceOp.SUM)
    log_total = total.log()
    entropy = log_total - weighted / total if columns.with_entropy else None
    return picked - log_total, entropy, highest + log_total


def gradient_in_place(
    logits: Tensor,  # [M, V]; what they were is lost
    labels: Tensor,  # [M]
    normaliser: Tensor,  # [M], as `measure` gave it
    entropy: Tensor | None,  # [M], as `measure` gave it
    columns: VocabColumns,
    for_logprobs: Tensor | None,  # [M]
    for_entropy: Tensor | None,  # [M]
    for_divergence: Tensor | None = None,  # [M]
    divergence: Tensor | None = None,  # [M], as `Columns.divergence` gave it
    other: Distribution | None = None,
) -> None:
    """Write the gradient by the logits over them, from those by log-probabilities, entropies and divergences."""
    local, is_here = columns.place(labels)
    slope = torch.zeros_like(normaliser) if for_logprobs is None else for_logprobs / columns.temperature
    at_label = slope.masked_fill(~is_here, 0.0)[:, None]
    for rows in columns.parts(len(logits)):
        surprise = columns.shifted(logits[rows], normaliser[rows])  # log p
        # By a logit, the derivative of the entropy is -p (log p + H), that of the divergence p (log p - log q - D).
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
        logprobs, entropy, normaliser = measure(logits, labels, columns)
        divergence = columns.divergence(logits, normaliser, other) if other else None
        ctx.save_for_backward(logits, labels, normaliser, entropy, divergence)
        ctx.columns, ctx.other = columns, other
        ctx.set_materialize_grads(False)
        return logprobs, entropy, divergence

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, labels, normaliser, entropy, divergence = ctx.saved_tensors
        for_logprobs, for_entropy, for_divergence = grads
        gradient_in_place(
            logits, labels, normaliser, entropy, ctx.columns, for_logprobs, for_entropy, for_divergence, divergence, ctx.other
        )  # fmt: skip
        return logits, None, None, None


def columns_of(
    width: int, *, vocab_size: int, tp_rank: int, temperature: float, with_entropy: bool, elements_at_once: int, group: dist.ProcessGroup
) -> VocabColumns:
    """The columns of a rank that has `width` of them, padding included. Temporary tensors have about `elements_at_once` elements."""
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
    labels: Tensor,  # [M], token ids of the whole vocabulary
    columns: VocabColumns,
    other: Distribution | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # [M] each
    """Of p = softmax(logits / temperature) over the true vocabulary: log-probability of each label and, if asked for, entropy of each row,
    and, if another distribution q is given, the exact divergence, sum of p (log p - log q).

    Columns that pad the vocabulary are left out, so that the numbers are those of the Hugging Face model.
    """
    return _VocabParallelLogprobs.apply(logits, labels, columns, other)  # pyright: ignore[reportReturnType]
