"""Checkpoint saves of one rank, immediate or in the background.

A background save is done by a thread, from copies in the machine's memory, while the training
continues.

At most one save is in progress; the next one waits for it. An error of the thread is raised by the
next call.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from msrl.errors import MsrlError
from msrl.trainer.checkpointing import state as checkpoints
from msrl.trainer.checkpointing.publish import Publication, RankFiles, discard
from msrl.trainer.checkpointing.resume import Retention, SavedTraining

if TYPE_CHECKING:
    from msrl.trainer.rank import TrainingRank

_FAILURES = (OSError, SafetensorError)  # of a full or absent disk


class Saver:
    """Writer of a training's checkpoints into `root`; `hf_dir` has config and tokenizer.

    All ranks must call it for the same steps.
    """

    def __init__(
        self, rank: TrainingRank, root: Path, hf_dir: Path, *, in_background: bool
    ) -> None:
        self._rank, self._root, self._hf_dir = rank, root, hf_dir
        self._in_background = in_background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._finished: list[SavedTraining] = []

    def save(self, step: int, extra: Mapping[str, Any], retention: Retention) -> None:
        """Save after `step` steps.

        In the background, return once the tensors that training changes are copied. Raises
        MsrlError.
        """
        try:
            if self._in_background:
                self._begin(step, extra, retention)
            else:
                saved = checkpoints.save(
                    self._rank, self._root, step, extra, hf_dir=self._hf_dir, retention=retention
                )
                self._finished.append(saved)
        except _FAILURES as error:
            raise self._save_error(step, error) from error

    def _begin(self, step: int, extra: Mapping[str, Any], retention: Retention) -> None:
        # At most one save is in progress: each holds a copy of the model.
        self._join()
        files, publication = checkpoints.begin(
            self._rank,
            self._root,
            step,
            extra,
            hf_dir=self._hf_dir,
            retention=retention,
            keeps_copy=True,
        )
        # A daemon thread, so that a rank that fails does not wait for files of other ranks.
        self._thread = threading.Thread(
            target=self._write, args=(files, publication), name=f"save {step}", daemon=True
        )
        self._thread.start()

    def finished_saves(self, *, must_wait: bool = False) -> list[SavedTraining]:
        """Return the saves finished since the last call.

        On the first rank these are complete checkpoints, on others the files of the rank.

        With `must_wait`, wait for the save in progress. Raises MsrlError, or the exception that
        ended the save.
        """
        if must_wait or (self._thread is not None and not self._thread.is_alive()):
            self._join()
        finished, self._finished = self._finished, []
        return finished

    def end(self) -> None:
        """Wait for the save in progress when a run ends in the middle of a step.

        No rank may leave before it is complete.

        All ranks must call it. An error of this rank is raised before the ranks synchronize, since
        the first rank still waits for the files of this rank.
        """
        self._join()
        self._rank.any_rank(False)

    def _write(self, files: RankFiles, publication: Publication | None) -> None:
        try:
            files.write()
            if publication is not None:
                publication.publish()
        except _FAILURES as error:
            self._error = self._save_error(files.step, error)
        except BaseException as error:
            self._error = error
        else:
            self._finished.append(SavedTraining(self._root, files.step))

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _save_error(self, step: int, error: Exception) -> MsrlError:
        """Return the error of a save that failed, and remove its files."""
        discard(self._root, step)
        return MsrlError(
            f"checkpoint.save={self._root}: step {step} could not be saved ({error}); earlier "
            "checkpoints are complete. Free disk space or set another folder, then resume with "
            "--resume auto."
        )
