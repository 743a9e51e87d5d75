"""Tensors of vision towers: weight rules, and names in Hugging Face files.

They have the names of the files below `vision_model.`, lie on the first pipeline stage, and are
equal on all tensor-parallel ranks. Sources: `Qwen2VisionTransformerPretrainedModel`,
`Qwen2_5_VisionTransformerPretrainedModel` and `Qwen3VLVisionModel` of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from msrl.models.rules import Replicated, Rule, Rules
from msrl.models.vision.tower import Kind, Vision

TOWER = "vision_model."
"""Prefix of a tower's tensors in Megatron's names."""
PROJECTOR = (f"{TOWER}merger.", f"{TOWER}deepstack_merger_list.")
"""Prefixes of the tensors of a tower's projector."""


def is_tower(rule: Rule) -> bool:
    """Return True for a tensor of a vision tower."""
    return rule.mcore.startswith(TOWER)


def is_projector(rule: Rule) -> bool:
    """Return True for a tensor that projects a tower's outputs to features."""
    return rule.mcore.startswith(PROJECTOR)


def with_tower_rules(rules: Rules, vision: Vision) -> Rules:
    """Return the rules of a model with its tower, which follow those of the embedding."""
    tower = (
        Rule(f"{TOWER}{name}", (f"{vision.prefix}{name}",), Replicated(), (size,))
        for name, size in tower_tensors(vision)
    )
    return replace(rules, first=(*rules.first, *tower))


def tower_tensors(vision: Vision) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of a tower's tensors in the order of the network."""
    hidden = vision.hidden_size
    patch = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield "patch_embed.proj.weight", (hidden, vision.in_channels, *patch)
    if vision.kind == "qwen3":
        yield "patch_embed.proj.bias", (hidden,)
        yield "pos_embed.weight", (vision.num_positions, hidden)
    for layer in range(vision.depth):
        for name, size in _block_tensors(vision):
            yield f"blocks.{layer}.{name}", size
    yield from _merger_tensors(vision, "merger.", hidden)
    for number in range(len(vision.deepstack)):
        yield from _merger_tensors(vision, f"deepstack_merger_list.{number}.", vision.merged_size)


def _block_tensors(vision: Vision) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn = vision.hidden_size, vision.ffn_hidden_size
    has_bias = vision.kind != "qwen2_5"
    yield from _norm("norm1", hidden, has_bias=has_bias)
    yield from _norm("norm2", hidden, has_bias=has_bias)
    yield from _linear("attn.qkv", 3 * hidden, hidden)
    yield from _linear("attn.proj", hidden, hidden)
    *inner, last = feed_forward_names(vision.kind)
    for name in inner:
        yield from _linear(f"mlp.{name}", ffn, hidden)
    yield from _linear(f"mlp.{last}", hidden, ffn)


def feed_forward_names(kind: Kind) -> tuple[str, ...]:
    """Return the names of the linear layers of a block; the last one returns to its input size."""
    names: dict[Kind, tuple[str, ...]] = {
        "qwen2": ("fc1", "fc2"),
        "qwen2_5": ("gate_proj", "up_proj", "down_proj"),
        "qwen3": ("linear_fc1", "linear_fc2"),
    }
    return names[kind]


def merger_names(kind: Kind) -> tuple[str, str, str]:
    """Return the names of a merger's norm and its two linear layers."""
    return ("norm", "linear_fc1", "linear_fc2") if kind == "qwen3" else ("ln_q", "mlp.0", "mlp.2")


def _merger_tensors(
    vision: Vision, prefix: str, norm_size: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    norm, first, second = merger_names(vision.kind)
    merged = vision.merged_size
    yield from _norm(f"{prefix}{norm}", norm_size, has_bias=vision.kind != "qwen2_5")
    yield from _linear(f"{prefix}{first}", merged, merged)
    yield from _linear(f"{prefix}{second}", vision.out_hidden_size, merged)


def _norm(name: str, size: int, *, has_bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (size,)
    if has_bias:
        yield f"{name}.bias", (size,)


def _linear(name: str, outputs: int, inputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


_Tensor = TypeVar("_Tensor")


def published_names(tensors: Mapping[str, _Tensor], vision: Vision) -> dict[str, _Tensor]:
    """Return the tensors of a file under the names of the published files.

    transformers reads two forms and has written both: Qwen2-VL and Qwen2.5-VL as `visual.*` and
    `model.*`, or like its modules as `model.visual.*` and `model.language_model.*`.
    """
    if vision.prefix == "visual.":
        renamed = (("model.visual.", "visual."), ("model.language_model.", "model."))
    else:
        renamed = (("visual.", "model.visual."),)

    def published(name: str) -> str:
        for other, prefix in renamed:
            if name.startswith(other):
                return prefix + name.removeprefix(other)
        return name

    return {published(name): tensor for name, tensor in tensors.items()}
