"""Images of rollouts: what a run records, its thumbnails, and what the pages show of them."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import view_runs
from msrl.algorithms.packing import Sequences
from msrl.config.sections.general import RolloutFormat
from msrl.data.tokenizer import TextTokenizer
from msrl.errors import MsrlError
from msrl.tracking.rollouts import RecordedImage, read_records
from msrl.types import Completion, Image, PlacedImage, Prompt, Reward, RolloutGroup, ScoredGroup
from msrl.workflows.rollout_log import RolloutLog
from msrl.workflows.training.run_log import write_results
from msrl.workflows.view.build import write_folder, write_single_file
from support import assert_mentions, mentions, python_path
from test_view import read_chunk
from vision_folders import encoded, picture

START, END, PAD = 3, 4, 6
IDS = [START, *[PAD] * 6, END, 65, START, *[PAD] * 2, END, 66]


def image(seed: int, rows: int, columns: int, data: bytes | None = None) -> Image:
    data = encoded(picture(300, 150, seed), "PNG") if data is None else data
    return Image(hashlib.sha256(data).hexdigest(), (1, rows, columns), data)


FIRST, SECOND = image(0, 4, 6), image(1, 2, 4)


def group(*placed: PlacedImage, ids: list[int] = IDS) -> ScoredGroup:
    """Return a group of two responses to a question with images."""
    prompt = Prompt(0, np.array(ids), "15", {}, placed)
    response = Completion(np.array([67, 68]), np.zeros(2, np.float32), "stop", 0, "CD")
    return ScoredGroup(RolloutGroup(prompt, (response,) * 2), (Reward(1.0, {}), Reward(0.0, {})))


def write(folder: Path, row: ScoredGroup, format: RolloutFormat = "jsonl") -> None:
    """Write the rollouts of a step as a training does."""
    decode = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
    log = RolloutLog(
        folder,
        cast(TextTokenizer, SimpleNamespace(backend=decode)),
        is_on=True,
        format=format,
    )
    log.write(1, [row], Sequences((), (), {}))


BOTH = group(PlacedImage(1, FIRST), PlacedImage(10, SECOND))


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_step_records_the_places_of_images_and_each_thumbnail_once(
    format: RolloutFormat, tmp_path: Path
) -> None:
    from PIL import Image as Picture

    run = view_runs.make_run(tmp_path / "grpo", num_steps=0)
    write(run, BOTH, format)
    files = sorted((run / "images").iterdir())
    assert {path.name for path in files} == {f"{FIRST.key}.jpg", f"{SECOND.key}.jpg"}
    assert Picture.open(files[0]).size == (256, 128)
    times = [path.stat().st_mtime_ns for path in files]
    write(run, BOTH, format)
    assert [path.stat().st_mtime_ns for path in files] == times
    write_folder([run], tmp_path / "view")
    (details, _) = read_chunk(tmp_path / "view", "0/rollout-samples-0")
    assert details["images"] == [[1, 6, 4, 6, 0, 0], [10, 2, 2, 4, 0, 1]]
    assert details["turns"][0][1] == "3 6 4 65 3 6 4 66"
    shown = read_chunk(tmp_path / "view", "0/images-0")
    assert base64.b64decode(shown[0]) == (run / "images" / f"{FIRST.key}.jpg").read_bytes()


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_the_report_of_a_run_shows_images_of_its_last_step(
    format: RolloutFormat, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = view_runs.make_run(tmp_path / "grpo", num_steps=0)
    write(run, BOTH, format)
    (run / "images" / f"{SECOND.key}.jpg").unlink()
    write_results(run, {}, curves=(), command=None)
    lines = (run / "report.md").read_text().splitlines()
    (row,) = [line for line in lines if ".jpg" in line]
    assert row == f"| ![image](images/{FIRST.key}.jpg) | 3 6 4 65 3 6 4 66 | CD | 1 |"
    assert "Rollouts of step 1:" in lines
    path = run / "rollouts" / f"step_000001.{format}"
    path.write_bytes(path.read_bytes()[:20])
    write_results(run, {}, curves=(), command=None)
    assert ".jpg" not in (run / "report.md").read_text()
    assert_mentions(capsys.readouterr().err, "no images", path.name)


def test_the_report_of_a_run_on_text_shows_no_rollouts(tmp_path: Path) -> None:
    run = view_runs.make_run(tmp_path / "grpo", num_steps=0)
    write(run, group(ids=[65, 66]))
    write_results(run, {}, curves=(), command=None)
    assert "Rollouts" not in (run / "report.md").read_text()


def test_records_without_images_have_no_column_and_no_folder(tmp_path: Path) -> None:
    run = view_runs.make_run(tmp_path / "grpo", num_steps=0)
    write(run, group(ids=[65, 66]), "parquet")
    (first, _) = read_records(run / "rollouts" / "step_000001.parquet")
    assert not (run / "images").exists() and first.images == ()
    write(run, BOTH, "parquet")
    (first, _) = read_records(run / "rollouts" / "step_000001.parquet")
    assert first.images == (
        RecordedImage(1, FIRST.key, 4, 6),
        RecordedImage(10, SECOND.key, 2, 4),
    )


def test_an_image_that_cannot_be_read_has_no_thumbnail(tmp_path: Path) -> None:
    run = view_runs.make_run(tmp_path / "grpo", num_steps=0)
    damaged = image(0, 4, 6, encoded(picture(300, 150), "PNG")[:-2000] + b"</script>")
    write(run, group(PlacedImage(1, damaged), PlacedImage(10, SECOND)))
    write_folder([run], tmp_path / "view")
    (details, _) = read_chunk(tmp_path / "view", "0/rollout-samples-0")
    assert details["images"] == [[1, 6, 4, 6, None, None], [10, 2, 2, 4, 0, 0]]


@pytest.mark.parametrize("kind", ["markup", "large", "link", "name"])
def test_other_files_in_place_of_thumbnails_are_not_shown(kind: str, tmp_path: Path) -> None:
    run = view_runs.make_run(tmp_path / "grpo", num_steps=0)
    write(run, BOTH)
    path = run / "images" / f"{FIRST.key}.jpg"
    secret = tmp_path / "secret.jpg"
    secret.write_bytes(path.read_bytes())
    path.unlink()
    if kind == "markup":
        path.write_text("<svg onload=window.hacked=1>")
    elif kind == "large":
        path.write_bytes(secret.read_bytes() + bytes(1 << 20))
    elif kind == "name":
        rows = run / "rollouts" / "step_000001.jsonl"
        rows.write_text(rows.read_text().replace(FIRST.key, "../../secret"))
    else:
        path.symlink_to(secret)
    write_folder([run], tmp_path / "view")
    (details, _) = read_chunk(tmp_path / "view", "0/rollout-samples-0")
    assert details["images"][0] == [1, 6, 4, 6, None, None]


@pytest.mark.parametrize("value", [{"offset": 99}, {"offset": "x"}, {"rows": None}, 3])
def test_places_of_images_that_are_no_places_are_refused(value: Any, tmp_path: Path) -> None:
    run = view_runs.make_run(tmp_path / "grpo", num_steps=0)
    write(run, BOTH)
    file = run / "rollouts" / "step_000001.jsonl"
    row = json.loads(file.read_text().splitlines()[0])
    row["images"][0] = row["images"][0] | value if isinstance(value, dict) else value
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(MsrlError, match=mentions(file.name)):
        write_folder([run], tmp_path / "view")


def test_a_single_file_has_the_thumbnails_too(tmp_path: Path) -> None:
    run = view_runs.make_run(tmp_path / "grpo", num_steps=0)
    write(run, BOTH)
    page = write_single_file([run], tmp_path / "view.html").read_text()
    data = (run / "images" / f"{SECOND.key}.jpg").read_bytes()
    assert base64.b64encode(data).decode() in page
    assert 'data-chunk="0/images-0"' in page and "img-src data:" in page


@pytest.mark.slow
def test_views_of_text_import_no_pillow(tmp_path: Path) -> None:
    run = view_runs.make_run(tmp_path / "grpo")
    code = (
        "import sys; from pathlib import Path; from msrl.workflows.view.build import write_folder; "
        f"write_folder([Path({str(run)!r})], Path({str(tmp_path / 'view')!r})); "
        "sys.exit('PIL' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": python_path()}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not [*(tmp_path / "view" / "data").glob("**/images-*")]


def test_thumbnails_are_small_jpeg_files_as_the_image_is_shown() -> None:
    from PIL import Image as Picture

    from msrl.vision.decoding import thumbnails
    from msrl.vision.errors import ImageError

    exif = Picture.Exif()
    exif[0x0112] = 6  # turned by a quarter
    files = [encoded(picture(600, 300), "JPEG", exif=exif), b"no image"]
    small, other = thumbnails(files)
    assert isinstance(small, bytes) and isinstance(other, ImageError)
    shown = Picture.open(io.BytesIO(small))
    assert (shown.format, shown.size) == ("JPEG", (128, 256))
