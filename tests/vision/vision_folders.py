"""Folders with the configuration of a vision-language model, and images."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

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
    "max_pixels": 200704,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def write_folder(folder, processor=None, config=None, name="preprocessor_config.json"):
    """Write the configuration of a model and of its image processor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    (folder / name).write_text(json.dumps(PROCESSOR if processor is None else processor))
    return folder


def picture(width, height, seed=0):
    """Return an image of random colors."""
    from PIL import Image

    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def encoded(image, form="PNG", **options):
    """Return an encoded image."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' or 'image' in c or 'image_url' in c %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in c %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


TILED_SPECIALS = (*SPECIALS[:3], "<img>", "</img>", "<quad>", "<IMG_CONTEXT>", "<video>")
TILED_TEMPLATE = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n")
TILED_CONFIG = {
    "architectures": ["InternVLForConditionalGeneration"],
    "model_type": "internvl",
    "image_token_id": 6,
    "vision_config": {
        "model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14],
    },
}  # fmt: skip
TILED_PROCESSOR = {
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "crop_to_patches": False,
    "size": {"height": 56, "width": 56},
    "min_patches": 1,
    "max_patches": 6,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
}


def write_tiled_model(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """Write the configuration and the tokenizer of a model whose images consist of tiles."""
    write_folder(folder, TILED_PROCESSOR)
    (folder / "config.json").write_text(json.dumps(config or TILED_CONFIG))
    make_vision_tokenizer(TILED_SPECIALS, TILED_TEMPLATE).save_pretrained(folder)
    return folder


def make_vision_tokenizer(specials: tuple[str, ...] = SPECIALS, template: str = TEMPLATE) -> Any:
    """Return a tokenizer with one token per byte, the tokens of images and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate((*specials, *alphabet))}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bpe.add_special_tokens(list(specials))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def write_vision_model(folder: Path) -> Path:
    """Write the configuration and the tokenizer of a vision-language model."""
    write_folder(folder)
    make_vision_tokenizer().save_pretrained(folder)
    return folder
