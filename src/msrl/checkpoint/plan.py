"""Which rank holds which tensors, from sizes alone: nothing is read to know it.

Pipeline stages are equal blocks of consecutive layers. The first stage has the embedding, the last one the final norm and the output
layer. A tied output layer has no tensor of its own, but with several stages the last one holds a copy of the embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from msrl.checkpoint.layouts import shard_shape
from msrl.errors import ManyErrors
from msrl.models.families import rules_for
from msrl.models.rules import Layout, Rule, Rules, Vocab
from msrl.models.shape import Shape


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of a stage: its rule (with global layer numbers) and the `name` that the stage gives it (counting from its own layers)."""

    rule: Rule
    name: str

    @property
    def layout(self) -> Layout:
        return self.rule.layout


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one (tensor, pipeline) rank holds: shapes by Megatron's local names, in the order of the network."""

    tp_rank: int
    pp_rank: int
    tensors: dict[str, tuple[int, ...]]

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole checkpoint cut for `tp` times `pp` ranks; `padded_vocab` rows in embedding and output layer together over the ranks."""

    tp: int
    pp: int
    padded_vocab: int
    ranks: tuple[RankPlan, ...]

    @property
    def num_elements(self) -> int:
        return sum(rank.num_elements for rank in self.ranks)


def check(shape: Shape, tp: int, pp: int) -> None:
    """Raises ManyErrors that names every size which the layout does not divide."""
    problems = [
        f"tp={tp} does not divide {what} ({size}); choose a tensor-parallel size that does"
        for what, size in (
            ("the key/value groups", shape.num_query_groups),
            ("the attention heads", shape.num_attention_heads),
            ("the feed-forward size", shape.ffn_hidden_size),
        )
        if size % tp
    ]
    if shape.num_layers % pp:
        problems.append(f"pp={pp} does not divide the {shape.num_layers} layers; choose a pipeline-parallel size that does")
    if problems:
        raise ManyErrors(problems)


def padded_vocab_size(shape: Shape, tp: int, multiple: int | None = None) -> int:
    """Rows of the vocabulary in a checkpoint: padded to `multiple` (default: tp), and always to something that tp divides."""
    return shape.padded_vocab_size(math.lcm(tp, multiple or tp))


def stage_tensors(shape: Shape, pp_rank: int, pp_size: int) -> tuple[Placed, ...]:
    """The tensors of one pipeline stage, in the order of the network."""
    rules = rules_for(shape)
    per_stage = shape.num_layers // pp_size
    first = [Placed(rule, rule.mcore) for rule in rules.first] if pp_rank == 0 else []
    layers = [Placed(rule.at(pp_rank * per_stage + local), rule.at(local).mcore) for local in range(per_stage) for rule in rules.layer]
    return (*first, *layers, *_last(shape, rules, pp_size)) if pp_rank == pp_size - 1 else (*first, *layers)


def _last(shape: Shape, rules: Rules, pp_size: int) -> list[Placed]:
    last = [Placed(rule, rule.mcore) for rule in rules.last]
    if shape.tie_word_embeddings and pp_size > 1:
        last += [Placed(rule, TIED_OUTPUT) for rule in rules.first if isinstance(rule.layout, Vocab)]
    return last


TIED_OUTPUT = "output_layer.weight"


def rank_plan(shape: Shape, tp_rank: int, tp_size: int, pp_rank: int, pp_size: int, padded_vocab: int) -> RankPlan:
    """The shapes that one rank holds."""
    tensors = {
        placed.name: shard_shape(placed.layout, placed.rule.shapes, tp_size, padded_vocab)
        for placed in stage_tensors(shape, pp_rank, pp_size)
    }
    return RankPlan(tp_rank, pp_rank, tensors)


def make_plan(shape: Shape, tp: int, pp: int, vocab_multiple: int | None = None) -> Plan:
    """The plan of a whole checkpoint. Raises ManyErrors as `check` does."""
    check(shape, tp, pp)
    padded = padded_vocab_size(shape, tp, vocab_multiple)
    ranks = tuple(rank_plan(shape, t, tp, p, pp, padded) for p in range(pp) for t in range(tp))
    return Plan(tp, pp, padded, ranks)
