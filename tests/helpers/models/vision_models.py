"""Folders of small random vision-language models that an engine on CPU can load, with tokenizers.

Attention heads have 32 channels, the smallest that vLLM supports on CPU. Every part of the towers
matters: several windows, positions between the entries of a table, and two deeper layers.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

import families
from families import FAMILIES
from mixture_families import MIXTURES
from msrl.types import Floats, Image, Ints, PlacedImage, Prompt
from msrl.vision.pixels import decode_image, patches_of
from msrl.vision.settings import VisionSettings, read_vision_settings
from msrl.vision.sizes import grid_of, image_tokens
from tiny_qwen2 import VOCAB_SIZE, make_tokenizer

MODELS = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl moe", "internvl")
VISION_TOKENS = (
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
IDS = {
    "vision_start_token_id": 3, "vision_end_token_id": 4, "vision_token_id": 5,
    "image_token_id": 6, "video_token_id": 7,
}  # fmt: skip
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2-vl": {"hidden_size": 128},
    "qwen2.5-vl": {
        "depth": 3, "window_size": 56, "fullatt_block_indexes": [1], "out_hidden_size": 128,
    },
    "qwen3-vl": {
        "depth": 3, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 25,
        "out_hidden_size": 128,
    },
}  # fmt: skip
TOWERS["qwen3-vl moe"] = TOWERS["qwen3-vl"]
_DELTA = ("qwen3.5, language model", "qwen3.5 moe, language model")  # bfloat16 only on CPU
TOWERS |= {name: {"num_position_embeddings": 25, "out_hidden_size": 128} for name in _DELTA}
TOWERS["internvl"] = {"num_hidden_layers": 3}
TILE_TOKENS = ("<img>", "</img>", "<quad>", "<IMG_CONTEXT>", "<video>")
_TILE_NAMES = {
    "start_image_token": "<img>", "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
}  # fmt: skip


def config(name: str) -> dict[str, Any]:
    """Return the config of a model."""
    values = copy.deepcopy((FAMILIES | MIXTURES)[name].config) | IDS
    values["vision_config"] |= TOWERS[name]
    text = values.get("text_config", values)
    text |= {
        "hidden_size": 128, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024,
        "bos_token_id": None, "eos_token_id": 2,
    }  # fmt: skip
    if name == "internvl":
        text["architectures"] = ["Qwen2ForCausalLM"]
    elif name in _DELTA:
        text |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    elif not name.startswith("qwen3-vl"):
        text["rope_scaling"] = {"type": "mrope", "mrope_section": [4, 6, 6]}
    return values


def processor(patch_size: int, *, min_tokens: int = 4) -> dict[str, Any]:
    """Return the settings of an image processor; images have at most 100 tokens."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch_size,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 4 * min_tokens * patch_size**2,
        "max_pixels": 400 * patch_size**2,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.3, 0.4],
        "resample": 3,
    }


def tiled_processor(tile: int, *, max_tiles: int = 4) -> dict[str, Any]:
    """Return the settings of an image processor that cuts images into tiles."""
    return {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "crop_to_patches": False,
        "size": {"height": tile, "width": tile},
        "min_patches": 1,
        "max_patches": max_tiles,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.3, 0.4],
        "resample": 3,
    }


def write_tile_marks(folder: Path, start: int, end: int) -> None:
    """Write the tokens before and after an image into the file of a tokenizer."""
    tokens = {str(start): {"content": "<img>"}, str(end): {"content": "</img>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))


def weights(name: str, seed: int = 0) -> dict[str, Any]:
    """Return weights of a model whose logits are small enough for float32 to be exact to 1e-5."""
    tensors = families.weights(config(name), seed)
    return {key: 0.6 * tensor if tensor.ndim > 1 else tensor for key, tensor in tensors.items()}


def save_model(folder: Path, name: str, seed: int = 0, template: str | None = None) -> Path:
    """Save a model with its tokenizer, chat template and the settings of its image processor."""
    values = config(name)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(weights(name, seed), folder / "model.safetensors", metadata={"format": "pt"})
    is_tiled = name == "internvl"
    tokenizer = make_tokenizer(more=TILE_TOKENS if is_tiled else VISION_TOKENS)
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    if not is_tiled:
        settings = processor(values["vision_config"]["patch_size"])
    else:
        tile, patch = (values["vision_config"][key][0] for key in ("image_size", "patch_size"))
        settings = tiled_processor(tile)
        # Read by transformers' processor, which a server of vLLM uses
        count = {"image_seq_length": (tile // patch) ** 2 // 4}
        (folder / "processor_config.json").write_text(json.dumps(count))
        file = folder / "tokenizer_config.json"
        named = json.loads(file.read_text()) | {"extra_special_tokens": _TILE_NAMES}
        file.write_text(json.dumps(named))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def picture(folder: Path, seed: int, height: int, width: int) -> Image:
    """Return an image of random colors, which the model resizes."""
    from PIL import Image as Pillow

    colors = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    smooth = Pillow.fromarray(colors).resize((width, height), Pillow.Resampling.BICUBIC)
    return encoded(folder, smooth)


def encoded(folder: Path, image: Any) -> Image:
    """Return an image of Pillow as a PNG file, with its size in patches."""
    file = io.BytesIO()
    image.save(file, "PNG")
    data = file.getvalue()
    grid = grid_of(image.height, image.width, read_vision_settings(folder))
    return Image(hashlib.sha256(data).hexdigest(), grid, data)


def interleave(
    texts: Sequence[Sequence[int]], images: Sequence[Image], start: int, token: int, end: int
) -> tuple[Ints, tuple[PlacedImage, ...]]:
    """Return the tokens of texts with images between them, and the images' places."""
    ids, placed = list[int](), list[PlacedImage]()
    for number, text in enumerate(texts):
        ids += text
        if number < len(images):
            ids.append(start)
            placed.append(PlacedImage(len(ids), images[number]))
            ids += [token] * image_tokens(images[number].grid, 2) + [end]
    return np.array(ids, np.int64), tuple(placed)


def make_prompt(seed: int, texts: Sequence[int], images: Sequence[Image], index: int = 0) -> Prompt:
    """Return a prompt of random texts of these lengths with images between them."""
    draw = np.random.default_rng(seed)
    drawn = [draw.integers(8, 264, length).tolist() for length in texts]
    tokens = (IDS[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end"))
    ids, placed = interleave(drawn, images, *tokens)
    return Prompt(index, ids, images=placed)


def prompts(folder: Path) -> list[Prompt]:
    """Return prompts with one image, none, two, and equal tokens with two different images."""
    wide, high, small, other = (
        picture(folder, seed, *size)
        for seed, size in enumerate([(84, 112), (140, 60), (100, 100), (84, 112)])
    )
    shapes = [([4, 9], [wide]), ([20], []), ([3, 5, 9], [high, small])]
    rows = [make_prompt(seed, *shape, seed) for seed, shape in enumerate(shapes)]
    return [*rows, make_prompt(9, [30, 8], [wide], 3), make_prompt(9, [30, 8], [other], 4)]


def logprobs(folder: Path, rows: Sequence[Prompt]) -> list[Floats]:
    """Return transformers' log-probability of every token but the first of each prompt."""
    import torch
    import transformers

    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    model = getattr(transformers, architecture).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    results = list[Floats]()
    for row in rows:
        ids = torch.from_numpy(row.token_ids)[None]
        with torch.inference_mode():
            logits = model(input_ids=ids, **image_arguments(folder, row)).logits[0]
        chosen = logits[:-1].double().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        results.append(chosen.float().numpy())
    return results


def image_arguments(folder: Path, row: Any) -> dict[str, Any]:
    """Return the arguments of transformers' models for the images of a row with `token_ids`."""
    import torch

    vision = read_vision_settings(folder)
    kinds = torch.from_numpy(row.token_ids == vision.image_token_id).long()[None]
    is_tiled = vision.tile > 0
    if not row.images:
        return {} if is_tiled else {"mm_token_type_ids": kinds}
    if is_tiled:
        return {"pixel_values": torch.from_numpy(_tiles(vision, row))}
    patches = [patches_of(decode_image(x.image.data, vision), vision) for x in row.images]
    return {
        "mm_token_type_ids": kinds,
        "pixel_values": torch.from_numpy(np.concatenate(patches)),
        "image_grid_thw": torch.tensor([placed.image.grid for placed in row.images]),
    }


def _tiles(vision: VisionSettings, row: Any) -> Any:  # [tiles, C, H, W]
    """Return the tiles of the images of a row, normalized as transformers does."""
    pixels = [decode_image(x.image.data, vision) for x in row.images]
    tiles = np.concatenate(pixels).reshape(-1, vision.tile, vision.tile, 3)
    mean, std = (np.array(x, np.float32) for x in (vision.image_mean, vision.image_std))
    normalized = ((tiles * (1 / 255)).astype(np.float32) - mean) / std
    return np.ascontiguousarray(normalized.transpose(0, 3, 1, 2))
