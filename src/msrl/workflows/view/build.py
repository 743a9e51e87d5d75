"""Writing of a view: pages and data of one or several runs, and their updates."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from msrl.errors import MsrlError
from msrl.files import why_not_writable, write_text
from msrl.tracking.run import CONFIG
from msrl.workflows.view.chunks import Chunks, FolderChunks, InlineChunks, safe_json
from msrl.workflows.view.page import page
from msrl.workflows.view.run_data import KINDS, RunData
from msrl.workflows.view.samples import sample_files
from msrl.workflows.view.search import TextIndex

INDEX = "index.html"
_MARK = ".msrl-view"  # marks a folder that a later view may replace
SINGLE_FILE_BYTES = 64 << 20
_MOST_DROPPED = 3  # a view has at least a third of the bytes of the samples it is built from


class View:
    """View of runs in a folder. `update` writes what has changed."""

    def __init__(self, folders: Sequence[Path], output: Path, *, is_live: bool = False) -> None:
        """Prepare the output folder.

        Args:
            folders: Folders of runs, or folders that contain them.
            output: Folder to write.
            is_live: True if a server updates the view and searches in its texts.

        Raises:
            MsrlError: A folder has no run, or the output folder has other contents.
        """
        self.output = output
        self._folders, self._is_live = folders, is_live
        self._version = 0
        run_folders(folders)
        _prepare(output)
        self.texts = TextIndex(output) if is_live else None
        self._runs: list[RunData] = []

    @property
    def runs(self) -> Sequence[Path]:
        """Folders of the runs by their numbers in the view."""
        return [run.folder for run in self._runs]

    @property
    def title(self) -> str:
        """Title of the page."""
        return ", ".join(run.name for run in self._runs)

    def update(self) -> None:
        """Write the data files that have changed, then the page."""
        chunks = FolderChunks(self.output)
        known = {*self.runs}
        new = [folder for folder in run_folders(self._folders) if folder not in known]
        self._runs += _open_runs(new, first=len(known), texts=self.texts)
        for run, name in zip(self._runs, distinct_names(self.runs), strict=True):
            run.name = name
        _write_runs(self._runs, chunks)
        self._version += 1
        chunks.add("version", safe_json(self._version))
        write_text(self.output / INDEX, page(self.title, is_live=self._is_live))


def write_folder(folders: Sequence[Path], output: Path) -> Path:
    """Write a view as a folder and return the path of its page."""
    View(folders, output).update()
    return output / INDEX


def write_single_file(folders: Sequence[Path], output: Path) -> Path:
    """Write a view as one HTML file and return its path.

    Raises:
        MsrlError: The runs have too much data for a single file.
    """
    reason = why_not_writable(output.parent)
    if reason is not None:
        raise MsrlError(f"--output={output}: cannot be written ({reason}). Choose another file.")
    run_dirs = run_folders(folders)
    runs = _open_runs(run_dirs)
    samples = [path for folder in run_dirs for kind in KINDS for path in sample_files(folder, kind)]
    chunks = InlineChunks(SINGLE_FILE_BYTES)
    chunks.require_room(sum(path.stat().st_size for path in samples) // _MOST_DROPPED)
    _write_runs(runs, chunks)
    text = page(", ".join(run.name for run in runs), chunks.values)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, text)
    return output


def run_folders(folders: Sequence[Path]) -> list[Path]:
    """Return the folders of runs: those that are named, and those in named ones.

    Raises:
        MsrlError: A folder neither is a run folder nor contains one.
    """
    run_dirs: list[Path] = []
    for folder in folders:
        inside = [folder] if (folder / CONFIG).is_file() else sorted(folder.glob(f"*/{CONFIG}"))
        if not inside:
            raise MsrlError(
                f"{folder}: contains neither {CONFIG} nor folders of runs. Name the folder of a "
                "run, as in runs/grpo, or of all runs."
            )
        run_dirs += inside if inside == [folder] else [config.parent for config in inside]
    return list(dict.fromkeys(run_dirs))


def _open_runs(
    folders: Sequence[Path], *, first: int = 0, texts: TextIndex | None = None
) -> list[RunData]:
    names = distinct_names(folders)
    return [RunData(folder, first + i, names[i], texts) for i, folder in enumerate(folders)]


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths: one, or as many as tell all folders apart."""
    paths = [folder.absolute().parts for folder in folders]
    for count in range(1, max(map(len, paths), default=0)):
        names = ["/".join(path[-count:]) for path in paths]
        if len({*names}) == len(names):
            return names
    return [str(folder) for folder in folders]


def _write_runs(runs: Sequence[RunData], chunks: Chunks) -> None:
    chunks.add("runs", safe_json([run.write(chunks) for run in runs]))


def _prepare(output: Path) -> None:
    """Create the folder, or remove the earlier view in it."""
    reason = why_not_writable(output)
    if reason is not None:
        raise MsrlError(f"--output={output}: cannot be written ({reason}). Choose another folder.")
    if output.is_dir() and any(output.iterdir()) and not (output / _MARK).is_file():
        raise MsrlError(
            f"--output={output}: the folder is not empty and contains no view. Choose a new folder."
        )
    (output / INDEX).unlink(missing_ok=True)  # without its data, it is no view
    if (output / "data").is_symlink():  # in a folder of others, which may lead anywhere
        (output / "data").unlink()
    shutil.rmtree(output / "data", ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    (output / _MARK).write_text("Folder of msrl view, which replaces its contents.\n")
