"""MindSpeed-RL's supervised files (cli/train_sft.py): `defaults` with model/*.yaml, and the section sft.

Its keys are the flags of MindSpeed-LLM's posttrain_gpt.py, but bf16 is on and an adapter half as large where they are left out.
Source: MindSpeed-RL 6a5b469^, configs/sft_*.yaml.
"""

from __future__ import annotations

from pathlib import Path

from msrl.config.sources import Node, Origin, wrap
from msrl.importers.megatron import with_model
from msrl.importers.mindspeed_llm.scripts import put_training
from msrl.importers.sections import Keys, hydra_layers
from msrl.importers.table import load_table
from msrl.importers.translation import Fate, Translation

MARKS = ("sft",)


def is_supervised(tree: Node) -> bool:
    """Whether a file is of train_sft.py."""
    return isinstance(tree.value, dict) and MARKS[0] in tree.value


def translate(tree: Node, file: Path) -> Translation:
    """The native configuration of one file; mistakes are in the result."""
    translation = Translation("MindSpeed-RL", load_table("mindspeed_llm"), str(file))
    translation.other_defaults = {("train", "bf16"): True, ("train", "lora_r"): 8, ("train", "lora_alpha"): 16}
    top = {given.key: given for given in translation.given(tree, "supervised", "")}
    models = hydra_layers(top["defaults"].node if "defaults" in top else None, file, translation)
    given = list(translation.given(top["sft"].node, "train", "sft"))
    keys = Keys(translation, "train", with_model(given, models, translation, "train"))
    translation.say(top["sft"], Fate.TOOK, "key by key")
    if "defaults" in top:
        translation.say(top["defaults"], Fate.SAME, "facts of the model are checked against its config.json")
    put_training(translation, keys)
    keys.apply_rest()
    translation.set("run.name", wrap(file.stem, Origin(translation.name)))
    translation.laid_in(("train",), keys)
    return translation
