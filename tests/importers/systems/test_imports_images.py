"""Files of vision-language models: what is imported, what needs no key, and what is refused."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from msrl.config.sections.reward import RewardConfig
from msrl.config.sources import parse, plain
from msrl.errors import MsrlError
from msrl.importers.command import native_yaml, translate_arguments
from msrl.importers.status import KeyStatus
from msrl.importers.translation import Translation
from msrl.workflows.import_config import validate
from support import mentions
from test_imports_commands import RLVR, edit

LIGHTRFT = (
    "--pretrain model --prompt_data x --rollout_batch_size 64 --n_samples_per_prompt 8 "
    "--train_batch_size 128 --actor_learning_rate 2e-6 --advantage_estimator group_norm"
)
RATES = {"tower_lr": 2e-6, "projector_lr": 2e-6}


def tree(translation: Translation) -> dict[str, Any]:
    """Return the native configuration, as it is written."""
    return plain(parse(native_yaml(translation), "native"))


def statuses(translation: Translation) -> dict[str, KeyStatus]:
    return {result.entry.key: result.status for result in translation.key_results}


def lightrft(flags: str) -> Translation:
    """Return the translation of a command of LightRFT with these flags too."""
    return translate_arguments("lightrft", f"{LIGHTRFT} {flags}".split())


@pytest.mark.parametrize(
    ("flags", "rates"),
    [
        ("--mixed_mm_data --images_key images", RATES),
        ("--limit_mm_image_per_prompt 10", RATES),
        ("--mixed_mm_data --freeze_prefix", None),
        ("--mixed_mm_data --text_only", None),
        ("--freeze_prefix", None),
        ("", None),
    ],
)
def test_the_tower_is_trained_as_lightrft_trains_it(flags: str, rates: object) -> None:
    assert tree(lightrft(flags))["train"].get("vision") == rates


def test_every_flag_of_images_of_lightrft_has_a_status() -> None:
    flags = (
        "--mixed_mm_data --processor x --images_key picture --limit_mm_image_per_prompt 4 "
        "--limit_mm_video_per_prompt 2 --fps 2.0 --max_pixels 282240 --freeze_prefix"
    )
    translation = lightrft(flags)
    found = statuses(translation)
    assert found["images_key"] is KeyStatus.DROPPED and found["processor"] is KeyStatus.DEAD
    for key in ("mixed_mm_data", "limit_mm_image_per_prompt", "limit_mm_video_per_prompt", "fps"):
        assert found[key] is KeyStatus.SAME
    assert found["freeze_prefix"] is found["max_pixels"] is KeyStatus.APPLIED
    assert tree(translation)["preprocess"] == {"max_pixels": 282240}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--mixed_mm_data --advantage_estimator gae", ("advantage_estimator=gae", "images")),
        ("--mixed_mm_data --lora_rank 8", ("lora_rank=8", "vision tower", "--approximate")),
    ],
)
def test_what_lightrft_does_with_images_and_msrl_does_not_is_refused(
    flags: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(MsrlError, match=mentions(*words)):
        lightrft(flags)


@pytest.mark.parametrize(
    ("program", "feature"),
    [
        ("examples/grm_vl_rl/train_colocate.py", "reward models"),
        ("examples/srm_training/train_srm_vl.py", "reward models"),
        ("examples/r1_aqa/train_colocate.py", "audio"),
    ],
)
def test_programs_without_a_counterpart_are_refused_in_one_line(
    program: str, feature: str, tmp_path: Path
) -> None:
    script = tmp_path / "run.sh"
    head = "DATA=$(printf '%s,' \"${files[@]}\" | sed 's/,$//')\n"
    for text in (head, ""):
        script.write_text(f"{text}# python examples/a/train.py\ntorchrun {program} {LIGHTRFT}\n")
        with pytest.raises(MsrlError, match=mentions("run.sh", program[-8:], feature)) as caught:
            translate_arguments("lightrft", [str(script)])
        assert "\n" not in str(caught.value)


PIXELS = "  data_args: {image_max_pixels: 1048576, messages: prompt}\n"


def roll(folder: Path, *lines: str, approximate: bool = False) -> Translation:
    """Return the translation of a file of ROLL whose actor_train has these lines too."""
    file = folder / "given.yaml"
    line = "  infer_batch_size: 4\n"
    file.write_text(edit(RLVR, (line, line + "".join(lines))), encoding="utf-8")
    return translate_arguments("roll", [str(file)], approximate=approximate)


@pytest.mark.parametrize(
    ("prefix", "rates"),
    [
        ("", {"tower_lr": 1e-6, "projector_lr": 1e-6}),
        ("vision_model", None),
        ("model.visual", None),
        ("'vision_model.blocks,vision_model.patch_embed'", {"projector_lr": 1e-6}),
        ("vision_model.merger", {"tower_lr": 1e-6}),
    ],
)
def test_the_tower_is_trained_as_roll_trains_it(prefix: str, rates: object, tmp_path: Path) -> None:
    model = f"  model_args: {{freeze_module_prefix: {prefix}}}\n"
    translation = roll(tmp_path, PIXELS, model)
    native = tree(translation)
    assert native["train"].get("vision") == rates
    assert native["preprocess"] == {"max_pixels": 1048576, "min_pixels": 3136}
    assert statuses(translation)["messages"] is KeyStatus.DROPPED


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("  model_args: {freeze_module_prefix: vision_model.blocks.0}\n", "freeze_module_prefix"),
        ("  model_args: {freeze_module_prefix: decoder}\n", "train.freeze"),
        ("  model_args: {freeze_module_prefix: 'vision_model,talker'}\n", "sound"),
        ("  model_args: {lora_target: all-linear, lora_rank: 8}\n", "vision tower"),
    ],
)
def test_other_parts_that_roll_freezes_or_adapts_are_refused(
    lines: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(MsrlError, match=mentions(words)):
        roll(tmp_path, PIXELS, lines)


def test_boxes_of_roll_are_scored_by_their_overlap_as_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    worker = ("roll.rewards.MathRuleRewardWorker", "roll.rewards.DetectionRewardWorker")
    file.write_text(edit(RLVR, worker), encoding="utf-8")
    with pytest.raises(MsrlError, match=mentions("DetectionRewardWorker", "--approximate")):
        translate_arguments("roll", [str(file)])
    (source,) = tree(translate_arguments("roll", [str(file)], approximate=True))["reward"][
        "sources"
    ]
    assert source == {"verifier": "box_iou", "tags": ["math"]}


def test_a_critic_of_roll_cannot_read_images(tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    pairs = (("adv_estimator: grpo", "adv_estimator: gae"), ("  infer_batch_size: 4\n", PIXELS))
    file.write_text(edit(RLVR, *pairs), encoding="utf-8")
    with pytest.raises(MsrlError, match=mentions("adv_estimator=gae", "images")):
        translate_arguments("roll", [str(file)])


# --- MindSpeed-MM

DATA: dict[str, Any] = {
    "dataset_type": "huggingface",
    "preprocess_parameters": {
        "model_name_or_path": "./Qwen2.5-VL-7B-Instruct",
        "image_max_pixels": 262144,
        "image_min_pixels": 0,
        "video_fps": 2.0,
    },
    "basic_parameters": {
        "template": "qwen2vl",
        "dataset": "rows.json, more.json",
        "cutoff_len": 1024,
    },
    "attr": {"images": "pictures", "messages": "messages", "role_tag": "role", "videos": None},
}


TRAINING = {"lr": 1e-5, "train_iters": 100, "global_batch_size": 16, "weight_decay": 0, "fancy": 1}


def mindspeed_mm(content: dict[str, Any], folder: Path) -> Translation:
    """Return the translation of a JSON file."""
    file = folder / "given.json"
    file.write_text(json.dumps(content, indent=4), encoding="utf-8")
    return translate_arguments("mindspeed-mm", [str(file)])


def parts(tower: bool, projector: bool) -> dict[str, Any]:
    """Return a model whose parts are frozen or not."""
    encoder = {
        "vision_encoder": {"num_layers": 32, "freeze": tower},
        "vision_projector": {"num_layers": 1, "freeze": projector},
    }
    return {"model_id": "qwen2_5vl", "image_encoder": encoder, "text_decoder": {"num_layers": 28}}


def test_data_of_mindspeed_mm_becomes_settings_of_preprocess(tmp_path: Path) -> None:
    translation = mindspeed_mm({"dataset_param": DATA, "dataloader_param": {}}, tmp_path)
    assert tree(translation)["preprocess"] == {
        "handler": "sharegpt",
        "tokenizer": "./Qwen2.5-VL-7B-Instruct",
        "max_pixels": 262144,
        "min_pixels": 1,
        "template": "native",
        "input": ["rows.json", "more.json"],
        "seq_length": 1024,
        "map_keys": {"images": "pictures"},
    }
    assert [line for line in translation.remarks if "resizes" in line]
    assert not validate(translation).errors


@pytest.mark.parametrize(
    ("tower", "projector", "rates"),
    [(True, True, None), (True, False, ["projector_lr"]), (False, False, list(RATES))],
)
def test_parts_that_mindspeed_mm_trains_have_the_rate_of_training(
    tower: bool, projector: bool, rates: list[str] | None, tmp_path: Path
) -> None:
    model = parts(tower, projector)
    named = mindspeed_mm(model, tmp_path).remarks
    assert ["projector_lr" in line for line in named] == [
        name == "projector_lr" for name in rates or []
    ]
    training = {"model": model, "data": {"dataset_param": DATA}, "training": TRAINING}
    translation = mindspeed_mm(training, tmp_path)
    assert not validate(translation).errors
    native = tree(translation)["train"]
    assert native["optimizer"] == {"lr": 1e-5, "weight_decay": 0}
    assert (native["steps"], native["global_batch"]) == (100, 16)
    assert native.get("vision") == (dict.fromkeys(rates, 1e-5) if rates else None)


@pytest.mark.parametrize(
    ("frozen", "rates"),
    [
        (["model.visual"], None),
        (["model.visual.blocks", "model.visual.patch_embed"], {"projector_lr": 1e-5}),
        (["model.visual.merger"], {"tower_lr": 1e-5}),
        ([], {"tower_lr": 1e-5, "projector_lr": 1e-5}),
    ],
)
def test_names_of_frozen_modules_select_the_trained_parts(
    frozen: list[str], rates: object, tmp_path: Path
) -> None:
    model = {"model_id": "qwen3_vl", "freeze": frozen}
    training = {"model": model, "data": {"dataset_param": DATA}, "training": TRAINING}
    assert tree(mindspeed_mm(training, tmp_path))["train"].get("vision") == rates


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"dataset_param": {**DATA, "attr": {"videos": "videos"}}}, ["videos"]),
        ({"dataset_param": {**DATA, "dataset_type": "multimodal"}}, ["dataset_type=multimodal"]),
        ({"dataset_param": {**DATA, "attr": {"user_tag": "me"}}}, ["user_tag=me", "human"]),
        ({**parts(True, True), "audio_encoder": {"freeze": True}}, ["sounds"]),
        ({**parts(True, True), "text_decoder": {"freeze": True}}, ["train.freeze"]),
        ({"model_id": "qwen", "generation_config": {}, "text_decoder": {}}, ["msrl generate"]),
        ({"dataset_param": {**DATA, "attr": {"imges": "x"}}}, ["imges", "unknown"]),
    ],
)
def test_what_msrl_has_not_of_mindspeed_mm_is_refused_in_one_line(
    content: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(MsrlError, match=mentions("given.json", *words)) as caught:
        mindspeed_mm(content, tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("system", ["mindspeed-mm", "mindspeed-llm", "roll"])
def test_a_script_of_mindspeed_mm_names_the_files_to_import(system: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("torchrun pretrain_vlm.py --lr 1e-5 --mm-data a.json\nT=`date`\n")
    with pytest.raises(MsrlError, match=mentions("run.sh", "--mm-data", "--from mindspeed-mm")):
        translate_arguments(system, [str(script)])


# --- verl

PPO = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
SFT = "torchrun -m verl.trainer.sft_trainer optim.lr=2e-6 "
ACTOR = "actor_rollout_ref.actor"
MODELS = {PPO: "actor_rollout_ref.model.path", SFT: "model.path"}
LIMITED = '+data.mm_processor_kwargs="{max_pixels: 501760, min_pixels: 3136}"'


def verl(
    folder: Path,
    *keys: str,
    program: str = PPO,
    model: str = "Qwen/Qwen2.5-VL-7B-Instruct",
    approximate: bool = True,
) -> Translation:
    """Return the translation of a command of verl with these keys."""
    file = folder / "run.sh"
    rate = "" if program == SFT else f"{ACTOR}.optim.lr=2e-6 "
    given = f"{MODELS[program]}={model} {rate}{' '.join(keys)}"
    file.write_text(f"{program}data.train_files=/data/train.parquet {given}\n")
    return translate_arguments("verl", [str(file)], approximate=approximate)


@pytest.mark.sample(3)
@pytest.mark.parametrize("program", [PPO, SFT])
@pytest.mark.parametrize(
    ("keys", "model", "rates"),
    [
        ((), "Qwen/Qwen3-VL-8B-Instruct", RATES),
        ((), "OpenGVLab/InternVL3-1B-hf", RATES),
        (("data.image_key=images",), "/models/mine", RATES),
        ((), "Qwen/Qwen3-8B", None),
    ],
)
def test_the_tower_is_trained_as_verl_trains_it(
    program: str, keys: tuple[str, ...], model: str, rates: object, tmp_path: Path
) -> None:
    translation = verl(tmp_path, *keys, program=program, model=model)
    assert tree(translation)["train"].get("vision") == rates


def test_keys_of_images_of_verl_have_a_status(tmp_path: Path) -> None:
    keys = ("data.image_key=pictures", LIMITED, f"{ACTOR}.freeze_vision_tower=True")
    translation = verl(tmp_path, *keys)
    native, found = tree(translation), statuses(translation)
    assert native["preprocess"] == {
        "map_keys": {"extra.tag": "data_source", "images": "pictures"},
        "max_pixels": 501760,
        "min_pixels": 3136,
    }
    assert "vision" not in native["train"]
    for key in ("image_key", "mm_processor_kwargs", "freeze_vision_tower"):
        assert found[key] is KeyStatus.APPLIED
    assert any("resizes" in remark for remark in translation.remarks)
    assert any("freeze_vision_tower" in remark for remark in translation.remarks)
    text = verl(tmp_path, *keys[2:], model="Qwen/Qwen3-8B")
    assert statuses(text)["freeze_vision_tower"] is KeyStatus.DEAD


def test_adapters_of_verl_are_those_of_the_language_model(tmp_path: Path) -> None:
    rank, excluded = (
        f"actor_rollout_ref.model.{key}"
        for key in ("lora_rank=8", "exclude_modules=\"'.*visual.*'\"")
    )
    translation = verl(tmp_path, rank, excluded)
    assert statuses(translation)["exclude_modules"] is KeyStatus.SAME
    assert not any("lora_rank" in text for text in translation.differences)
    assert tree(translation)["train"]["lora"]["rank"] == 8
    with pytest.raises(MsrlError, match=mentions("lora_rank=8", "vision tower", "--approximate")):
        verl(tmp_path, rank, approximate=False)
    with pytest.raises(MsrlError, match=mentions("exclude_modules", "target_modules")):
        verl(tmp_path, rank, "actor_rollout_ref.model.exclude_modules=q_proj")


def test_the_score_of_geometry_has_the_weights_of_verl(tmp_path: Path) -> None:
    with pytest.raises(MsrlError, match=mentions("mathruler", "--approximate")):
        verl(tmp_path, approximate=False)
    rewards = tree(verl(tmp_path))["reward"]["sources"]
    tag = "hiyouga/geometry3k"
    sources = RewardConfig.model_validate({"sources": rewards}, strict=False).sources
    response = "<think>\n60 + 30\n</think>So \\boxed{90}"
    scores = [
        source.weight * score_with(source, response, "90")
        for source in sources
        if tag in source.tags
    ]
    assert scores == [0.9, 0.1]


def score_with(source: Any, response: str, answer: str) -> float:
    verifier = importlib.import_module(f"msrl.rewards.verifiers.{source.verifier}")
    return verifier.score(response, answer, **source.options)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (LIMITED.replace("max_pixels", "do_resize"), ("mm_processor_kwargs", "do_resize")),
        ("algorithm.adv_estimator=gae", ("adv_estimator=gae", "images")),
    ],
)
def test_what_verl_does_with_images_and_msrl_does_not_is_refused(
    key: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(MsrlError, match=mentions(*words)):
        verl(tmp_path, key)
