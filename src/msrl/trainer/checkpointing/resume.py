"""Where the checkpoints of a training lie, and which one to go on from. Light to import.

    <save>/iter_0000010/, <save>/hf/, ...   the model's weights, as `checkpoint/mcore.py` lays them out
    <save>/training/iter_0000010/           ours: optimizer per parameter, random-number states, the step

An iteration is whole when both folders are there (each was written beside its place and renamed, the model's last) and every file is as
it was written: `state.json` has the sizes and checksums of all of them, those of the weights included, and its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrl.errors import MsrlError
from msrl.files import why_not_writable
from msrl.trainer.checkpointing.integrity import damages, is_sealed_json, open_sealed_json

STATE = "state.json"
_OURS = frozenset(
    ("training", "hf", "latest_checkpointed_iteration.txt", "msrl_manifest.json", "attempts.jsonl")
)  # the last: a run's folder


@dataclass(frozen=True, slots=True)
class SavedTraining:
    """A whole checkpoint of a training: its folder (`<save>`), and the steps done.

    `passed_over` are the steps of newer ones that are not whole, and that a training which goes on from here writes again.
    """

    root: Path
    step: int
    passed_over: tuple[int, ...] = ()

    @property
    def training_dir(self) -> Path:
        return training_dir(self.root, self.step)

    def state(self) -> dict[str, Any]:
        """What was saved besides tensors. Raises MsrlError when it cannot be read, or an earlier version saved it in another form."""
        path = self.training_dir / STATE
        try:
            text = path.read_text(encoding="utf-8")
            if is_sealed_json(text):
                return open_sealed_json(text)
        except (OSError, ValueError) as error:
            raise MsrlError(f"{path}: cannot be read ({error}); resume from another checkpoint") from error
        kept = f"go on from its weights with checkpoint.load: {self.root}, in a training that starts anew"
        raise MsrlError(f"{path}: saved by an earlier version, whose optimizer files are no longer read; {kept}")

    def damage(self) -> str | None:
        """What is not as it was written, in one line; every file is read. None where all is whole."""
        if not (self.training_dir / STATE).is_file():
            return f"{self.training_dir / STATE} is missing"
        try:
            found = damages(self.root, self.state()["files"])
        except MsrlError as error:
            return str(error)
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return found[0] + more if found else None


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints stay: the `newest` ones (None: all), as far as all take at most `max_bytes`; the newest and `best` in any case."""

    newest: int | None = None
    max_bytes: float | None = None
    best: int | None = None

    def surplus(self, root: Path, up_to: int | None = None) -> list[int]:
        """The steps of the checkpoints under `root` that go. Later ones than `up_to` were passed over in a resume and count for nothing."""
        steps = [step for step in saved_steps(root) if up_to is None or step <= up_to]
        going, taken = list[int](), self._bytes(root, self.best) if self.best in steps else 0
        for age, step in enumerate(reversed(steps)):
            if step == self.best:
                continue
            taken += self._bytes(root, step)
            is_over = self.max_bytes is not None and taken > self.max_bytes
            if age > 0 and (is_over or (self.newest is not None and age >= self.newest)):
                going.append(step)
        return going

    def _bytes(self, root: Path, step: int | None) -> int:
        if self.max_bytes is None or step is None:
            return 0
        folders = (root / f"iter_{step:07d}", training_dir(root, step))
        return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())


KEEP_ALL = Retention()


def training_dir(root: Path, step: int) -> Path:
    return root / "training" / f"iter_{step:07d}"


def saved_steps(root: Path) -> list[int]:
    """The steps of all checkpoints of a training under `root`, ascending; whether their files are as they were written is not looked at."""
    return [step for step in _iterations(root) if training_dir(root, step).is_dir()]


def _iterations(root: Path) -> list[int]:
    found = [re.fullmatch(r"iter_(\d{7,})", path.name) for path in root.glob("iter_*")]
    return sorted(int(match[1]) for match in found if match)


def check_room(root: Path, resume: SavedTraining | None) -> None:
    """Raises MsrlError when `root` holds checkpoints of steps that a training from `resume` on would write again, those of another
    training, or other people's files, or when it cannot be made or written.
    """
    reason = why_not_writable(root)
    if reason is not None:
        raise MsrlError(f"checkpoint.save={root}: this folder cannot be made or written ({reason}); set checkpoint.save to another one")
    _refuse_other_files(root)
    start_step = resume.step if resume else 0
    goes_on = resume is not None and resume.root.resolve() == root.resolve()
    replaced = resume.passed_over if resume and goes_on else ()
    others = [step for step in _iterations(root) if not (goes_on and step <= start_step) and step not in replaced]
    if not others:
        return
    steps = ", ".join(map(str, others))
    which, them = (f"the checkpoint of step {steps} is", "it") if len(others) == 1 else (f"the checkpoints of steps {steps} are", "them")
    if not saved_steps(root):
        why = "without the state of a training that could go on"
        cure = f"start from {them} with checkpoint.load: {root} and another checkpoint.save"
    elif resume is not None and others[0] <= start_step:
        why = f"of another training than the one in {resume.root} that this one goes on from"
        cure = "set checkpoint.save to another folder"
    else:
        why = f"and this training starts after step {start_step}"
        cure = "go on from the newest (--resume auto), set checkpoint.save to another folder"
    raise MsrlError(f"checkpoint.save={root}: {which} there, {why}; {cure}, or remove {them}")


def _refuse_other_files(root: Path) -> None:
    """A folder that holds something, and nothing that a training or a conversion writes there; hidden files are nobody's."""
    names = sorted(path.name for path in root.iterdir() if not path.name.startswith(".")) if root.is_dir() else []
    if names and not any(name in _OURS or name.startswith("iter_") for name in names):
        raise MsrlError(f"checkpoint.save={root}: holds other files ({names[0]}); name a new or an empty folder")


def resume_from(resume: str, root: Path) -> tuple[SavedTraining | None, tuple[str, ...]]:
    """What `checkpoint.resume` means, and what is to be said of it.

    `none`; `auto`, the newest whole one under `root`, if any is there; a folder of checkpoints, the newest whole one; or one iteration.
    Raises MsrlError when nothing whole is there, and for `auto` when checkpoints are there and none is whole.
    """
    if resume == "none" or (resume == "auto" and not saved_steps(root)):
        return None, (f"checkpoint.resume=auto: no checkpoint is in {root}, so the training starts anew",) if resume == "auto" else ()
    path = root if resume == "auto" else Path(resume)
    match = re.fullmatch(r"iter_(\d{7,})", path.name) if resume != "auto" else None
    if match is None:
        return _newest_whole(path, resume)
    steps = saved_steps(path.parent)
    if int(match[1]) not in steps:
        known = f"; there are those of steps {', '.join(map(str, steps))}" if steps else ""
        raise MsrlError(f"checkpoint.resume={resume}: no whole checkpoint of a training is there{known}")
    saved = SavedTraining(path.parent, int(match[1]))
    damage = saved.damage()
    if damage is not None:
        raise MsrlError(f"checkpoint.resume={resume}: {damage}; resume from another checkpoint")
    return saved, ()


def _newest_whole(root: Path, resume: str) -> tuple[SavedTraining, tuple[str, ...]]:
    """The newest checkpoint whose files are all as they were written, and a sentence on each newer one and on it."""
    passed_over = dict[int, str]()
    for step in reversed(saved_steps(root)):
        damage = SavedTraining(root, step).damage()
        if damage is None:
            said = [f"the checkpoint of step {late} is passed over: {why}" for late, why in passed_over.items()]
            taken = f"going on after step {step}, the newest whole checkpoint in {root}"
            return SavedTraining(root, step, tuple(passed_over)), (*said, taken)
        passed_over[step] = damage
    which = "; ".join(f"step {step}: {why}" for step, why in passed_over.items())
    advice = "put the files back, or start anew in another folder (checkpoint.save)"
    raise MsrlError(
        f"checkpoint.resume={resume}: no whole checkpoint of a training is there" + (f" ({which}); {advice}" if passed_over else "")
    )
