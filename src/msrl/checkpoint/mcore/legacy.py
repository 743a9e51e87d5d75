"""Files of Megatron's models from before megatron-core ("legacy"): the same tensors under other
names, nested by module.

    model = {"language_model": {"embedding": {"word_embeddings": {"weight"}},
                                "encoder": {"layers.0.input_norm.weight", ..., "final_norm.weight"},
                                "output_layer": {"weight"}},                       where it is not
                                tied to the embedding
             "word_embeddings_for_head": {"weight"}}                               where it is tied,
             on the last of several stages

q, k and v of a query group, and gate and up, lie as in megatron-core's (checkpoint version 3.0), so
names are all that changes. Source: `TransformerLanguageModel.state_dict_for_save_checkpoint` in
megatron.legacy.model; the legacy names of MindSpeed-LLM 2.0's converter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msrl.errors import MsrlError

_LAYER = re.compile(r"(decoder|encoder)\.layers\.(\d+)\.(.+)")
_INSIDE = {
    "input_layernorm.weight": "input_norm.weight",
    "self_attention.linear_qkv.weight": "self_attention.query_key_value.weight",
    "self_attention.linear_qkv.bias": "self_attention.query_key_value.bias",
    "self_attention.linear_proj.weight": "self_attention.dense.weight",
    "pre_mlp_layernorm.weight": "post_attention_norm.weight",
    "mlp.linear_fc1.weight": "mlp.dense_h_to_4h.weight",
    "mlp.linear_fc2.weight": "mlp.dense_4h_to_h.weight",
}
_OUTSIDE = {
    "embedding.word_embeddings.weight": (
        "language_model",
        "embedding",
        "word_embeddings",
        "weight",
    ),
    "decoder.final_layernorm.weight": ("language_model", "encoder", "final_norm.weight"),
    "output_layer.weight": ("language_model", "output_layer", "weight"),
}
_TIED_OUTPUT = ("word_embeddings_for_head", "weight")
_OURS_INSIDE = {legacy: ours for ours, legacy in _INSIDE.items()}
_OURS_OUTSIDE = {".".join(path): ours for ours, path in _OUTSIDE.items()} | {
    ".".join(_TIED_OUTPUT): "output_layer.weight"
}


def is_legacy(model: Mapping[str, Any]) -> bool:
    """Whether a file's model is nested by the modules of the old models."""
    return isinstance(model.get("language_model"), Mapping)


def place(name: str, *, tied: bool) -> tuple[str, ...] | None:
    """Where a tensor of ours, by its name inside a chunk, stands in a legacy model; None: nowhere.
    """
    if name == "output_layer.weight" and tied:
        return _TIED_OUTPUT
    match = _LAYER.fullmatch(name)
    if match is None:
        return _OUTSIDE.get(name)
    inside = _INSIDE.get(match[3])
    return None if inside is None else ("language_model", "encoder", f"layers.{match[2]}.{inside}")


def refuse_unnamed(names: Iterable[str], architecture: str) -> None:
    """Raises MsrlError for tensors (by their names inside a chunk) that the old models do not have.
    """
    kinds = {
        re.sub(r"\.layers\.\d+\.", ".layers.*.", name)
        for name in names
        if place(name, tied=False) is None
    }
    if kinds:
        some = ", ".join(sorted(kinds)[:3])
        raise MsrlError(
            f"--names legacy: Megatron's old models have no name for {some} of {architecture}; write local or te names"
        )


def nested(model: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """The legacy form of one chunk of a rank. Raises ValueError for a tensor that `refuse_unnamed`
    would have named.
    """
    found: dict[str, Any] = {}
    for name, value in model.items():
        path = place(name, tied=tied)
        if path is None:
            raise ValueError(f"{name} has no legacy name")
        inner = found
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return found


def flat(path: Path, model: Mapping[str, Any]) -> dict[str, Any]:
    """One chunk under our names; the way back of `nested`. Raises MsrlError for names that are not
    known; `path` is for it.
    """
    found: dict[str, Any] = {}
    for name, value in _leaves(model, ""):
        if not name.endswith(("_extra_state", ".inv_freq")):
            found[_our_name(path, name)] = value
    return found


def _leaves(model: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in model.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _our_name(path: Path, name: str) -> str:
    if name in _OURS_OUTSIDE:
        return _OURS_OUTSIDE[name]
    match = _LAYER.fullmatch(name.removeprefix("language_model."))
    if match is None or match[3] not in _OURS_INSIDE:
        raise MsrlError(f"{path}: tensor {name} of Megatron's old models is not known")
    return f"decoder.layers.{match[2]}.{_OURS_INSIDE[match[3]]}"
