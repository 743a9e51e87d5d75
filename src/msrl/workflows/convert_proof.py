"""The proof of a conversion: every tensor read back from disk bit for bit, and equal logits of transformers and real Megatron ranks.

A mistake that conversion and read-back share (gate and up swapped both ways, say) passes the first check; the second one finds it.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrl import platforms
from msrl.checkpoint.carried import carried_tensors
from msrl.checkpoint.convert import hf_specs
from msrl.checkpoint.dtypes import CHOICES, cast_to
from msrl.checkpoint.found import find_checkpoint
from msrl.checkpoint.lora import MergedSource
from msrl.checkpoint.mcore import SIDECAR
from msrl.checkpoint.source import HfSource, WeightSource, open_mcore
from msrl.checkpoint.verify import compare
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.models.cut import Cut
from msrl.models.families import all_rules, load_shape, num_parameters
from msrl.models.hf_config import read_hf_config
from msrl.models.rules import Rule
from msrl.models.shape import Shape
from msrl.tracking.progress import amount_text, progress

MAX_LOGIT_DIFFERENCE = 1e-4
_NUM_SEQUENCES, _MAX_TOKENS = 2, 32


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the proof: what was compared, with what result."""

    name: str
    compared: str
    result: str
    passed: bool


def refuse_without_memory(shape: Shape) -> None:
    """Raises MsrlError when the model does not fit into memory once in float32: better known before a conversion than after it."""
    import psutil

    needed, available = int(num_parameters(shape) * 4 * 1.2), psutil.virtual_memory().available
    if needed > available:
        sizes = f"about {amount_text(needed, 'B')} of memory, {amount_text(available, 'B')} are free"
        raise MsrlError(f"verification needs {sizes}; convert on a larger machine, or without it (--no-verify)")


def checks(config: Config, source: WeightSource, load: Path, save: Path) -> list[Check]:
    """All comparisons of what was written to `save` with the `source` in `load`."""
    convert, dtype = config.convert, CHOICES[config.convert.dtype]
    to_hf, merged = convert.command in ("mcore2hf", "hf2hf"), isinstance(source, MergedSource)
    result: WeightSource = HfSource(save) if to_hf else open_mcore(save)
    first = [_round_trip(source, result, dtype), *([_merge(source)] if isinstance(source, MergedSource) else [])]
    if not all(check.passed for check in first):
        return first
    if _class_of(source.shape) is None:
        return [*first, _not_compared(source.shape)]
    tokens = sample_tokens(source.shape)
    if to_hf and (merged or convert.command == "hf2hf"):
        loaded = _pretrained(save, tokens, None), _filled(source, tokens, dtype)
        return [*first, _logits(source.shape, *loaded, sides="transformers: the result, the source")]
    if convert.command == "hf2mcore" and not merged:
        transformers, megatron = _as_converted(source, load, tokens, dtype), _megatron(config, save, tokens)
    elif not to_hf:
        transformers, megatron = _filled(source, tokens, dtype), _megatron(config, save, tokens)
    else:  # a cast is proven by the round trip, so that the two sides are compared as they were before it
        transformers = _pretrained(save, tokens, None) if dtype is None else _filled(source, tokens, None)
        megatron = _megatron(config, load, tokens, source.hf_dir)
    return [*first, _logits(source.shape, transformers, megatron)]


def _round_trip(source: WeightSource, result: WeightSource, dtype: torch.dtype | None) -> Check:
    with progress("reading back", total=sum(spec.num_bytes for spec in hf_specs(source, dtype).values()), unit="B") as bar:
        found = compare(source, result, dtype, bar.advance)
    outcome = f"{len(found.different)} differ: {', '.join(found.different[:3])}" if found.different else "equal bit for bit"
    return Check("round trip", f"{found.num_tensors} tensors, {amount_text(found.num_bytes, 'B')}", outcome, not found.different)


def _merge(source: MergedSource) -> Check:
    """The sums W + s B A once more in float64: rounding may differ from that of float32 in the last bit of the weights' type."""
    worst, count = 0.0, 0
    for rule in all_rules(source.shape):
        for name, found, exact in zip(rule.hf, source.hf_tensors(rule), source.merged(rule, torch.float64), strict=True):
            if name in source.adapter.deltas:
                scale = exact.abs().max().clamp(min=1e-30).double()
                worst, count = max(worst, float((found.double() - exact.double()).abs().max() / scale)), count + 1
    limit = 8 * torch.finfo(source.main_dtype()).eps
    compared = f"{count} merged weights, again in float64"
    return Check("merge", compared, f"largest difference {worst:.1e} of the largest weight (limit {limit:.0e})", worst <= limit)


def _logits(shape: Shape, transformers: Sequence[Tensor], megatron: Sequence[Tensor], sides: str = "transformers, Megatron") -> Check:
    largest = max_difference(transformers, megatron, shape.vocab_size)
    compared = f"{sides}: {len(megatron)} x {megatron[0].shape[0]} tokens x {shape.vocab_size:,}"
    outcome = f"largest difference {largest:.1e} (limit {MAX_LOGIT_DIFFERENCE:.0e})"
    return Check("logits, fp32", compared, outcome, largest <= MAX_LOGIT_DIFFERENCE)


def _class_of(shape: Shape) -> Any:
    """transformers' class of the model; None where its code comes with its checkpoints (which is never run)."""
    import transformers

    return getattr(transformers, shape.architecture, None)


def _not_compared(shape: Shape) -> Check:
    compared = f"transformers has no {shape.architecture}; msrl's own tests hold this family to a forward pass written by hand"
    return Check("logits, fp32", compared, "not compared", passed=True)


def max_difference(left: Sequence[Tensor], right: Sequence[Tensor], vocab_size: int) -> float:
    """The largest absolute difference of two sides' logits, each [T, vocabulary or more]; NaN anywhere is infinite."""
    differences = [(a[:, :vocab_size].double() - b[:, :vocab_size].double()).abs() for a, b in zip(left, right, strict=True)]
    return max(float(torch.nan_to_num(d, nan=float("inf")).max()) for d in differences)


def sample_tokens(shape: Shape) -> list[list[int]]:
    """Token ids to compare on: drawn from the whole vocabulary, its first and last entries included."""
    length = min(_MAX_TOKENS, shape.max_position_embeddings)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(shape.vocab_size, (_NUM_SEQUENCES, length), generator=draw)
    rows[0, 0], rows[-1, -1] = 0, shape.vocab_size - 1
    return rows.tolist()


def _megatron(config: Config, checkpoint: Path, tokens: list[list[int]], hf_dir: Path | None = None) -> list[Tensor]:
    """Logits of real Megatron ranks in the layout of the checkpoint; on the CPU where there are fewer devices than ranks.

    `hf_dir` is where the config lies, if not in the checkpoint.
    """
    from msrl.trainer.probe import megatron_logits

    found = find_checkpoint(checkpoint)
    platform = platforms.resolve(config.cluster.platform)
    cut = Cut(tp=found.cut.tp)
    enough = platform.name == "cpu" or platform.device_count() >= cut.ranks_per_model
    name = platform.name if enough else "cpu"
    with _with_config(checkpoint, hf_dir) as folder:
        return megatron_logits(folder, tokens, cut, platform=name)


@contextlib.contextmanager
def _with_config(checkpoint: Path, hf_dir: Path | None) -> Iterator[Path]:
    """A checkpoint folder that has its config: itself, or links to it and to the config elsewhere."""
    if hf_dir is None or hf_dir == checkpoint / SIDECAR:
        yield checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="msrl_") as folder:
        linked = {entry.name: entry for entry in checkpoint.iterdir()} | {SIDECAR: hf_dir}
        for entry, target in linked.items():
            (Path(folder) / entry).symlink_to(target.absolute())
        yield Path(folder)


def _as_converted(source: WeightSource, load: Path, tokens: list[list[int]], dtype: torch.dtype | None) -> list[Tensor]:
    """Logits of transformers from a Hugging Face folder; those of packed weights, which it takes on some devices alone, as we read them."""
    is_packed = "quantization_config" in read_hf_config(load).values
    return _filled(source, tokens, dtype) if is_packed else _pretrained(load, tokens, dtype)


def _pretrained(folder: Path, tokens: list[list[int]], dtype: torch.dtype | None) -> list[Tensor]:
    """Logits of transformers, loading the folder as any user would; weights rounded to `dtype` unless it is None."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = _class_of(load_shape(folder)).from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    if dtype is not None:
        for parameter in model.parameters():
            parameter.data.copy_(parameter.data.to(dtype))
    return _forward(model, tokens)


def _filled(source: WeightSource, tokens: list[list[int]], dtype: torch.dtype | None) -> list[Tensor]:
    """Logits of transformers with the tensors of `source` put into it; rounded to `dtype` unless it is None."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source.hf_dir, local_files_only=True)
    vars(config).pop("quantization_config", None)  # the tensors are what the packed ones stand for
    weights = {name: tensor for rule in all_rules(source.shape) for name, tensor in _cast(source, rule, dtype)}
    weights |= {name: tensor.read() for name, tensor in carried_tensors(source.hf_dir, source.shape).items()}
    model_class = _class_of(source.shape)
    model, found = model_class.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32, output_loading_info=True)
    astray = sorted(name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in map(str, found[kind]))
    if astray:
        raise RuntimeError(f"transformers' {source.shape.architecture} and the rules disagree on {', '.join(astray[:5])}")
    return _forward(model, tokens)


def _cast(source: WeightSource, rule: Rule, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    kind = cast_to(rule, dtype)
    for name, tensor in zip(rule.hf, source.hf_tensors(rule), strict=True):
        yield name, tensor if kind is None else tensor.to(kind)


def _forward(model: Any, tokens: list[list[int]]) -> list[Tensor]:
    """Each sequence's logits, [T, vocabulary]; the model is let go of afterwards."""
    model.eval()
    with torch.inference_mode():
        logits = [model(torch.tensor([ids])).logits[0].clone() for ids in tokens]
    del model
    gc.collect()
    return logits
