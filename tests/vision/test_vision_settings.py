"""Settings of images in the files of a model's folder."""

import dataclasses
import json

import pytest

from msrl.errors import MsrlError
from msrl.vision.settings import from_json, has_vision, read_vision_settings
from support import assert_mentions
from vision_folders import CONFIG, PROCESSOR, write_folder


def without(*keys):
    return {key: value for key, value in PROCESSOR.items() if key not in keys}


def test_old_and_new_names_of_the_limits_are_equal(tmp_path):
    plain = without("min_pixels", "max_pixels")
    size = {"shortest_edge": 3136, "longest_edge": 200704}
    folders = [
        write_folder(tmp_path / "old"),
        write_folder(tmp_path / "both", PROCESSOR | {"size": {"shortest_edge": 1}}),
        write_folder(tmp_path / "new", plain | {"size": size}),
        write_folder(
            tmp_path / "nested",
            {"image_processor": plain | {"size": size}, "processor_class": "X"},
            name="processor_config.json",
        ),
        write_folder(
            tmp_path / "first",
            plain | {"size": {"min_pixels": 3136, "max_pixels": 200704}},
        ),
    ]
    settings = {read_vision_settings(folder) for folder in folders}
    assert len(settings) == 1
    (only,) = settings
    assert (only.min_pixels, only.max_pixels, only.resample, only.factor) == (3136, 200704, 3, 28)
    assert (only.image_token_id, only.vision_start_token_id, only.vision_end_token_id) == (6, 3, 4)


def test_the_processor_of_transformers_5_comes_first(tmp_path):
    folder = write_folder(tmp_path / "m", PROCESSOR | {"max_pixels": 1_000_000})
    nested = {"image_processor": PROCESSOR | {"max_pixels": 400_000}}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    assert read_vision_settings(folder).max_pixels == 400_000
    (folder / "processor_config.json").write_text('{"processor_class": "Qwen2_5_VLProcessor"}')
    assert read_vision_settings(folder).max_pixels == 1_000_000


def test_limits_can_be_changed_and_a_manifest_has_all_settings(tmp_path):
    settings = read_vision_settings(write_folder(tmp_path / "m"))
    changed = settings.with_limits(None, 50_000)
    assert changed.max_pixels == 50_000 and changed.min_pixels == settings.min_pixels
    assert settings.differences(changed) == ["max_pixels"]
    assert from_json(json.loads(json.dumps(changed.as_json()))) == changed
    with pytest.raises(MsrlError) as error:
        settings.with_limits(300_000, None)
    assert_mentions(error.value, "min_pixels=300000", "max_pixels")
    for values in ({}, settings.as_json() | {"patch_size": "14"}, {"image_mean": 3}):
        with pytest.raises(ValueError, match="settings of images"):
            from_json(values)


@pytest.mark.parametrize(
    ("processor", "config", "words"),
    [
        ({"image_processor_type": "Gemma3ImageProcessor"}, {}, ("image_processor_type", "Gemma3")),
        (PROCESSOR | {"do_resize": False}, {}, ("do_resize=false",)),
        (PROCESSOR | {"do_center_crop": True}, {}, ("do_center_crop=true",)),
        (PROCESSOR | {"rescale_factor": 1}, {}, ("rescale_factor=1",)),
        (PROCESSOR | {"patch_size": 16}, {}, ("patch_size=16", "vision tower")),
        (PROCESSOR | {"patch_size": 1 << 30}, {}, ("patch_size", "limit")),
        (PROCESSOR | {"merge_size": 0}, {}, ("merge_size=0",)),
        (PROCESSOR | {"min_pixels": 900_000}, {}, ("min_pixels=900000", "max_pixels")),
        (PROCESSOR | {"image_mean": [0.5]}, {}, ("image_mean", "three")),
        (PROCESSOR | {"image_std": [0.5, 0, 0.5]}, {}, ("image_std",)),
        (PROCESSOR | {"resample": 9}, {}, ("resample=9",)),
        (PROCESSOR | {"size": 3}, {}, ("size=3",)),
        ({}, {"image_token_id": "x"}, ("image_token_id",)),
        ({}, {"architectures": ["Gemma3ForConditionalGeneration"]}, ("both directions",)),
        ({}, {"architectures": ["Mistral3ForConditionalGeneration"]}, ("Mistral 3", "text only")),
        ([], {}, ("JSON object",)),
    ],
)  # fmt: skip
def test_a_processor_that_is_not_supported_is_one_line(tmp_path, processor, config, words):
    folder = write_folder(tmp_path / "m", processor, config)
    with pytest.raises(MsrlError) as error:
        read_vision_settings(folder)
    assert_mentions(error.value, str(folder), *words)
    assert "\n" not in str(error.value)


def test_a_folder_without_tower_or_processor_is_one_line(tmp_path):
    folder = write_folder(tmp_path / "m")
    assert has_vision(folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(MsrlError) as error:
        read_vision_settings(folder)
    assert_mentions(error.value, str(folder), "preprocessor_config.json")
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(MsrlError, match="JSON"):
        read_vision_settings(folder)
    text = {key: value for key, value in CONFIG.items() if key != "vision_config"}
    (folder / "config.json").write_text(json.dumps(text))
    assert not has_vision(folder)
    assert not has_vision(tmp_path / "none")
    with pytest.raises(MsrlError) as error:
        read_vision_settings(folder)
    assert_mentions(error.value, str(folder), "vision tower")


def test_settings_are_frozen(tmp_path):
    settings = read_vision_settings(write_folder(tmp_path / "m"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.patch_size = 3
