"""Logits of transformers from weights that need not fit into memory: one layer at a time, whatever
they lie in.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from msrl.checkpoint.dtypes import cast_to
from msrl.checkpoint.source import WeightSource
from msrl.models.entries import stack_of
from msrl.models.families import all_rules, rules_for
from msrl.models.hf_config import read_hf_config
from msrl.models.rules import Rule
from msrl.models.shape import Shape

if TYPE_CHECKING:
    from msrl.trainer.model.streaming import Fill

ATTENTION = (
    "eager"  # transformers' fused attention leaves out the caps of scores (Gemma 2) without a word
)


def largest_part(shape: Shape) -> int:
    """Parameters of the largest thing that is in memory at once: a layer, or a table of the
    vocabulary.
    """
    sizes: dict[str, int] = {}
    for rule in all_rules(shape):
        number = next((part for part in rule.mcore.split(".") if part.isdigit()), rule.mcore)
        sizes[number] = sizes.get(number, 0) + sum(torch.Size(size).numel() for size in rule.shapes)
    return max(sizes.values())


def class_of(shape: Shape) -> Any:
    """transformers' class of the model; None where its code comes with its checkpoints (which is
    never run).
    """
    import transformers

    return getattr(transformers, shape.architecture, None)


def config_of(shape: Shape, hf_dir: Path) -> Any:
    """transformers' config of the model in `hf_dir`, without its packing: the tensors are what the
    packed ones stand for.

    It is of the class that the model's own class has, whatever the file names: Kimi K2's
    `model_type` is none of transformers', which would ask to run the code beside it, and leaves
    experts unread.
    """
    values = read_hf_config(hf_dir).values
    kept = {
        key: value
        for key, value in values.items()
        if key not in ("model_type", "auto_map", "quantization_config")
    }
    return class_of(shape).config_class.from_dict(kept)


def transformers_logits(
    source: WeightSource, tokens: list[list[int]], dtype: torch.dtype | None
) -> list[Tensor]:
    """Each sequence's logits in float32, [T, vocabulary]; weights rounded to `dtype` unless it is
    None.
    """
    from msrl.trainer.model.streaming import parameters_without_memory, stream_weights

    config = config_of(source.shape, source.hf_dir)
    with parameters_without_memory():
        model = class_of(source.shape)._from_config(
            config, dtype=torch.float32, attn_implementation=ATTENTION
        )
    fill = _filler(source, dtype)
    stream_weights(model, fill)
    for name, buffer in model.named_buffers():
        if name in places(source.shape):  # the biases of experts, a number for each
            fill(name, buffer)
    model.eval()
    longest = max(map(len, tokens))
    rows = torch.tensor(
        [ids + [0] * (longest - len(ids)) for ids in tokens]
    )  # in one pass; attention is causal, the filling comes last
    with torch.inference_mode():
        logits = outputs(model, rows, source.shape)
    return [row[: len(ids)].clone() for row, ids in zip(logits, tokens, strict=True)]


def outputs(model: Any, rows: Tensor, shape: Shape) -> Tensor:
    """What transformers' `model` gives at every position of token ids [B, T]: logits [B, T,
    vocabulary], or scores [B, T, 1].

    A reward model's own forward pass keeps the score of the last token alone.
    """
    if shape.reward_head:
        return model.score(model.base_model(rows, use_cache=False).last_hidden_state)
    return model(rows, use_cache=False).logits


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """What a parameter of transformers' model is made of: for each of its `entries` along the first
    axis a rule and which of its tensors, one above the other. A parameter that is no stack has one
    entry, which it is itself.
    """

    entries: tuple[tuple[Rule, tuple[int, ...]], ...]
    is_stack: bool = False


@functools.lru_cache(maxsize=2)
def places(shape: Shape) -> dict[str, LayerTensor]:
    """Where the parameters of transformers' model are, by its names: those of the files but for
    stacked experts and some prefixes.
    """
    found: dict[str, LayerTensor] = {}
    stacks: dict[str, list[tuple[Rule, tuple[int, ...]]]] = {}
    for layer, rule in (
        (layer, rule) for layer, rules in enumerate(rules_for(shape).layers) for rule in rules
    ):
        if rule.expert is not None:
            numbered = rule.at(layer)
            stacks.setdefault(_stack_name(numbered, layer), []).append(
                (numbered, tuple(range(len(rule.hf))))
            )
    for rule in all_rules(shape):
        if rule.expert is None:
            found |= {
                _model_name(name, shape): LayerTensor(((rule, (index,)),))
                for index, name in enumerate(rule.hf)
            }
    found |= {
        name: LayerTensor(tuple(sorted(entries, key=_expert_of)), is_stack=True)
        for name, entries in stacks.items()
    }
    if shape.tie_word_embeddings:
        found.setdefault("lm_head.weight", found[_model_name("model.embed_tokens.weight", shape)])
    return found


def _expert_of(entry: tuple[Rule, tuple[int, ...]]) -> int:
    assert entry[0].expert is not None
    return entry[0].expert


def _stack_name(rule: Rule, layer: int) -> str:
    """The parameter that a rule of one expert is an entry of: gate above up, and down, where the
    files have experts one by one.
    """
    stack = stack_of(rule.hf[0])
    if stack is not None:
        return stack[0]
    return f"model.layers.{layer}.mlp.experts.{'gate_up_proj' if len(rule.hf) > 1 else 'down_proj'}"


def _model_name(name: str, shape: Shape) -> str:
    """transformers' name for a tensor of a file: Mixtral's mixtures are `mlp` as all others', a
    model beside a vision tower is nested.
    """
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return (
        name.replace("model.", "model.language_model.", 1)
        if shape.family == "qwen2_5_vl" and name.startswith("model.")
        else name
    )


def _filler(source: WeightSource, dtype: torch.dtype | None) -> Fill:
    from msrl.trainer.model.streaming import put

    def made(rule: Rule, which: tuple[int, ...]) -> Tensor:
        tensors, kind = source.hf_tensors(rule), cast_to(rule, dtype)
        parts = [tensors[index] for index in which]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return whole if kind is None else whole.to(kind)

    def fill(name: str, into: Tensor) -> None:
        place = places(source.shape)[name]
        if place.is_stack and len(place.entries) != len(into):
            raise RuntimeError(
                f"{name} has {len(place.entries)} experts, but the module makes it {len(into)}"
            )
        for entry, room in zip(place.entries, into if place.is_stack else [into], strict=True):
            put(room, made(*entry), name)

    return fill
