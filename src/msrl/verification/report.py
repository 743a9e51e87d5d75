"""Verification report of a conversion.

Every tensor is read back from disk and compared bit for bit, and the logits of transformers and of
Megatron ranks are compared. A mistake that conversion and read-back share, such as gate and up
swapped both ways, passes the first comparison and fails the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from msrl.checkpoint.adapters.merge import MergedSource
from msrl.checkpoint.convert import hf_specs
from msrl.checkpoint.dtypes import CHOICES
from msrl.checkpoint.gguf.folder import open_gguf
from msrl.checkpoint.gguf.write import FILE, GgufModel
from msrl.checkpoint.mcore.files import TRACKER
from msrl.checkpoint.mcore.locate import saved_layout
from msrl.checkpoint.source import HfSource, ShardedSource, WeightSource, open_mcore
from msrl.config.sections.commands import ConvertConfig
from msrl.errors import MsrlError
from msrl.models.families import all_rules, num_parameters
from msrl.models.parallel_layout import SINGLE_RANK, ParallelLayout
from msrl.models.shape import Shape
from msrl.models.stages import has_deepstack_on_first_stage
from msrl.temporary import owned_folder
from msrl.tracking.progress import amount_text, progress
from msrl.types import PlacedImage
from msrl.verification import layerwise
from msrl.verification.agreement import Agreement, compare_logits
from msrl.verification.bits import compare, find_unequal_copies
from msrl.verification.images import image_prompts
from msrl.verification.logits import LogitSource
from msrl.verification.tolerance import MAX_DIVERGENCE, family_tolerance

_NUM_DRAWS, _MAX_TOKENS = 2, 32
_TEXTS = (
    "The capital of France is Paris, and the river that runs through it is called",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "Natalia sold 48 clips in April and half as many in May. Altogether she sold 48 + 24 =",
    "\u5df2\u77e5\u4e09\u89d2\u5f62\u7684\u5e95\u662f 6\uff0c\u9ad8\u662f "
    "4\uff0c\u5b83\u7684\u9762\u79ef\u662f",
)
# Memory per layer in float32: the layer, a tensor that it is built from, and activations.
_MEMORY_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report: what was compared, and the result."""

    name: str
    compared: str
    result: str
    passed: bool


def fits_in_memory(shape: Shape) -> bool:
    """Return True if one copy of the model in float32 fits into memory."""
    import psutil

    return num_parameters(shape) * 4 * 1.2 <= psutil.virtual_memory().available


def require_memory(shape: Shape, *, in_memory: bool = False) -> None:
    """Check before a conversion that there is enough memory to verify its result.

    One layer is in memory at a time, or with `in_memory` the model.

    Raises:
        MsrlError: There is not enough memory.
    """
    import psutil

    if fits_in_memory(shape) or layerwise.model_class(shape) is None:
        return
    available = psutil.virtual_memory().available
    largest = num_parameters(shape) if in_memory else layerwise.largest_part(shape)
    needed = int(largest * 4 * _MEMORY_FACTOR)
    if needed > available:
        raise MsrlError(
            f"verification needs about {amount_text(needed, 'B')} of memory, "
            f"{amount_text(available, 'B')} are free. "
            "Convert on a larger machine, or without verification (--no-verify)."
        )


def checks(
    convert: ConvertConfig, platform: str, source: WeightSource, load: Path, save: Path
) -> list[Check]:
    """Run all comparisons of the result in `save` with the `source` in `load`."""
    if convert.command == "hf2gguf":
        return _gguf_checks(convert, platform, source, save / FILE)
    dtype = CHOICES[convert.dtype]
    to_hf = convert.command in ("mcore2hf", "hf2hf", "gguf2hf")
    result: WeightSource = HfSource(save) if to_hf else open_mcore(save)
    bit_checks = [
        _check_bits(source, result, dtype),
        *(_check_copies(result) if isinstance(result, ShardedSource) else []),
        *([_check_merge(source)] if isinstance(source, MergedSource) else []),
    ]
    if not all(check.passed for check in bit_checks):
        return bit_checks
    if layerwise.model_class(source.shape) is None:
        return [*bit_checks, _not_compared(source.shape)]
    samples, in_memory = sample_tokens(source.shape, source.hf_dir), fits_in_memory(source.shape)
    if not in_memory:
        print("The model does not fit into memory: computing its logits layer by layer")
    elif source.shape.vision is not None:
        samples = _with_images(samples, source.shape, _layout(load, save))
    logits = LogitSource(platform, samples.token_ids, in_memory, samples.images)
    description = "transformers, Megatron"
    if convert.command == "gguf2hf":
        left, right = logits.from_weights(source, None), logits.from_gguf(load, source)
        description = "transformers: the weights, its own reader of GGUF"
    elif to_hf and (isinstance(source, MergedSource) or convert.command == "hf2hf"):
        left, right = logits.from_folder(result, save), logits.from_weights(source, dtype)
        description = "transformers: the result, the source"
    elif to_hf:
        # The bitwise comparison verifies a cast, so the logits are compared without it.
        is_cast = dtype is not None
        left = logits.from_weights(source, None) if is_cast else logits.from_folder(result, save)
        right = logits.from_megatron(load, source.hf_dir)
    else:
        is_plain = isinstance(source, HfSource) and dtype is None
        left = logits.from_folder(source, load) if is_plain else logits.from_weights(source, dtype)
        right = logits.from_megatron(save)
    return [*bit_checks, *_check_logits(source.shape, samples, left, right, description)]


def _gguf_checks(
    convert: ConvertConfig, platform: str, source: WeightSource, file: Path
) -> list[Check]:
    """Read a GGUF file with msrl's reader and with that of transformers.

    The weights of msrl's reader must be those of `source`, rounded by torch or the package gguf,
    and both readers must give the same logits.
    """
    expected = GgufModel(source, convert.dtype).rounded()
    with owned_folder("msrl-gguf-") as folder:
        result = open_gguf(file, folder)
        bits = _check_bits(expected, result, None)
        if not bits.passed:
            return [bits]
        samples = sample_tokens(source.shape, source.hf_dir)
        is_equal = sample_tokens(source.shape, folder) == samples
        tokens = Check("tokens", samples.origin, "equal" if is_equal else "differ", is_equal)
        logits = LogitSource(platform, samples.token_ids, fits_in_memory(source.shape))
        left, right = logits.from_weights(result, None), logits.from_gguf(file, result)
        description = "transformers: the weights, its own reader of GGUF"
        return [bits, tokens, *_check_logits(source.shape, samples, left, right, description)]


def _check_bits(source: WeightSource, result: WeightSource, dtype: torch.dtype | None) -> Check:
    with progress(
        "reading back",
        total=sum(spec.num_bytes for spec in hf_specs(source, dtype).values()),
        unit="B",
    ) as bar:
        comparison = compare(source, result, dtype, bar.advance)
    compared = f"{comparison.num_tensors} tensors, {amount_text(comparison.num_bytes, 'B')}"
    different = comparison.different
    if different:
        message = f"{len(different)} differ: {', '.join(different[:3])}"
        return Check("round trip", compared, message, passed=False)
    return Check("round trip", compared, "equal bit for bit", passed=True)


def _check_copies(result: ShardedSource) -> list[Check]:
    """Compare the tensors that several ranks hold, of which the round trip reads one copy.

    Returns:
        The check; none if each tensor is on one rank only.
    """
    num_bytes = sum(copy.other.nbytes for copy in result.copies())
    if not num_bytes:
        return []
    with progress("comparing copies on other ranks", total=num_bytes, unit="B") as bar:
        num_copies, unequal = find_unequal_copies(result, bar.advance)
    compared = f"{num_copies} copies on other ranks"
    if not unequal:
        return [Check("copies", compared, "equal bit for bit", passed=True)]
    message = f"{len(unequal)} differ: {unequal[0].ranks}"
    return [Check("copies", compared, message, passed=False)]


def _check_merge(source: MergedSource) -> Check:
    """Compare the sums W + s B A with sums in float64.

    They may differ in the last bit of the weights' type, because of the rounding in float32.
    """
    worst, count, limit = 0.0, 0, 0.0
    with progress("merging again", total=len(source.adapter.deltas), unit="weights") as bar:
        for merged, exact in _merged_weights(source):
            scale = exact.abs().max().clamp(min=1e-30).double()
            difference = (merged.double() - exact.double()).abs().max()
            worst, count = max(worst, float(difference / scale)), count + 1
            limit = max(limit, 8 * torch.finfo(merged.dtype).eps)
            bar.advance()
    compared = f"{count} merged weights, again in float64"
    return Check(
        "merge",
        compared,
        f"largest difference {worst:.1e} of the largest weight (limit {limit:.0e})",
        worst <= limit,
    )


def _merged_weights(source: MergedSource) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every weight that has an adapter, merged as in the result and in float64."""
    for rule in all_rules(source.shape):
        exact_tensors = source.merge_rule(rule, torch.float64)
        for name, merged, exact in zip(
            rule.hf, source.hf_tensors(rule), exact_tensors, strict=True
        ):
            if name in source.adapter.deltas:
                yield merged, exact


def _check_logits(
    shape: Shape,
    samples: Samples,
    left: Sequence[Tensor],
    right: Sequence[Tensor],
    description: str,
) -> list[Check]:
    """Compare the logits, and the distributions they define; of a reward model only the scores."""
    tolerance = family_tolerance(shape)
    agreement = compare_logits(left, right, shape.num_outputs, tie=tolerance.logits)
    limit = tolerance.logits * max(1.0, agreement.spread)
    inliers = agreement.within(limit)
    num_positions = agreement.num_positions
    outliers = num_positions - inliers.num_positions
    compared = f"{description}: {samples.origin}, {num_positions} positions x {shape.num_outputs:,}"
    result = (
        f"largest difference {agreement.largest:.1e} (limit {limit:.0e}), "
        f"standard deviation {agreement.spread:.2g}"
    )
    if tolerance.outliers:
        share = f"limit {tolerance.outliers:.0%}, for experts that tie"
        result += f", {outliers} positions beyond it ({share})"
    name = "scores, fp32" if shape.reward_head else "logits, fp32"
    # NaN is no tie between experts, however few positions have it.
    passed = agreement.is_finite and outliers <= tolerance.outliers * num_positions
    check = Check(name, compared, result, passed)
    if shape.reward_head:
        return [check]
    if check.passed:
        return [check, _check_distributions(inliers, outliers)]
    return [check, _check_distributions(agreement, 0)]


def _check_distributions(agreement: Agreement, outliers: int) -> Check:
    """Compare the distributions of the next token, and its most likely value."""
    compared = "next token, at each position" + (f" but {outliers}" if outliers else "")
    result = (
        f"largest KL {agreement.divergence:.1e} (limit {MAX_DIVERGENCE:.0e}), "
        f"same likeliest token {agreement.same_choice}/{agreement.num_positions}"
    )
    has_same_choice = agreement.same_choice == agreement.num_positions
    passed = agreement.divergence <= MAX_DIVERGENCE and has_same_choice
    return Check("distributions", compared, result, passed)


def _not_compared(shape: Shape) -> Check:
    compared = (
        f"transformers has no {shape.architecture}; msrl's tests compare this family with a "
        "reference "
        "forward pass"
    )
    return Check("logits, fp32", compared, "not compared", passed=True)


@dataclass(frozen=True, slots=True)
class Samples:
    """Token ids for the comparison, a description of their origin, and images of each row."""

    token_ids: list[list[int]]
    origin: str
    images: tuple[tuple[PlacedImage, ...], ...] = ()


def sample_tokens(shape: Shape, hf_dir: Path) -> Samples:
    """Return tokenized texts and random rows with the vocabulary's first and last entry."""
    length = min(_MAX_TOKENS, shape.max_position_embeddings)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(shape.vocab_size, (_NUM_DRAWS, length), generator=draw)
    rows[0, 0], rows[-1, -1] = 0, shape.vocab_size - 1
    texts = [ids[:length] for ids in _texts(hf_dir) if ids and max(ids) < shape.vocab_size]
    return Samples(
        [*texts, *rows.tolist()], f"{len(texts)} texts and {_NUM_DRAWS} rows of random tokens"
    )


def _with_images(samples: Samples, shape: Shape, layout: ParallelLayout) -> Samples:
    """Return the samples with prompts that have two images each.

    They are unchanged if Megatron cannot compute images in the parallel layout.
    """
    prompts = image_prompts(shape)
    if not prompts or not has_deepstack_on_first_stage(shape, layout):
        return replace(samples, origin=f"{samples.origin}, none with images")
    return Samples(
        [*samples.token_ids, *(prompt.token_ids for prompt in prompts)],
        f"{samples.origin}, {len(prompts)} prompts with two images each",
        (*[()] * len(samples.token_ids), *(prompt.images for prompt in prompts)),
    )


def _layout(load: Path, save: Path) -> ParallelLayout:
    """Return the parallel layout of the mcore checkpoint of a conversion, if there is one."""
    folders = (folder for folder in (save, load) if (folder / TRACKER).is_file())
    checkpoint = next(folders, None)
    return SINGLE_RANK if checkpoint is None else saved_layout(checkpoint)


def _texts(hf_dir: Path) -> list[list[int]]:
    """Return the token ids of the texts; none if no tokenizer is readable.

    The report shows the number of texts.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            hf_dir, local_files_only=True, trust_remote_code=False
        )
        return [list(tokenizer(text)["input_ids"]) for text in _TEXTS]
    except Exception:  # whatever a tokenizer's own code raises
        return []
