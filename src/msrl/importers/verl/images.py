"""Trainings of verl on images: columns, limits of pixels, and the trained parts of the tower.

The original reads the column of images wherever rows have it, and trains the vision tower at the
rate of the language model. Source: verl 1dda0392, verl/utils/dataset/rl_dataset.py and
verl/workers/engine; `freeze_vision_tower` is read by the workers of earlier versions.
"""

from __future__ import annotations

import re
from pathlib import Path

from msrl.config.sources import wrap
from msrl.importers.sections import PROJECTOR, TOWER, Keys, put_tower_rates, settings_of
from msrl.importers.table import as_list
from msrl.importers.translation import KeyStatus, SourceKey
from msrl.importers.verl.sections import ACTOR, MODEL, OPTIM, Sections

_START, _END = r"(^|[/_.-])", r"\d*([/_.-]|$)"
_SOUND_KEYS = ("video_key", "audio_key")
_SOUND = re.compile(
    rf"{_START}(omni(?![_-]?math)|video|audio){_END}|{_START}(Whisper|Voxtral|Ultravox)", re.I
)
_IMAGE_DATA = re.compile(rf"geo3k|geometry3k|{_START}(vl|vlm|vision|multimodal){_END}", re.I)
_COMPUTED = re.compile(r"Qwen-?_?(2|2[._]5|3)[-_]?VL|QVQ|InternVL", re.I)
_OTHER_MODEL = re.compile(
    rf"{_START}(vl|vlm|vision|multimodal){_END}|-(1|4|4\.\d|4_1)V(-|$)|{_START}(MiniCPM-[oV]|LLaVA"
    r"|SmolVLM|PaliGemma|Pixtral|Janus|Idefics|Ovis)|-R1V",
    re.I,
)
_OF_TOWER = re.compile(r"[\^.*\\]*(visual|vision_tower|vision_model)[.*$\\]*")
_LIMITS = ("min_pixels", "max_pixels")


def refused_media(sections: Sections, data: str = "data") -> str:
    """Return the feature of a training on video or sound, or of another model; empty without."""
    keys = (sections[data].get(name) for name in _SOUND_KEYS)
    key = next((entry for entry in keys if _is_chosen(entry)), None)
    if key is not None:
        return f"a training on video or audio ({key.path}={key.value})"
    model = str(sections[MODEL].value("path"))
    name = next((name for name in (*_files(sections, data), model) if _SOUND.search(name)), None)
    if name is not None:
        return f"a training on video or audio ({name})"
    if _OTHER_MODEL.search(model) and not _COMPUTED.search(model):
        return f"a vision-language model that msrl does not compute ({model})"
    return ""


def has_images(sections: Sections, data: str = "data") -> bool:
    """Return True if a key, or the name of the data or the model, tells that rows have images."""
    names = _files(sections, data)
    return (
        _is_chosen(sections[data].get("image_key"))
        or any(map(_IMAGE_DATA.search, names))
        or _COMPUTED.search(str(sections[MODEL].value("path"))) is not None
    )


def put_images(sections: Sections, data: str = "data") -> None:
    """Translate the keys of images."""
    keys = sections[data]
    for name in _SOUND_KEYS:
        keys.record(name, KeyStatus.SAME, "rows have no such column")
    if not has_images(sections, data):
        unread = [(keys, name) for name in ("image_key", "mm_processor_kwargs")]
        unread += [(sections[name], "freeze_vision_tower") for name in (ACTOR, MODEL)]
        for section, name in unread:
            section.record(name, KeyStatus.DEAD, "read with images only")
        return
    _put_column(keys)
    _put_limits(keys)
    _put_parts(sections)
    if not sections.is_supervised and sections["algorithm"].value("adv_estimator") == "gae":
        text = "not supported with images: msrl's critic reads text only. Use grpo"
        sections["algorithm"].add_error("adv_estimator", text)


def are_of_tower(patterns: object) -> bool:
    """Return True if patterns of modules match modules of a vision tower only."""
    names = [str(name) for name in as_list(patterns)]
    return bool(names) and all(map(_OF_TOWER.fullmatch, names))


def _is_chosen(entry: SourceKey | None) -> bool:
    """Return True for a key that a user has set; complete configurations have every key."""
    is_complete = entry is not None and Path(entry.origin.name).suffix in (".yaml", ".yml")
    return entry is not None and bool(entry.value) and not is_complete


def _files(sections: Sections, data: str) -> list[str]:
    return [str(name) for name in as_list(sections[data].value("train_files"))]


def _put_column(keys: Keys) -> None:
    name = keys.get("image_key")
    if name is not None and name.value not in (None, "images"):
        columns = wrap({"images": str(name.value)}, name.origin)
        keys.translation.set("preprocess.map_keys", columns)
        keys.record("image_key", KeyStatus.APPLIED, "preprocess.map_keys")
    keys.record("image_key", KeyStatus.SAME, "the column images")


def _put_limits(keys: Keys) -> None:
    """Translate the limits of pixels, by which the original resizes images a second time."""
    entry = keys.get("mm_processor_kwargs")
    settings = settings_of(entry)
    if entry is None or not settings:
        return None
    others = [name for name in settings if name not in _LIMITS]
    if others:
        text = f"not supported: settings of the image processor ({', '.join(others)})"
        return keys.translation.add_error(entry, text)
    for name, value in settings.items():
        keys.translation.set(f"preprocess.{name}", wrap(value, entry.origin))
    keys.translation.remarks.append(
        f"{keys.translation.name}: the original first resizes images to at most 16,384 tokens, "
        "then to the limits of mm_processor_kwargs; msrl resizes once"
    )
    text = " and ".join(f"preprocess.{name}" for name in settings)
    return keys.translation.record(entry, KeyStatus.APPLIED, text)


def _put_parts(sections: Sections) -> None:
    """Set the rates of the vision tower, unless it is frozen or the model has adapters."""
    flags = [sections[name].get("freeze_vision_tower") for name in (ACTOR, MODEL)]
    frozen = next((flag for flag in flags if flag is not None and flag.value is True), None)
    if _has_adapters(sections):
        for name in (ACTOR, MODEL):
            text = "adapters freeze the model"
            sections[name].record("freeze_vision_tower", KeyStatus.SAME, text)
    elif frozen is None:
        put_tower_rates(sections[OPTIM], "lr", TOWER, PROJECTOR)
    else:
        text = "the vision tower is frozen, the default of train.vision"
        sections.translation.record(frozen, KeyStatus.APPLIED, text)
        sections.translation.remarks.append(
            f"{sections.translation.name}: {frozen.path} freezes the tower, as verl's FSDP workers "
            "do; its newer engines do not read the key and train the tower"
        )


def _has_adapters(sections: Sections) -> bool:
    return bool(sections[MODEL].number("lora_rank") or sections[f"{MODEL}.lora"].number("rank"))
