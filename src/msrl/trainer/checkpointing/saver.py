"""The saves of one rank: at once, or by a thread from copies in the machine's memory while the training goes on.

One save at most is under way; the next waits for it. What goes wrong in the thread is raised in the rank that asks next.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from msrl.errors import MsrlError
from msrl.trainer.checkpointing import state as checkpoints
from msrl.trainer.checkpointing.publish import Publication, RankFiles
from msrl.trainer.checkpointing.resume import Retention, SavedTraining

if TYPE_CHECKING:
    from msrl.trainer.rank import TrainWorker

_FAILURES = (OSError, SafetensorError)  # what a full or absent disk makes


class Saver:
    """Writes the checkpoints of a training into `root`; `hf_dir` has config and tokenizer. All ranks must ask for the same saves."""

    def __init__(self, worker: TrainWorker, root: Path, hf_dir: Path, *, in_background: bool) -> None:
        self._worker, self._root, self._hf_dir, self._in_background = worker, root, hf_dir, in_background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._finished: list[SavedTraining] = []

    def save(self, step: int, extra: Mapping[str, Any], retention: Retention) -> None:
        """Save after `step` steps; in the background, return as soon as all that training changes is copied. Raises MsrlError."""
        try:
            if self._in_background:
                self._begin(step, extra, retention)
            else:
                saved = checkpoints.save(self._worker, self._root, step, extra, hf_dir=self._hf_dir, retention=retention)
                self._finished.append(saved)
        except _FAILURES as error:
            raise self._failed(step, error) from error

    def _begin(self, step: int, extra: Mapping[str, Any], retention: Retention) -> None:
        self._join()
        part, publication = checkpoints.begin(
            self._worker, self._root, step, extra, hf_dir=self._hf_dir, retention=retention, keeps_copy=True
        )
        # A daemon, so that a rank that fails does not wait for the parts of others.
        self._thread = threading.Thread(target=self._write, args=(part, publication), name=f"save {step}", daemon=True)
        self._thread.start()

    def finished(self, *, must_wait: bool = False) -> list[SavedTraining]:
        """The saves that were finished since this was asked last: on the first rank whole checkpoints, on others their parts.

        With `must_wait` the one under way is waited for. Raises MsrlError, or what else kept it from being written.
        """
        if must_wait or (self._thread is not None and not self._thread.is_alive()):
            self._join()
        found, self._finished = self._finished, []
        return found

    def end(self) -> None:
        """Asked of all ranks when a run ends in the middle of a step: the save under way is whole before any of them leaves.

        Raises what kept this rank's part from being written at once: the first rank still waits for that part, and would meet nobody.
        """
        self._join()
        self._worker.any_rank(False)

    def _write(self, part: RankFiles, publication: Publication | None) -> None:
        try:
            part.write()
            if publication is not None:
                publication.publish()
        except _FAILURES as error:
            self._error = self._failed(part.step, error)
        except BaseException as error:
            self._error = error
        else:
            self._finished.append(SavedTraining(self._root, part.step))

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _failed(self, step: int, error: Exception) -> MsrlError:
        return MsrlError(
            f"checkpoint.save={self._root}: step {step} could not be saved ({error}); checkpoints before it are whole: make room or"
            " choose another folder, and go on with --resume auto"
        )
