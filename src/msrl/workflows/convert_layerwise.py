"""Logits of transformers from weights that need not fit into memory: one layer at a time, whatever they lie in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from msrl.checkpoint.dtypes import cast_to
from msrl.checkpoint.source import WeightSource
from msrl.models.families import all_rules, num_experts
from msrl.models.shape import Shape

ATTENTION = "eager"  # transformers' fused attention leaves out the caps of scores (Gemma 2) without a word


def largest_part(shape: Shape) -> int:
    """Parameters of the largest thing that is in memory at once: a layer, or a table of the vocabulary."""
    sizes: dict[str, int] = {}
    for rule in all_rules(shape):
        number = next((part for part in rule.mcore.split(".") if part.isdigit()), rule.mcore)
        sizes[number] = sizes.get(number, 0) + sum(torch.Size(size).numel() for size in rule.shapes)
    return max(sizes.values())


def is_possible(shape: Shape) -> bool:
    """Whether transformers names the parameters as the files do: it stacks experts, and nests what stands beside a vision tower."""
    return not num_experts(shape) and not shape.carried


def class_of(shape: Shape) -> Any:
    """transformers' class of the model; None where its code comes with its checkpoints (which is never run)."""
    import transformers

    return getattr(transformers, shape.architecture, None)


def transformers_logits(source: WeightSource, tokens: list[list[int]], dtype: torch.dtype | None) -> list[Tensor]:
    """Each sequence's logits in float32, [T, vocabulary]; weights rounded to `dtype` unless it is None."""
    from transformers import AutoConfig

    from msrl.trainer.streaming import stream_weights

    config = AutoConfig.from_pretrained(source.hf_dir, local_files_only=True)
    vars(config).pop("quantization_config", None)  # the tensors are what the packed ones stand for
    with parameters_without_memory():
        model = class_of(source.shape)._from_config(config, dtype=torch.float32, attn_implementation=ATTENTION)
    stream_weights(model, _fetcher(source, dtype))
    model.eval()
    longest = max(map(len, tokens))
    rows = torch.tensor([ids + [0] * (longest - len(ids)) for ids in tokens])  # in one pass; attention is causal, the filling comes last
    with torch.inference_mode():
        logits = outputs(model, rows, source.shape)
    return [row[: len(ids)].clone() for row, ids in zip(logits, tokens, strict=True)]


def outputs(model: Any, rows: Tensor, shape: Shape) -> Tensor:
    """What transformers' `model` gives at every position of token ids [B, T]: logits [B, T, vocabulary], or scores [B, T, 1].

    A reward model's own forward pass keeps the score of the last token alone.
    """
    if shape.reward_head:
        return model.score(model.base_model(rows, use_cache=False).last_hidden_state)
    return model(rows, use_cache=False).logits


def _fetcher(source: WeightSource, dtype: torch.dtype | None) -> Callable[[str], Tensor]:
    places = {name: (rule, index) for rule in all_rules(source.shape) for index, name in enumerate(rule.hf)}
    if source.shape.tie_word_embeddings:
        places.setdefault("lm_head.weight", places["model.embed_tokens.weight"])

    def fetch(name: str) -> Tensor:
        rule, index = places[name]
        tensor, kind = source.hf_tensors(rule)[index], cast_to(rule, dtype)
        return tensor if kind is None else tensor.to(kind)

    return fetch


@contextlib.contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Modules that are made inside have their parameters' shapes alone (on torch's `meta` device); buffers are as ever."""
    register = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.data.to("meta"), requires_grad=False))

    nn.Module.register_parameter = without_memory
    try:
        yield
    finally:
        nn.Module.register_parameter = register
