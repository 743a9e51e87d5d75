"""Logits of one model by every way that a conversion can be looked at: transformers and real
Megatron ranks, whole or layer by layer.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrl import platforms
from msrl.checkpoint.dtypes import cast_to
from msrl.checkpoint.hf.expert_stacks import put_together
from msrl.checkpoint.hf.pass_through import pass_through_tensors
from msrl.checkpoint.mcore.files import SIDECAR
from msrl.checkpoint.mcore.locate import saved_layout
from msrl.checkpoint.source import WeightSource
from msrl.config.schema import Config
from msrl.models.entries import stack_sizes
from msrl.models.families import all_rules, load_shape
from msrl.models.hf_config import read_hf_config
from msrl.models.parallel_layout import WHOLE
from msrl.models.rules import Rule
from msrl.models.shape import Shape
from msrl.temporary import owned_folder
from msrl.verification import layerwise


@dataclass(frozen=True, slots=True)
class Sides:
    """The ways to compute the logits of `token_ids`, each sequence [T, vocabulary]; `whole`: with
    the whole model in memory.
    """

    config: Config
    token_ids: list[list[int]]
    whole: bool

    def loaded(self, source: WeightSource, folder: Path) -> list[Tensor]:
        """transformers, loading the folder of `source` as any user would.

        Packed weights, which it takes on some devices alone, are given to it as we read them.
        """
        if self.whole and "quantization_config" not in read_hf_config(folder).values:
            return _pretrained(folder, self.token_ids)
        return self.filled(source, None)

    def filled(self, source: WeightSource, dtype: torch.dtype | None) -> list[Tensor]:
        """transformers with the tensors of `source` put into it; rounded to `dtype` unless it is
        None.
        """
        return (_filled if self.whole else layerwise.transformers_logits)(
            source, self.token_ids, dtype
        )

    def megatron(self, checkpoint: Path, hf_dir: Path | None = None) -> list[Tensor]:
        """Megatron from an mcore checkpoint; `hf_dir` is where the config lies, if not in the
        checkpoint.

        Ranks as the checkpoint is cut for, on the CPU where there are fewer devices; layer by
        layer, one.
        """
        from msrl.trainer.probe import megatron_logits

        cut = saved_layout(checkpoint) if self.whole else WHOLE
        platform = platforms.resolve(self.config.cluster.platform)
        enough = self.whole and (
            platform.name == "cpu" or platform.device_count() >= cut.ranks_per_model
        )
        with _with_config(checkpoint, hf_dir) as folder:
            name = platform.name if enough else "cpu"
            return megatron_logits(
                folder, self.token_ids, cut, platform=name, layerwise=not self.whole
            )


@contextlib.contextmanager
def _with_config(checkpoint: Path, hf_dir: Path | None) -> Iterator[Path]:
    """A checkpoint folder that has its config: itself, or links to it and to the config elsewhere.
    """
    if hf_dir is None or hf_dir == checkpoint / SIDECAR:
        yield checkpoint
        return
    with owned_folder("msrl-config-") as folder:
        linked = {entry.name: entry for entry in checkpoint.iterdir()} | {SIDECAR: hf_dir}
        for entry, target in linked.items():
            (folder / entry).symlink_to(target.absolute())
        yield folder


def _pretrained(folder: Path, tokens: list[list[int]]) -> list[Tensor]:
    from transformers.utils import logging

    logging.disable_progress_bar()
    shape = load_shape(folder)
    model_class = layerwise.class_of(shape)
    model = model_class.from_pretrained(
        folder, config=layerwise.config_of(shape, folder), dtype=torch.float32, local_files_only=True,
        attn_implementation=layerwise.ATTENTION,
    )  # fmt: skip
    return _forward(model, tokens, shape)


def _filled(
    source: WeightSource, tokens: list[list[int]], dtype: torch.dtype | None
) -> list[Tensor]:
    config = layerwise.config_of(source.shape, source.hf_dir)
    tensors = (each for rule in all_rules(source.shape) for each in _cast(source, rule, dtype))
    weights = dict(put_together(tensors, stack_sizes(source.shape)))
    weights |= {
        name: tensor.read()
        for name, tensor in pass_through_tensors(source.hf_dir, source.shape).items()
    }
    model_class = layerwise.class_of(source.shape)
    model, found = model_class.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=torch.float32,
        attn_implementation=layerwise.ATTENTION,
        output_loading_info=True,
    )
    astray = sorted(
        name
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        for name in map(str, found[kind])
    )
    if astray:
        raise RuntimeError(
            f"transformers' {source.shape.architecture} and the rules disagree on {', '.join(astray[:5])}"
        )
    return _forward(model, tokens, source.shape)


def _cast(
    source: WeightSource, rule: Rule, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    kind = cast_to(rule, dtype)
    for name, tensor in zip(rule.hf, source.hf_tensors(rule), strict=True):
        yield name, tensor if kind is None else tensor.to(kind)


def _forward(model: Any, tokens: list[list[int]], shape: Shape) -> list[Tensor]:
    """Each sequence's logits, [T, vocabulary], or scores, [T, 1]; the model is let go of
    afterwards.
    """
    model.eval()
    with torch.inference_mode():
        logits = [layerwise.outputs(model, torch.tensor([ids]), shape)[0].clone() for ids in tokens]
    del model
    gc.collect()
    return logits
