"""Environment variables that a script exports."""

from __future__ import annotations

from pathlib import Path

from msrl.config.sources import Origin, wrap
from msrl.importers.secrets import is_secret
from msrl.importers.shell import Script, Word
from msrl.importers.translation import KeyStatus, SourceKey, Translation

# Variables of the launching shell. Workers inherit its folders of programs and modules.
_SEARCH_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
_RENDEZVOUS = (
    "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "NNODES",
    "NODE_RANK", "WORLD_SIZE", "RANK", "LOCAL_RANK", "GPUS_PER_NODE", "NPUS_PER_NODE",
)  # fmt: skip


def put_exports(translation: Translation, script: Script) -> None:
    """Pass exported variables to the workers of a training; other commands have no workers.

    Also record unset variables, files that the script includes, and lines that bash reads
    otherwise.
    """
    starts_ray = any(
        result.entry.section in ("ray", "ray_start") for result in translation.key_results
    )
    trains = starts_ray or translation.is_training
    for name, word in script.exported.items():
        text = "***" if is_secret(name, word.text) else word.text
        node = wrap(text, Origin(translation.name, word.line))
        entry = SourceKey("environment", name, name, node)
        _put_export(translation, entry, word, trains=trains)
    for name, line in script.scope.empty.items():
        node = wrap("", Origin(translation.name, line))
        entry = SourceKey("variable", name, name, node)
        translation.record(entry, KeyStatus.SAME, "not set in the script: empty, as in the shell")
    for word, file in script.sources:
        _put_source(translation, word, file)
    translation.notes += [f"{translation.name}:{line}: {text}" for line, text in script.repairs]


def _put_source(translation: Translation, word: Word, file: Path | None) -> None:
    """Record a file that a script includes."""
    node = wrap(word.text, Origin(translation.name, word.line))
    entry = SourceKey("script", "source", "source", node)
    if file is not None:
        return translation.record(entry, KeyStatus.APPLIED, f"the variables of {file}")
    reason = (
        "the file was not read: its variables are those of the environment of msrl. "
        "Source it before msrl starts."
    )
    return translation.record(entry, KeyStatus.DROPPED, reason)


def _put_export(translation: Translation, entry: SourceKey, word: Word, *, trains: bool) -> None:
    if entry.key in _SEARCH_PATHS:
        reason = "workers have the search paths of the environment of msrl"
        return translation.record(entry, KeyStatus.DROPPED, reason)
    if entry.key in _RENDEZVOUS:
        reason = (
            "msrl sets the devices and addresses of its workers. "
            "To hide devices, export the variable before msrl starts."
        )
        return translation.record(entry, KeyStatus.PLACEMENT, reason)
    if is_secret(entry.key, word.text):
        reason = "secrets are not written to files. Export it before msrl starts."
        return translation.record(entry, KeyStatus.DROPPED, reason)
    if not trains:
        reason = "this command starts no workers. To use it, export it before msrl starts."
        return translation.record(entry, KeyStatus.DROPPED, reason)
    if word.problem:
        return translation.record(entry, KeyStatus.DROPPED, word.problem)
    return translation.assign(entry, [f"cluster.env.{entry.key}"], word.text)
