"""Keys of ROLL's rlvr files for vision-language models: pixels, and the trained parts of the tower.

Without `freeze_module_prefix`, the original trains the vision tower at the rate of the language
model. Source: ROLL 8eb27cc2, roll/datasets/vlm_dataset_utils.py and roll/models/model_providers.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from msrl.config.sources import Node
from msrl.importers.roll.pipelines import has_images
from msrl.importers.sections import PROJECTOR, TOWER, Keys, put_tower_rates
from msrl.importers.table import as_list
from msrl.importers.translation import KeyStatus, SourceKey

_ROOT = re.compile(r"^(vision_model|(model\.)?visual)(\.|$)")
_ENCODERS = re.compile(r"(^|\.)(vision|visual|audio|talker|code2wav)")
_SOUND = re.compile(r"(^|\.)(audio|talker|code2wav)")
_BLOCKS = frozenset({"blocks", "patch_embed"})  # of towers without learned positions
_PROJECTOR = frozenset({"merger"})
_OPTIONAL = {_BLOCKS: {"pos_embed"}, _PROJECTOR: {"deepstack_merger_list"}}


def put_images(tree: Node, top: Keys, model: Keys, training: Keys, data: Keys) -> None:
    """Translate the keys of images, if a file has images; `model`, ... are of actor_train."""
    if not has_images(tree):
        return put_frozen_encoders(model)
    if top.value("adv_estimator") == "gae":
        text = "not supported with images: msrl's critic reads text only. Use grpo"
        top.add_error("adv_estimator", text)
    for key, native in (("image_max_pixels", "max_pixels"), ("image_min_pixels", "min_pixels")):
        data.put(key, f"preprocess.{native}")
    return _put_parts(model, training)


def put_frozen_encoders(model: Keys) -> None:
    """Record frozen encoders of images and audio, and refuse other frozen modules."""
    entry = model.get("freeze_module_prefix")
    if entry is None or not entry.value:
        return
    if all(_ENCODERS.search(name) for name in _names(entry)):
        text = "rows without images do not train the vision tower"
        model.translation.record(entry, KeyStatus.SAME, text)
    else:
        _refuse(model, entry)


def _put_parts(model: Keys, training: Keys) -> None:
    """Set the rates of the parts of the tower that the original trains."""
    entry = model.get("freeze_module_prefix")
    names = _names(entry) if entry is not None and entry.value else []
    parts = {_ROOT.sub("", name).partition(".")[0] for name in names}
    if entry is not None and names and not all(map(_ROOT.match, names)):
        others = [name for name in names if not _ROOT.match(name)]
        if all(map(_SOUND.search, others)):
            text = f"not supported: a model with parts for sound ({', '.join(others)})"
            return model.translation.add_error(entry, text)
        return _refuse(model, entry)
    if model.value("lora_target") is not None:
        return _report_adapters(model)
    if entry is None or not names:
        return put_tower_rates(training, "learning_rate", TOWER, PROJECTOR)
    text = "the vision tower is frozen, the default of train.vision"
    if "" in parts:
        pass
    elif _is(parts, _BLOCKS):
        put_tower_rates(training, "learning_rate", PROJECTOR)
        text = f"{PROJECTOR}: learning_rate; the rest of the tower is frozen"
    elif _is(parts, _PROJECTOR):
        put_tower_rates(training, "learning_rate", TOWER)
        text = f"{TOWER}: learning_rate; the projector is frozen"
    else:
        return _refuse(model, entry)
    return model.translation.record(entry, KeyStatus.APPLIED, text)


def _names(entry: SourceKey) -> list[str]:
    return [name.strip() for item in as_list(entry.value) for name in str(item).split(",")]


def _is(parts: Collection[str], names: frozenset[str]) -> bool:
    """Return True if frozen parts are these names, with or without those that few towers have."""
    return names <= set(parts) <= names | _OPTIONAL[names]


def _report_adapters(model: Keys) -> None:
    """Report adapters in the tower; without them, the tower of a model with adapters is frozen."""
    entry = model.get("lora_target")
    if entry is not None and entry.value in ("all", "all-linear"):
        text = "the original also has adapters in the vision tower, msrl in the language model only"
        model.translation.report_difference(entry, text)
    model.record("freeze_module_prefix", KeyStatus.SAME, "adapters freeze the model")


def _refuse(model: Keys, entry: SourceKey) -> None:
    text = "not supported: set train.freeze to patterns of parameter names"
    model.translation.add_error(entry, text)
