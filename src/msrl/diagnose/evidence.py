"""Evidence about a mismatch, as it was collected from engine, trainer and transformers.

N response tokens of all samples, concatenated. T tokens of the sequence whose layers were recorded,
H channels, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msrl.diagnose.gap import Gap, HealthyRange, healthy_range, measure, rounding_range
from msrl.types import Floats, Ints, SamplingParams

ENGINE, TRAINER, REFERENCE = "engine", "trainer", "transformers"


@dataclass(frozen=True, slots=True)
class Component:
    """One of the three implementations of the model.

    Attributes:
        dtype: dtype of its computation: float32, float16 or bfloat16.
        digests: Digest of each weight that it holds, by Hugging Face name, as text.
        settings: Settings of attention, RoPE and router as it reads them.
        encodings: Token ids of each probe text, by the text's name.
        activations: Output of each layer, [T, H], in order.
        experts: Experts that each token was routed to, sorted, [T, k], by layer.
        cache_dtype: dtype of the engine's KV cache, if it is not `dtype`.
        image: Stages of an image before the decoder layers, in order: normalized patches, blocks of
            the vision tower, features, and positions of the tokens. Empty without a tower.
    """

    dtype: str
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    encodings: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    activations: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    experts: Mapping[int, Ints] = field(default_factory=dict[int, Ints])
    cache_dtype: str | None = None
    image: Mapping[str, Floats] = field(default_factory=dict[str, Floats])


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the same tokens, [N] each.

    `raw` ones follow the model's own distribution: temperature 1, no filters.

    Attributes:
        sampled: Of the sampling distribution, as the engine reported them while it sampled.
        trainer: Of the training ranks at the temperature of the run, as a step computes them.
        engine_together: Raw, of the engine's prefill of all sequences at once.
        engine_alone: Raw, of the engine's prefill of one sequence at a time, without a cache.
        trainer_packed: Raw, of ranks with several sequences in a micro-batch.
        trainer_alone: Raw, of ranks with one sequence in a micro-batch.
        reference: Raw, of transformers in float32.
        reference_tempered: Of transformers at the temperature of the run.
        reference_filtered: Of transformers after temperature and sampling filters.
        trainer_in_float32: Raw, of the same ranks with one sequence in a micro-batch, in float32.
            None where rounding is not measured.
    """

    sampled: Floats
    trainer: Floats
    engine_together: Floats
    engine_alone: Floats
    trainer_packed: Floats
    trainer_alone: Floats
    reference: Floats
    reference_tempered: Floats
    reference_filtered: Floats
    trainer_in_float32: Floats | None = None


@dataclass(frozen=True, slots=True)
class CacheProbe:
    """Raw log-probabilities of tokens sampled with a prefix cache and of their prefill without it.

    The cache was filled before the engine loaded its present weights.
    """

    cached: Floats  # [M]
    recomputed: Floats  # [M]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Log-probabilities in the rollout record of a run, and of the trainer with that version."""

    step: int
    version: int
    behavior: Floats  # [N]
    trainer: Floats  # [N]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that the checks read.

    Attributes:
        sampling: Sampling parameters of the engine.
        engine: Engine.
        trainer: Training ranks.
        reference: transformers.
        logprobs: Log-probabilities of the sampled tokens.
        cache: Probe of the prefix cache; None if the engine has no cache.
        adapted: Weights that have a LoRA adapter.
        base_digests: Digests of the weights without adapters.
        recorded: Comparison with the rollout record; None without one.
        with_image: Log-probabilities of a sequence with an image, in the engine and in the trainer;
            None if no image is compared.
    """

    sampling: SamplingParams
    engine: Component
    trainer: Component
    reference: Component
    logprobs: Logprobs
    cache: CacheProbe | None = None
    adapted: frozenset[str] = frozenset()
    base_digests: Mapping[str, str] = field(default_factory=dict[str, str])
    recorded: Recorded | None = None
    with_image: tuple[Floats, Floats] | None = None  # [T - 1] each

    @property
    def rounding(self) -> Gap | None:
        """Difference of the ranks from themselves in float32; None if it is not measured."""
        wide = self.logprobs.trainer_in_float32
        return None if wide is None else measure(self.logprobs.trainer_alone, wide)

    @property
    def limits(self) -> HealthyRange:
        """Range of differences that rounding explains."""
        rounding, dtypes = self.rounding, {self.engine.dtype, self.trainer.dtype}
        if rounding is not None and len(dtypes) == 1:
            return rounding_range(rounding)
        return healthy_range(*dtypes)
