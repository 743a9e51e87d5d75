"""The proof of a conversion: every tensor read back from disk bit for bit, and equal logits of
transformers and real Megatron ranks.

A mistake that conversion and read-back share (gate and up swapped both ways, say) passes the first
check; the second one finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from msrl.checkpoint.adapters.merge import MergedSource
from msrl.checkpoint.convert import hf_specs
from msrl.checkpoint.dtypes import CHOICES
from msrl.checkpoint.source import HfSource, WeightSource, open_mcore
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.models.families import all_rules, num_parameters
from msrl.models.shape import Shape
from msrl.tracking.progress import amount_text, progress
from msrl.verification import layerwise
from msrl.verification.agreement import Agreement, compare_logits
from msrl.verification.bits import compare
from msrl.verification.logits import Sides
from msrl.verification.tolerance import MAX_DIVERGENCE, tolerance_of

_NUM_DRAWS, _MAX_TOKENS = 2, 32
_TEXTS = (
    "The capital of France is Paris, and the river that runs through it is called",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "Natalia sold 48 clips in April and half as many in May. Altogether she sold 48 + 24 =",
    "\u5df2\u77e5\u4e09\u89d2\u5f62\u7684\u5e95\u662f 6\uff0c\u9ad8\u662f 4\uff0c\u5b83\u7684\u9762\u79ef\u662f",
)
_ROOM = 2.0  # of one layer in float32: it, a tensor that it is made from, and the activations


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the proof: what was compared, with what result."""

    name: str
    compared: str
    result: str
    passed: bool


def fits_whole(shape: Shape) -> bool:
    """Whether the model fits into memory once in float32."""
    import psutil

    return num_parameters(shape) * 4 * 1.2 <= psutil.virtual_memory().available


def refuse_without_memory(shape: Shape) -> None:
    """Raises MsrlError when a model that does not fit into memory whole cannot be proven layer by
    layer: known before a conversion.
    """
    import psutil

    if fits_whole(shape) or layerwise.class_of(shape) is None:
        return
    available, needed = (
        psutil.virtual_memory().available,
        int(layerwise.largest_part(shape) * 4 * _ROOM),
    )
    if needed > available:
        sizes = (
            f"about {amount_text(needed, 'B')} of memory, {amount_text(available, 'B')} are free"
        )
        raise MsrlError(
            f"verification needs {sizes}; convert on a larger machine, or without it (--no-verify)"
        )


def checks(config: Config, source: WeightSource, load: Path, save: Path) -> list[Check]:
    """All comparisons of what was written to `save` with the `source` in `load`."""
    convert, dtype = config.convert, CHOICES[config.convert.dtype]
    to_hf = convert.command in ("mcore2hf", "hf2hf")
    result: WeightSource = HfSource(save) if to_hf else open_mcore(save)
    first = [
        _round_trip(source, result, dtype),
        *([_merge(source)] if isinstance(source, MergedSource) else []),
    ]
    if not all(check.passed for check in first):
        return first
    if layerwise.class_of(source.shape) is None:
        return [*first, _not_compared(source.shape)]
    samples, whole = sample_tokens(source.shape, source.hf_dir), fits_whole(source.shape)
    if not whole:
        print("the model does not fit into memory whole: its logits are computed layer by layer")
    sides = Sides(config, samples.token_ids, whole)
    if to_hf and (isinstance(source, MergedSource) or convert.command == "hf2hf"):
        left, right, names = (
            sides.loaded(result, save),
            sides.filled(source, dtype),
            "transformers: the result, the source",
        )
    elif to_hf:  # a cast is proven by the round trip, so that the two sides are compared as they were before it
        left = sides.loaded(result, save) if dtype is None else sides.filled(source, None)
        right, names = sides.megatron(load, source.hf_dir), "transformers, Megatron"
    else:
        is_plain = isinstance(source, HfSource) and dtype is None
        left = sides.loaded(source, load) if is_plain else sides.filled(source, dtype)
        right, names = sides.megatron(save), "transformers, Megatron"
    return [*first, *_logits(source.shape, samples, left, right, names)]


def _round_trip(source: WeightSource, result: WeightSource, dtype: torch.dtype | None) -> Check:
    with progress(
        "reading back",
        total=sum(spec.num_bytes for spec in hf_specs(source, dtype).values()),
        unit="B",
    ) as bar:
        found = compare(source, result, dtype, bar.advance)
    outcome = (
        f"{len(found.different)} differ: {', '.join(found.different[:3])}"
        if found.different
        else "equal bit for bit"
    )
    return Check(
        "round trip",
        f"{found.num_tensors} tensors, {amount_text(found.num_bytes, 'B')}",
        outcome,
        not found.different,
    )


def _merge(source: MergedSource) -> Check:
    """The sums W + s B A once more in float64: rounding may differ from that of float32 in the last
    bit of the weights' type.
    """
    worst, count = 0.0, 0
    for rule in all_rules(source.shape):
        for name, found, exact in zip(
            rule.hf, source.hf_tensors(rule), source.merged(rule, torch.float64), strict=True
        ):
            if name in source.adapter.deltas:
                scale = exact.abs().max().clamp(min=1e-30).double()
                worst, count = (
                    max(worst, float((found.double() - exact.double()).abs().max() / scale)),
                    count + 1,
                )
    limit = 8 * torch.finfo(source.main_dtype()).eps
    compared = f"{count} merged weights, again in float64"
    return Check(
        "merge",
        compared,
        f"largest difference {worst:.1e} of the largest weight (limit {limit:.0e})",
        worst <= limit,
    )


def _logits(
    shape: Shape, samples: Samples, left: Sequence[Tensor], right: Sequence[Tensor], sides: str
) -> list[Check]:
    """Two lines: the logits themselves, and what is sampled from them; of a reward model the scores
    alone.
    """
    tolerance = tolerance_of(shape)
    found = compare_logits(left, right, shape.num_outputs, tie=tolerance.logits)
    limit = tolerance.logits * max(1.0, found.spread)
    near = found.within(limit)
    strays = found.num_positions - near.num_positions
    compared = f"{sides}: {samples.origin}, {found.num_positions} positions x {shape.num_outputs:,}"
    outcome = f"largest difference {found.largest:.1e} (limit {limit:.0e}), standard deviation {found.spread:.2g}"
    if tolerance.strays:
        outcome += (
            f", {strays} positions beyond it (limit {tolerance.strays:.0%}, for experts that tie)"
        )
    name = "scores, fp32" if shape.reward_head else "logits, fp32"
    first = Check(name, compared, outcome, strays <= tolerance.strays * found.num_positions)
    return (
        [first]
        if shape.reward_head
        else [first, _distributions(near if first.passed else found, strays if first.passed else 0)]
    )


def _distributions(found: Agreement, strays: int) -> Check:
    """What is sampled: how far the next token's distributions are apart, and whether they have the
    same likeliest token.
    """
    where = "of the next token, at each position" + (f" but {strays}" if strays else "")
    outcome = f"largest KL {found.divergence:.1e} (limit {MAX_DIVERGENCE:.0e}), same likeliest token {found.same_choice}/{found.num_positions}"
    return Check(
        "distributions",
        where,
        outcome,
        found.divergence <= MAX_DIVERGENCE and found.same_choice == found.num_positions,
    )


def _not_compared(shape: Shape) -> Check:
    compared = f"transformers has no {shape.architecture}; msrl's own tests hold this family to a forward pass written by hand"
    return Check("logits, fp32", compared, "not compared", passed=True)


@dataclass(frozen=True, slots=True)
class Samples:
    """Token ids to compare on, and where they are from."""

    token_ids: list[list[int]]
    origin: str


def sample_tokens(shape: Shape, hf_dir: Path) -> Samples:
    """Texts as the model's tokenizer reads them, and rows drawn from the whole vocabulary, its
    first and last entries included.
    """
    length = min(_MAX_TOKENS, shape.max_position_embeddings)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(shape.vocab_size, (_NUM_DRAWS, length), generator=draw)
    rows[0, 0], rows[-1, -1] = 0, shape.vocab_size - 1
    texts = [ids[:length] for ids in _texts(hf_dir) if ids and max(ids) < shape.vocab_size]
    return Samples(
        [*texts, *rows.tolist()], f"{len(texts)} texts and {_NUM_DRAWS} rows of random tokens"
    )


def _texts(hf_dir: Path) -> list[list[int]]:
    """Token ids of the texts; none where there is no tokenizer that can be read, which the table
    then shows.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            hf_dir, local_files_only=True, trust_remote_code=False
        )
        return [list(tokenizer(text)["input_ids"]) for text in _TEXTS]
    except Exception:  # whatever a tokenizer's own code raises
        return []
