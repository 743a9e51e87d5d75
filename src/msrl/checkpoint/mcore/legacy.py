"""Tensor names of Megatron's models before megatron-core ("legacy"), nested by module.

    model = {"language_model": {"embedding": {"word_embeddings": {"weight"}},
                                "encoder": {"layers.0.input_norm.weight", ..., "final_norm.weight"},
                                "output_layer": {"weight"}},     # unless tied to the embedding
             "word_embeddings_for_head": {"weight"}}    # if tied, on the last of several stages

The order of q, k and v in a query group, and of gate and up, is the same as in megatron-core
(checkpoint version 3.0), so only the names differ. Source:
`TransformerLanguageModel.state_dict_for_save_checkpoint` in
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
_LOCAL_INSIDE = {legacy: local for local, legacy in _INSIDE.items()}
_LOCAL_OUTSIDE = {".".join(path): local for local, path in _OUTSIDE.items()} | {
    ".".join(_TIED_OUTPUT): "output_layer.weight"
}


def is_legacy(model: Mapping[str, Any]) -> bool:
    """Return True if a file's model is nested by the modules of legacy models."""
    return isinstance(model.get("language_model"), Mapping)


def _legacy_path(name: str, *, tied: bool) -> tuple[str, ...] | None:
    """Return the keys of a tensor in a legacy model; None if there is no such tensor.

    `name` is msrl's name inside a virtual stage.
    """
    if name == "output_layer.weight" and tied:
        return _TIED_OUTPUT
    match = _LAYER.fullmatch(name)
    if match is None:
        return _OUTSIDE.get(name)
    inside = _INSIDE.get(match[3])
    return None if inside is None else ("language_model", "encoder", f"layers.{match[2]}.{inside}")


def refuse_unnamed(names: Iterable[str], architecture: str) -> None:
    """Raise MsrlError for tensors without a legacy name.

    `names` are those inside a virtual stage.
    """
    kinds = {
        re.sub(r"\.layers\.\d+\.", ".layers.*.", name)
        for name in names
        if _legacy_path(name, tied=False) is None
    }
    if kinds:
        examples = ", ".join(sorted(kinds)[:3])
        raise MsrlError(
            f"--names legacy: legacy models have no name for {examples} of {architecture}. "
            "Use --names local or te."
        )


def to_legacy(model: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """Return the legacy form of one virtual stage of a rank.

    Raises:
        ValueError: A tensor has no legacy name (see `refuse_unnamed`).
    """
    result: dict[str, Any] = {}
    for name, value in model.items():
        path = _legacy_path(name, tied=tied)
        if path is None:
            raise ValueError(f"{name} has no legacy name")
        inner = result
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return result


def from_legacy(path: Path, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return one virtual stage under msrl's names; the inverse of `to_legacy`.

    Raises:
        MsrlError: A name is unknown; `path` is the file in the message.
    """
    result: dict[str, Any] = {}
    for name, value in _leaves(model, ""):
        if not name.endswith(("_extra_state", ".inv_freq")):
            result[_local_name(path, name)] = value
    return result


def _leaves(model: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in model.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _local_name(path: Path, name: str) -> str:
    if name in _LOCAL_OUTSIDE:
        return _LOCAL_OUTSIDE[name]
    match = _LAYER.fullmatch(name.removeprefix("language_model."))
    if match is None or match[3] not in _LOCAL_INSIDE:
        raise MsrlError(f"{path}: unknown legacy tensor {name}")
    return f"decoder.layers.{match[2]}.{_LOCAL_INSIDE[match[3]]}"
