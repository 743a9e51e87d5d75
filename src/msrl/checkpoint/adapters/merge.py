"""LoRA adapters merged into weights on the CPU: W' = W + s B A (arXiv:2106.09685, section 4.1).

The score head of a reward model, which is trained alongside its adapters, replaces the head of the
base model, or its output layer.

A is [r, in], B is [out, r], W is [out, in] per Hugging Face tensor. s = alpha / r, or alpha /
sqrt(r) for rank-stabilized LoRA (arXiv:2312.03732). The sum is computed in float32 and rounded once
to the type of the result. Adapter files: `adapters.megatron` and `adapters.peft`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from msrl.checkpoint.dtypes import cast_to, same_bits
from msrl.checkpoint.scored import with_score_head
from msrl.checkpoint.weights import ChangedSource, WeightSource
from msrl.errors import ManyErrors, MsrlError
from msrl.models.families import all_rules
from msrl.models.reward_head import HF_WEIGHT
from msrl.models.rules import Rule
from msrl.models.vision.tensors import is_tower

_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Delta:
    """Update of one weight: `scale` * b @ a, with a [r, in] and b [out, r]."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.b.shape[0], self.a.shape[1]

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def equals(self, other: Delta) -> bool:
        """Return True if both have the same bits."""
        return (
            self.scale == other.scale and same_bits(self.a, other.a) and same_bits(self.b, other.b)
        )

    def added_to(self, weight: Tensor, compute: torch.dtype = torch.float32) -> Tensor:
        """Return `weight` plus the update, computed and returned in the type `compute`."""
        product = self.b.to(compute) @ self.a.to(compute)
        return torch.add(weight.to(compute), product, alpha=self.scale)


@dataclass(frozen=True, slots=True)
class Adapter:
    """Adapter of a model: updates by the Hugging Face names of the weights, and replaced weights.

    `where` is the folder of the adapter, `alpha` the lora_alpha recorded there.
    """

    where: str
    alpha: float
    deltas: Mapping[str, Delta]
    replaced: Mapping[str, Tensor]

    @property
    def has_score_head(self) -> bool:
        """True for the adapter of a reward model, which comes with its score head."""
        return HF_WEIGHT in self.replaced

    def check(self, rules: Iterable[Rule]) -> None:
        """Check that the adapter fits a model.

        Raises:
            MsrlError: A tensor is not part of the model or has another shape.
            ManyErrors: The same for several tensors.
        """
        rules = list(rules)
        shapes = {
            name: shape for rule in rules for name, shape in zip(rule.hf, rule.shapes, strict=True)
        }
        in_tower = {name for rule in rules if is_tower(rule) for name in rule.hf}
        shapes_in_adapter = {name: delta.shape for name, delta in self.deltas.items()} | {
            n: tuple(t.shape) for n, t in self.replaced.items()
        }
        problems = [
            f"{self.where}: adapts {name}, which is not part of the model"
            for name in shapes_in_adapter
            if name not in shapes
        ]
        problems += [
            f"{self.where}: {name} has shape {list(shape)}, but the model needs "
            f"{list(shapes[name])}"
            for name, shape in shapes_in_adapter.items()
            if name in shapes and shape != shapes[name]
        ]
        problems += [
            f"{self.where}: adapts {name} of the vision tower, which is not supported. Train an "
            "adapter of the language model only."
            for name in shapes_in_adapter
            if name in in_tower
        ]
        if len(problems) > 1:
            raise ManyErrors(problems[:20])
        if problems:
            raise MsrlError(problems[0])

    def without_output_layer(self, embedding_name: str) -> Adapter:
        """Return the adapter for a model with tied embeddings, without its output layer.

        `embedding_name` is the Hugging Face name of the embedding.

        Raises:
            MsrlError: Only one of embedding and output layer is replaced, or they differ. PEFT's
                model is then no longer tied.
        """
        embedding, head = (self.replaced.get(name) for name in (embedding_name, _HEAD))
        if embedding is None and head is None:
            return self
        if embedding is None or head is None or not torch.equal(embedding, head):
            raise MsrlError(
                f"{self.where}: the model ties embedding and output layer, but the adapter "
                "replaces them differently. Train the adapter with PEFT's ensure_weight_tying."
            )
        return replace(
            self, replaced={name: tensor for name, tensor in self.replaced.items() if name != _HEAD}
        )

    def summary(self) -> str:
        """Return a summary such as `rank 16, scale 2, 96 weights`."""
        ranks = "/".join(map(str, sorted({delta.rank for delta in self.deltas.values()})))
        distinct_scales = sorted({delta.scale for delta in self.deltas.values()})
        scales = "/".join(f"{scale:g}" for scale in distinct_scales)
        replaced = f", {len(self.replaced)} weights replaced" if self.replaced else ""
        return f"rank {ranks}, scale {scales}, {len(self.deltas)} weights{replaced}"


class MergedSource(ChangedSource):
    """The weights of `base` with an adapter merged into them."""

    def __init__(
        self,
        base: WeightSource,
        adapter: Adapter,
        *,
        dtype: torch.dtype | None = None,
        hf_dir: Path | None = None,
    ) -> None:
        """Check that the adapter fits `base`; raises MsrlError otherwise.

        Args:
            base: Weights that the adapter belongs to.
            adapter: Adapter to merge.
            dtype: Type that merged weights are rounded to; default: the dtype of the weight in
                `base`.
            hf_dir: Folder of config and tokenizer, if it is not the folder of `base`.
        """
        if adapter.has_score_head:
            base = with_score_head(base)
        embedding = all_rules(base.shape)[0].hf[0]
        if base.shape.tie_word_embeddings:
            adapter = adapter.without_output_layer(embedding)
        adapter.check(all_rules(base.shape))
        self.base, self.adapter, self._dtype = base, adapter, dtype
        self.shape, self.hf_dir = base.shape, hf_dir or base.hf_dir

    def dtype(self, rule: Rule) -> torch.dtype:
        merged = cast_to(rule, self._dtype) if self.changes(rule) else None
        return merged or self.base.dtype(rule)

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        return self.merge_rule(rule, torch.float32)

    def merge_rule(self, rule: Rule, compute: torch.dtype) -> tuple[Tensor, ...]:
        """Return the Hugging Face tensors of a rule, with the sum computed in `compute`."""
        dtype = self.dtype(rule)
        return tuple(
            self._merge_tensor(name, tensor, compute).to(dtype)
            for name, tensor in zip(rule.hf, self.base.hf_tensors(rule), strict=True)
        )

    def _merge_tensor(self, name: str, tensor: Tensor, compute: torch.dtype) -> Tensor:
        """Return a merged weight that is not yet rounded to its type."""
        weight = self.adapter.replaced.get(name, tensor)
        delta = self.adapter.deltas.get(name)
        return weight if delta is None else delta.added_to(weight, compute)

    def changes(self, rule: Rule) -> bool:
        return any(name in self.adapter.deltas or name in self.adapter.replaced for name in rule.hf)
