"""Folders of a training's checkpoints, resume checks, and retention. Light to import.

    <save>/iter_0000010/, <save>/hf/, ...   the model's weights, in the format of `checkpoint/mcore`
    <save>/training/iter_0000010/           training state: optimizer, random numbers, step

A checkpoint is complete if both folders exist and every file matches its size and checksum in
`state.json`, which covers the weights and itself. Each folder is written under a temporary name and
renamed, the model's last.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrl.errors import MALFORMED, MsrlError
from msrl.files import has_hole, why_not_writable
from msrl.models.parallel_layout import ParallelLayout
from msrl.trainer.checkpointing.integrity import damages, has_checksum, read_with_checksum

STATE = "state.json"
# Names that msrl writes; the last one belongs to a run's folder.
_KNOWN_NAMES = frozenset(
    ("training", "hf", "latest_checkpointed_iteration.txt", "msrl_manifest.json", "attempts.jsonl")
)


@dataclass(frozen=True, slots=True)
class SavedTraining:
    """Complete checkpoint of a training after `step` steps, in the folder `root` (`<save>`).

    `skipped` are the steps of newer, damaged checkpoints, which a training that resumes from this
    one writes again.
    """

    root: Path
    step: int
    skipped: tuple[int, ...] = ()

    @property
    def training_dir(self) -> Path:
        """Folder of the training's state."""
        return training_dir(self.root, self.step)

    def state(self) -> dict[str, Any]:
        """Return the saved state besides tensors.

        Raises MsrlError if it cannot be read, or an earlier version saved it in another form.
        """
        path = self.training_dir / STATE
        try:
            if has_hole(path):
                raise ValueError("it has a hole")
            text = path.read_text(encoding="utf-8")
            if has_checksum(text):
                return _checked(read_with_checksum(text))
        except (OSError, *MALFORMED) as error:
            raise MsrlError(
                f"{path}: cannot be read ({error}). Resume from another checkpoint."
            ) from error
        raise MsrlError(
            f"{path}: saved by an earlier version, whose optimizer files are no longer read."
            f" Start a new training from its weights with checkpoint.load: {self.root}"
        )

    def damage(self) -> str | None:
        """Read every file; return a line on the first problem, or None if there is none."""
        if not (self.training_dir / STATE).is_file():
            return f"{self.training_dir / STATE} is missing"
        try:
            problems = damages(self.root, self.state()["files"])
        except MsrlError as error:
            return str(error)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return problems[0] + more if problems else None


def _checked(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state whose values have their types, which others may have written.

    Raises an exception of MALFORMED for another state.
    """
    files, extra = state["files"], state["extra"]
    if not isinstance(extra, dict) or not all(isinstance(r["bytes"], int) for r in files.values()):
        raise TypeError("a value has another type")
    layout = ParallelLayout.from_json(state["cut"])
    if not 0 < layout.ranks_per_model <= len(files):  # each rank has a file
        raise ValueError(f"it has {len(files)} files for {layout.ranks_per_model:,} ranks")
    return state


@dataclass(frozen=True, slots=True)
class Retention:
    """Checkpoints to keep.

    These are the `newest` ones (None: all) while they total at most `max_bytes`, and always the
    newest one and `best`.
    """

    newest: int | None = None
    max_bytes: float | None = None
    best: int | None = None

    def surplus(self, root: Path, up_to: int | None = None) -> list[int]:
        """Return the steps of the checkpoints under `root` to remove.

        Later ones than `up_to` were skipped by a resume and are ignored.
        """
        steps = [step for step in saved_steps(root) if up_to is None or step <= up_to]
        surplus, total = list[int](), self._bytes(root, self.best) if self.best in steps else 0
        for age, step in enumerate(reversed(steps)):
            if step == self.best:
                continue
            total += self._bytes(root, step)
            is_over = self.max_bytes is not None and total > self.max_bytes
            if age > 0 and (is_over or (self.newest is not None and age >= self.newest)):
                surplus.append(step)
        return surplus

    def _bytes(self, root: Path, step: int | None) -> int:
        if self.max_bytes is None or step is None:
            return 0
        folders = (root / f"iter_{step:07d}", training_dir(root, step))
        return sum(
            file.stat().st_size
            for folder in folders
            for file in folder.rglob("*")
            if file.is_file()
        )


KEEP_ALL = Retention()


def training_dir(root: Path, step: int) -> Path:
    """Return the folder of the training's state after `step` steps."""
    return root / "training" / f"iter_{step:07d}"


def saved_steps(root: Path) -> list[int]:
    """Return the steps of all checkpoints of a training under `root`, ascending.

    Their files are not checked.
    """
    return [step for step in _iterations(root) if training_dir(root, step).is_dir()]


def _iterations(root: Path) -> list[int]:
    matches = [re.fullmatch(r"iter_(\d{7,})", path.name) for path in root.glob("iter_*")]
    return sorted(int(match[1]) for match in matches if match)


def check_room(root: Path, resume: SavedTraining | None) -> None:
    """Check that a training that starts from `resume` can save into `root`.

    Raises:
        MsrlError: The folder cannot be written, or it holds other files, checkpoints of another
            training, or checkpoints of steps that the training would write again.
    """
    reason = why_not_writable(root)
    if reason is not None:
        raise MsrlError(
            f"checkpoint.save={root}: the folder cannot be created or written ({reason}). Set it "
            "to another folder."
        )
    _refuse_other_files(root)
    start_step = resume.step if resume else 0
    is_same_root = resume is not None and resume.root.resolve() == root.resolve()
    replaced = resume.skipped if resume and is_same_root else ()
    conflicting = [
        step
        for step in _iterations(root)
        if not (is_same_root and step <= start_step) and step not in replaced
    ]
    if conflicting:
        raise MsrlError(_conflict(root, resume, conflicting))


def _conflict(root: Path, resume: SavedTraining | None, conflicting: Sequence[int]) -> str:
    """Return the message on checkpoints under `root` that the training must not replace."""
    steps = ", ".join(map(str, conflicting))
    present, them = (
        (f"the checkpoint of step {steps}", "it")
        if len(conflicting) == 1
        else (f"the checkpoints of steps {steps}", "them")
    )
    if not saved_steps(root):
        problem = "without the training state that a resume needs"
        remedy = f"Start from {them} with checkpoint.load: {root} and another checkpoint.save"
    elif resume is not None and conflicting[0] <= resume.step:
        problem = f"of another training than the resumed one in {resume.root}"
        remedy = "Set checkpoint.save to another folder"
    else:
        problem = f"and this training starts after step {resume.step if resume else 0}"
        remedy = "Resume from the newest one (--resume auto), set checkpoint.save to another folder"
    holds = f"the folder holds {present}, {problem}"
    return f"checkpoint.save={root}: {holds}. {remedy}, or remove {them}."


def _refuse_other_files(root: Path) -> None:
    """Raise MsrlError if the folder holds files, but none of a training or conversion.

    Hidden files are ignored.
    """
    names = (
        sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
        if root.is_dir()
        else []
    )
    if names and not any(name in _KNOWN_NAMES or name.startswith("iter_") for name in names):
        raise MsrlError(
            f"checkpoint.save={root}: the folder holds other files ({names[0]}). Set it to a new "
            "or empty folder."
        )


def resume_from(resume: str, root: Path) -> tuple[SavedTraining | None, tuple[str, ...]]:
    """Return the checkpoint that `checkpoint.resume` means, and lines for the log.

    `none`: no checkpoint. `auto`: the newest complete one under `root`, if there are any. A folder
    of checkpoints: its newest complete one. A folder of one iteration: that one.

    Raises:
        MsrlError: There is no complete checkpoint; for `auto` only if there are damaged ones.
    """
    if resume == "none":
        return None, ()
    if resume == "auto" and not saved_steps(root):
        return None, (f"checkpoint.resume=auto: no checkpoint in {root}; starting a new training",)
    path = root if resume == "auto" else Path(resume)
    match = re.fullmatch(r"iter_(\d{7,})", path.name) if resume != "auto" else None
    if match is None:
        return _newest_complete(path, resume)
    return _iteration(path.parent, int(match[1]), resume), ()


def _iteration(root: Path, step: int, resume: str) -> SavedTraining:
    """Return the checkpoint of one step. Raises MsrlError if it is not complete."""
    steps = saved_steps(root)
    if step not in steps:
        known = f"; the folder has steps {', '.join(map(str, steps))}" if steps else ""
        raise MsrlError(
            f"checkpoint.resume={resume}: no complete training checkpoint found{known}. Set it to "
            "another checkpoint."
        )
    saved = SavedTraining(root, step)
    damage = saved.damage()
    if damage is not None:
        raise MsrlError(f"checkpoint.resume={resume}: {damage}. Set it to another checkpoint.")
    return saved


def _newest_complete(root: Path, resume: str) -> tuple[SavedTraining, tuple[str, ...]]:
    """Return the newest complete checkpoint, and a line on it and on each newer one.

    Raises MsrlError if there is none.
    """
    damaged = dict[int, str]()
    for step in reversed(saved_steps(root)):
        damage = SavedTraining(root, step).damage()
        if damage is None:
            notes = [
                f"skipped the checkpoint of step {late}: {problem}"
                for late, problem in damaged.items()
            ]
            resumed = f"resuming after step {step}, from the newest complete checkpoint in {root}"
            return SavedTraining(root, step, tuple(damaged)), (*notes, resumed)
        damaged[step] = damage
    which = "; ".join(f"step {step}: {problem}" for step, problem in damaged.items())
    details = (
        f" ({which}). Restore the files, or start a new training in another folder "
        "(checkpoint.save)."
        if damaged
        else "."
    )
    raise MsrlError(f"checkpoint.resume={resume}: no complete training checkpoint found{details}")
