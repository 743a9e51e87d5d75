"""Where the checkpoints of a training lie, and which one to go on from. Light to import.

    <save>/iter_0000010/, <save>/hf/, ...   the model's weights, as `checkpoint/mcore.py` lays them out
    <save>/training/iter_0000010/           ours: optimizer per parameter, random-number states, the step

An iteration is whole when both folders are there: each was written beside its place and renamed, the model's last.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrl.errors import MsrlError

STATE = "state.json"


@dataclass(frozen=True, slots=True)
class SavedTraining:
    """A whole checkpoint of a training: its folder (`<save>`), and the steps done."""

    root: Path
    step: int

    @property
    def training_dir(self) -> Path:
        return training_dir(self.root, self.step)

    def state(self) -> dict[str, Any]:
        """What was saved besides tensors. Raises MsrlError when it cannot be read."""
        path = self.training_dir / STATE
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise MsrlError(f"{path}: cannot be read ({error}); resume from another checkpoint") from error


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints stay: the `newest` ones (None: all), as far as all take at most `max_bytes`; the newest and `best` in any case."""

    newest: int | None = None
    max_bytes: float | None = None
    best: int | None = None

    def surplus(self, root: Path) -> list[int]:
        """The steps of the checkpoints under `root` that go."""
        steps = saved_steps(root)
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
    """The steps of all whole checkpoints under `root`, ascending."""
    return [step for step in _iterations(root) if (training_dir(root, step) / STATE).is_file()]


def _iterations(root: Path) -> list[int]:
    found = [re.fullmatch(r"iter_(\d{7,})", path.name) for path in root.glob("iter_*")]
    return sorted(int(match[1]) for match in found if match)


def check_room(root: Path, start_step: int) -> None:
    """Raises MsrlError when `root` holds checkpoints of steps that a training from `start_step` on would write again."""
    later = [step for step in _iterations(root) if step > start_step]
    if later:
        raise MsrlError(
            f"checkpoint.save={root}: checkpoints of steps {', '.join(map(str, later))} are there, and this training starts after step"
            f" {start_step}; go on from the newest (--resume auto), set checkpoint.save to another folder, or remove them"
        )


def resume_from(resume: str, root: Path) -> SavedTraining | None:
    """What `checkpoint.resume` means: `none`; `auto`, the newest whole one under `root`, if any; a folder of checkpoints; or one iteration.

    Raises MsrlError when nothing whole is there.
    """
    if resume == "none":
        return None
    if resume == "auto":
        steps = saved_steps(root)
        return SavedTraining(root, steps[-1]) if steps else None
    path = Path(resume)
    match = re.fullmatch(r"iter_(\d{7,})", path.name)
    root, wanted = (path.parent, int(match[1])) if match else (path, None)
    steps = saved_steps(root)
    if not steps or (wanted is not None and wanted not in steps):
        known = f"; whole there: {', '.join(map(str, steps))}" if steps else ""
        raise MsrlError(f"checkpoint.resume={resume}: no whole checkpoint of a training is there{known}")
    return SavedTraining(root, steps[-1] if wanted is None else wanted)
