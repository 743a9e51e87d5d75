"""Find a Megatron checkpoint on disk: its iteration, its cut, and the file of every rank (folders
and files as `mcore.py` has them).
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msrl.checkpoint.dist.read import is_distributed, read_common
from msrl.checkpoint.mcore.arguments import cut_of_args, refuse_schedule
from msrl.checkpoint.mcore.files import FILE, TRACKER, iteration_dir, rank_folder, read_rank_file
from msrl.errors import MsrlError
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.stages import chunk_name

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint on disk: its iteration (a number, or the word `release`), its cut and the file
    of every rank.
    """

    iteration: int | str
    cut: ParallelLayout
    files: Mapping[Coords, Path]


def latest_iteration(save: Path) -> int | str:
    """The iteration that the tracker names; `release` is one. Raises MsrlError when there is no
    tracker or it makes no sense.
    """
    tracker = save / TRACKER
    if not tracker.is_file():
        hint = "; give the folder above" if save.name.startswith("iter_") else ""
        raise MsrlError(f"{save}: not an mcore checkpoint (there is no {TRACKER}){hint}")
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if text == "release":
        return text
    if not text.isdecimal():
        raise MsrlError(f"{tracker}: says {text[:40]!r}; it must hold a number or the word release")
    return int(text)


def find_checkpoint(save: Path, iteration: int | str | None = None) -> Found:
    """The files of an iteration (default: the latest). Raises MsrlError when the folder or the file
    of a rank is missing.
    """
    iteration = latest_iteration(save) if iteration is None else iteration
    folder = iteration_dir(save, iteration)
    if not folder.is_dir():
        raise MsrlError(
            f"{save}: {TRACKER} names iteration {iteration}, but there is no folder {folder.name}"
        )
    if is_distributed(folder):
        raise MsrlError(
            f"{folder}: a distributed checkpoint, where a file per rank is needed; make one with convert-ckpt reshard"
        )
    folders = {
        child.name: _numbers_of(child) for child in sorted(folder.iterdir()) if child.is_dir()
    }
    if not folders:
        raise MsrlError(f"{folder}: holds no mp_rank_* folders")
    first = next(
        (folder / name / FILE for name in folders if (folder / name / FILE).is_file()),
        folder / next(iter(folders)) / FILE,
    )
    args = read_rank_file(first)["args"]
    refuse_schedule(first, args)
    cut = _cut_of_folders(list(folders.values()), args)
    files = {at: folder / rank_folder(cut, at) / FILE for at in cut.ranks()}
    for path in files.values():
        if not path.is_file():
            raise MsrlError(f"{path}: the file of this rank is missing ({cut})")
    strange = sorted(set(folders) - {path.parent.name for path in files.values()})
    if strange:
        raise MsrlError(
            f"{folder / strange[0]}: not the folder of a rank, as the arguments in {first} make them ({cut})"
        )
    return Found(iteration, cut, files)


def saved_layout(save: Path) -> ParallelLayout:
    """The cut of the latest iteration, of either layout: a distributed checkpoint tells by which it
    was saved.
    """
    folder = iteration_dir(save, latest_iteration(save))
    return (
        cut_of_args(read_common(folder)["args"])
        if is_distributed(folder)
        else find_checkpoint(save).cut
    )


def _numbers_of(folder: Path) -> tuple[int, ...]:
    """The numbers in the name of a rank's folder: tp; tp and pp or ep; all three."""
    match = _RANK.fullmatch(folder.name)
    if match is None:
        raise MsrlError(
            f"{folder}: not the folder of a rank (mp_rank_TT, with _PPP for stages and _EEE for experts)"
        )
    return tuple(int(number) for number in match.groups() if number is not None)


def _cut_of_folders(numbers: list[tuple[int, ...]], args: argparse.Namespace) -> ParallelLayout:
    """The cut of a checkpoint: sizes from the names of its folders, what these do not tell from the
    arguments in its files.
    """
    said = cut_of_args(args)
    sizes = [1 + max(number) for number in zip(*numbers, strict=False)] + [1, 1]
    if (
        len(numbers[0]) == 2 and said.ep > 1 and said.pp == 1
    ):  # a single number after tp is that of the experts
        sizes[1:3] = [1, sizes[1]]
    return dataclasses.replace(said, tp=sizes[0], pp=sizes[1], ep=sizes[2])


def empty_positions(
    cut: ParallelLayout, num_positions: int, models: Mapping[Coords, Mapping[str, object]]
) -> tuple[int, ...]:
    """The positions without a layer, from the names of a checkpoint's tensors: they leave holes in
    the local layer numbers.
    """
    if num_positions % (cut.pp * (cut.vpp or 1)):
        return ()
    whole = dataclasses.replace(cut, noop_layers=())
    empty: list[int] = []
    for stage in range(cut.pp):
        names = models[Coords(pp=stage)]
        chunks = whole.chunks(num_positions, stage)
        for number, positions in enumerate(chunks):
            for local, position in enumerate(positions):
                prefix = chunk_name(f"decoder.layers.{local}.", number, len(chunks))
                if position is not None and not any(name.startswith(prefix) for name in names):
                    empty.append(position)
    return tuple(sorted(empty))
