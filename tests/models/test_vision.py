"""Shapes and weight rules of vision towers, and their tensors in checkpoints of both kinds."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import families
from families import FAMILIES
from mixture_families import MIXTURES
from msrl.checkpoint.convert import McoreTarget, write_hf, write_mcore
from msrl.checkpoint.hf.pass_through import FILE as CARRIED
from msrl.checkpoint.source import ShardedSource, open_mcore, open_weights
from msrl.checkpoint.torch_files.reader import read_torch_file
from msrl.config.sections.train import LoraConfig
from msrl.errors import MsrlError
from msrl.models.families import all_rules
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.select import check_layers, is_layer, select_names
from msrl.models.vision.tensors import is_tower
from msrl.verification.bits import compare, find_unequal_copies
from support import mentions

TOWERS = (
    *("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5, language model", "qwen3-vl moe"),
    *("internvl", "internvl, qwen3"),
)
ROWS = FAMILIES | MIXTURES
CONFIGS = {name: ROWS[name].config for name in TOWERS}
TARGETS = {
    "tp2 pp2": McoreTarget(ParallelLayout(2, 2)),
    "virtual stages": McoreTarget(ParallelLayout(pp=2, vpp=1)),
    "distributed": McoreTarget(distributed=True),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("towers")
    return families.save_models(root, {name: ROWS[name] for name in TOWERS})


def with_vision(name: str, **changes: object) -> dict[str, object]:
    """Return changes of a config that change its `vision_config`."""
    return {"vision_config": CONFIGS[name]["vision_config"] | changes}


@pytest.mark.parametrize("name", TOWERS)
def test_the_rules_have_the_tensors_of_transformers(name: str) -> None:
    import transformers

    config = CONFIGS[name]
    model_class = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = model_class(model_class.config_class(**copy.deepcopy(config))).model
    if name.startswith("internvl"):
        tensors = model.vision_tower.state_dict()
        projector = model.multi_modal_projector.state_dict()
        tensors |= {f"multi_modal_projector.{key}": each for key, each in projector.items()}
    else:
        tensors = model.visual.state_dict()
    rules = [rule for rule in all_rules(families.shape(config)) if is_tower(rule)]
    shapes = {rule.mcore.removeprefix("vision_model."): rule.shapes[0] for rule in rules}
    assert shapes == {key: tuple(value.shape) for key, value in tensors.items()}


def test_pairs_of_channels_turn_by_sections_or_alternate() -> None:
    """Qwen3-VL's sections of 8, 4 and 4 pairs alternate up to the twelfth one."""
    contiguous, alternating = (families.shape(CONFIGS[n]).rotary.axes for n in TOWERS[1:3])
    assert contiguous == (0, 0, 1, 1, 1, 2, 2, 2)
    assert alternating == (0, 1, 2) * 4 + (0, 0, 0, 0)


def test_absent_keys_have_the_defaults_of_transformers() -> None:
    text = {"vision_config": {}, "hidden_size": 3584, "num_attention_heads": 224}
    text["image_token_id"] = None
    tower = families.shape(CONFIGS["qwen2-vl"], **text).vision
    assert (tower.depth, tower.hidden_size, tower.ffn_hidden_size) == (32, 1280, 5120)
    assert (tower.patch_size, tower.merge_size, tower.image_token_id) == (14, 2, 151655)


BAD = [
    ("qwen2.5-vl", with_vision("qwen2.5-vl", out_hidden_size=48), ("out_hidden_size=48", "64")),
    ("qwen2-vl", with_vision("qwen2-vl", hidden_size=48), ("hidden_size=48", "64")),
    ("qwen2.5-vl", with_vision("qwen2.5-vl", hidden_act="gelu"), ("hidden_act", "silu")),
    ("qwen2.5-vl", with_vision("qwen2.5-vl", num_heads=3), ("hidden_size=32", "num_heads=3")),
    ("qwen2.5-vl", with_vision("qwen2.5-vl", window_size=8), ("window_size=8",)),
    ("qwen2.5-vl", with_vision("qwen2.5-vl", fullatt_block_indexes=[7]), ("fullatt_block",)),
    ("qwen3-vl", with_vision("qwen3-vl", deepstack_visual_indexes=0), ("deepstack_visual",)),
    ("qwen3-vl", with_vision("qwen3-vl", rope_parameters={"rope_type": "linear"}), ("axial",)),
    ("qwen3-vl", {"image_token_id": "<image>"}, ("image_token_id",)),
    ("qwen3-vl", {"vision_config": 3}, ("vision_config",)),
    ("internvl", {"text_config": {"model_type": "gpt_oss"}}, ("gpt_oss", "qwen2, qwen3")),
    ("internvl", {"downsample_ratio": 0.25}, ("downsample_ratio=0.25",)),
    ("internvl", {"image_seq_length": 256}, ("image_seq_length=256", "4")),
    ("internvl", with_vision("internvl", image_size=[56, 28]), ("image_size", "twice")),
    ("internvl", with_vision("internvl", image_size=42), ("image_size=42", "28")),
    ("internvl", with_vision("internvl", use_mean_pooling=False), ("use_mean_pooling",)),
    ("internvl", with_vision("internvl", norm_type="batch_norm"), ("norm_type",)),
    ("internvl", with_vision("internvl", num_attention_heads=3), ("num_attention_heads=3",)),
]


@pytest.mark.parametrize(("name", "changes", "message"), BAD)
def test_towers_that_are_not_supported_are_refused_by_key(
    name: str, changes: dict[str, object], message: tuple[str, ...]
) -> None:
    with pytest.raises(MsrlError, match=mentions(*message)):
        families.shape(CONFIGS[name], **changes)


def test_sections_in_the_order_of_another_family_are_refused() -> None:
    sections = {"type": "mrope", "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    with pytest.raises(MsrlError, match=mentions("mrope_interleaved")):
        families.shape(CONFIGS["qwen2.5-vl"], rope_scaling=sections)


@pytest.mark.sample(6)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("name", TOWERS)
def test_towers_convert_both_ways_bit_for_bit(
    tmp_path: Path, folders: dict[str, Path], name: str, target: McoreTarget
) -> None:
    source = open_weights(folders[name])
    write_mcore(source, tmp_path / "mcore", target)
    result = open_weights(tmp_path / "mcore")
    assert compare(source, result, None).different == ()
    if isinstance(result, ShardedSource) and result.layout.tp > 1:
        num_copies, unequal = find_unequal_copies(result)
        assert num_copies > len(families.shape(CONFIGS[name]).layers)
        assert not unequal
    write_hf(result, tmp_path / "hf", None)
    before, after = (load_file(x / "model.safetensors") for x in (folders[name], tmp_path / "hf"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_checkpoints_with_the_tower_in_a_separate_file_load(
    tmp_path: Path, folders: dict[str, Path], target: McoreTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions wrote the tower unchanged beside config and tokenizer."""
    source, save = open_weights(folders["qwen3-vl"]), tmp_path / "mcore"
    with monkeypatch.context() as patch:
        patch.setattr("msrl.models.families.with_tower_rules", lambda rules, vision: rules)
        families_cache_clear()
        write_mcore(source, save, target)
    families_cache_clear()
    tower = {
        rule.hf[0]: source.hf_tensors(rule)[0].clone()
        for rule in all_rules(source.shape)
        if is_tower(rule)
    }
    save_file(tower, save / "hf" / CARRIED)
    result = open_weights(save)
    assert compare(source, result, None).different == ()
    write_mcore(result, tmp_path / "again", McoreTarget(ParallelLayout(2)))
    assert not (tmp_path / "again" / "hf" / CARRIED).exists()
    assert compare(source, open_weights(tmp_path / "again"), None).different == ()
    (save / "hf" / CARRIED).unlink()
    with pytest.raises(MsrlError, match=mentions("model.visual.*", "--hf-config")):
        open_weights(save)
    assert compare(source, open_mcore(save, folders["qwen3-vl"]), None).different == ()


def families_cache_clear() -> None:
    from msrl.models.families import rules_for

    rules_for.cache_clear()


def test_the_tower_is_on_every_rank_of_the_first_stage(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    write_mcore(open_weights(folders["qwen2-vl"]), tmp_path, McoreTarget(ParallelLayout(2, 2)))
    files = {
        path.parent.name: read_torch_file(path)["model"] for path in tmp_path.rglob("model*.pt")
    }
    assert len(files) == 4
    for name, tensors in files.items():
        is_first = name.endswith("_000")
        assert any(key.startswith("vision_model.blocks.1.") for key in tensors) is is_first


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "internvl"])
def test_files_with_the_other_form_of_names_are_read(
    tmp_path: Path, folders: dict[str, Path], name: str
) -> None:
    tensors = load_file(folders[name] / "model.safetensors")
    if name == "qwen3-vl":
        renamed = {key.replace("model.visual.", "visual."): each for key, each in tensors.items()}
    elif name == "internvl":
        renamed = {
            f"model.{key}".replace("language_model.model.", "language_model.").replace(
                "model.language_model.lm_head.", "lm_head."
            ): each
            for key, each in tensors.items()
        }
    else:
        renamed = {
            f"model.{key}"
            if key.startswith("visual.")
            else key.replace("model.", "model.language_model."): each
            for key, each in tensors.items()
        }
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    assert compare(open_weights(folders[name]), open_weights(tmp_path), None).different == ()


@pytest.mark.parametrize("name", [name for name in TOWERS if not name.endswith("moe")])
def test_default_adapters_skip_the_tower(name: str) -> None:
    shape = families.shape(CONFIGS[name])
    check_layers(shape, LoraConfig().targets, key="train.lora.targets")
    adapted = [r for r in all_rules(shape) if is_layer(r.mcore, r.hf, LoraConfig().targets)]
    assert adapted and not any(is_tower(rule) for rule in adapted)


def test_adapters_in_the_tower_are_refused_by_name() -> None:
    shape = families.shape(CONFIGS["qwen2-vl"])
    with pytest.raises(MsrlError, match=mentions("train.lora.targets=qkv", "vision tower")):
        check_layers(shape, ("linear_qkv", "qkv"), key="train.lora.targets")


def test_adapters_of_packed_experts_are_refused_beside_dense_layers_of_their_names() -> None:
    shape = families.shape(MIXTURES["qwen3-vl moe"].config)
    for target in ("linear_fc1", "linear_fc2"):
        with pytest.raises(MsrlError, match=mentions(f"targets={target}", "packed", "linear_qkv")):
            check_layers(shape, ("linear_qkv", target), key="train.lora.targets")
    check_layers(shape, ("linear_qkv", "linear_proj"), key="train.lora.targets")


def test_patterns_select_the_tower_and_its_projector() -> None:
    shape = families.shape(CONFIGS["qwen2.5-vl"])
    tower = {rule.mcore for rule in all_rules(shape) if is_tower(rule)}
    assert select_names(shape, ["visual.*"], key="train.freeze") == tower
    merger = select_names(shape, ["vision_model.merger.*"], key="train.freeze")
    assert merger and merger < tower
