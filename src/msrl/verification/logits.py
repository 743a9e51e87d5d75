"""Logits of a model by transformers and by Megatron ranks, in memory or layer by layer."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrl import platforms
from msrl.checkpoint.dtypes import cast_to
from msrl.checkpoint.hf.expert_stacks import stack_experts
from msrl.checkpoint.hf.pass_through import pass_through_tensors
from msrl.checkpoint.mcore.files import SIDECAR
from msrl.checkpoint.mcore.locate import saved_layout
from msrl.checkpoint.source import WeightSource
from msrl.models.entries import stack_sizes
from msrl.models.families import all_rules, load_shape
from msrl.models.hf_config import read_hf_config
from msrl.models.parallel_layout import SINGLE_RANK
from msrl.models.rules import Rule
from msrl.models.shape import Shape
from msrl.temporary import owned_folder
from msrl.tracking.progress import Progress, progress
from msrl.types import PlacedImage
from msrl.verification import layerwise
from msrl.verification.images import ImagePrompt, image_inputs


@dataclass(frozen=True, slots=True)
class LogitSource:
    """Computation of the logits of `token_ids`, each sequence [T, vocabulary].

    The `images` of each sequence need the model in memory.

    Megatron runs on `platform`, a choice of `cluster.platform`. With `in_memory`, the complete
    model is in memory; otherwise one layer at a time.
    """

    platform: str
    token_ids: list[list[int]]
    in_memory: bool
    images: tuple[tuple[PlacedImage, ...], ...] = ()

    @property
    def _prompts(self) -> list[ImagePrompt]:
        images = self.images or ((),) * len(self.token_ids)
        return [ImagePrompt(*each) for each in zip(self.token_ids, images, strict=True)]

    def from_folder(self, source: WeightSource, folder: Path) -> list[Tensor]:
        """Return the logits of transformers, which loads the folder of `source` as a user would.

        transformers loads quantized weights only on some devices, so it receives them dequantized.
        It does not read experts in every form that msrl does, and receives the published one.
        """
        is_quantized = "quantization_config" in read_hf_config(folder).values
        if not self.in_memory or is_quantized or not source.has_published_experts:
            return self.from_weights(source, None)
        with self._progress("transformers") as bar:
            return _logits_from_folder(folder, self._prompts, bar.advance)

    def from_weights(self, source: WeightSource, dtype: torch.dtype | None) -> list[Tensor]:
        """Return the logits of transformers with the tensors of `source`, rounded to `dtype`.

        `dtype` None means no rounding.
        """
        with self._progress("transformers") as bar:
            if self.in_memory:
                return _logits_from_weights(source, self._prompts, dtype, bar.advance)
            logits = layerwise.transformers_logits(source, self.token_ids, dtype)
            bar.advance(len(logits))
            return logits

    def from_gguf(self, file: Path, source: WeightSource) -> list[Tensor]:
        """Return the logits of transformers, which reads the tensors of a GGUF file itself.

        The config is the one of `source`: transformers does not read every setting, such as the
        head size of Qwen3.
        """
        from transformers import modeling_gguf_pytorch_utils

        # transformers has no switch for the progress bar of this loop.
        reader: Any = modeling_gguf_pytorch_utils
        reader.tqdm = _without_bar
        with self._progress("transformers") as bar:
            model = layerwise.model_class(source.shape).from_pretrained(
                str(file.parent),
                gguf_file=file.name,
                config=layerwise.model_config(source.shape, source.hf_dir),
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                attn_implementation=layerwise.ATTENTION,
            )
            return _forward(model, self._prompts, source.shape, bar.advance)

    def from_megatron(self, checkpoint: Path, hf_dir: Path | None = None) -> list[Tensor]:
        """Return the logits of Megatron, which loads an mcore checkpoint.

        `hf_dir` is the folder of the config, if it is not in the checkpoint. In memory, there are
        as many ranks as the checkpoint has, on the CPU if there are fewer devices; layer by layer,
        there is one.
        """
        from msrl.trainer.probe import megatron_logits

        layout = saved_layout(checkpoint) if self.in_memory else SINGLE_RANK
        platform = platforms.resolve(self.platform)
        has_devices = self.in_memory and (
            platform.name == "cpu" or platform.device_count() >= layout.ranks_per_model
        )
        name = platform.name if has_devices else "cpu"
        with _with_config(checkpoint, hf_dir) as folder, self._progress("Megatron") as bar:
            logits = megatron_logits(
                folder,
                self.token_ids,
                layout,
                platform=name,
                layerwise=not self.in_memory,
                images=self.images,
            )
            bar.advance(len(logits))
            return logits

    def _progress(self, library: str) -> AbstractContextManager[Progress]:
        """Show the progress of a computation, most of which is the start of the library."""
        total = len(self.token_ids)
        return progress(f"computing logits with {library}", total=total, unit="sequences")


@contextlib.contextmanager
def _with_config(checkpoint: Path, hf_dir: Path | None) -> Iterator[Path]:
    """Yield a checkpoint folder with a config: the folder itself, or links to it and the config."""
    if hf_dir is None or hf_dir == checkpoint / SIDECAR:
        yield checkpoint
        return
    with owned_folder("msrl-config-") as folder:
        linked = {entry.name: entry for entry in checkpoint.iterdir()} | {SIDECAR: hf_dir}
        for entry, target in linked.items():
            (folder / entry).symlink_to(target.absolute())
        yield folder


def _logits_from_folder(
    folder: Path, prompts: list[ImagePrompt], advance: Callable[[], None] = lambda: None
) -> list[Tensor]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    shape = load_shape(folder)
    model_class = layerwise.model_class(shape)
    model = model_class.from_pretrained(
        folder,
        config=layerwise.model_config(shape, folder),
        dtype=torch.float32,
        local_files_only=True,
        attn_implementation=layerwise.ATTENTION,
    )
    return _forward(model, prompts, shape, advance)


def _logits_from_weights(
    source: WeightSource,
    prompts: list[ImagePrompt],
    dtype: torch.dtype | None,
    advance: Callable[[], None] = lambda: None,
) -> list[Tensor]:
    return _forward(transformers_model(source, dtype), prompts, source.shape, advance)


def transformers_model(source: WeightSource, dtype: torch.dtype | None) -> Any:
    """Return transformers' model in float32 with the tensors of `source`, rounded to `dtype`."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = layerwise.model_config(source.shape, source.hf_dir)
    tensors = (
        named_tensor
        for rule in all_rules(source.shape)
        for named_tensor in _cast(source, rule, dtype)
    )
    weights = dict(stack_experts(tensors, stack_sizes(source.shape)))
    weights |= {
        name: tensor.read()
        for name, tensor in pass_through_tensors(source.hf_dir, source.shape).items()
    }
    model_class = layerwise.model_class(source.shape)
    model, loading_info = model_class.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=torch.float32,
        attn_implementation=layerwise.ATTENTION,
        output_loading_info=True,
    )
    mismatched = sorted(
        name
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        for name in map(str, loading_info[kind])
    )
    if mismatched:
        raise RuntimeError(
            f"transformers' {source.shape.architecture} and the weight rules disagree on "
            f"{', '.join(mismatched[:5])}"
        )
    return model.eval()


def _cast(
    source: WeightSource, rule: Rule, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors of a rule by name, rounded to `dtype`."""
    target_dtype = cast_to(rule, dtype)
    for name, tensor in zip(rule.hf, source.hf_tensors(rule), strict=True):
        yield name, tensor if target_dtype is None else tensor.to(target_dtype)


def _without_bar(items: Iterable[Any], **_: object) -> Iterable[Any]:
    return items


def _forward(
    model: Any, prompts: list[ImagePrompt], shape: Shape, advance: Callable[[], None]
) -> list[Tensor]:
    """Return each sequence's logits, [T, vocabulary], or scores, [T, 1], and release the model."""
    model.eval()
    logits = list[Tensor]()
    with torch.inference_mode():
        for prompt in prompts:
            rows, inputs = torch.tensor([prompt.token_ids]), dict[str, Tensor]()
            if prompt.images:
                assert shape.vision is not None, "sampled for a model with a vision tower"
                inputs = image_inputs(model, shape.vision, rows, prompt.images)
            logits.append(layerwise.outputs(model, rows, shape, **inputs)[0].clone())
            advance()
    del model
    gc.collect()
    return logits
