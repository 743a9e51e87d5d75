"""Images of steps on their way from the driver: how often they travel, and the driver's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fake_workers import FakeWorkers
from msrl.config.schema import Config
from msrl.types import Image, PlacedImage, Prompt
from msrl.workflows.preprocess import run as preprocess
from msrl.workflows.training.shared_images import SharedImages, with_files, without_files
from support import locate, python_path
from vision_folders import PROCESSOR, encoded, write_vision_model

PROMPTS, STEPS, MEGABYTES = 64, 3, 1 << 20


class Sharing(FakeWorkers):
    """Workers that keep shared values."""

    keeps_shared = True

    def __init__(self) -> None:
        super().__init__(1)
        self.shared = list[Any]()

    def share(self, value: object) -> Any:
        self.shared.append(value)
        return value


def _prompts(*keys: Sequence[str]) -> list[Prompt]:
    """Return prompts with images, whose files are their keys."""
    return [
        Prompt(
            index,
            np.zeros(4, np.int64),
            images=tuple(
                PlacedImage(number, Image(key, (1, 2, 2), lambda key=key: key.encode()))
                for number, key in enumerate(own)
            ),
        )
        for index, own in enumerate(keys)
    ]


def test_images_are_shared_once_until_others_follow() -> None:
    workers = Sharing()
    images, step = SharedImages(workers), _prompts("ab", "b", "")
    first = images.share(step)
    assert images.share(step[1:]) is first and images.share(step) is first
    assert images.share(step[2:]) is None
    assert [{key: bytes(file) for key, file in files.items()} for files in workers.shared] == [
        {"a": b"a", "b": b"b"}
    ]
    sent = without_files(step)
    assert [placed.image.data for prompt in sent for placed in prompt.images] == [b""] * 3
    received = with_files(sent, first)
    assert [placed.image.data for prompt in received for placed in prompt.images] == [
        *(b"a", b"b", b"b")
    ]
    assert [prompt.images for prompt in received] == [prompt.images for prompt in step]
    images.share(_prompts("c"))
    assert len(workers.shared) == 2


def test_workers_without_a_store_get_the_files_with_each_call() -> None:
    step = _prompts("a")
    assert SharedImages(FakeWorkers(1)).share(step) is None
    assert with_files(step, None) is step


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the prefix of prompts with different images of 1280 x 960 pixels."""
    from PIL import Image as Pillow

    folder = tmp_path_factory.mktemp("large")
    model = write_vision_model(folder / "model")
    settings = {**PROCESSOR, "max_pixels": 1_003_520}
    (model / "preprocessor_config.json").write_text(json.dumps(settings))
    draw, rows = np.random.default_rng(0), list[dict[str, Any]]()
    for number in range(PROMPTS):
        colors = draw.integers(0, 256, (240, 320, 3), dtype=np.uint8)
        image = Pillow.fromarray(colors).resize((1280, 960), Pillow.Resampling.BICUBIC)
        (folder / f"{number}.jpg").write_bytes(encoded(image, "JPEG", quality=85))
        rows.append({"instruction": "<image>?", "images": [f"{number}.jpg"], "output": "a"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {
        "input": [str(folder / "rows.jsonl")], "tokenizer": str(model), "handler": "alpaca",
        "template": "native", "kind": "prompts", "output_prefix": str(folder / "data"),
        "verify_images": "header",
    }  # fmt: skip
    preprocess(Config.model_validate({"preprocess": keys}, strict=False))
    return folder / "data"


@pytest.mark.full
@pytest.mark.slow
def test_large_images_of_512_samples_take_little_memory_of_the_driver(prefix: Path) -> None:
    """Pixels would take 12 GB, and a file per sample 200 MB for each of six calls of a step."""
    done = subprocess.run(
        [sys.executable, str(locate("image_steps.py")), str(prefix), str(STEPS)],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result, files = json.loads(done.stdout), (prefix.parent / "data_images.bin").stat().st_size
    assert files > 15 * MEGABYTES, "the images have the size of photos"
    assert result["grown"] < 200 * MEGABYTES
    assert result["ranks"] == PROMPTS, "the same images are sent once for all steps"
    assert result["engines"] == PROMPTS
