"""Import of MindSpeed-RL files for SFT and DPO: `defaults` and one section of flags.

The section is sft (cli/train_sft.py), or megatron_training with stage dpo (cli/train_dpo.py).

`defaults` names model files in model/*.yaml. The keys are the flags of MindSpeed-LLM's
posttrain_gpt.py. Their defaults differ: bf16 is on, and adapters have half the rank.
Source: MindSpeed-RL 6a5b469^, configs/sft_*.yaml.
"""

from __future__ import annotations

from pathlib import Path

from msrl.config.sources import Node, Origin, wrap
from msrl.importers.megatron import with_model
from msrl.importers.mindspeed_llm.preference import STAGES
from msrl.importers.mindspeed_llm.training import put_training
from msrl.importers.sections import Keys, hydra_layers
from msrl.importers.table import load_table
from msrl.importers.translation import KeyStatus, Translation

MARKS = ("sft",)
_MEGATRON = "megatron_training"


def is_supervised(tree: Node) -> bool:
    """Return True if a file configures train_sft.py, train_dpo.py or train_orm.py."""
    return _section(tree) is not None


def _section(tree: Node) -> str | None:
    """Return the name of the section with the flags; None for files of other programs."""
    if not isinstance(tree.value, dict):
        return None
    if MARKS[0] in tree.value:
        return MARKS[0]
    section = tree.value.get(_MEGATRON)
    keys = section.value if section is not None else None
    stage = keys.get("stage") if isinstance(keys, dict) else None
    return _MEGATRON if stage is not None and stage.value in STAGES else None


def translate(tree: Node, file: Path) -> Translation:
    """Return the translation of one file, which includes its errors."""
    translation = Translation("MindSpeed-RL", load_table("mindspeed_llm"), str(file))
    translation.ignored_sections = ("supervised",)
    translation.reserved = frozenset(load_table("mindspeed_rl").keys("top"))
    translation.other_defaults = {
        ("train", "bf16"): True,
        ("train", "lora_r"): 8,
        ("train", "lora_alpha"): 16,
    }
    top = {entry.key: entry for entry in translation.entries(tree, "supervised", "")}
    models = hydra_layers(top["defaults"].node if "defaults" in top else None, file, translation)
    name = str(_section(tree))
    entries = list(translation.entries(top[name].node, "train", name))
    keys = Keys(translation, "train", with_model(entries, models, translation, "train"))
    translation.record(top[name], KeyStatus.APPLIED, "key by key")
    if "defaults" in top:
        translation.record(
            top["defaults"],
            KeyStatus.SAME,
            "model properties are checked against config.json",
        )
    put_training(translation, keys)
    if translation.is_refused:
        return translation
    keys.apply_remaining()
    translation.set("run.name", wrap(file.stem, Origin(translation.name)))
    translation.fill_defaults(("train",), keys)
    return translation
