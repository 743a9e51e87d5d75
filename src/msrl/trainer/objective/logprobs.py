"""Log-probabilities, entropies and divergences of vocabulary-parallel logits.

Logits are the largest tensors of a step, so no second tensor of their size is allocated: rows are
processed R at a time, and the gradient overwrites the logits. Their exponentials overwrite them in
the forward pass if they are float32; otherwise the backward pass recomputes the probabilities.
Results are float32 for every dtype of the logits. Letters: M positions, V vocabulary columns of
this rank, c channels, R rows that are processed at once, K comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_LEAST = torch.finfo(torch.float32).min  # maximum over no columns

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Elementwise function of two log-probabilities, see `msrl.algorithms.divergences`."""


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
        return columns.shift(
            self.project(self.hidden[rows].to(self.normalizer.device)), self.normalizer[rows]
        )

    def select(self, rows: slice) -> Distribution:
        """Return the distribution at some of the positions."""
        return Distribution(self.hidden[rows], self.project, self.normalizer[rows])


@dataclass(frozen=True, slots=True)
class DistributionComparison:
    """Another distribution, and the divergence of the model from it."""

    other: Distribution
    divergence: Divergence

    def __call__(
        self, rows: slice, logprobs: Tensor, columns: VocabColumns
    ) -> tuple[Tensor, Tensor]:  # [R, V]
        """Return the divergence's terms and slopes for some rows' log-probabilities."""
        return self.divergence(logprobs, self.other.logprobs(rows, columns))

    def select(self, rows: slice) -> DistributionComparison:
        """Return the comparison at some of the positions."""
        return DistributionComparison(self.other.select(rows), self.divergence)


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

    def shift(self, logits: Tensor, by: Tensor) -> Tensor:
        """Return logits / temperature - by, of [R, V] and [R], as a new float32 tensor."""
        return torch.add(-by[:, None], logits[:, : self.num_valid], alpha=1 / self.temperature)

    def locate(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the column of each label, [M, 1], and True where this rank holds it, [M]."""
        local = labels - self.first
        is_here = (local >= 0) & (local < self.num_valid)
        return local.clamp(0, max(self.num_valid - 1, 0))[:, None], is_here

    def sums(self, logits: Tensor, *, overwrite: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return max x, sum exp(x - max) and sum exp(x - max) (x - max) on this rank, [M] each.

        Here x = logits / temperature. With `overwrite`, exp(x - max) replaces the logits, which
        must be float32.
        """
        top, total, weighted = logits.new_full((3, len(logits)), 0.0, dtype=torch.float32)
        top.fill_(_LEAST)
        for rows in self.row_slices(len(logits)):
            top[rows] = logits[rows, : self.num_valid].amax(-1).float() / self.temperature
            shifted = self.shift(logits[rows], top[rows])
            if overwrite:
                grown = torch.exp(shifted, out=logits[rows, : self.num_valid])
            else:
                grown = shifted.exp() if self.with_entropy else shifted.exp_()
            total[rows] = grown.sum(-1)
            if self.with_entropy:
                weighted[rows] = shifted.mul_(grown).sum(-1)
        return top, total, weighted

    def normalizer(self, logits: Tensor) -> Tensor:
        """Return the log of the sum of exp(logits / temperature) over the full vocabulary, [M]."""
        top, total, _ = self.sums(logits)
        highest = self.all_reduce(top.clone(), dist.ReduceOp.MAX)
        return highest + self.all_reduce(total * (top - highest).exp(), dist.ReduceOp.SUM).log()

    def divergences(
        self, logits: Tensor, normalizer: Tensor, comparisons: Sequence[DistributionComparison]
    ) -> Tensor:
        """Return the sums over the vocabulary of each comparison's terms and slopes, [2, M, K]."""
        totals = normalizer.new_zeros((2, len(logits), len(comparisons)))
        for rows in self.row_slices(len(logits)):
            logprobs = self.shift(logits[rows], normalizer[rows])
            for number, comparison in enumerate(comparisons):
                terms, slopes = comparison(rows, logprobs, self)
                totals[0, rows, number] = terms.sum(-1)
                totals[1, rows, number] = slopes.sum(-1)
        return self.all_reduce(totals, dist.ReduceOp.SUM)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(x, op=op, group=self.group)
        return x


class Measured(NamedTuple):
    """Results for each position, [M] each.

    Attributes:
        logprobs: Log-probability of the label, equal on all ranks.
        entropy: Entropy, equal on all ranks; None unless the columns request it.
        normalizer: Log of the sum of exp(logits / temperature) over the full vocabulary.
        top_probability: Probability of the token with the largest logit on this rank. Times
            exp((logits - max) / temperature), it gives the probabilities of all its tokens.
    """

    logprobs: Tensor
    entropy: Tensor | None
    normalizer: Tensor
    top_probability: Tensor


def measure(
    logits: Tensor, labels: Tensor, columns: VocabColumns, *, overwrite: bool = False
) -> Measured:
    """Return the results for each position. With `overwrite`, exponentials replace the logits."""
    local, is_here = columns.locate(labels)
    at_label = logits.gather(-1, local).squeeze(-1).float() / columns.temperature
    top, total, weighted = columns.sums(logits, overwrite=overwrite)
    highest = columns.all_reduce(top.clone(), dist.ReduceOp.MAX)
    # Rescale from the maximum of this rank to the maximum of all ranks.
    below = top - highest
    scale = below.exp()
    picked = (at_label - highest).masked_fill_(~is_here, 0.0)
    sums = torch.stack((total * scale, picked, (weighted + total * below) * scale))
    total, picked, weighted = columns.all_reduce(sums, dist.ReduceOp.SUM)
    log_total = total.log()
    entropy = log_total - weighted / total if columns.with_entropy else None
    return Measured(picked - log_total, entropy, highest + log_total, scale / total)


def gradient_in_place(
    logits: Tensor,  # [M, V], overwritten
    labels: Tensor,  # [M]
    normalizer: Tensor,  # [M], from `measure`
    entropy: Tensor | None,  # [M], from `measure`
    columns: VocabColumns,
    for_logprobs: Tensor | None,  # [M]
    for_entropy: Tensor | None,  # [M]
    for_divergences: Tensor | None = None,  # [M, K]
    slopes: Tensor | None = None,  # [M, K], the second result of `VocabColumns.divergences`
    comparisons: Sequence[DistributionComparison] = (),
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
        surprise = columns.shift(logits[rows], normalizer[rows])  # log p
        # With respect to a logit, the derivative of the entropy is -p (log p + H).
        factor: Tensor = -slope[rows, None]
        further: Tensor | None = None
        if for_divergences is not None:
            assert slopes is not None
            weights = for_divergences[rows] / columns.temperature
            further = _divergence_gradient(rows, surprise, comparisons, weights, columns)
            factor = factor - (weights * slopes[rows]).sum(-1, keepdim=True)
        if for_entropy is not None:
            assert entropy is not None
            weight = for_entropy[rows, None] / columns.temperature
            factor = torch.addcmul(factor, surprise + entropy[rows, None], weight, value=-1.0)
        grad = surprise.exp_().mul_(factor)
        grad = grad if further is None else grad.add_(further)
        logits[rows, : columns.num_valid] = grad.scatter_add_(-1, local[rows], at_label[rows])
    logits[:, columns.num_valid :] = 0.0


def _gradient_from_exponentials(
    exponentials: Tensor,  # [M, V], overwritten
    labels: Tensor,  # [M]
    top_probability: Tensor,  # [M], from `measure`
    entropy: Tensor | None,  # [M], from `measure`
    columns: VocabColumns,
    for_logprobs: Tensor | None,  # [M]
    for_entropy: Tensor | None,  # [M]
) -> None:
    """Overwrite the exponentials of `measure` with the gradient of the logits."""
    local, is_here = columns.locate(labels)
    valid = exponentials[:, : columns.num_valid]
    slope = (
        torch.zeros_like(top_probability)
        if for_logprobs is None
        else for_logprobs / columns.temperature
    )
    if for_entropy is None:
        valid.mul_((-slope * top_probability)[:, None])
    else:
        assert entropy is not None
        weight = for_entropy / columns.temperature
        factor = -slope - weight * entropy
        for rows in columns.row_slices(len(valid)):
            probabilities = valid[rows].mul_(top_probability[rows, None])
            # p log p is 0 where p is 0
            surprise = torch.xlogy(probabilities, probabilities).mul_(weight[rows, None])
            probabilities.mul_(factor[rows, None]).sub_(surprise)
    if columns.num_valid:
        valid.scatter_add_(-1, local, slope.masked_fill(~is_here, 0.0)[:, None])
    exponentials[:, columns.num_valid :] = 0.0


def _divergence_gradient(
    rows: slice,
    logprobs: Tensor,  # [R, V]
    comparisons: Sequence[DistributionComparison],
    weights: Tensor,  # [R, K]
    columns: VocabColumns,
) -> Tensor:  # [R, V]
    """Return the weighted sum of the slopes.

    With respect to a logit, the derivative of a divergence is its slope minus p times the sum of
    all slopes, which the caller subtracts.
    """
    total = torch.zeros_like(logprobs)
    for number, comparison in enumerate(comparisons):
        total.addcmul_(comparison(rows, logprobs, columns)[1], weights[:, number, None])
    return total


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        columns: VocabColumns,
        comparisons: Sequence[DistributionComparison],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        logprobs, entropy, normalizer, _ = measure(logits, labels, columns)
        divergences = slopes = None
        if comparisons:
            divergences, slopes = columns.divergences(logits, normalizer, comparisons)
        ctx.save_for_backward(logits, labels, normalizer, entropy, slopes)
        ctx.columns, ctx.comparisons = columns, comparisons
        ctx.set_materialize_grads(False)
        return logprobs, entropy, divergences

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, labels, normalizer, entropy, slopes = ctx.saved_tensors
        for_logprobs, for_entropy, for_divergences = grads
        gradient_in_place(
            logits,
            labels,
            normalizer,
            entropy,
            ctx.columns,
            for_logprobs,
            for_entropy,
            for_divergences,
            slopes,
            ctx.comparisons,
        )
        return logits, None, None, None


class _LogprobsOfFloats(torch.autograd.Function):
    """Log-probabilities and entropies of float32 logits, which their exponentials overwrite."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, columns: VocabColumns
    ) -> tuple[Tensor, Tensor | None]:
        logprobs, entropy, _, top_probability = measure(logits, labels, columns, overwrite=True)
        ctx.save_for_backward(logits, labels, top_probability, entropy)
        ctx.columns = columns
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        exponentials, labels, top_probability, entropy = ctx.saved_tensors
        _gradient_from_exponentials(
            exponentials, labels, top_probability, entropy, ctx.columns, *grads
        )
        return exponentials, None, None


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
    logits: Tensor,  # [M, V]; overwritten if they need a gradient
    labels: Tensor,  # [M], token ids of the full vocabulary
    columns: VocabColumns,
    comparisons: Sequence[DistributionComparison] = (),
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # [M], [M], [M, K]
    """Return log-probabilities, entropies and divergences over the unpadded vocabulary.

    The distribution is p = softmax(logits / temperature).

    Columns that pad the vocabulary are ignored, so the results equal the results of the Hugging
    Face model.

    Returns:
        Log-probability of each label; entropy of each row if `columns` wants it; exact divergence
        of each comparison if there are any.
    """
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    if needs_gradient and logits.dtype == torch.float32 and not comparisons:
        logprobs, entropy = _LogprobsOfFloats.apply(logits, labels, columns)
        return logprobs, entropy, None
    return _VocabParallelLogprobs.apply(logits, labels, columns, comparisons)  # pyright: ignore[reportReturnType]
