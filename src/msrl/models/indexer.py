"""Config keys of indexers, which choose the keys of every query (DeepSeek V3.2, GLM-5)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from msrl.models.hf_config import HfConfig
from msrl.models.shape import Indexer, Layer, Mla, Shape

_LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")  # one name per transformers 5.x
_KINDS = {"F": "full", "S": "shared"}


def with_indexers(
    config: HfConfig,
    shape: Shape,
    *,
    num_heads: int,
    interleaved: bool,
    is_shared: Sequence[bool] = (),
) -> Shape:
    """Return the shape of a model whose latent attention has indexers.

    `num_heads` is the default of the family's config class, `interleaved` tells how its indexers
    rotate, and `is_shared` which layers take the choice of a layer before them (() means none).

    Raises:
        MsrlError: A size is missing or does not fit, or a layer has another kind of attention.
    """
    _check_layer_types(config, shape.num_layers)
    mla = shape.mla
    assert mla is not None
    if mla.q_lora_rank is None:
        config.fail("q_lora_rank", "must be set: the indexer's queries come from this latent")
    indexer = Indexer(
        num_heads=config.count("index_n_heads", num_heads),
        head_dim=config.count("index_head_dim", 128),
        top_k=config.count("index_topk", 2048),
        rotary=replace(mla.rotary, interleaved=interleaved),
    )
    if indexer.head_dim < mla.rope_head_dim:
        config.fail(
            "index_head_dim",
            f"is less than qk_rope_head_dim={mla.rope_head_dim}, the channels that it rotates",
        )

    @functools.cache
    def indexed(layer: Layer, is_shared: bool) -> Layer:
        mixer = cast("Mla", layer.mixer)
        return replace(layer, mixer=replace(mixer, indexer=replace(indexer, is_shared=is_shared)))

    shared = is_shared or [False] * shape.num_layers
    return replace(shape, layers=tuple(map(indexed, shape.layers, shared)))


def _check_layer_types(config: HfConfig, count: int) -> None:
    kinds: Any = config.values.get("layer_types")
    if kinds is None:
        return
    listed = cast("list[object]", kinds) if isinstance(kinds, list) else []
    if len(listed) != count or not all(kind in _LAYER_TYPES for kind in listed):
        config.fail("layer_types", f"must contain {_LAYER_TYPES[0]} for each of the {count} layers")


def choosing_layer(shape: Shape, layer: int) -> int:
    """Return the number of the layer whose indexer chooses the keys of a layer."""
    mixers = [cast("Mla", shape.layers[number].mixer) for number in range(layer + 1)]
    return max(number for number, mixer in enumerate(mixers) if mixer.has_indexer_weights)


def shared_layers(config: HfConfig) -> tuple[bool, ...]:
    """Return for each layer if it takes the choice of a layer before it, as GLM-5.2 has them.

    transformers reads `indexer_types`. Without it, and in vLLM, a text `index_topk_pattern` of F
    and S decides, or else `index_topk_freq` and `index_skip_topk_offset`.

    Raises:
        MsrlError: A value is invalid, they contradict each other, or the first layer is shared.
    """
    count = config.count("num_hidden_layers")
    types, pattern = (config.values.get(key) for key in ("indexer_types", "index_topk_pattern"))
    has_period = config.values.get("index_topk_freq") is not None
    derived = _periodic(config, count)
    if pattern is not None:
        derived = _listed(config, "index_topk_pattern", count)
    if types is not None:
        listed = _listed(config, "indexer_types", count)
        if (pattern is not None or has_period) and listed != derived:
            key = "index_topk_pattern" if pattern is not None else "index_topk_freq"
            config.fail(key, "contradicts indexer_types. vLLM reads it, transformers the other")
        derived = listed
    if derived[0] == "shared":
        config.fail(
            "indexer_types" if types is not None else "index_topk_pattern",
            "the first layer must be full, since no layer before it chooses keys",
        )
    return tuple(kind == "shared" for kind in derived)


def _listed(config: HfConfig, key: str, count: int) -> tuple[str, ...]:
    """Return the kind of each layer that a key lists, as names or as a text of F and S."""
    value: Any = config.values[key]
    is_text = isinstance(value, str) and key == "index_topk_pattern"
    listed = [*cast("Any", value)] if is_text or isinstance(value, list) else []
    kinds = tuple(_KINDS.get(kind, kind) if is_text else kind for kind in map(str, listed))
    if len(kinds) != count or not all(kind in _KINDS.values() for kind in kinds):
        config.fail(key, f"must say full or shared for each of the {count} layers")
    return kinds


def _periodic(config: HfConfig, count: int) -> tuple[str, ...]:
    """Return the kinds of layers where every `index_topk_freq`-th one is full after an offset."""
    period = config.count("index_topk_freq", 1)
    offset = config.values.get("index_skip_topk_offset", 2)
    if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
        config.fail("index_skip_topk_offset", "must be an integer, 0 or more")
    return tuple(
        "shared" if max(layer - offset + 1, 0) % period else "full" for layer in range(count)
    )
