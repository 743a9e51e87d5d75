"""Pipelines of ROLL that msrl does not have: refused in one line that names the feature."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, cast

from msrl.config.sources import Node, plain
from msrl.importers.translation import Translation

_DIFFUSION = "training of diffusion models"
_TRAINERS = ("actor_train", "sft_train", "student", "student_train")
_IMAGE_TEMPLATE = re.compile(r"(^|[-_])vl($|[-_])", re.I)  # such as qwen2-vl


def unsupported_pipeline(tree: Node) -> str:
    """Return the feature that a file needs and msrl does not have; empty if there is none."""
    entries = tree.value if isinstance(tree.value, dict) else {}
    if "diffusion_process" in entries:
        return _DIFFUSION
    modalities = _modalities(entries, (*_TRAINERS, "validation"))
    if modalities & {"video", "audio"} or "VideoR1RewardWorker" in _reward_workers(entries):
        return "training on videos or audio"
    trains_rows = any(name in entries for name in _TRAINERS[1:]) or "chosen_key" in entries
    if trains_rows and has_images(tree):
        return "a vision-language pipeline of SFT, DPO or distillation"
    infer = _section(entries, "actor_infer")
    if infer.get("device_mapping") is not None and not _trains(entries):
        return "rollouts without training (actor_train has no device_mapping). Use `msrl eval`."
    mock = _section(entries, "rollout_mock")
    if _is(mock.get("enable"), True) and _is(mock.get("mode"), "mock"):
        return "recorded rollouts (rollout_mock.mode=mock)"
    return ""


def has_images(tree: Node) -> bool:
    """Return True if a file trains on images: by its keys of pixels, template or rewards."""
    entries = tree.value if isinstance(tree.value, dict) else {}
    templates = (_template(entries.get(name)) for name in _TRAINERS)
    return (
        "image" in _modalities(entries, _TRAINERS)
        or any(_IMAGE_TEMPLATE.search(template) for template in templates)
        or "DetectionRewardWorker" in _reward_workers(entries)
    )


def unsupported_environment(tree: Node, kinds: Sequence[str]) -> str:
    """Return the error of an environment that msrl does not have; empty if it has all of them."""
    environments = _section(tree, "custom_envs")
    for tag in _tags(_section(tree, "train_env_manager")):
        keys = _section(environments, tag)
        kind, manager = keys.get("env_type"), keys.get("env_manager_cls")
        name = str(plain(manager)).rpartition(".")[2] if manager is not None else ""
        if kind is not None and plain(kind) not in kinds:
            return (
                f"{kind.origin}: custom_envs.{tag}.env_type={plain(kind)}: not supported: msrl has "
                f"{', '.join(kinds)} of these. Use environment.path for an environment of your own."
            )
        if manager is not None and name not in _MANAGERS:
            feature = "agents with their own prompts. Use environment.name=endpoint."
            if name.startswith("VL"):
                feature = "images"
            path = f"{manager.origin}: custom_envs.{tag}.env_manager_cls={name}"
            return f"{path}: not supported: {feature}"
    return ""


_MANAGERS = ("TrajEnvManager", "StepEnvManager", "AgentNativeStepEnvManager")


def _is(node: Node | None, value: object) -> bool:
    return node is not None and node.value == value


def _trains(entries: Mapping[str, Node]) -> bool:
    """Return whether a file gives its trainer devices, also with misspelled keys.

    Misspelled keys have their own errors, which name them.
    """
    trainers = get_close_matches("actor_train", entries, n=1, cutoff=0.9)
    keys = list(_section(entries, trainers[0])) if trainers else []
    return bool(get_close_matches("device_mapping", keys, n=1, cutoff=0.9))


def _section(parent: Node | Mapping[str, Node], key: str) -> Mapping[str, Node]:
    entries = parent.value if isinstance(parent, Node) else parent
    child = entries.get(key) if isinstance(entries, Mapping) else None
    return child.value if child is not None and isinstance(child.value, dict) else {}


def _tags(manager: Mapping[str, Node]) -> list[str]:
    tags = plain(manager["tags"]) if "tags" in manager else None
    return [str(tag) for tag in cast("list[Any]", tags)] if isinstance(tags, list) else []


def _reward_workers(entries: Mapping[str, Node]) -> set[str]:
    """Return the names of the classes that score the domains."""
    domains = _section(entries, "rewards")
    nodes = [_section(domains, name).get("worker_cls") for name in domains]
    return {str(plain(node)).rpartition(".")[2] for node in nodes if node is not None}


def _template(worker: Node | None) -> str:
    entries = worker.value if worker is not None and isinstance(worker.value, dict) else {}
    node = _section(entries, "data_args").get("template")
    return "" if node is None else str(plain(node))


def _modalities(entries: Mapping[str, Node], workers: Sequence[str]) -> set[str]:
    """Return the modalities that keys of `data_args` of the workers begin with."""
    keys = (key for name in workers for key in _keys(entries.get(name), "data_args"))
    names = {key.partition("_")[0].removesuffix("s") for key in keys}
    return names & {"image", "video", "audio"}


def _keys(worker: Node | None, section: str) -> Iterator[str]:
    entries = worker.value if worker is not None and isinstance(worker.value, dict) else {}
    node = entries.get(section)
    if node is not None and isinstance(node.value, dict):
        yield from node.value


def refuse(translation: Translation, error: str) -> Translation:
    """Return a translation with this error only."""
    translation.errors[:] = [error]
    translation.is_refused = True
    return translation
