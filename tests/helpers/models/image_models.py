"""Small random vision-language models, rows with images, and transformers' loss of them.

Images are PNG files of random colors. Every part of the towers matters: several windows,
positions between the entries of a table, and two deeper layers.
"""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import families
from families import FAMILIES
from mixture_families import MIXTURES
from msrl.algorithms.packing import Sequences
from msrl.types import Bools, Image, Ints, PlacedImage
from msrl.vision.settings import read_vision_settings
from vision_models import (
    encoded,
    image_arguments,
    interleave,
    processor,
    tiled_processor,
    write_tile_marks,
)

CHANGES = {
    "qwen2-vl": {},
    "qwen2.5-vl": {"depth": 3, "window_size": 56, "fullatt_block_indexes": [1]},
    "qwen3-vl": {"depth": 3, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 25},
    "qwen3-vl moe": {"depth": 3, "deepstack_visual_indexes": [0, 2]},
    "qwen3.5": {"num_position_embeddings": 25},
    "qwen3.5 moe": {"num_position_embeddings": 25},
    "internvl": {"num_hidden_layers": 3},
}
# Rows of families, where they have other names. Without biases, no gradient is zero.
_ROWS = {
    "qwen3.5": "qwen3.5, language model",
    "qwen3.5 moe": "qwen3.5 moe, language model",
    "internvl": "internvl, qwen3",
}
START, END, TOKEN = 190, 191, 197


def config(name: str) -> dict[str, Any]:
    """Return the config of a model."""
    values = copy.deepcopy((FAMILIES | MIXTURES)[_ROWS.get(name, name)].config)
    values["vision_config"] |= CHANGES[name]
    return values


def save_model(folder: Path, name: str) -> Path:
    """Save a model with the settings of its image processor."""
    families.save_model(folder, config(name))
    if name == "internvl":
        settings = tiled_processor(config(name)["vision_config"]["image_size"][0])
        write_tile_marks(folder, START, END)
    else:
        settings = processor(config(name)["vision_config"]["patch_size"], min_tokens=1)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def picture(folder: Path, seed: int, rows: int, columns: int) -> Image:
    """Return an image that is `rows` x `columns` image tokens large."""
    from PIL import Image as Pillow

    settings = read_vision_settings(folder)
    draw = np.random.default_rng(seed)
    sides = [2 * settings.patch_size * size for size in (rows, columns)]
    return encoded(folder, Pillow.fromarray(draw.integers(0, 256, (*sides, 3), dtype=np.uint8)))


@dataclass(frozen=True)
class Row:
    token_ids: Ints
    loss_mask: Bools
    images: tuple[PlacedImage, ...]


def make_row(seed: int, texts: list[int], images: list[Image], answer: int) -> Row:
    """Return a row of texts of these lengths with images between them, and a trained answer."""
    draw = np.random.default_rng(seed)
    drawn = [draw.integers(0, START, length).tolist() for length in texts]
    ids, placed = interleave(drawn, images, START, TOKEN, END)
    return Row(ids, np.arange(len(ids)) >= len(ids) - answer, placed)


@functools.cache
def rows(folder: Path) -> tuple[Row, ...]:
    """Return rows with one image, none, two, equal tokens with different images, and samples.

    The last three rows share a prompt, and two of them an image.
    """
    wide, high, small, other = (
        picture(folder, seed, *size) for seed, size in enumerate([(2, 3), (5, 2), (1, 1), (2, 3)])
    )
    samples = [make_row(9, [3, 7], [wide], 5) for _ in range(2)]
    samples[1].token_ids[-4:] = [5, 6, 7, 8]
    return (
        make_row(1, [4, 8], [wide], 6),
        make_row(2, [11], [], 7),
        make_row(3, [2, 5, 9], [high, small], 8),
        make_row(4, [5, 6], [wide], 4),
        make_row(9, [3, 7], [other], 5),
        *samples,
    )


BATCHES = ((0, 1, 2), (3, 4, 5, 6))
"""Rows of each micro-batch."""


def sequences(folder: Path, numbers: tuple[int, ...], *, everywhere: bool = False) -> Sequences:
    """Return rows to pack; `everywhere` sets the loss mask of every token."""
    chosen = [rows(folder)[number] for number in numbers]
    masks = [np.ones_like(row.loss_mask) if everywhere else row.loss_mask for row in chosen]
    ids, images = (tuple(getattr(row, key) for row in chosen) for key in ("token_ids", "images"))
    return Sequences(ids, tuple(masks), {}, None, images)


def num_loss_tokens(folder: Path) -> int:
    return sum(int(row.loss_mask[1:].sum()) for row in rows(folder))


@dataclass(frozen=True)
class Reference:
    """Logits of every row, the loss of all rows, and its gradients by the names of the files."""

    logits: tuple[np.ndarray, ...]
    loss: float
    gradients: dict[str, np.ndarray]


@functools.cache
def reference(folder: Path) -> Reference:
    """Return the results of transformers, one row at a time."""
    import transformers

    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    model = getattr(transformers, architecture).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    total, logits = torch.zeros(()), list[np.ndarray]()
    for row in rows(folder):
        output = model(torch.from_numpy(row.token_ids)[None], **image_arguments(folder, row))
        logits.append(output.logits[0].detach().numpy())
        logprobs = output.logits[0, :-1].log_softmax(-1)
        labels, trained = (torch.from_numpy(x[1:]) for x in (row.token_ids, row.loss_mask))
        total = total - logprobs.gather(-1, labels[:, None])[:, 0][trained].sum()
    loss = total / num_loss_tokens(folder)
    loss.backward()
    gradients = {
        _file_name(name, architecture): _file_gradient(name, parameter.grad, architecture).numpy()
        for name, parameter in model.named_parameters()
    }
    return Reference(tuple(logits), loss.item(), gradients)


def _file_gradient(name: str, gradient: torch.Tensor, architecture: str) -> torch.Tensor:
    """Return a gradient in the form of the files: those of Qwen3-VL have inputs before outputs."""
    is_exchanged = architecture.startswith("Qwen3VLMoe") and ".experts." in name
    return gradient.mT if is_exchanged else gradient


def _file_name(name: str, architecture: str) -> str:
    if architecture.startswith("Qwen3"):
        return name
    if architecture.startswith("InternVL"):
        nested = name.replace("model.language_model.", "model.language_model.model.")
        return nested.removeprefix("model.").replace("lm_head.", "language_model.lm_head.")
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
