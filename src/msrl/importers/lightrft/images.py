"""Flags of LightRFT for vision-language models: the trained parts, and limits of images.

Source: LightRFT 49e62cb, examples/gsm8k_geo3k/train_colocate.py, models/actor_vl.py and
datasets/prompts_dataset_vl.py.
"""

from __future__ import annotations

from msrl.importers.sections import PROJECTOR, TOWER, Keys, put_tower_rates
from msrl.importers.translation import KeyStatus

_FLAGS = ("mixed_mm_data", "images_key", "limit_mm_image_per_prompt", "max_pixels")


def put_images(keys: Keys) -> None:
    """Translate the flags of images: whether the vision tower is trained, and what cannot be.

    Without `freeze_prefix`, the original trains the tower at the rate of the language model.
    """
    is_frozen = keys.value("freeze_prefix") is True
    if not _has_images(keys):
        keys.record("freeze_prefix", KeyStatus.SAME, "rows without images do not train the tower")
        return
    _refuse_critic(keys)
    _report_adapters(keys)
    if is_frozen:
        text = (
            "the vision tower is frozen, the default of train.vision (the original freezes names "
            "that begin with visual, which transformers has up to 4.51)"
        )
        keys.record("freeze_prefix", KeyStatus.APPLIED, text)
    elif not keys.value("lora_rank"):
        put_tower_rates(keys, "actor_learning_rate", TOWER, PROJECTOR)
    keys.record("freeze_prefix", KeyStatus.OFF, "")


def _has_images(keys: Keys) -> bool:
    """Return True if a flag says that the rows have images."""
    values = (entry.value for key in _FLAGS if (entry := keys.get(key)) is not None)
    is_text = keys.value("text_only") is True
    return not is_text and any(value not in (False, None, -1) for value in values)


def _refuse_critic(keys: Keys) -> None:
    """Refuse the estimator with a critic, which reads images in the original only."""
    if keys.value("advantage_estimator") == "gae":
        text = "not supported with images: msrl's critic reads text only. Use group_norm"
        keys.add_error("advantage_estimator", text)


def _report_adapters(keys: Keys) -> None:
    """Report adapters in the vision tower, where the original has them with its default targets."""
    rank, targets = keys.get("lora_rank"), keys.value("target_modules")
    if rank is not None and rank.value and targets in (None, "all-linear"):
        text = "the original also has adapters in the vision tower, msrl in the language model only"
        keys.translation.report_difference(rank, text)
