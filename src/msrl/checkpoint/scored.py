"""Weights of a language model as a reward model's: a score head of zeros at its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from msrl.checkpoint import tensor_layouts as layouts
from msrl.checkpoint.weights import WeightSource
from msrl.models.reward_head import BIAS, WEIGHT, scoring_architecture, with_score
from msrl.models.rules import Rule


class ScoredSource(WeightSource):
    """Weights of `base` without its output layer and with a score head of zeros."""

    def __init__(self, base: WeightSource) -> None:
        assert not base.shape.reward_head, "has a score head"
        self._base, self.hf_dir = base, base.hf_dir
        self.shape = with_score(base.shape, scoring_architecture(base.shape.architecture))

    def dtype(self, rule: Rule) -> torch.dtype:
        return self._base.main_dtype() if _is_head(rule) else self._base.dtype(rule)

    def canonical(self, rule: Rule) -> Tensor:
        if _is_head(rule):
            return layouts.fuse(rule.layout, self.hf_tensors(rule))
        return self._base.canonical(rule)

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        if _is_head(rule):
            return tuple(torch.zeros(shape, dtype=self.dtype(rule)) for shape in rule.shapes)
        return self._base.hf_tensors(rule)

    def hf_pieces(self, rule: Rule) -> tuple[Iterable[Tensor], ...]:
        return super().hf_pieces(rule) if _is_head(rule) else self._base.hf_pieces(rule)

    def shard(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Tensor:
        if _is_head(rule):
            return layouts.shard(rule.layout, self.hf_tensors(rule), rank, size, padded_vocab)
        return self._base.shard(rule, rank, size, padded_vocab)

    def pieces(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Iterator[Tensor]:
        if _is_head(rule):
            yield self.shard(rule, rank, size, padded_vocab)
        else:
            yield from self._base.pieces(rule, rank, size, padded_vocab)


def with_score_head(source: WeightSource) -> WeightSource:
    """Return the weights of a reward model; weights of a language model get a head of zeros."""
    return source if source.shape.reward_head else ScoredSource(source)


def _is_head(rule: Rule) -> bool:
    return rule.mcore in (WEIGHT, BIAS)
