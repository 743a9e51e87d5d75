"""Pipelines of ROLL that msrl does not have: refused in one line that names the feature."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.config.sources import Node
from msrl.importers.translation import Translation

_TOP = {
    "student": "distillation",
    "teacher": "distillation",
    "teacher_0": "distillation",
    "sft_train": "supervised training. Use `msrl train-sft`",
    "chosen_key": "preference training. Use `msrl train-dpo`",
    "diffusion_process": "training of diffusion models",
}
_MODALITIES = ("image", "images", "video", "audio")


def unsupported_pipeline(tree: Node) -> str:
    """Return the feature that a file needs and msrl does not have; empty if there is none."""
    entries = tree.value if isinstance(tree.value, dict) else {}
    for key in entries:
        if key in _TOP:
            return _TOP[key]
    for worker in ("actor_train", "validation"):
        keys = _keys(entries.get(worker), "data_args")
        if any(key.partition("_")[0] in _MODALITIES for key in keys):
            return "a vision-language or audio pipeline"
    return ""


def _keys(worker: Node | None, section: str) -> Iterator[str]:
    entries = worker.value if worker is not None and isinstance(worker.value, dict) else {}
    node = entries.get(section)
    if node is not None and isinstance(node.value, dict):
        yield from node.value


def refused(translation: Translation, feature: str) -> Translation:
    """Return a translation whose only error is that its pipeline is not supported."""
    translation.errors[:] = [f"{translation.name}: not supported: {feature}"]
    translation.is_refused = True
    return translation
