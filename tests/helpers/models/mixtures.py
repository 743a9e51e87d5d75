"""A synthetic mixture of experts with rules by hand, independent of the model families."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import msrl.models.families
from msrl.checkpoint import source
from msrl.models import parallel_layout, stages
from msrl.models.families import all_rules
from msrl.models.rules import GateUp, Replicated, Rule, Rules, Sharded, Vocab
from msrl.models.shape import Shape
from test_models import QWEN2, shape

EXPERTS, HIDDEN, COLUMNS, VOCAB = 8, 6, 4, 10
_MLP, _HF = "decoder.layers.{layer}.mlp.", "model.layers.{layer}.mlp."


def rules(model: Shape) -> Rules:
    """Return rules of a dense first layer and of layers with eight experts, named as in Megatron
    and Qwen.
    """
    norm = Rule(
        "decoder.layers.{layer}.pre_mlp_layernorm.weight",
        ("model.layers.{layer}.post_attention_layernorm.weight",),
        Replicated(),
        ((HIDDEN,),),
    )
    dense = Rule(
        f"{_MLP}linear_fc2.weight", (f"{_HF}down_proj.weight",), Sharded(1), ((HIDDEN, 8),)
    )
    router = Rule(
        f"{_MLP}router.weight", (f"{_HF}gate.weight",), Replicated(), ((EXPERTS, HIDDEN),)
    )
    experts = tuple(rule for number in range(EXPERTS) for rule in _expert(number))
    embedding = Rule(
        "embedding.word_embeddings.weight",
        ("model.embed_tokens.weight",),
        Vocab(VOCAB),
        ((VOCAB, HIDDEN),),
    )
    head = Rule("output_layer.weight", ("lm_head.weight",), Vocab(VOCAB), ((VOCAB, HIDDEN),))
    return Rules(
        (embedding,),
        ((norm, dense), *((norm, router, *experts),) * (model.num_layers - 1)),
        (head,),
    )


def _expert(number: int) -> tuple[Rule, Rule]:
    ours, theirs = f"{_MLP}experts.local_experts.{{expert}}.", f"{_HF}experts.{{expert}}."
    gate_up = (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")
    return (
        Rule(
            f"{ours}linear_fc1.weight",
            gate_up,
            GateUp(),
            ((COLUMNS, HIDDEN), (COLUMNS, HIDDEN)),
            number,
        ),
        Rule(
            f"{ours}linear_fc2.weight",
            (f"{theirs}down_proj.weight",),
            Sharded(1),
            ((HIDDEN, COLUMNS),),
            number,
        ),
    )


def install(monkeypatch: pytest.MonkeyPatch, num_layers: int = 4) -> Shape:
    """Install `rules` for the returned shape during a test."""
    model = shape({**QWEN2, "num_hidden_layers": num_layers, "vocab_size": VOCAB})
    model = replace(model, family="mixture", architecture="MixtureForTest")
    for module in (msrl.models.families, stages, parallel_layout):
        monkeypatch.setattr(module, "rules_for", rules)
    return model


class Weights(source.WeightSource):
    """Random tensors under Hugging Face names."""

    def __init__(self, model: Shape, hf_dir: object) -> None:
        torch.manual_seed(0)
        self.shape, self.hf_dir = model, hf_dir  # pyright: ignore[reportAttributeAccessIssue]
        self.tensors = {
            name: torch.randn(size).to(torch.bfloat16)
            for rule in all_rules(model)
            for name, size in zip(rule.hf, rule.shapes, strict=True)
        }

    def dtype(self, rule: Rule) -> torch.dtype:
        return torch.bfloat16

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        return tuple(self.tensors[name] for name in rule.hf)
