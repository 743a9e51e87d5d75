"""Verification of the files that a command loads, before engines and ranks start.

Each file is read once, on this machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from msrl.limits import print_note
from msrl.tracking.progress import progress

if TYPE_CHECKING:
    from msrl.checkpoint.integrity import FileCheck

UNVERIFIED = (".unverified", ".failed-verification")  # suffixes of folders
SHOWN_BYTES = 1 << 28  # smaller amounts take at most seconds and show no progress bar


def verify_models(folders: Iterable[Path]) -> None:
    """Verify the weight files of models, each folder once.

    Raises MsrlError that names the damaged file and its record.
    """
    from msrl.checkpoint.integrity import weight_checks

    distinct = {folder.resolve(): folder for folder in folders if folder.is_dir()}
    verify_files([check for folder in distinct.values() for check in weight_checks(folder)])


def verify_files(checks: list[FileCheck]) -> None:
    """Verify files, with a progress bar if there is much to read.

    Warns about folders of conversions that were not verified. Raises MsrlError as `refuse_damaged`
    does.
    """
    from msrl.checkpoint.integrity import refuse_damaged

    for folder in sorted({check.folder for check in checks}):
        if folder.suffix in UNVERIFIED:
            line = f"{folder}: was not verified after its conversion. Convert it again."
            print_note(line)
    num_bytes = sum(check.num_bytes for check in checks)
    if num_bytes < SHOWN_BYTES:
        refuse_damaged(checks)
        return
    with progress("verifying checksums", total=num_bytes, unit="B") as bar:
        refuse_damaged(checks, bar.advance)
