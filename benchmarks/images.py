"""Preprocessing of rows with images, beside decoding and resizing alone.

The inputs are JPEG files of 1280 x 960 pixels, which the model's processor resizes to at most
1,003,520 pixels. `python -m benchmarks.images FOLDER WORKERS` decodes and resizes all of them with
Pillow and prints the images per second as JSON.
"""

from __future__ import annotations

import json
import math
import sys
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.cases import ROOT, Bench, Case, Measurement, Sample
from benchmarks.measure import quiet_environment, timed

NUM_IMAGES, WIDTH, HEIGHT = 400, 1280, 960
MAX_PIXELS, SIDE, BICUBIC = 1_003_520, 28, 3
CONFIG = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "image_token_id": 6,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": MAX_PIXELS,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip


def prepare(bench: Bench) -> None:
    """Create the images, rows and model if they are missing, and read the images once."""
    folder = bench.inputs / "images"
    rows = folder / "rows.jsonl"
    if not rows.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write_model(folder / "model")
        _write_images(folder)
        lines = (
            {
                "images": [f"{number}.jpg"],
                "messages": [
                    {"role": "user", "content": "<image>What is shown?"},
                    {"role": "assistant", "content": "Waves."},
                ],
            }
            for number in range(NUM_IMAGES)
        )
        rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in folder.glob("*.jpg"):
        path.read_bytes()


def _write_model(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate((*SPECIALS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)


def _write_images(folder: Path) -> None:
    """Write images of waves with noise, of which each JPEG file has about 360 KB."""
    import numpy as np
    from PIL import Image

    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    random = np.random.default_rng(0)
    noise = random.normal(0, 12, (HEIGHT, WIDTH, 3))
    for number in range(NUM_IMAGES):
        waves = np.sin(rows / (9 + number % 17)) * np.cos(columns / (13 + number % 29))
        colors = 128 + 80 * waves[..., None] + np.roll(noise, 7 * number, axis=1)
        image = Image.fromarray(np.clip(colors, 0, 255).astype(np.uint8))
        image.save(folder / f"{number}.jpg", quality=90)


def ours(num_workers: int) -> Measurement:
    """Preprocess all rows: read, decode and check every image, and store it."""

    def run(bench: Bench) -> Sample:
        folder = bench.inputs / "images"
        done = bench.msrl(
            *("preprocess", "--input", folder / "rows.jsonl", "--tokenizer", folder / "model"),
            *("--handler", "sharegpt", "--template", "qwen", "--overwrite"),
            *("--output-prefix", bench.work / "images", "--workers", str(num_workers)),
        )
        return Sample(
            NUM_IMAGES / done.seconds, {"peak anonymous MB": done.peak_anonymous_bytes / 1e6}
        )

    return run


def decode_and_resize(num_workers: int) -> Measurement:
    """Decode and resize the same files in as many processes, also measured from their start."""

    def run(bench: Bench) -> Sample:
        folder = bench.inputs / "images"
        command = [sys.executable, "-m", "benchmarks.images", folder, str(num_workers)]
        done = timed(command, environment=quiet_environment(), cwd=ROOT)
        return Sample(NUM_IMAGES / done.seconds)

    return run


def _resize(path: Path, size: tuple[int, int]) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        resized = image.convert("RGB").resize(size, resample=Image.Resampling(BICUBIC))
    return resized.getpixel((0, 0))


def main(arguments: list[str]) -> int:
    """Decode and resize all images of a folder."""
    scale = math.sqrt(MAX_PIXELS / (WIDTH * HEIGHT))
    width, height = (int(length * scale / SIDE) * SIDE for length in (WIDTH, HEIGHT))
    paths, start = sorted(Path(arguments[0]).glob("*.jpg")), time.perf_counter()
    with get_context("spawn").Pool(int(arguments[1])) as pool:
        pool.map(partial(_resize, size=(width, height)), paths, chunksize=8)
    print(json.dumps({"images_per_s": len(paths) / (time.perf_counter() - start)}))
    return 0


CASES = tuple(
    Case(
        name,
        f"JPEG files of 1280 x 960 pixels to data with images, {workers}",
        "images/s",
        ours(count),
        {"decode_resize": decode_and_resize(count)},
        {"decode_resize": 0.8},
        prepare,
        higher_is_better=True,
        uses_inputs=False,
    )
    for name, count, workers in (("images", 2, "2 workers"), ("images-one", 1, "1 worker"))
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
