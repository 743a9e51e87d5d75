"""Rotary settings of a config equal transformers', or they are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import families
from families import FAMILIES, GEMMA3
from llama_like import LLAMA_LIKE, PHI4_MINI
from mixture_families import MIXTURES
from msrl.errors import MsrlError
from msrl.models.families import shape_from_config
from msrl.models.hf_config import HfConfig
from msrl.models.shape import LinearRopeScaling, Llama3RopeScaling, Shape, YarnRopeScaling
from support import mentions

ROWS = {**FAMILIES, **MIXTURES}
NAMES = ("qwen2.5", "glm 4 0414", "gemma 2", "mixtral", "deepseek v3", "gpt-oss")
KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
LINEAR = {"type": "linear", "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 2e6}

EQUAL: dict[str, dict[str, Any]] = {
    "theta": {"rope_theta": 5e5},
    "parameters": {"rope_parameters": DEFAULT},
    "parameters without a type": {"rope_parameters": {"rope_theta": 2e6}},
    "parameters and the same theta above": {"rope_parameters": DEFAULT, "rope_theta": 2e6},
    "parameters without theta": {"rope_parameters": YARN, "rope_theta": 5e5},
    "parameters with the default theta": {"rope_parameters": YARN},
    "llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    "scaling": {"rope_scaling": LINEAR, "rope_theta": 5e5},
    "scaling of null": {"rope_scaling": None, "rope_theta": 5e5},
    "empty scaling": {"rope_scaling": {}, "rope_parameters": DEFAULT},
    "parameters of null": {"rope_parameters": None, "rope_scaling": YARN, "rope_theta": 5e5},
    "scaling with the same theta": {
        "rope_parameters": DEFAULT, "rope_scaling": {**YARN, "rope_theta": 2e6}},
    "scaling with the same theta above": {
        "rope_parameters": DEFAULT, "rope_scaling": YARN, "rope_theta": 2e6},
    "yarn without the original length": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 5e5},
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "scaling that replaces theta": (
        {"rope_parameters": DEFAULT, "rope_scaling": YARN}, "rope_parameters.rope_theta"),
    "another theta above": ({"rope_parameters": DEFAULT, "rope_theta": 5e5}, "rope_theta"),
    "another theta above the scaling": (
        {"rope_scaling": {**YARN, "rope_theta": 2e6}, "rope_theta": 5e5}, "rope_theta"),
    "another fraction above": (
        {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5},
        "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    "two scalings": (
        {"rope_parameters": YARN, "rope_scaling": LINEAR, "rope_theta": 2e6},
        "rope_parameters.rope_type"),
    "by layer type": (
        {"rope_parameters": {"full_attention": DEFAULT, "sliding_attention": DEFAULT}},
        "rope_parameters.full_attention"),
    "theta of null": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        "rope_parameters.rope_theta"),
    "an original length that only vllm reads": (
        {"rope_scaling": YARN, "original_max_position_embeddings": 64},
        "original_max_position_embeddings"),
    "a setting of vllm": ({"rope_theta": 5e5, "rotary_pct": 0.5}, "rotary_pct"),
    "ntk by alpha": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000}}, "rope_scaling.alpha"),
    "trained positions of vllm": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, "max_trained_positions": 64}},
        "rope_scaling.max_trained_positions"),
    "a factor that is no float": (
        {"rope_scaling": {"type": "linear", "factor": 10**400}}, "rope_scaling.factor"),
    "a factor of text": (
        {"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor"),
    "yarn without a factor": ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor"),
    "an original length of null": (
        {"rope_scaling": {**YARN, "original_max_position_embeddings": None}},
        "rope_scaling.original_max_position_embeddings"),
    "an original length with a fraction": (
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 12.5}},
        "rope_scaling.original_max_position_embeddings"),
    "theta of null at the top level": ({"rope_theta": None}, "rope_theta"),
    "layer types of null": (
        {"rope_parameters": {"full_attention": None}}, "rope_parameters.full_attention"),
    "parameters of a list": ({"rope_parameters": []}, "rope_parameters"),
    "lists of factors": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0]}},
        "longrope"),
}  # fmt: skip


def config_with(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    row: Any = ROWS[name]
    config = copy.deepcopy(dict(getattr(row, "config", row)))
    for key in KEYS:
        config.pop(key, None)
    return {**config, **copy.deepcopy(settings)}


def settings_of(shape: Shape) -> dict[str, Any]:
    """Return the settings in the form of transformers' `rope_parameters`."""
    scaling = shape.rotary.scaling
    kinds = {YarnRopeScaling: "yarn", LinearRopeScaling: "linear", Llama3RopeScaling: "llama3"}
    settings = {"rope_theta": shape.rotary.theta, "rope_type": kinds.get(type(scaling), "default")}
    for key in ("factor", "original_max_position_embeddings"):
        if hasattr(scaling, key):
            settings[key] = getattr(scaling, key)
    return settings


@pytest.mark.sample(30)
@pytest.mark.parametrize("case", EQUAL)
@pytest.mark.parametrize("name", NAMES)
def test_rotary_settings_are_those_of_transformers(name: str, case: str, tmp_path: Path):
    from transformers import AutoConfig

    config = config_with(name, EQUAL[case])
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = AutoConfig.from_pretrained(tmp_path).rope_parameters
    settings = settings_of(shape_from_config(HfConfig(config, "config.json")))
    assert settings == {key: expected[key] for key in settings}


@pytest.mark.sample(13)
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", ["qwen2.5", "gemma 2"])
def test_rotary_settings_without_one_meaning_are_refused(name: str, case: str):
    settings, key = REFUSED[case]
    with pytest.raises(MsrlError, match=mentions(key)):
        shape_from_config(HfConfig(config_with(name, settings), "config.json"))


BOTH = [
    ({"rope_theta": 5e5}, "rope_theta"),
    ({"rope_local_base_freq": 5e3}, "rope_local_base_freq"),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "factor"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters.rope_type"),
    ({"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention"),
]
BY_KIND = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def test_rotary_bases_by_layer_are_equal_in_the_spelling_of_both_versions() -> None:
    old = GEMMA3
    new = {key: value for key, value in old.items() if "rope" not in key}
    expected = families.shape(old)
    assert families.shape({**new, "rope_parameters": BY_KIND}) == expected
    assert families.shape({**old, "rope_parameters": BY_KIND}) == expected
    bases = [(layer.mixer.window, layer.mixer.rotary.theta) for layer in expected.layers]
    assert bases == [(8, 1e4), (8, 1e4), (None, 1e6), (8, 1e4)]
    assert [rotary.scaling for rotary in expected.rotaries] == [None, LinearRopeScaling(8.0)]


@pytest.mark.parametrize(("changes", "key"), BOTH)
def test_rotary_bases_of_both_spellings_with_different_values_are_refused(
    changes: dict[str, Any], key: str
) -> None:
    config = {**GEMMA3, "rope_parameters": BY_KIND, **changes}
    with pytest.raises(MsrlError, match=mentions(key)):
        families.shape(config)


FLAT = [name for name, row in LLAMA_LIKE.items() if row.architecture != "Olmo3ForCausalLM"]


def _in_parameters(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return a config with its rotary settings as transformers 5 writes them."""
    others = {key: value for key, value in config.items() if not key.startswith("rope_")}
    table = {**(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta", 1e4)}
    return {**others, "rope_parameters": {**table, **changes}}


@pytest.mark.parametrize("name", FLAT)
def test_rotary_settings_have_two_spellings_with_one_meaning(name: str) -> None:
    old = LLAMA_LIKE[name].config
    assert families.shape(_in_parameters(old)) == families.shape(old)
    both = _in_parameters(old, rope_theta=123.0) | {"rope_scaling": LINEAR, "rope_theta": 5e5}
    with pytest.raises(MsrlError, match=mentions("rope_parameters")):
        families.shape(both)


LONG = PHI4_MINI["rope_scaling"]


def test_a_long_rope_depends_on_the_length_and_has_a_factor_of_transformers() -> None:
    scaling = families.shape(PHI4_MINI).rotary.scaling
    assert scaling.attention_factor == pytest.approx(
        1.40105, rel=1e-5
    )  # sqrt(1 + ln(512 / 24) / ln 24)
    assert families.shape(PHI4_MINI).rotary.constant_length == 24
    equal = {**LONG, "long_factor": LONG["short_factor"]}
    assert families.shape(PHI4_MINI, rope_scaling=equal).rotary.constant_length is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {**LONG, "long_factor": [1.0] * 5}}, ("rope_scaling", "6 factors")),
        ({"rope_scaling": {**LONG, "long_factor": 2.0}}, ("rope_scaling.long_factor",)),
        ({"rope_scaling": {**LONG, "short_factor": [0] * 6}}, ("rope_scaling.short_factor",)),
        ({"rope_scaling": {**LONG, "short_mscale": 1.2}}, ("rope_scaling.short_mscale",)),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 24}}, ("longrope",)),
        (
            {"rope_scaling": {**LONG, "original_max_position_embeddings": 48}},
            ("original_max_position_embeddings=24",),
        ),
    ],
)
def test_a_long_rope_without_one_meaning_is_refused(
    changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(MsrlError, match=mentions(*words)):
        families.shape(PHI4_MINI, **changes)
