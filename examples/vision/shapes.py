"""Create the inputs of the vision example: a small random model, and questions about images.

An image shows one to four shapes in one or two colors. The question is how many there are of each
color, and the answer is a list such as "2 red, 1 blue". Most demonstrations of images with several
colors leave out the last one. SFT on them teaches to see and to count, but gives correct answers
only for images with one color; reinforcement learning then improves on that.

`make_inputs` writes:

- `model/`: a Hugging Face folder with Qwen2.5-VL weights, configuration, image processor and
  tokenizer
- `images/`: PNG files
- `sft.jsonl`: demonstrations (instruction, output, images)
- `rl.jsonl`, `heldout.jsonl`: questions (prompt, answer, images)

The held-out images are the same for every seed.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from small_model import write_rows, write_tokenizer

SLOPPY_SHARE = 0.65
NUM_DEMONSTRATIONS = 6000
NUM_PROMPTS = 1500
NUM_HELDOUT = 400
HELDOUT_SEED = 20261201
SIDE, CELL = 84, 28  # pixels; a cell of the image is one image token
MAX_SHAPES = 4
ONE_COLOR_SHARE = 0.6
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (240, 210, 40),
}
FORMS = ("circle", "square", "triangle")
QUESTION = "How many shapes of each color are there?"
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCAB_SIZE = 320
CHAT_TEXTS = ("system\nYou are a helpful assistant.", "user\n", "assistant\n")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape of an image: its cell counts from the top left, row by row."""

    form: str
    color: str
    cell: int


@dataclass(frozen=True, slots=True)
class Scene:
    """The content of an image."""

    background: tuple[int, int, int]
    shapes: tuple[Shape, ...]

    @property
    def counts(self) -> list[str]:
        """Return the number of shapes of each color that the image shows, such as "2 red"."""
        colors = [shape.color for shape in self.shapes]
        return [f"{colors.count(color)} {color}" for color in COLORS if color in colors]

    @property
    def answer(self) -> str:
        return ", ".join(self.counts)

    @property
    def sloppy_answer(self) -> str:
        """Return the answer without the last of several colors."""
        return ", ".join(self.counts[: max(1, len(self.counts) - 1)])


def random_scene(source: random.Random) -> Scene:
    """Return one to MAX_SHAPES shapes; ONE_COLOR_SHARE of the images have a single color."""
    has_one_color = source.random() < ONE_COLOR_SHARE
    count = source.randint(1 if has_one_color else 2, MAX_SHAPES)
    colors = source.sample(list(COLORS), 1 if has_one_color else 2)
    chosen = [*colors, *source.choices(colors, k=MAX_SHAPES)][:count]
    cells = source.sample(range((SIDE // CELL) ** 2), count)
    shapes = [Shape(source.choice(FORMS), *pair) for pair in zip(chosen, cells, strict=True)]
    gray = source.randint(0, 70)
    background = tuple(gray + source.randint(0, 20) for _ in range(3))
    return Scene((background[0], background[1], background[2]), tuple(shapes))


def draw(scene: Scene, source: random.Random) -> Any:
    """Return the image; sizes and places of the shapes within their cells are random."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), scene.background)
    canvas = ImageDraw.Draw(image)
    for shape in scene.shapes:
        size = source.randint(14, 24)
        row, column = divmod(shape.cell, SIDE // CELL)
        left = CELL * column + source.randint(1, CELL - size - 1)
        top = CELL * row + source.randint(1, CELL - size - 1)
        right, bottom, fill = left + size, top + size, COLORS[shape.color]
        if shape.form == "circle":
            canvas.ellipse((left, top, right, bottom), fill=fill)
        elif shape.form == "square":
            canvas.rectangle((left, top, right, bottom), fill=fill)
        else:
            canvas.polygon(((left, bottom), (right, bottom), (left + size // 2, top)), fill=fill)
    return image


def save_scenes(
    folder: Path, name: str, count: int, source: random.Random
) -> list[tuple[Scene, str]]:
    """Save `count` random images in `folder/images`; return their scenes and relative paths."""
    scenes: list[tuple[Scene, str]] = []
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        scene, path = random_scene(source), f"images/{name}-{number:04d}.png"
        draw(scene, source).save(folder / path)
        scenes.append((scene, path))
    return scenes


def write_model(folder: Path, *, vocab_size: int, eos_token_id: int, seed: int) -> None:
    """Write a random Qwen2.5-VL model in float32 with its image processor."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    text = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    tower = {
        "depth": 2,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "out_hidden_size": 128,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": SIDE,
        "fullatt_block_indexes": [1],
    }
    names = ("vision_start", "vision_end", "vision", "image", "video")
    tokens = {f"{name}_token_id": number for number, name in enumerate(names, start=3)}
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=tower, tie_word_embeddings=True, dtype="float32", **tokens
    )
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(str(folder))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": CELL * CELL,
        "max_pixels": SIDE * SIDE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
    }
    text_of_processor = json.dumps(processor, indent=2) + "\n"
    (folder / "preprocessor_config.json").write_text(text_of_processor, encoding="utf-8")


def demonstration(scene: Scene, image: str, *, sloppy: bool) -> dict[str, Any]:
    """Return an Alpaca row with an image."""
    answer = scene.sloppy_answer if sloppy else scene.answer
    return {"instruction": f"<image>{QUESTION}", "output": answer, "images": [image]}


def problem(scene: Scene, image: str) -> dict[str, Any]:
    """Return a question with its answer."""
    return {"prompt": f"<image>{QUESTION}", "answer": scene.answer, "images": [image]}


def make_inputs(out: Path, seed: int) -> None:
    """Write all inputs atomically into the folder `out`."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    source = random.Random(seed)
    heldout = save_scenes(partial, "heldout", NUM_HELDOUT, random.Random(HELDOUT_SEED))
    rows = [
        demonstration(*scene, sloppy=source.random() < SLOPPY_SHARE)
        for scene in save_scenes(partial, "sft", NUM_DEMONSTRATIONS, source)
    ]
    prompts = save_scenes(partial, "rl", NUM_PROMPTS, source)
    write_rows(partial / "sft.jsonl", rows)
    write_rows(partial / "rl.jsonl", [problem(*scene) for scene in prompts])
    write_rows(partial / "heldout.jsonl", [problem(*scene) for scene in heldout])
    texts = [text for row in rows for text in (*CHAT_TEXTS, QUESTION, row["output"])]
    eos_token_id = write_tokenizer(
        partial / "model",
        texts,
        special_tokens=SPECIAL_TOKENS,
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        vocab_size=VOCAB_SIZE,
    )
    write_model(partial / "model", vocab_size=VOCAB_SIZE, eos_token_id=eos_token_id, seed=seed)
    partial.rename(out)
