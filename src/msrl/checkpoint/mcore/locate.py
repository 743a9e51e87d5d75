"""Location of Megatron checkpoints on disk: iteration, parallel layout and the file of every rank.

The folders and files are described in `mcore/files.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msrl.checkpoint.distributed.read import is_distributed, read_common
from msrl.checkpoint.mcore.arguments import layout_from_args, refuse_schedule
from msrl.checkpoint.mcore.files import FILE, TRACKER, iteration_dir, rank_folder, read_rank_file
from msrl.errors import MsrlError
from msrl.files import read_text_within
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.stages import chunk_name

_MAX_FILES = 1 << 16
_MAX_DIGITS = 18  # of an iteration
_MAX_TRACKER_BYTES = 1 << 20
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Files of a checkpoint with one file per rank. `iteration` is a number or `release`."""

    iteration: int | str
    layout: ParallelLayout
    files: Mapping[Coords, Path]


def latest_iteration(save: Path) -> int | str:
    """Return the iteration that the tracker names: a number or `release`.

    Raises:
        MsrlError: The tracker is missing or invalid.
    """
    tracker = save / TRACKER
    if not tracker.is_file():
        hint = ". Name its parent folder." if save.name.startswith("iter_") else ""
        raise MsrlError(f"{save}: not an mcore checkpoint ({TRACKER} is missing){hint}")
    text = _tracker_text(tracker).strip()
    if text == "release":
        return text
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise MsrlError(f"{tracker}: {text[:40]!r}: must be a number or the word release")
    return int(text)


def _tracker_text(tracker: Path) -> str:
    try:
        return read_text_within(tracker, _MAX_TRACKER_BYTES)
    except UnicodeDecodeError:
        raise MsrlError(f"{tracker}: is not UTF-8 text. Restore it.") from None


def find_checkpoint(save: Path, iteration: int | str | None = None) -> CheckpointFiles:
    """Return the files of an iteration (default: the latest).

    Raises:
        MsrlError: The folder or the file of a rank is missing.
    """
    iteration = latest_iteration(save) if iteration is None else iteration
    folder = iteration_dir(save, iteration)
    if not folder.is_dir():
        raise MsrlError(
            f"{save}: {TRACKER} names iteration {iteration}, but folder {folder.name} is missing"
        )
    if is_distributed(folder):
        raise MsrlError(
            f"{folder}: is a distributed checkpoint, but one file per rank is needed. "
            "Convert it with convert-ckpt reshard."
        )
    folders = {
        child.name: _rank_numbers(child) for child in sorted(folder.iterdir()) if child.is_dir()
    }
    if not folders:
        raise MsrlError(f"{folder}: contains no mp_rank_* folders")
    first = next(
        (folder / name / FILE for name in folders if (folder / name / FILE).is_file()),
        folder / next(iter(folders)) / FILE,
    )
    args = read_rank_file(first)["args"]
    refuse_schedule(first, args)
    layout = _layout_from_folders(folder, list(folders.values()), args)
    files = {at: folder / rank_folder(layout, at) / FILE for at in layout.ranks()}
    for path in files.values():
        if not path.is_file():
            raise MsrlError(f"{path}: the file of this rank is missing ({layout})")
    unexpected = sorted(set(folders) - {path.parent.name for path in files.values()})
    if unexpected:
        raise MsrlError(
            f"{folder / unexpected[0]}: not the folder of a rank, "
            f"according to the arguments in {first} ({layout})"
        )
    return CheckpointFiles(iteration, layout, files)


def saved_layout(save: Path) -> ParallelLayout:
    """Return the parallel layout of the latest iteration.

    A distributed checkpoint records the layout of the training that saved it.
    """
    folder = iteration_dir(save, latest_iteration(save))
    if is_distributed(folder):
        return layout_from_args(read_common(folder)["args"])
    return find_checkpoint(save).layout


def _rank_numbers(folder: Path) -> tuple[int, ...]:
    """Return the numbers in the name of a rank's folder: tp; tp and pp or ep; or all three."""
    match = _RANK.fullmatch(folder.name)
    if match is None:
        raise MsrlError(
            f"{folder}: not the folder of a rank "
            "(mp_rank_TT, with _PPP for stages and _EEE for experts)"
        )
    return tuple(int(number) for number in match.groups() if number is not None)


def _layout_from_folders(
    folder: Path, numbers: list[tuple[int, ...]], args: argparse.Namespace
) -> ParallelLayout:
    """Return the parallel layout of a checkpoint.

    The sizes follow from the folder names, all else from the arguments in the files.
    """
    recorded = layout_from_args(args)
    sizes = [1 + max(number) for number in zip(*numbers, strict=False)] + [1, 1]
    if math.prod(sizes) > _MAX_FILES:
        raise MsrlError(
            f"{folder}: the names of its folders count {math.prod(sizes)} ranks, more than the "
            f"limit of {_MAX_FILES}, but there are {len(numbers)} folders"
        )
    if len(numbers[0]) == 2 and recorded.ep > 1 and recorded.pp == 1:
        # The only number after tp counts the experts.
        sizes[1:3] = [1, sizes[1]]
    return dataclasses.replace(recorded, tp=sizes[0], pp=sizes[1], ep=sizes[2])


def empty_positions(
    layout: ParallelLayout, num_positions: int, models: Mapping[Coords, Mapping[str, object]]
) -> tuple[int, ...]:
    """Return the pipeline positions without a layer: gaps in the local layer numbers."""
    if num_positions % (layout.pp * (layout.vpp or 1)):
        return ()
    without_empty = dataclasses.replace(layout, noop_layers=())
    empty: list[int] = []
    for stage in range(layout.pp):
        names = models[Coords(pp=stage)]
        chunks = without_empty.chunks(num_positions, stage)
        for number, positions in enumerate(chunks):
            for local, position in enumerate(positions):
                prefix = chunk_name(f"decoder.layers.{local}.", number, len(chunks))
                if position is not None and not any(name.startswith(prefix) for name in names):
                    empty.append(position)
    return tuple(sorted(empty))
