"""Logits of transformers, computed layer by layer for weights that do not fit into memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from msrl.checkpoint.dtypes import cast_to
from msrl.checkpoint.source import WeightSource
from msrl.models.entries import split_entry
from msrl.models.families import all_rules, rules_for
from msrl.models.hf_config import read_hf_config
from msrl.models.reward_head import scoring_config
from msrl.models.rules import Rule
from msrl.models.shape import LongRopeScaling, Shape
from msrl.models.vision.tensors import is_tower

if TYPE_CHECKING:
    from msrl.trainer.streaming import Fill

ATTENTION = "eager"  # transformers' fused attention silently ignores soft-capping (Gemma 2)


def largest_part(shape: Shape) -> int:
    """Return the parameters of the largest part in memory: a layer or a vocabulary table."""
    sizes: dict[str, int] = {}
    for rule in all_rules(shape):
        layer_numbers = (word for word in rule.mcore.split(".") if word.isdigit())
        component = next(layer_numbers, rule.mcore)
        sizes[component] = sizes.get(component, 0) + sum(
            torch.Size(size).numel() for size in rule.shapes
        )
    return max(sizes.values())


def model_class(shape: Shape) -> Any:
    """Return the model's class in transformers.

    Return None if its code is distributed with its checkpoints; such code is never run.
    """
    import transformers

    return getattr(transformers, shape.architecture, None)


def model_config(shape: Shape, hf_dir: Path) -> Any:
    """Return transformers' config of the model in `hf_dir`, without quantization.

    The weights are dequantized on reading. The config is of the class that the model's class
    declares, whatever config.json names: transformers does not know `model_type` of Kimi K2, would
    ask to run the code in the folder, and would not load the experts.
    """
    values = read_hf_config(hf_dir).values
    config_values = {
        key: value
        for key, value in values.items()
        if key not in ("model_type", "auto_map", "quantization_config")
    }
    if shape.vision is not None:
        # The default of InternVL's class, unlike the published models
        config_values.setdefault("tie_word_embeddings", shape.tie_word_embeddings)
    if shape.reward_head:
        config_values = scoring_config(config_values)
    config = model_class(shape).config_class.from_dict(config_values)
    scaling = shape.rotary.scaling
    if isinstance(scaling, LongRopeScaling):  # MiniCPM 3's class reads it
        growth = shape.max_position_embeddings / scaling.original_max_position_embeddings
        config.rope_parameters.setdefault("factor", growth)
    return config


def transformers_logits(
    source: WeightSource, tokens: list[list[int]], dtype: torch.dtype | None
) -> list[Tensor]:
    """Return each sequence's logits in float32, [T, vocabulary].

    The weights are rounded to `dtype` unless it is None.
    """
    from msrl.trainer.streaming import parameters_without_memory, stream_weights

    config = model_config(source.shape, source.hf_dir)
    with parameters_without_memory():
        model = model_class(source.shape)._from_config(
            config, dtype=torch.float32, attn_implementation=ATTENTION
        )
    sources, put_weights = parameter_sources(source.shape), _filler(source, dtype)
    filled = set[str]()

    def fill(name: str, into: Tensor) -> None:
        put_weights(name, into)
        filled.add(name)

    stream_weights(model, fill)
    for name, buffer in model.named_buffers():
        if name in sources:  # biases of the routers, one number per expert
            fill(name, buffer)
    model.eval()
    max_length = max(map(len, tokens))
    # One pass over all sequences. Attention is causal, so the padding at the end has no effect.
    rows = torch.tensor([ids + [0] * (max_length - len(ids)) for ids in tokens])
    with torch.inference_mode():
        logits = outputs(model, rows, source.shape)
    tower = {
        _model_name(name, source.shape)
        for rule in filter(is_tower, all_rules(source.shape))
        for name in rule.hf
    }
    tied = {_OUTPUT} if source.shape.tie_word_embeddings else set[str]()
    unused = sources.keys() - filled - tied - tower
    if unused:
        raise RuntimeError(f"transformers' model has no parameter {min(unused)}")
    return [row[: len(ids)].clone() for row, ids in zip(logits, tokens, strict=True)]


def outputs(model: Any, rows: Tensor, shape: Shape, **images: Tensor) -> Tensor:
    """Return the output of transformers' `model` for token ids [B, T] at every position.

    `images` are its arguments for images.

    It is logits [B, T, vocabulary], or scores [B, T, 1]: the forward pass of a reward model returns
    only the score of the last token.
    """
    if shape.reward_head:
        return model.score(model.base_model(rows, use_cache=False).last_hidden_state)
    return model(rows, use_cache=False, **images).logits


_OUTPUT = "lm_head.weight"
# Names of mixtures in files, and in transformers' models. Some families have other ones.
_EXPERT_NAMES = (
    (".block_sparse_moe.", ".mlp."),  # Mixtral, MiniMax M2
    (".mlp.router.gate.", ".mlp.gate."),  # Hunyuan 3, as the next ones
    (".mlp.expert_bias", ".mlp.e_score_correction_bias"),
    (".mlp.shared_mlp.", ".mlp.shared_experts."),
)
_FAMILY_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "granite_moe": (
        (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
        (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
        (".router.layer.", ".router."),
    ),
    "ernie4_5_moe": ((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
    "hunyuan_v1": (),
}


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """Source of a parameter of transformers' model.

    Each entry along the first axis is a rule and the indices of its tensors that are
    concatenated along their rows. A parameter that is not a stack has one entry.
    """

    entries: tuple[tuple[Rule, tuple[int, ...]], ...]
    is_stack: bool = False


@functools.lru_cache(maxsize=2)
def parameter_sources(shape: Shape) -> dict[str, LayerTensor]:
    """Return the sources of the parameters of transformers' model, by its names.

    Names equal the names in the files, except for stacked experts and some prefixes.
    """
    sources: dict[str, LayerTensor] = {}
    for rule in all_rules(shape):
        if rule.expert is not None:
            continue
        for index, name in enumerate(rule.hf):
            stack = split_entry(name)  # a stack of one entry
            key = _model_name(stack[0] if stack else name, shape)
            sources[key] = LayerTensor(((rule, (index,)),), is_stack=stack is not None)
    for name, entries in _expert_entries(shape).items():
        sources[name] = LayerTensor(tuple(sorted(entries, key=_expert_number)), is_stack=True)
    if shape.tie_word_embeddings:
        embedding = sources[_model_name(all_rules(shape)[0].hf[0], shape)]
        sources.setdefault(_OUTPUT, embedding)
    return sources


def _expert_entries(shape: Shape) -> dict[str, list[tuple[Rule, tuple[int, ...]]]]:
    """Return the rules of experts, and the indices of all their tensors, by stacked parameter."""
    stacks: dict[str, list[tuple[Rule, tuple[int, ...]]]] = {}
    for layer, rules in enumerate(rules_for(shape).layers):
        for rule in rules:
            if rule.expert is not None:
                numbered = rule.at(layer)
                entry = numbered, tuple(range(len(rule.hf)))
                name = _model_name(_stacked_name(numbered, layer), shape)
                stacks.setdefault(name, []).append(entry)
    return stacks


def _expert_number(entry: tuple[Rule, tuple[int, ...]]) -> int:
    assert entry[0].expert is not None
    return entry[0].expert


def _stacked_name(rule: Rule, layer: int) -> str:
    """Return the name of the parameter that contains the expert of a rule.

    Where the files have experts one by one, the parameters are gate and up concatenated, and down.
    """
    stack = split_entry(rule.hf[0])
    if stack is not None:
        return stack[0]
    return f"model.layers.{layer}.mlp.experts.{'gate_up_proj' if len(rule.hf) > 1 else 'down_proj'}"


def _model_name(name: str, shape: Shape) -> str:
    """Return transformers' name for a tensor of a file.

    Blocks of experts have the same names in all its models. A model next to a vision tower is
    nested.
    """
    for in_file, in_model in _FAMILY_NAMES.get(shape.family, _EXPERT_NAMES):
        name = name.replace(in_file, in_model)
    if name.startswith(("vision_tower.", "multi_modal_projector.")):
        return f"model.{name}"
    if name.startswith("language_model."):
        inner = name.removeprefix("language_model.")
        return inner.replace("model.", "model.language_model.", 1)
    if shape.vision is not None and shape.vision.prefix == "visual.":
        if name.startswith("visual."):
            return f"model.{name}"
        if name.startswith("model."):
            return name.replace("model.", "model.language_model.", 1)
    return name


def _filler(source: WeightSource, dtype: torch.dtype | None) -> Fill:
    from msrl.trainer.streaming import put

    def build(rule: Rule, indices: tuple[int, ...]) -> Tensor:
        tensors, target_dtype = source.hf_tensors(rule), cast_to(rule, dtype)
        rows = [tensors[index] for index in indices]
        stacked = torch.cat(rows) if len(rows) > 1 else rows[0]
        return stacked if target_dtype is None else stacked.to(target_dtype)

    def fill(name: str, into: Tensor) -> None:
        layer_tensor = parameter_sources(source.shape)[name]
        if layer_tensor.is_stack and len(layer_tensor.entries) != len(into):
            raise RuntimeError(
                f"{name} has {len(layer_tensor.entries)} experts, but the module makes it "
                f"{len(into)}"
            )
        for entry, target in zip(
            layer_tensor.entries, into if layer_tensor.is_stack else [into], strict=True
        ):
            value = build(*entry)
            # transformers exchanges inputs and outputs where the shape requires it (`Transpose`
            # with `check_dims` in its `core_model_loading.py`).
            has_shape = not layer_tensor.is_stack or value.shape == target.shape
            put(target, value if has_shape else value.mT, name)

    return fill
