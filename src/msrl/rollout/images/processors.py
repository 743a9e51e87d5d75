"""Vision-language classes of vLLM where torchvision is not installed (vLLM 0.23 to 0.32).

vLLM's classes of Qwen2-VL, its successors and InternVL import processors of transformers, and these
modules import functions of torchvision whether they call them or not. On CPU, often only a build of
torchvision for other devices is at hand, which does not load. msrl computes pixels itself, and
transformers resizes images with Pillow where torchvision is missing, so nothing needs these
functions: they are replaced while the modules are imported, and name torchvision if they are used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from msrl.models.hf_config import read_hf_config
from msrl.platforms.base import is_installed
from msrl.vision.settings import has_vision

VARIABLE = "MSRL_VISION_MODEL"
"""Environment variable with the architecture that a process of vLLM must be able to import."""

_PACKAGE = "transformers.models"
_FUNCTIONS = "torchvision.transforms.v2.functional"
# They import torchvision's functions only if it is installed.
_BASES = ("transformers.image_processing_backends", "transformers.video_processing_utils")
_AUTO = f"{_PACKAGE}.auto.video_processing_auto"
# Models with processors of images, of which there is one with Pillow
_IMAGES = {"qwen2_vl": "Qwen2VLImageProcessor", "got_ocr2": "GotOcr2ImageProcessor"}
# Modules with processors of videos, and the config classes of their models (transformers 5.16 to
# 5.19). The last one of the list is the oldest model's, from which the others import.
_VIDEOS = {
    "internvl": ("InternVLConfig",),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLMoeConfig", "Qwen3_5Config", "Qwen3_5MoeConfig"),
    "qwen2_vl": ("Qwen2VLConfig", "Qwen2_5_VLConfig"),
}
# Classes of language models in files of vLLM with vision-language models.
_TEXT_CLASSES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
_CLASSES = {
    "internvl": "InternVLVideoProcessor",
    "qwen3_vl": "Qwen3VLVideoProcessor",
    "qwen2_vl": "Qwen2VLVideoProcessor",
}


class _Absent(ModuleType):
    """Stand-in for a module of torchvision."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"torchvision is not installed, which {self.__name__}.{name} needs")


def class_variable(model_dir: Path) -> dict[str, str]:
    """Return the environment variable of processes that must import the class of a model.

    It is empty for models without a tower whose class is not beside one with a tower.
    """
    if is_installed("torchvision"):
        return {}
    architecture = read_hf_config(model_dir).architecture()
    needs_processors = has_vision(model_dir) or architecture in _TEXT_CLASSES
    return {VARIABLE: architecture} if needs_processors else {}


def prepare_process() -> None:
    """Make the class importable that the environment names. Every process of vLLM calls this."""
    if architecture := os.environ.get(VARIABLE):
        make_importable(architecture)


def make_importable(architecture: str) -> None:
    """Let vLLM use its class of a vision-language model, also if torchvision is not installed.

    The class is registered, so that vLLM does not import it once more in another process.
    """
    if is_installed("torchvision"):
        return
    _import_processors()
    from vllm import ModelRegistry

    entry: Any = ModelRegistry.models.get(architecture)
    if entry is not None:
        ModelRegistry.register_model(architecture, entry.load_model_cls())


@functools.cache
def _import_processors() -> None:
    """Import the processors that vLLM's classes name, and let transformers find them."""
    for name in _BASES:
        importlib.import_module(name)
    with _stand_ins():
        for model in _IMAGES:
            _publish(model, f"image_processing_{model}")
        for model in _VIDEOS:
            _publish(model, f"video_processing_{model}", _CLASSES[model])
    for model, name in _IMAGES.items():
        _publish(model, f"image_processing_pil_{model}", f"{name}Pil")
        package: Any = importlib.import_module(f"{_PACKAGE}.{model}")
        setattr(package, name, getattr(package, f"{name}Pil"))
    # `ProcessorMixin` looks the base classes of its parts up here.
    transformers: Any = importlib.import_module("transformers.processing_utils").transformers_module
    transformers.VideoProcessorMixin = importlib.import_module(_BASES[1]).VideoProcessorMixin
    auto: Any = importlib.import_module(_AUTO).AutoVideoProcessor
    # It has imported a placeholder, which its class of InternVL uses.
    loader: Any = importlib.import_module("vllm.transformers_utils.processor")
    loader.AutoVideoProcessor = auto
    for model, configs in _VIDEOS.items():
        processor = getattr(importlib.import_module(f"{_PACKAGE}.{model}"), _CLASSES[model])
        for config in (getattr(transformers, name, None) for name in configs):
            if config is not None:
                auto.register(config, processor, exist_ok=True)


def _publish(model: str, module: str, *names: str) -> None:
    """Import a module of a model's package, whose names become attributes of the package.

    The package has placeholders for classes that need a missing package.
    """
    package: Any = importlib.import_module(f"{_PACKAGE}.{model}")
    imported = importlib.import_module(f"{_PACKAGE}.{model}.{module}")
    for name in names:
        setattr(package, name, getattr(imported, name))


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Replace torchvision's functions in the body."""
    parts = _FUNCTIONS.split(".")
    names = [".".join(parts[: number + 1]) for number in range(len(parts))]
    modules = [_Absent(name) for name in names]
    for parent, part, module in zip(modules, parts[1:], modules[1:], strict=False):
        setattr(parent, part, module)
    sys.modules.update(zip(names, modules, strict=True))
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
