"""System and kind of a foreign file, by its keys or programs, for the counts of `imports.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msrl.config.sources import Node, read
from msrl.importers.mindspeed.scripts import PROGRAMS, UNSUPPORTED_PROGRAMS
from msrl.importers.shell import Word, parse_script
from msrl.importers.systems import detect_system
from msrl.importers.table import canonical
from msrl.importers.verl import files as verl

_ROLL_KINDS = {
    "train_env_manager": "agentic",
    "custom_envs": "agentic",
    "student": "distillation",
    "sft_train": "SFT",
    "reference_config": "DPO",
    "chosen_key": "DPO",
}


def yaml_kind(file: Path) -> tuple[str | None, str]:
    """Return system and kind of a YAML file; without system, the file configures no command."""
    tree = read(file)
    keys = {canonical(key) for key in tree.value} if isinstance(tree.value, dict) else set[str]()
    system = detect_system(tree, file)
    if system is None:
        return None, "other YAML"
    if system == "verl":
        return system, _verl_kind([])
    if system == "roll":
        return system, next((kind for key, kind in _ROLL_KINDS.items() if key in keys), "RLVR")
    if keys & {"output_prefix", "handler_name"}:
        return system, "data"
    return system, _stage(tree)


def _stage(tree: Node) -> str:
    """Return the training stage of a MindSpeed-RL file."""
    entries = tree.value if isinstance(tree.value, dict) else {}
    for section in (*entries.values(), tree):
        keys = section.value if isinstance(section.value, dict) else {}
        if "stage" in keys:
            return str(keys["stage"].value).removeprefix("ray_")
    return "training"


def script_kinds(file: Path) -> tuple[str | None, str]:
    """Return system and kind of a shell script; without system, it runs no known program."""
    script = parse_script(file.read_text(encoding="utf-8"), str(file))
    for words in script.commands:
        if verl.is_program(words):
            return "verl", _verl_kind(words)
        if words[0].text == "msrun":
            return "mindspeed-llm", "MindSpore"
        for word in words:
            program = word.text.rpartition("/")[2].removesuffix(".py")
            if word.text.endswith(".py") and program in PROGRAMS:
                return "mindspeed-llm", _program_kind(PROGRAMS[program], program, words)
            if word.text.endswith(".py") and program in UNSUPPORTED_PROGRAMS:
                return "mindspeed-llm", f"{program}.py"
            is_lightrft = "lightrft" in str(file).lower() and program == "train"
            if program == "train_colocate" or is_lightrft:
                return "lightrft", "training"
    return None, "other script"


def _verl_kind(words: Sequence[Word]) -> str:
    """Return the estimator of a training; images and audio have their own kind."""
    texts = [word.text for word in words]
    modalities = ("data.image_key", "data.video_key", "data.audio_key")
    files = [text for text in texts if text.startswith(("data.train_files", "data.val_files"))]
    if any(text.startswith(modalities) for text in texts) or "geo3k" in " ".join(files):
        return "images, video or audio"
    if any(text.endswith("sft_trainer") for text in texts):
        return "SFT"
    keys = dict(text.lstrip("+").split("=", 1) for text in texts if "=" in text)
    if keys.get("actor_rollout_ref.actor.policy_loss.loss_mode") == "gspo":
        return "gspo"
    return keys.get("algorithm.adv_estimator", "training")


def _program_kind(section: str, program: str, words: Sequence[Word]) -> str:
    texts = [word.text for word in words]
    if section == "train":
        return "tune" if program == "posttrain_gpt" or "--stage" in texts else "pretrain"
    if section == "inference":
        return "chat" if "chat" in texts else "generate"
    return {"ray": "launch", "preprocess": "data"}.get(section, section)
