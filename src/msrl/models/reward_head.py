"""Reward models: decoders with one score per token instead of an output layer.

    score.weight      [1, hidden]   Hugging Face: ...ForSequenceClassification with num_labels 1;
                                    the last token's score counts
    rm_head.weight    [1, hidden]   MindSpeed-LLM's outcome reward model (`--orm`), sharded along
                                    hidden
    rm_head.bias      [1]           MindSpeed-LLM only: zero, the same on every rank; absent in
                                    transformers

Source: `GenericForSequenceClassification` in transformers.modeling_layers; `rm_head` in
MindSpeed-LLM 2.0's checkpoint converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from msrl.models.hf_config import HfConfig
from msrl.models.rules import Rule, Rules, Sharded, Zeros
from msrl.models.shape import Shape

_SCORING, _GENERATING = "ForSequenceClassification", "ForCausalLM"
OUTPUT_LAYER = "output_layer.weight"
WEIGHT, BIAS = "rm_head.weight", "rm_head.bias"
HF_WEIGHT = "score.weight"


def is_scoring(architecture: str) -> bool:
    """Return True if an architecture's name means a model with a score head."""
    return architecture.endswith(_SCORING)


def base_architecture(architecture: str) -> str:
    """Return the architecture of the same decoder with an output layer, to look up its family."""
    return (
        architecture.removesuffix(_SCORING) + _GENERATING
        if is_scoring(architecture)
        else architecture
    )


def base_config(config: HfConfig) -> HfConfig:
    """Return the config of the decoder.

    Raises:
        MsrlError: The model does not have exactly one score.
    """
    labels: object = config.values.get("id2label")
    default = len(cast("Mapping[str, object]", labels)) if isinstance(labels, Mapping) else 2
    count = config.values.get("num_labels", default)
    if count != 1:
        key = "num_labels" if "num_labels" in config.values else "id2label"
        config.fail(
            key,
            f"means {count} scores (transformers' default is 2). A reward model needs num_labels 1",
        )
    return replace(
        config,
        values={**config.values, "architectures": [base_architecture(config.architecture())]},
    )


def has_classifier(architecture: str) -> bool:
    """Return True if `architecture` has a counterpart with a score head in transformers."""
    return architecture.endswith((_SCORING, _GENERATING))


def scoring_architecture(architecture: str) -> str:
    """Return the architecture of the same decoder with a score head.

    It keeps its name if transformers has no such class.
    """
    if not has_classifier(architecture):
        return architecture
    return base_architecture(architecture).removesuffix(_GENERATING) + _SCORING


def scoring_config(values: Mapping[str, object]) -> dict[str, object]:
    """Return the config.json of a decoder with a score head, given the one without."""
    names = cast("list[str]", values["architectures"])
    return {
        **values,
        "architectures": [scoring_architecture(name) for name in names],
        "num_labels": 1,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }


def with_score(shape: Shape, architecture: str) -> Shape:
    """Return the shape of the decoder with a score head, which is not tied to the embedding."""
    return replace(shape, architecture=architecture, tie_word_embeddings=False, reward_head=True)


def with_score_rules(rules: Rules, shape: Shape) -> Rules:
    """Return the rules of the decoder with a score head instead of the output layer."""
    head = (
        Rule(WEIGHT, (HF_WEIGHT,), Sharded(1), ((1, shape.hidden_size),)),
        Rule(BIAS, (), Zeros(1), ()),
    )
    return replace(
        rules, last=(*(rule for rule in rules.last if rule.mcore != OUTPUT_LAYER), *head)
    )
