"""Reward models: a decoder with one score per token in place of an output layer, in Hugging Face's names and in MindSpeed's.

    score.weight      [1, hidden]   transformers' ...ForSequenceClassification with num_labels 1; the score is that of the last token
    rm_head.weight    [1, hidden]   MindSpeed-LLM's outcome reward model (`--orm`), cut along hidden
    rm_head.bias      [1]           a bias that transformers' classes do not have: zero, the same on every rank

Source: `GenericForSequenceClassification` in transformers.modeling_layers; `rm_head` in MindSpeed-LLM 2.0's checkpoint converter.
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


def is_scoring(architecture: str) -> bool:
    """Whether an architecture's name is that of a model with a score head."""
    return architecture.endswith(_SCORING)


def base_architecture(architecture: str) -> str:
    """The architecture of the same decoder with an output layer, by which its family is known."""
    return architecture.removesuffix(_SCORING) + _GENERATING if is_scoring(architecture) else architecture


def base_config(config: HfConfig) -> HfConfig:
    """The config of the decoder. Raises MsrlError for a model with anything but one score."""
    labels: object = config.values.get("id2label")
    count = config.values.get("num_labels", len(cast("Mapping[str, object]", labels)) if isinstance(labels, Mapping) else 2)
    if count != 1:
        key = "num_labels" if "num_labels" in config.values else "id2label"
        config.fail(key, f"makes {count} scores (transformers' default is 2); a reward model has one: num_labels must be 1")
    return replace(config, values={**config.values, "architectures": [base_architecture(config.architecture())]})


def has_classifier(architecture: str) -> bool:
    """Whether there is a name for the same decoder with a score head."""
    return architecture.endswith((_SCORING, _GENERATING))


def scoring_config(values: Mapping[str, object]) -> dict[str, object]:
    """The config.json of a decoder with a score head, from that of the one with an output layer."""
    names = cast("list[str]", values["architectures"])
    scoring = [name.removesuffix(_GENERATING) + _SCORING for name in names]
    return {**values, "architectures": scoring, "num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def with_score(shape: Shape, architecture: str) -> Shape:
    """The shape of the decoder with a score head; nothing of it is tied to the embedding."""
    return replace(shape, architecture=architecture, tie_word_embeddings=False, reward_head=True)


def with_score_rules(rules: Rules, shape: Shape) -> Rules:
    """The rules of the decoder with the score head's for those of the output layer."""
    head = (Rule(WEIGHT, ("score.weight",), Sharded(1), ((1, shape.hidden_size),)), Rule(BIAS, (), Zeros(1), ()))
    return replace(rules, last=(*(rule for rule in rules.last if rule.mcore != OUTPUT_LAYER), *head))
