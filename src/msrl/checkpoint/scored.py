"""Weights of a language model as a reward model's: a score head of zeros at its end."""

from __future__ import annotations

import torch
from torch import Tensor

from msrl.checkpoint.weights import ChangedSource, WeightSource
from msrl.models.reward_head import BIAS, WEIGHT, scoring_architecture, with_score
from msrl.models.rules import Rule


class ScoredSource(ChangedSource):
    """Weights of `base` without its output layer and with a score head of zeros."""

    def __init__(self, base: WeightSource) -> None:
        assert not base.shape.reward_head, "has a score head"
        self.base, self.hf_dir = base, base.hf_dir
        self.shape = with_score(base.shape, scoring_architecture(base.shape.architecture))

    def dtype(self, rule: Rule) -> torch.dtype:
        return self.base.main_dtype() if self.changes(rule) else self.base.dtype(rule)

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        if self.changes(rule):
            return tuple(torch.zeros(shape, dtype=self.dtype(rule)) for shape in rule.shapes)
        return self.base.hf_tensors(rule)

    def changes(self, rule: Rule) -> bool:
        return rule.mcore in (WEIGHT, BIAS)


def with_score_head(source: WeightSource) -> WeightSource:
    """Return the weights of a reward model; weights of a language model get a head of zeros."""
    return source if source.shape.reward_head else ScoredSource(source)
