"""Rollouts of the last step that a report shows with their images."""

from __future__ import annotations

from pathlib import Path

from msrl.errors import MsrlError
from msrl.limits import print_note
from msrl.tracking.report import ShownRollout
from msrl.workflows.thumbnails import FOLDER, read_thumbnail
from msrl.workflows.view.samples import ViewSample, read_samples, sample_files

_NUM_GROUPS = 4


def rollouts_with_images(run_dir: Path) -> list[ShownRollout]:
    """Return the first rollout of each of the first groups of the last step that have images."""
    files = sample_files(run_dir, "rollout")
    if not files or not (run_dir / FOLDER).is_dir():
        return []
    try:
        samples = read_samples(files[-1])
    except MsrlError as error:
        print_note(f"the report shows no images: {error}")
        return []
    first = {sample.group: sample for sample in reversed(samples) if sample.images}
    return [_shown(run_dir, first[group]) for group in sorted(first)[:_NUM_GROUPS]]


def _shown(run_dir: Path, sample: ViewSample) -> ShownRollout:
    keys = dict.fromkeys(image.key for image in sample.images)
    with_thumbnails = [key for key in keys if read_thumbnail(run_dir / FOLDER, key) is not None]
    return ShownRollout(
        sample.step,
        tuple(f"{FOLDER}/{key}.jpg" for key in with_thumbnails),
        sample.prompt,
        sample.response,
        sample.reward,
    )
